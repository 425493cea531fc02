"""Sounds over HTTP: every format is really that format, events, and what is refused."""

from __future__ import annotations

import asyncio
import base64
import io
import json
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import av
import pytest

from app.engine.request import RequestError
from tests.support.api_server import Served, serve_engines, settles
from tests.support.fake_pictures import FakePictures, fake_sounds
from tests.support.local_engine import ScriptedEngine

PATH = "/v1/audio/speech"
BODY: dict[str, Any] = {"model": "composer", "input": "rain on a roof", "seed": 3}
CODECS = {"mp3": "mp3float", "opus": "opus", "aac": "aac", "flac": "flac", "wav": "pcm_s16le"}


@pytest.fixture
def composer() -> FakePictures:
    return fake_sounds()


@pytest.fixture
async def served(composer: FakePictures, scripted: ScriptedEngine) -> AsyncIterator[Served]:
    async with serve_engines(composer, scripted, FakePictures()) as running:
        yield running


async def post(served: Served, **changes: Any) -> Any:
    body = {name: value for name, value in {**BODY, **changes}.items() if value is not None}
    return await served.http.post(PATH, json=body)


@pytest.mark.parametrize("form", [None, *CODECS])
async def test_the_file_is_what_its_type_says(served: Served, form: str | None) -> None:
    answer = await post(served, response_format=form)
    types = {"mp3": "audio/mpeg", "opus": "audio/ogg; codecs=opus"}
    assert answer.headers["content-type"] == types.get(form or "mp3", f"audio/{form}")
    assert "content-length" not in answer.headers  # it comes in chunks
    with av.open(io.BytesIO(answer.content)) as sound:
        stream = sound.streams.audio[0]
        samples = sum(frame.samples for frame in sound.decode(audio=0))
    assert (stream.codec.name, stream.channels) == (CODECS[form or "mp3"], 2)
    assert samples / stream.rate == pytest.approx(0.5, abs=0.06)


async def test_pcm_is_bare_samples_of_one_channel_at_24_khz(served: Served) -> None:
    answer = await post(served, response_format="pcm", duration=1)
    assert answer.headers["content-type"] == "audio/pcm"
    assert len(answer.content) == pytest.approx(2 * 24_000, abs=100)


async def test_the_official_client_streams_a_sound_to_the_end(served: Served) -> None:
    async with served.openai() as client:
        speaking = client.audio.speech.with_streaming_response.create(
            model="composer", input="rain", voice="alloy", response_format="wav", extra_body={"seconds": 2}
        )
        async with speaking as answer:
            content = b"".join([piece async for piece in answer.iter_bytes()])
    assert content[:4] == b"RIFF"
    assert len(content) == pytest.approx(2 * 44_100 * 4, rel=0.01)


async def test_events_hold_the_same_sound_and_usage(served: Served) -> None:
    options = {"include_progress": True}
    text = (await post(served, stream_format="sse", stream_options=options, response_format="flac")).text
    events = [json.loads(block.split("\n")[1][6:]) for block in text.strip().split("\n\n")]
    kinds = [event["type"].rpartition(".")[2] for event in events]
    assert kinds[:4] == ["progress"] * 4
    assert kinds[-1] == "done"
    sound = b"".join(base64.b64decode(event["audio"]) for event in events if event["type"].endswith("delta"))
    assert sound == (await post(served, response_format="flac")).content
    assert events[-1]["usage"] == {"input_tokens": 5, "output_tokens": 12, "total_tokens": 17}


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        ({"input": None}, "input"),
        ({"input": " "}, "input"),
        ({"response_format": "ogg"}, "response_format"),
        ({"speed": 2}, "speed"),
        ({"voice": "morgan"}, "voice"),
        ({"voice": {}}, "voice"),
        ({"duration": 0}, "duration"),
        ({"duration": 1e-9}, "duration"),
        ({"duration": 1, "seconds": 2}, "seconds"),
        ({"instructions": "whisper"}, "instructions"),
        ({"temperature": 3}, "temperature"),
        ({"top_k": -1}, "top_k"),
        ({"top_p": 0}, "top_p"),
        ({"n": 2}, "n"),
        ({"size": "32x32"}, "size"),
        ({"model": "scripted"}, "model"),
        ({"model": "painter"}, "model"),
    ],
)
async def test_bad_input_is_refused_by_name(
    served: Served, composer: FakePictures, changes: dict[str, Any], param: str
) -> None:
    answer = await post(served, **changes)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)
    assert not composer.requests


async def test_what_the_engine_calls_prompt_is_called_input(served: Served, composer: FakePictures) -> None:
    def refuse(number: int) -> None:
        raise RequestError("prompt", "prompt_too_long", "the prompt has 90 tokens, the text encoder takes 77")

    composer.before_step = refuse
    error = (await post(served)).json()["error"]
    assert (error["param"], error["code"]) == ("input", "prompt_too_long")


@pytest.mark.parametrize("asked", ["duration", "seconds"])
async def test_a_length_is_refused_by_the_name_it_came_in(
    served: Served, composer: FakePictures, asked: str
) -> None:
    def refuse(number: int) -> None:
        raise RequestError("seconds", "invalid_value", "a song is at most 30 seconds long")

    composer.before_step = refuse
    error = (await post(served, **{asked: 31})).json()["error"]
    assert (error["param"], error["code"]) == (asked, "invalid_value")


async def test_how_tokens_are_drawn_reaches_the_engine(served: Served, composer: FakePictures) -> None:
    await post(served, temperature=0.5, top_k=9, top_p=0.9, guidance_scale=2)
    (asked,) = composer.requests
    assert (asked.temperature, asked.top_k, asked.top_p, asked.guidance_scale) == (0.5, 9, 0.9, 2)


async def test_a_song_of_tokens_counts_as_text_does(scripted: ScriptedEngine) -> None:
    singer = fake_sounds("singer")
    singer.defaults = replace(singer.defaults, draws_tokens=True)
    async with serve_engines(singer, scripted) as served:
        assert (await post(served, model="singer")).status_code == 200
        value = served.metrics.registry.get_sample_value
        told = {"model": "singer"}
        assert (
            value("diffuse_prompt_tokens_total", told),
            value("diffuse_generated_tokens_total", told),
        ) == (5, 4)
        assert value("diffuse_denoising_steps_total", told) is None


async def test_no_model_for_sounds_is_a_404(scripted: ScriptedEngine) -> None:
    async with serve_engines(scripted) as served:
        for body in (BODY, {**BODY, "model": None}):
            asked = {name: value for name, value in body.items() if value is not None}
            answer = await served.http.post(PATH, json=asked)
            assert (answer.status_code, answer.json()["error"]["code"]) == (404, "model_not_found")


@pytest.mark.parametrize("stream_format", ["audio", "sse"])
async def test_leaving_ends_the_sound(served: Served, composer: FakePictures, stream_format: str) -> None:
    composer.before_step = lambda number: asyncio.Event().wait() if number == 2 else None
    writer = await served.begin(PATH, {**BODY, "stream_format": stream_format})
    await settles(lambda: composer.num_open == 1)
    writer.close()
    await settles(lambda: composer.num_open == 0 and served.gateway.num_running == 0)
