"""What langchain-openai reads of recorded streams: one JSON line for each."""

from __future__ import annotations

import json
import os
import sys

from langchain_core.tools import tool
from langchain_openai import ChatOpenAI, OpenAI

SCENARIOS = json.loads(os.environ["SCENARIOS"])


@tool
def get_weather(city: str) -> str:
    """Tell the weather of a city."""
    return "sunny"


def main() -> None:
    for name, kind in SCENARIOS.items():
        url = f"{os.environ['REPLAY']}/{name.replace(' ', '-')}/v1"
        told = {"base_url": url, "api_key": "none", "model": "fixture", "max_retries": 0, "streaming": True}
        found = {"text": [""], "error": False}
        try:
            if kind == "completions":
                for piece in OpenAI(**told).stream("x"):
                    found["text"][0] += piece
            else:
                chat(ChatOpenAI(use_responses_api=kind == "responses", stream_usage=True, **told), found)
        except Exception as error:
            found["error"] = "layers 10:20" in str(error) or f"{type(error).__name__}: {error}"
        print(json.dumps({"scenario": name, "reading": found}), flush=True)


def chat(model: ChatOpenAI, found: dict) -> None:
    whole = None
    for chunk in model.stream("x"):
        whole = chunk if whole is None else whole + chunk
        found["text"] = [whole.text]
    found["calls"] = [[call["name"], call["args"]] for call in whole.tool_calls]
    usage = whole.usage_metadata
    found["usage"] = usage and [usage["input_tokens"], usage["output_tokens"]]
    told = whole.response_metadata
    if "finish_reason" in told:
        found["finish"] = [told["finish_reason"]]
    elif "status" in told:
        found["finish"] = [told["status"]]
    if (told.get("logprobs") or {}).get("content"):
        found["logprobs"] = b"".join(bytes(one["bytes"]) for one in told["logprobs"]["content"]).decode()


if __name__ == "__main__":
    sys.exit(main())
