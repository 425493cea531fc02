"""Recordings over HTTP: every format is what it says, streams, the official client, and what is refused."""

from __future__ import annotations

import asyncio
import io
import json
import wave
from collections.abc import AsyncIterator
from typing import Any

import httpx
import numpy as np
import openai
import pytest

from app.engine.tokenizer import ChatTokenizer
from app.media.subtitles import subrip, webvtt
from routing.errors import NoRouteError
from tests.support.api_server import Served, serve_engines, settles
from tests.support.fake_scribe import RATE, FakeScribe
from tests.support.local_engine import ScriptedEngine

PATH = "/v1/audio/transcriptions"
TRANSLATIONS = "/v1/audio/translations"
TEXT = "Hello there. How are you? Fine --> I <think> & you?"


def wav(seconds: float, rate: int = RATE) -> bytes:
    file = io.BytesIO()
    with wave.open(file, "wb") as writing:
        writing.setnchannels(1)
        writing.setsampwidth(2)
        writing.setframerate(rate)
        writing.writeframes(bytes(2 * round(seconds * rate)))
    return file.getvalue()


@pytest.fixture
def scribe(tokenizer: ChatTokenizer) -> FakeScribe:
    return FakeScribe(tokenizer)


@pytest.fixture
async def served(scribe: FakeScribe, scripted: ScriptedEngine) -> AsyncIterator[Served]:
    async with serve_engines(scribe, scripted, max_recording_s=20, max_upload_bytes=2_000_000) as running:
        yield running


async def post(
    served: Served, content: bytes | None = None, path: str = PATH, **fields: Any
) -> httpx.Response:
    form = {name: value for name, value in {"model": "scribe", **fields}.items() if value is not None}
    file = ("speech.wav", wav(2.5) if content is None else content, "audio/wav")
    return await served.http.post(path, data=form, files={"file": file})


def events_of(text: str) -> list[dict[str, Any]]:
    blocks = [block.split("\n") for block in text.removesuffix("\n\n").split("\n\n")]
    events = [
        json.loads(lines[-1].removeprefix("data: ")) for lines in blocks if not lines[0].startswith(":")
    ]
    names = [lines[0].removeprefix("event: ") for lines in blocks if not lines[0].startswith(":")]
    assert names == [event["type"] for event in events]
    return events


async def test_json_is_the_text_and_how_long_it_was(served: Served, scribe: FakeScribe) -> None:
    answer = await post(served)
    assert answer.headers["content-type"] == "application/json"
    assert answer.json() == {"text": TEXT, "usage": {"type": "duration", "seconds": 3}}
    assert "total;dur=500.0" in answer.headers["server-timing"]
    asked = scribe.requests[0]
    assert (asked.language, asked.task, asked.prompt, asked.temperature) == (None, "transcribe", "", 0.0)
    assert not asked.wants_times
    assert asked.samples.dtype == np.float32
    assert len(asked.samples) == 2.5 * RATE
    assert "samples" not in repr(asked)


async def test_what_is_asked_reaches_the_engine(served: Served, scribe: FakeScribe) -> None:
    fields = {"language": "French", "prompt": "Diffuse, NixOS", "temperature": "0.4", "seed": "7"}
    await post(served, **fields, response_format="verbose_json", chunking_strategy="auto")
    asked = scribe.requests[0]
    assert (asked.language, asked.prompt, asked.temperature, asked.seed) == ("fr", "Diffuse, NixOS", 0.4, 7)
    assert asked.wants_times


@pytest.mark.parametrize(
    ("form", "content_type"),
    [
        ("text", "text/plain; charset=utf-8"),
        ("srt", "application/x-subrip; charset=utf-8"),
        ("vtt", "text/vtt; charset=utf-8"),
    ],
)
async def test_other_formats_are_plain_text(served: Served, form: str, content_type: str) -> None:
    answer = await post(served, response_format=form)
    assert answer.headers["content-type"] == content_type
    expected = {
        "text": TEXT + "\n",
        "srt": "1\n00:00:00,000 --> 00:00:01,000\nHello there.\n\n"
        "2\n00:00:01,000 --> 00:00:02,000\nHow are you?\n\n"
        "3\n00:00:02,000 --> 00:00:02,500\nFine -> I <think> & you?\n\n",
        "vtt": "WEBVTT\n\n00:00:00.000 --> 00:00:01.000\nHello there.\n\n"
        "00:00:01.000 --> 00:00:02.000\nHow are you?\n\n"
        "00:00:02.000 --> 00:00:02.500\nFine -> I &lt;think> &amp; you?\n\n",
    }
    assert answer.text == expected[form]


def test_subtitles_of_hours_and_of_nothing(tokenizer: ChatTokenizer) -> None:
    assert subrip(()) == ""
    assert webvtt(()) == "WEBVTT\n\n"
    segment = FakeScribe(tokenizer)._segment(3725, 4000)
    assert subrip([segment]).startswith("1\n01:02:05,000 --> 01:02:06,000\n")


async def test_verbose_json_has_everything_of_each_segment(served: Served, scribe: FakeScribe) -> None:
    answer = (
        await post(served, response_format="verbose_json", **{"timestamp_granularities[]": "segment"})
    ).json()
    assert (answer["task"], answer["language"], answer["duration"]) == ("transcribe", "french", 2.5)
    assert answer["text"] == TEXT
    assert answer["usage"] == {"type": "duration", "seconds": 3}
    assert answer["segments"][1] == {
        "id": 1,
        "seek": 100,
        "start": 1.0,
        "end": 2.0,
        "text": " How are you?",
        "tokens": [311, 7, 8, 330],
        "temperature": 0.0,
        "avg_logprob": -0.25,
        "compression_ratio": 1.1,
        "no_speech_prob": 0.125,
    }
    scribe.knows_logprobs = False
    thin = (await post(served, response_format="verbose_json")).json()
    assert {type(value) for value in thin["segments"][0].values()} == {int, float, str, list}


async def test_a_stream_tells_each_window_and_then_all(served: Served) -> None:
    answer = await post(served, stream="true")
    assert answer.headers["content-type"].startswith("text/event-stream")
    *deltas, done = events_of(answer.text)
    assert {event["type"] for event in deltas} == {"transcript.text.delta"}
    assert "".join(event["delta"] for event in deltas) == TEXT == done["text"]
    assert done["type"] == "transcript.text.done"
    assert done["usage"] == {
        "type": "tokens",
        "input_tokens": 128,
        "output_tokens": 15,
        "total_tokens": 143,
        "input_token_details": {"audio_tokens": 125, "text_tokens": 3},
    }


async def test_progress_comes_when_it_is_asked_for(served: Served) -> None:
    answer = await post(served, stream="true", **{"stream_options[include_progress]": "true"})
    progress = [event for event in events_of(answer.text) if event["type"] == "transcript.progress"]
    assert [(event["done_s"], event["total_s"]) for event in progress] == [(1.0, 2.5), (2.0, 2.5), (2.5, 2.5)]
    assert progress[1]["segments"][0]["text"] == " How are you?"


async def test_a_slow_stream_has_comments(scribe: FakeScribe) -> None:
    scribe.before_window = lambda number: asyncio.sleep(0.3 * number)
    async with serve_engines(scribe, keepalive_s=0.05) as served:
        answer = await post(served, wav(2), stream="true")
    assert ": keep-alive\n\n" in answer.text
    assert events_of(answer.text)[-1]["type"] == "transcript.text.done"


async def test_a_translation_is_in_english(served: Served, scribe: FakeScribe) -> None:
    answer = (await post(served, path=TRANSLATIONS, response_format="verbose_json")).json()
    assert (answer["task"], answer["language"]) == ("translate", "english")
    assert scribe.requests[0].task == "translate"
    refused = await post(served, path=TRANSLATIONS, language="fr")
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "language")


async def test_an_english_model_translates_nothing(scribe: FakeScribe) -> None:
    scribe.is_multilingual, scribe.languages = False, {"en": "english"}
    async with serve_engines(scribe) as served:
        refused = await post(served, path=TRANSLATIONS)
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "model")
        assert "understands English only" in refused.json()["error"]["message"]
        assert (await post(served, language="fr")).json()["error"]["param"] == "language"
        for language in ("en", "English", ""):
            assert (await post(served, language=language)).status_code == 200


async def test_the_official_client_reads_every_format(client: openai.AsyncOpenAI) -> None:
    def file() -> tuple[str, bytes]:
        return "speech.wav", wav(2.5)

    create = client.audio.transcriptions.create
    plain = await create(model="scribe", file=file())
    assert plain.text == TEXT
    assert plain.usage is not None
    assert (plain.usage.type, plain.usage.seconds) == ("duration", 3)
    verbose = await create(
        model="scribe",
        file=file(),
        response_format="verbose_json",
        timestamp_granularities=["segment"],
        temperature=0,
        language="en",
        chunking_strategy="auto",
    )
    assert verbose.language == "english"
    assert verbose.segments is not None
    assert [segment.end for segment in verbose.segments] == [1.0, 2.0, 2.5]
    assert await create(model="scribe", file=file(), response_format="text") == TEXT + "\n"
    assert (await create(model="scribe", file=file(), response_format="srt")).startswith("1\n00:00:00,000")
    assert (await create(model="scribe", file=file(), response_format="vtt")).startswith("WEBVTT")
    stream = await create(model="scribe", file=file(), stream=True)
    events = [event async for event in stream]
    assert events[-1].type == "transcript.text.done"
    assert events[-1].text == TEXT
    assert events[-1].usage.total_tokens == 143
    with pytest.deprecated_call():  # the client warns of it
        translated = await client.audio.translations.create(model="scribe", file=file())
    assert translated.text == TEXT


@pytest.mark.parametrize(
    ("fields", "param", "code"),
    [
        ({"timestamp_granularities[]": "word"}, "timestamp_granularities", "unsupported_parameter"),
        ({"timestamp_granularities[]": "segment"}, "timestamp_granularities", "invalid_value"),
        ({"timestamp_granularities[]": "syllable"}, "timestamp_granularities.0", "invalid_value"),
        ({"response_format": "diarized_json"}, "response_format", "invalid_value"),
        ({"response_format": "srt", "stream": "true"}, "stream", "invalid_value"),
        ({"include[]": "logprobs"}, "include", "unsupported_parameter"),
        ({"chunking_strategy": "server_vad"}, "chunking_strategy", "unsupported_parameter"),
        ({"known_speaker_names[]": "Ada"}, "known_speaker_names", "unsupported_parameter"),
        ({"temperature": "1.5"}, "temperature", "invalid_value"),
        ({"temperature": "warm"}, "temperature", "invalid_value"),
        ({"stream": "perhaps"}, "stream", "invalid_value"),
        ({"language": "klingon"}, "language", "invalid_value"),
        ({"prompt": "x" * 40_000}, "prompt", "invalid_value"),
        ({"stream_options[include_progress]": "true"}, "stream_options", "invalid_value"),
        ({"diffuse[draft]": "off"}, "diffuse.draft", "unsupported_parameter"),
        ({"model": "scripted"}, "model", "invalid_value"),
    ],
)
async def test_a_wrong_field_is_named(
    served: Served, scribe: FakeScribe, fields: dict[str, Any], param: str, code: str
) -> None:
    answer = await post(served, **fields)
    error = answer.json()["error"]
    assert (answer.status_code, error["param"], error["code"]) == (400, param, code)
    assert not scribe.requests


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "empty"),
        (b"milk, bread, six eggs\n" * 200, "cannot be read"),
        (wav(0), "no length|cannot be read"),
        (wav(0.05), "shorter than 0.1 seconds"),
        (wav(21), "longer than 20 seconds"),
    ],
)
async def test_what_is_no_recording_is_refused(
    served: Served, scribe: FakeScribe, content: bytes, message: str
) -> None:
    answer = await post(served, content)
    error = answer.json()["error"]
    assert (answer.status_code, error["param"], error["type"]) == (400, "file", "invalid_request_error")
    assert any(one in error["message"] for one in message.split("|"))
    assert not scribe.requests
    assert (await post(served)).status_code == 200  # others are answered as ever


async def test_a_missing_or_misplaced_file_is_named(served: Served) -> None:
    for answer in (
        await served.http.post(PATH, data={"model": "scribe"}, files={"note": (None, "x")}),
        await served.http.post(PATH, json={"model": "scribe"}),
    ):
        error = answer.json()["error"]
        assert (answer.status_code, error["param"]) == (400, "file")
        assert error["code"] == "missing_required_parameter"
    text = await served.http.post(PATH, json={"model": "scribe", "file": "aGVsbG8="})
    assert "multipart" in text.json()["error"]["message"]
    other = await served.http.post(PATH, data={"model": "scribe"}, files={"picture": ("a.png", b"x")})
    assert other.json()["error"]["param"] == "picture"
    twice = await served.http.post(PATH, files=[("file", ("a.wav", wav(1))), ("file", ("b.wav", wav(1)))])
    assert twice.json()["error"]["code"] == "invalid_form"


async def test_a_body_past_the_limit_is_refused_unread(served: Served) -> None:
    async def endless() -> AsyncIterator[bytes]:
        head = b'--x\r\ncontent-disposition: form-data; name="file"; filename="a.wav"\r\n\r\n'
        yield head
        for _ in range(100):
            yield bytes(100_000)

    headers = {"content-type": "multipart/form-data; boundary=x"}
    answer = await served.http.post(PATH, content=endless(), headers=headers)
    assert (answer.status_code, answer.json()["error"]["code"]) == (413, "request_too_large")
    reader, writer = await asyncio.open_connection("127.0.0.1", served.port)
    head = f"POST {PATH} HTTP/1.1\r\nhost: localhost\r\ncontent-length: {2 << 30}\r\n"
    writer.write(f"{head}content-type: {headers['content-type']}\r\n\r\n".encode())
    assert b" 413 " in await reader.readline()  # before a byte of the 2 GB was sent
    writer.close()


async def test_no_speech_model_is_told(scripted: ScriptedEngine) -> None:
    async with serve_engines(scripted) as served:
        for fields in ({"model": "whisper-1"}, {"model": None}):
            error = (await post(served, **fields)).json()["error"]
            assert (error["code"], error["param"]) == ("model_not_found", "model")


async def test_without_a_name_the_first_speech_model_answers(served: Served) -> None:
    assert (await post(served, model=None)).json()["text"] == TEXT


async def test_a_speech_model_in_a_chat_is_pointed_to_its_endpoint(served: Served) -> None:
    messages = [{"role": "user", "content": "hello"}]
    answer = await served.http.post("/v1/chat/completions", json={"model": "scribe", "messages": messages})
    assert answer.status_code == 400
    assert PATH in answer.json()["error"]["message"]


async def test_a_client_that_leaves_frees_the_engine(served: Served, scribe: FakeScribe) -> None:
    scribe.before_window = lambda number: asyncio.sleep(60 if number else 0)
    form = {"model": (None, "scribe"), "stream": (None, "true"), "file": ("a.wav", wav(3))}
    async with served.http.stream("POST", PATH, files=form) as answer:
        async for _ in answer.aiter_bytes():
            break
        assert scribe.num_open == 1
    await settles(lambda: scribe.num_open == 0)
    assert served.metric("diffuse_requests_aborted_total", endpoint=PATH) == 1


async def test_a_failure_in_the_middle_is_told_in_the_stream(served: Served, scribe: FakeScribe) -> None:
    def fail(number: int) -> None:
        if number == 1:
            raise NoRouteError(((0, 2),), "scribe")

    scribe.before_window = fail
    assert (await post(served)).status_code == 503
    events = (await post(served, stream="true")).text.removesuffix("\n\n").split("\n\n")
    assert json.loads(events[-1].removeprefix("data: "))["error"]["code"] == "no_route"


async def test_recordings_are_counted_while_they_are_held(scribe: FakeScribe) -> None:
    """1.2 MB of samples each, and room for 2 MB."""
    held = asyncio.Event()
    scribe.before_window = lambda _: held.wait()
    async with serve_engines(scribe, media_bytes=2_000_000) as served:
        first = asyncio.create_task(post(served, wav(19)))
        await settles(lambda: scribe.num_open == 1)
        second = await post(served, wav(19))
        assert (second.status_code, second.json()["error"]["code"]) == (503, "overloaded")
        held.set()
        assert (await first).status_code == 200
        assert (await post(served, wav(19))).status_code == 200


async def test_files_are_counted_while_they_come(scribe: FakeScribe) -> None:
    """Room for 1.5 MB, of which somebody who sends slowly, and then leaves, has filled a whole one."""
    head = b'--b\r\nContent-Disposition: form-data; name="file"; filename="a"\r\n\r\n'
    is_there, leaves = asyncio.Event(), asyncio.Event()

    async def slowly() -> AsyncIterator[bytes]:
        yield head + bytes(1_000_000)
        is_there.set()
        await leaves.wait()
        raise ConnectionError

    async with serve_engines(scribe, media_bytes=1_500_000) as served:
        form = {"content-type": "multipart/form-data; boundary=b"}
        first = asyncio.create_task(served.http.post(PATH, content=slowly(), headers=form))
        await is_there.wait()
        async with asyncio.timeout(10):  # what was sent may not have arrived yet
            while (second := await post(served, wav(19))).status_code == 200:  # a file of 0.6 MB
                pass
        assert (second.status_code, second.json()["error"]["code"]) == (503, "overloaded")
        assert int(second.headers["retry-after"]) > 0
        leaves.set()
        await asyncio.gather(first, return_exceptions=True)
        await settles_to_200(served)


async def settles_to_200(served: Served) -> None:
    async with asyncio.timeout(10):
        while (await post(served, wav(3))).status_code != 200:
            await asyncio.sleep(0.02)


async def test_a_file_in_the_wrong_field_is_told_the_right_one(served: Served) -> None:
    answer = await served.http.post(PATH, data={"model": "scribe"}, files={"audio": ("a.wav", wav(1))})
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, "audio")
    assert "'file'" in error["message"]


async def test_a_prompt_that_is_no_prompt_is_named(served: Served) -> None:
    error = (await post(served, prompt="word " * 60_000)).json()["error"]
    assert error["param"] == "prompt"


async def test_what_was_said_is_counted_and_never_told(
    served: Served, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("DEBUG")
    await post(served, prompt="a secret name")
    metrics = (await served.http.get("/metrics")).text
    assert 'diffuse_generated_tokens_total{model="scribe"} 15.0' in metrics
    assert served.metric("diffuse_replays_total", model="scribe") == 1
    told = metrics + caplog.text
    assert "Hello" not in told
    assert "secret" not in told
    assert "recording_s 2.5" in caplog.text
