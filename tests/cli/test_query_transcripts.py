"""`query` for models that write recordings down, from a real gateway and from our own engine."""

from __future__ import annotations

import contextlib
import io
import json
import wave
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from app.engine.request import ModelStatus
from app.engine.tokenizer import ChatTokenizer
from cli import engine, engine_transcript
from cli.background import BackgroundLoop
from tests.cli.conftest import Diffuse
from tests.support.api_server import Served, serve_engines
from tests.support.fake_scribe import RATE, FakeScribe
from tests.support.local_engine import ScriptedEngine, saying
from tests.support.tiny_tokenizer import write_tiny_tokenizer

NODE = ("--node", f"{'ab' * 32}@127.0.0.1:7000")
SUBTITLES = (
    "1\n00:00:00,000 --> 00:00:01,000\nHello there.\n\n2\n00:00:01,000 --> 00:00:02,000\nHow are you?\n\n"
)
PLACES = pytest.mark.parametrize("place", ["gateway", "nodes"])


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> ChatTokenizer:
    return ChatTokenizer.load(write_tiny_tokenizer(tmp_path_factory.mktemp("tiny")))


@pytest.fixture
def scribe(tokenizer: ChatTokenizer) -> FakeScribe:
    return FakeScribe(tokenizer)


@pytest.fixture
def served(scribe: FakeScribe, tokenizer: ChatTokenizer) -> Iterator[Served]:
    """A real gateway over fake engines in another thread: the second of its models hears."""
    loop = BackgroundLoop()
    try:
        with loop.entered(
            serve_engines(ScriptedEngine(tokenizer, saying(tokenizer, "hello")), scribe)
        ) as running:
            yield running
    finally:
        loop.close()


@pytest.fixture
def own_engine(scribe: FakeScribe, monkeypatch: pytest.MonkeyPatch) -> FakeScribe:
    """Our own engine, without nodes and weights."""

    @contextlib.asynccontextmanager
    async def open_transcripts(settings: Any) -> AsyncIterator[SimpleNamespace]:
        yield SimpleNamespace(engine=scribe, directory=SimpleNamespace(last_errors={}))

    monkeypatch.setattr("app.engine.swarm.open_transcripts", open_transcripts)
    monkeypatch.setattr(engine, "makes_pictures", lambda target, model: False)
    monkeypatch.setattr(engine_transcript, "makes_transcripts", lambda target, model: True)
    return scribe


@pytest.fixture
def recording(tmp_path: Path) -> str:
    file = io.BytesIO()
    with wave.open(file, "wb") as writing:
        writing.setnchannels(1)
        writing.setsampwidth(2)
        writing.setframerate(RATE)
        writing.writeframes(bytes(4 * RATE))
    path = tmp_path / "talk.wav"
    path.write_bytes(file.getvalue())
    return str(path)


def where(served: Served, place: str) -> tuple[str, ...]:
    return ("--url", served.url) if place == "gateway" else (*NODE, "--model", "scribe")


@PLACES
def test_the_words_are_printed_and_the_model_that_hears_is_found(
    diffuse: Diffuse, served: Served, own_engine: FakeScribe, recording: str, place: str
) -> None:
    result = diffuse("query", *where(served, place), "--audio", recording)
    assert result.exit_code == 0, result.stderr
    assert result.stdout == "Hello there. How are you?\n"
    assert "2.0 s of sound in " in result.stderr
    assert own_engine.requests[0].prompt == ""


@PLACES
def test_subtitles_go_into_a_file_that_is_never_written_over(
    diffuse: Diffuse, served: Served, own_engine: FakeScribe, recording: str, tmp_path: Path, place: str
) -> None:
    out = tmp_path / "talk.srt"
    asked = ("query", *where(served, place), "--audio", recording, "--out", str(out), "-p", "Ada")
    result = diffuse(*asked, "--model", "scribe", "--temperature", "0.3", "--seed", "4")
    assert result.exit_code == 0, result.stderr
    assert result.stdout == f"{out}\n"
    assert out.read_text() == SUBTITLES
    told = own_engine.requests[0]
    assert (told.prompt, told.temperature, told.seed) == ("Ada", 0.3, 4)
    again = diffuse(*asked, "--model", "scribe")
    assert again.exit_code == 2
    assert "not written over" in again.stderr
    assert len(own_engine.requests) == 1


@pytest.mark.parametrize(
    ("suffix", "begins"),
    [(".vtt", "WEBVTT\n\n00:00:00.000"), (".txt", "Hello there. How"), (".json", "[\n {\n")],
)
def test_the_suffix_says_what_is_written(
    diffuse: Diffuse, served: Served, recording: str, tmp_path: Path, suffix: str, begins: str
) -> None:
    out = tmp_path / f"talk{suffix}"
    result = diffuse(
        "query", "--url", served.url, "--model", "scribe", "--audio", recording, "--out", str(out)
    )
    assert result.exit_code == 0, result.stderr
    assert out.read_text().startswith(begins)


def test_json_holds_segments(diffuse: Diffuse, served: Served, recording: str) -> None:
    result = diffuse("query", "--url", served.url, "--model", "scribe", "--audio", recording, "--json")
    told = json.loads(result.stdout)
    assert (told["model"], told["text"]) == ("scribe", "Hello there. How are you?")
    assert told["segments"][1] == {"start_s": 1.0, "end_s": 2.0, "text": " How are you?"}
    assert told["duration_s"] == 2.0


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        (("--steps", "3"), "--steps"),
        (("--max-tokens", "3"), "--max-tokens"),
        (("--out", "talk.wav"), "a transcript's file ends in .srt"),
        (("--audio", "again.wav"), "give one recording"),
        (("--image", "a.png"), "--image"),
    ],
)
def test_flags_that_mean_nothing_are_refused(
    diffuse: Diffuse,
    served: Served,
    scribe: FakeScribe,
    recording: str,
    extra: tuple[str, ...],
    message: str,
) -> None:
    result = diffuse("query", "--url", served.url, "--model", "scribe", "--audio", recording, *extra)
    assert result.exit_code == 2
    assert message in " ".join(result.stderr.replace("│", "").split())
    assert not scribe.requests


@PLACES
def test_a_file_that_is_no_recording_is_told(
    diffuse: Diffuse, served: Served, own_engine: FakeScribe, tmp_path: Path, place: str
) -> None:
    (tmp_path / "list.wav").write_text("milk, bread\n" * 100)
    result = diffuse("query", *where(served, place), "--audio", str(tmp_path / "list.wav"))
    assert result.exit_code == 1
    assert "cannot be read" in result.stderr
    assert not own_engine.requests


def test_without_words_a_chat_model_is_not_asked(diffuse: Diffuse, served: Served, recording: str) -> None:
    result = diffuse("query", "--url", served.url, "--model", "scripted", "--audio", recording)
    assert result.exit_code == 2
    assert "say what to ask about the recording" in " ".join(result.stderr.replace("│", "").split())
    nothing = diffuse("query", "--url", served.url)
    assert nothing.exit_code == 2
    assert "--prompt" in nothing.stderr


def test_missing_layers_are_named(diffuse: Diffuse, own_engine: FakeScribe, recording: str) -> None:
    own_engine.status = ModelStatus("partial", 4, ((2, 4),))
    result = diffuse("query", *NODE, "--model", "scribe", "--audio", recording)
    assert result.exit_code == 1
    assert "no node serves layers 2:4 of 4" in result.stderr
