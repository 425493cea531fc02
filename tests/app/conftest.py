"""A scripted engine behind a real server, for the API's tests."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import HealthCheck, settings

from app.engine.request import TextEngine
from app.engine.tokenizer import ChatTokenizer
from tests.support.api_server import Served, serve_engines
from tests.support.local_engine import ScriptedEngine, saying
from tests.support.tiny_tokenizer import write_tiny_tokenizer

if TYPE_CHECKING:
    from openai import AsyncOpenAI

ANSWER = "hello world, the quick brown fox"

patient = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])  # machines are shared

Serve = Callable[..., AbstractAsyncContextManager[Served]]


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_tokenizer(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="session")
def tokenizer(tiny_folder: Path) -> ChatTokenizer:
    return ChatTokenizer.load(tiny_folder)


@pytest.fixture
def scripted(tokenizer: ChatTokenizer) -> ScriptedEngine:
    return ScriptedEngine(tokenizer, saying(tokenizer, ANSWER))


@pytest.fixture
def serve(scripted: ScriptedEngine) -> Serve:
    """Serve the scripted engine, or others, with any settings."""

    def start(*engines: TextEngine, **settings: Any) -> AbstractAsyncContextManager[Served]:
        return serve_engines(*(engines or (scripted,)), **settings)

    return start


@pytest.fixture
async def served(serve: Serve) -> AsyncIterator[Served]:
    async with serve() as running:
        yield running


@pytest.fixture
async def client(served: Served) -> AsyncIterator[AsyncOpenAI]:
    """The official client of what the test's own `served` serves."""
    async with served.openai() as made:
        yield made
