"""`query` for models that make vectors, from a real gateway and from our own engine."""

from __future__ import annotations

import contextlib
import json
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from app.engine.request import ModelStatus
from app.engine.tokenizer import ChatTokenizer
from cli import engine, engine_vectors
from cli.background import BackgroundLoop
from tests.cli.conftest import Diffuse
from tests.support.api_server import Served, serve_engines
from tests.support.fake_embeddings import FINGERPRINT, SIZE, FakeEmbeddings, vector_of
from tests.support.local_engine import ScriptedEngine, saying
from tests.support.tiny_tokenizer import write_tiny_tokenizer

NODE = ("--node", f"{'ab' * 32}@127.0.0.1:7000")


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> ChatTokenizer:
    return ChatTokenizer.load(write_tiny_tokenizer(tmp_path_factory.mktemp("tiny")))


@pytest.fixture
def librarian(tokenizer: ChatTokenizer) -> FakeEmbeddings:
    return FakeEmbeddings(tokenizer)


@pytest.fixture
def served(librarian: FakeEmbeddings, tokenizer: ChatTokenizer) -> Iterator[Served]:
    """A real gateway over fake engines in another thread: the first of its models makes vectors."""
    loop = BackgroundLoop()
    try:
        with loop.entered(
            serve_engines(librarian, ScriptedEngine(tokenizer, saying(tokenizer, "hello")))
        ) as running:
            yield running
    finally:
        loop.close()


@pytest.fixture
def own_engine(librarian: FakeEmbeddings, monkeypatch: pytest.MonkeyPatch) -> FakeEmbeddings:
    """Our own engine, without nodes and weights."""

    @contextlib.asynccontextmanager
    async def open_vectors(settings: Any) -> AsyncIterator[SimpleNamespace]:
        yield SimpleNamespace(engine=librarian, directory=SimpleNamespace(last_errors={}))

    monkeypatch.setattr("app.engine.swarm.open_vectors", open_vectors)
    monkeypatch.setattr(engine, "makes_pictures", lambda target, model: False)
    monkeypatch.setattr(engine_vectors, "makes_vectors", lambda target, model: True)
    return librarian


def test_the_first_numbers_are_printed(diffuse: Diffuse, served: Served) -> None:
    result = diffuse("query", "-p", "hello", "--url", served.url, "--model", "librarian")
    assert result.exit_code == 0, result.stderr
    assert result.stdout.startswith("[3.000000, 1.000000, 2.000000, ")
    assert f"{SIZE} dimensions of 3 tokens" in result.stderr


@pytest.mark.parametrize("place", ["gateway", "nodes"])
def test_json_holds_them_all(
    diffuse: Diffuse, served: Served, own_engine: FakeEmbeddings, place: str
) -> None:
    where = ("--url", served.url) if place == "gateway" else NODE
    result = diffuse("query", "-p", "hello", *where, "--model", "librarian", "--json")
    assert result.exit_code == 0, result.stderr
    told = json.loads(result.stdout)
    assert told["embedding"] == vector_of(own_engine.encode("hello")).tolist()
    assert (told["dimensions"], told["system_fingerprint"]) == (SIZE, FINGERPRINT)
    assert told["usage"] == {"prompt_tokens": 3, "total_tokens": 3}


def test_without_a_name_a_question_still_goes_to_a_model_of_text(
    diffuse: Diffuse, served: Served, librarian: FakeEmbeddings
) -> None:
    result = diffuse("query", "-p", "hello", "--url", served.url)
    assert result.stdout == "hello\n"
    assert not librarian.requests


@pytest.mark.parametrize(
    "flags",
    [("--steps", "3"), ("--max-tokens", "3"), ("--out", "a.png"), ("--system", "be brief"), ("--raw",)],
)
def test_flags_of_other_models_are_refused(
    diffuse: Diffuse, served: Served, librarian: FakeEmbeddings, flags: tuple[str, ...]
) -> None:
    result = diffuse("query", "-p", "hello", "--url", served.url, "--model", "librarian", *flags)
    assert result.exit_code == 2
    assert flags[0] in result.stderr
    assert not librarian.requests


def test_a_route_that_is_missing_is_told(diffuse: Diffuse, own_engine: FakeEmbeddings) -> None:
    own_engine.status = ModelStatus("partial", 6, ((2, 4),))
    result = diffuse("query", "-p", "hello", *NODE, "--model", "librarian")
    assert result.exit_code == 1
    assert "no node serves layers 2:4 of 6" in result.stderr


def test_a_text_that_is_too_long_is_told(diffuse: Diffuse, served: Served, tmp_path: Path) -> None:
    result = diffuse("query", "-p", "x" * 100, "--url", served.url, "--model", "librarian")
    assert result.exit_code == 1
    assert "maximum context length is 32 tokens" in result.stderr
