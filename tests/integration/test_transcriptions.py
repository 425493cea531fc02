"""Recordings written down over real node servers: as the uncut model does, whatever happens on the way."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import WhisperForConditionalGeneration

from app.engine.request import RequestError
from app.engine.speech import Transcribed, TranscriptionRequest, WindowDone
from app.engine.transcription import TranscriptionEngine
from routing.errors import ErrorCode, WorkError
from routing.types import Message, Step
from slicing.encoder import load_home
from slicing.model_source import open_checkpoint
from tests.integration.chats import Chat, chat
from tests.support.tiny_speech import WholeSpeech, noise, save_speech, tiny_whisper

RECORDING = noise(1.5)
PLACES = [((0, 0), 1), ((1, 0), 2), ((0, 1), 3), ((1, 1), 2)]


@dataclass
class Scribe:
    """An engine over nodes, and the uncut model."""

    engine: TranscriptionEngine
    here: Chat
    whole: WholeSpeech

    async def heard(
        self, samples: np.ndarray = RECORDING, **fields: Any
    ) -> tuple[list[WindowDone], Transcribed]:
        request = TranscriptionRequest("r", "tiny", samples, **fields)
        async with aclosing(self.engine.transcribe(request)) as telling:
            events = [event async for event in telling]
        assert isinstance(events[-1], Transcribed)
        return [event for event in events if isinstance(event, WindowDone)], events[-1]


@pytest.fixture(scope="module")
def model() -> WhisperForConditionalGeneration:
    return tiny_whisper()


@contextlib.asynccontextmanager
async def scribe(
    model: WhisperForConditionalGeneration,
    folder: Path,
    local: tuple[int, int] | None = (1, 0),
    *,
    is_multilingual: bool = False,
    **options: Any,
) -> AsyncIterator[Scribe]:
    whole = WholeSpeech(save_speech(model, folder, is_multilingual=is_multilingual), model)
    encoder = load_home(open_checkpoint(str(folder)), dtype=torch.float32)
    options = {"copies": 1, "chunk": 512} | options
    with ThreadPoolExecutor(1) as encoding:
        async with chat(model, whole.tokenizer, local, **options) as here:
            engine = TranscriptionEngine(
                here.engine,
                encoder,
                encoding,
                whole.features,
                whole.tokens,
                stride=2,
                knows_logprobs=local is not None,
            )
            yield Scribe(engine, here, whole)


@pytest.mark.parametrize(("local", "slices"), PLACES)
async def test_windows_are_those_of_the_uncut_model(
    model: WhisperForConditionalGeneration, tmp_path: Path, local: tuple[int, int], slices: int
) -> None:
    async with scribe(model, tmp_path, local, slices=slices) as here:
        windows, made = await here.heard(seed=7)
        expected = await here.whole.windows(RECORDING, seed=7)
        assert windows == expected
        assert len(windows) == 4
        assert {segment.temperature for segment in made.segments} > {0.0}, "some were made again"
        assert made.segments == tuple(segment for window in expected for segment in window.segments)
        await here.here.is_freed()


async def test_with_the_ends_on_nodes_nobody_doubts(
    model: WhisperForConditionalGeneration, tmp_path: Path
) -> None:
    async with scribe(model, tmp_path, None) as here:
        windows, made = await here.heard()
        assert windows == await here.whole.windows(RECORDING, knows_logprobs=False)
        assert all(segment.avg_logprob is None for segment in made.segments)


async def test_a_language_is_heard_or_told(model: WhisperForConditionalGeneration, tmp_path: Path) -> None:
    async with scribe(model, tmp_path, is_multilingual=True) as here:
        windows, made = await here.heard()
        assert windows == await here.whole.windows(RECORDING)
        assert made.language in here.engine.languages
        other = next(code for code in here.engine.languages if code != made.language)
        told, said = await here.heard(language=other, task="translate")
        assert told == await here.whole.windows(RECORDING, language=other, task="translate")
        assert said.language == other
        assert told != windows


async def test_a_prompt_goes_before_each_window(
    model: WhisperForConditionalGeneration, tmp_path: Path
) -> None:
    async with scribe(model, tmp_path) as here:
        windows, made = await here.heard(prompt="the quick fox")
        assert windows == await here.whole.windows(RECORDING, prompt="the quick fox")
        assert windows != await here.whole.windows(RECORDING)
        assert made.prompt_tokens > 0


async def test_a_short_recording_without_times_is_one_piece(
    model: WhisperForConditionalGeneration, tmp_path: Path
) -> None:
    async with scribe(model, tmp_path) as here:
        windows, _ = await here.heard(RECORDING[:8000], wants_times=False)
        assert windows == await here.whole.windows(RECORDING[:8000], times=False)
        assert [len(window.segments) for window in windows] == [1]


@pytest.mark.parametrize("local", [(1, 0), None])
@pytest.mark.parametrize("after", [2, 25])
async def test_a_node_lost_in_the_middle_changes_nothing(
    model: WhisperForConditionalGeneration, tmp_path: Path, local: tuple[int, int] | None, after: int
) -> None:
    async with scribe(model, tmp_path, local, copies=2) as here:
        steps = 0

        def lose(link: Any, message: Message) -> bool:
            nonlocal steps
            if isinstance(message, Step) and link.peer_id in {node.node_id for node in here.here.nodes[:2]}:
                steps += 1
                if steps == after:
                    here.here.lost.add(link.peer_id)
                    here.here.here.rig.network.cut_off(link.peer_id)
            return False

        here.here.here.rig.network.drop = lose
        windows, made = await here.heard(seed=3)
        assert windows == await here.whole.windows(RECORDING, knows_logprobs=local is not None, seed=3)
        assert made.replays >= 1
        await here.here.is_freed()


async def test_the_recording_stays_at_home(model: WhisperForConditionalGeneration, tmp_path: Path) -> None:
    payloads: list[bytes] = []
    async with scribe(model, tmp_path) as here:

        def note(link: Any, message: Message) -> bool:
            if isinstance(message, Step):
                payloads.append(bytes(message.payload))
            return False

        here.here.here.rig.network.drop = note
        await here.heard(RECORDING[:16_000])
        features = here.whole.features.window(
            RECORDING[:16_000], 0, here.whole.features.loudest(RECORDING[:16_000])
        )
        with torch.inference_mode():
            states = model.model.encoder(features).last_hidden_state[0].numpy()
    arrived = b"".join(payloads)
    samples, mels = RECORDING[:16_000], features[0].numpy()
    for dtype in (np.float32, np.float16):
        assert not any(samples[at : at + 4].astype(dtype).tobytes() in arrived for at in range(0, 16_000, 4))
        frames = np.ascontiguousarray(mels.T.astype(dtype))
        assert not any(frame[:3].tobytes() in arrived for frame in frames)
    assert not any(
        (samples[at : at + 4] * 32768).astype("<i2").tobytes() in arrived for at in range(0, 16_000, 4)
    )
    assert states[7].tobytes() in arrived, "the search finds what did travel"


async def test_two_recordings_at_once_do_not_mix(
    model: WhisperForConditionalGeneration, tmp_path: Path
) -> None:
    other = noise(0.8, seed=9)
    async with scribe(model, tmp_path) as here:
        (first, _), (second, _) = await asyncio.gather(here.heard(), here.heard(other))
        assert first == await here.whole.windows(RECORDING)
        assert second == await here.whole.windows(other)


async def test_silence_is_empty_and_costs_nothing(
    model: WhisperForConditionalGeneration, tmp_path: Path
) -> None:
    async with scribe(model, tmp_path) as here:
        windows, made = await here.heard(np.zeros(40_000, np.float32))
        assert made.text == ""
        assert sum(window.num_tokens for window in windows) == 0
        assert made.duration_s == 2.5


async def test_a_deadline_ends_a_recording(model: WhisperForConditionalGeneration, tmp_path: Path) -> None:
    async with scribe(model, tmp_path) as here:
        with pytest.raises(WorkError) as ended:
            await here.heard(noise(60), deadline_s=0.5)
        assert ended.value.code is ErrorCode.DEADLINE
        await here.here.is_freed()
        assert here.engine.num_running == 0


async def test_an_abandoned_recording_frees_the_nodes(
    model: WhisperForConditionalGeneration, tmp_path: Path
) -> None:
    async with scribe(model, tmp_path) as here:
        telling = here.engine.transcribe(TranscriptionRequest("r", "tiny", noise(30)))
        await anext(telling)
        await telling.aclose()
        await here.here.is_freed()


@pytest.mark.parametrize(
    ("fields", "param"), [({"language": "xx"}, "language"), ({"task": "translate"}, "model")]
)
async def test_what_the_model_cannot_do_is_refused(
    model: WhisperForConditionalGeneration, tmp_path: Path, fields: dict[str, Any], param: str
) -> None:
    async with scribe(model, tmp_path) as here:
        with pytest.raises(RequestError) as refused:
            await here.heard(**fields)
        assert refused.value.param == param
