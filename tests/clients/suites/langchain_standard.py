"""LangChain's standard tests of a chat model, for ChatOpenAI over a gateway: run in an environment of its own.

`BASE_URL`, `API_KEY` and `MODEL` come from the environment.
"""

from __future__ import annotations

import os
from typing import Any

from langchain_openai import ChatOpenAI
from langchain_tests.integration_tests import ChatModelIntegrationTests

# What one sets for a small model, which else repeats its words, and the call that it has made.
SMALL = {"frequency_penalty": 1, "model_kwargs": {"parallel_tool_calls": False}}


class TestGateway(ChatModelIntegrationTests):
    @property
    def chat_model_class(self) -> type[ChatOpenAI]:
        return ChatOpenAI

    @property
    def chat_model_params(self) -> dict[str, Any]:
        return {
            "base_url": os.environ["BASE_URL"],
            "api_key": os.environ["API_KEY"],
            "model": os.environ["MODEL"],
            "max_tokens": int(os.environ.get("MAX_TOKENS", "400")),
            "temperature": 0,
            "stream_usage": True,
            "max_retries": 0,
            **(SMALL if os.environ.get("IS_SMALL") else {}),
        }

    @property
    def supports_json_mode(self) -> bool:
        return True

    @property
    def model_override_value(self) -> str:
        return os.environ["OTHER_MODEL"]
