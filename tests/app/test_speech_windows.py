"""The algorithm of windows: where it cuts, when it tries again, and that it is the stock one."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import WhisperFeatureExtractor

from app.engine.speech import WindowDone
from app.engine.speech_features import SpeechFeatures
from app.engine.speech_tokens import SpeechTokens
from app.engine.speech_windows import TEMPERATURES, Decoded, Windows, Wishes, cut
from slicing.errors import ModelError
from slicing.logits_rule import WhisperRule
from slicing.sampler import SamplingParams
from tests.support.tiny_speech import (
    BEFORE,
    END,
    FIRST_LANGUAGE,
    FIRST_TIME,
    MAX_POSITIONS,
    NO_TIMES,
    RATE,
    START,
    TRANSCRIBE,
    WholeSpeech,
    noise,
    save_speech,
    tiny_whisper,
)

SURE, UNSURE = -0.2, -2.0


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_speech(tiny_whisper(), tmp_path_factory.mktemp("speech"))


@pytest.fixture(scope="module")
def languages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_speech(tiny_whisper(), tmp_path_factory.mktemp("languages"), is_multilingual=True)


@dataclass
class Scripted:
    """Decodes what it is told to, attempt by attempt: token ids, how sure it is, how probable silence is."""

    script: Sequence[tuple[tuple[int, ...], float, float]]
    asked: list[tuple[tuple[int, ...], SamplingParams, int]] = field(default_factory=list)
    features: list[torch.Tensor] = field(default_factory=list)

    async def encode(self, features: torch.Tensor) -> torch.Tensor:
        self.features.append(features)
        return features

    async def decode(
        self,
        memory: torch.Tensor,
        prompt_ids: tuple[int, ...],
        sampling: SamplingParams,
        max_tokens: int,
        watched_ids: tuple[int, ...],
    ) -> Decoded:
        ids, sure, silence = self.script[len(self.asked)]
        self.asked.append((prompt_ids, sampling, max_tokens))
        return Decoded(ids, (sure,) * len(ids), (float(np.log(silence)),))


async def heard(
    folder: Path, decoder: Scripted, samples: np.ndarray | None = None, **wishes: Any
) -> list[WindowDone]:
    windows = Windows(
        noise(1.0) if samples is None else samples,
        Wishes(**wishes),
        SpeechTokens.read(folder),
        SpeechFeatures.load(folder),
        decoder,
        read=lambda ids: "".join(f" {number}" for number in ids),
        max_positions=MAX_POSITIONS,
        stride=2,
    )
    return [window async for window in windows.heard()]


def at(steps: int) -> int:
    return FIRST_TIME + steps


def said(*ids: int) -> tuple[int, ...]:
    return (at(0), *ids, at(50), END)


GOOD = (said(7), SURE, 0.1)
DOUBTED = (said(8), UNSURE, 0.1)


@pytest.mark.parametrize(
    ("ids", "cuts", "advance"),
    [
        ((at(0), 5, at(20), at(20), 6, at(45)), [(0, 20), (20, 45)], 100),
        ((at(0), 5, at(20), at(20), 6), [(0, 20)], 40),
        ((at(0), 5, at(20), at(20)), [(0, 20)], 40),
        ((at(0), 5, at(20), at(30), 6, at(45), at(45)), [(0, 20), (30, 45)], 90),
        ((at(3), 5, at(20)), [(0, 20)], 100),
        ((at(0), 5, 6), [(0, 50)], 100),
        ((5, 6), [(0, 50)], 100),
        ((), [(0, 50)], 100),
        ((at(0), at(0), at(0)), [(0, 0), (0, 0)], 1),
    ],
)
def test_a_window_is_cut_where_two_times_meet(
    ids: tuple[int, ...], cuts: list[tuple[int, int]], advance: int
) -> None:
    made, further = cut(ids, FIRST_TIME, 100, 2)
    assert [(one.start, one.end) for one in made] == cuts
    assert further == advance


async def test_an_answer_that_is_doubted_or_repeats_itself_is_made_again_warmer(folder: Path) -> None:
    repeating = (said(*[9] * 40), SURE, 0.1)
    decoder = Scripted([DOUBTED, repeating, GOOD])
    (window,) = await heard(folder, decoder, seed=5)
    assert [segment.text for segment in window.segments] == [" 7"]
    assert window.segments[0].temperature == 0.4
    assert window.num_tokens == 4 + 43 + 4
    asked = [sampling for _, sampling, _ in decoder.asked]
    assert [sampling.temperature for sampling in asked] == [0.0, 0.2, 0.4]
    assert len({(sampling.seed, sampling.stream) for sampling in asked}) == 3, "each attempt draws anew"
    assert len(decoder.features) == 1, "the encoder hears it once"


async def test_the_last_attempt_is_taken_whatever_it_is(folder: Path) -> None:
    (window,) = await heard(folder, Scripted([DOUBTED] * 6))
    assert window.segments[0].temperature == TEMPERATURES[-1]


async def test_a_temperature_that_was_asked_for_is_kept(folder: Path) -> None:
    (window,) = await heard(folder, Scripted([DOUBTED]), temperature=0.3)
    assert window.segments[0].temperature == 0.3


@pytest.mark.parametrize(
    ("sure", "silence", "segments"), [(UNSURE, 0.9, 0), (SURE, 0.9, 1), (UNSURE, 0.1, 1)]
)
async def test_silence_is_what_is_both_improbable_and_doubted(
    folder: Path, sure: float, silence: float, segments: int
) -> None:
    (window,) = await heard(folder, Scripted([(said(7), sure, silence)] * 6))
    assert len(window.segments) == segments


async def test_windows_without_sound_are_not_decoded(folder: Path) -> None:
    samples = np.concatenate([noise(1.0), np.zeros(RATE, np.float32), noise(0.5)])
    decoder = Scripted([GOOD, GOOD])
    windows = await heard(folder, decoder, samples)
    assert [(window.done_s, len(window.segments)) for window in windows] == [(1.0, 1), (2.0, 0), (2.5, 1)]
    assert [window.segments[0].start_s for window in windows if window.segments] == [0.0, 2.0]
    assert windows[-1].segments[0].end_s == 2.5, "not past the end"


async def test_a_prompt_keeps_its_end_and_leaves_room(folder: Path) -> None:
    decoder = Scripted([GOOD])
    await heard(folder, decoder, prompt_ids=tuple(range(100, 140)))
    prompt, _, max_tokens = decoder.asked[0]
    assert prompt == (BEFORE, *range(140 - 13, 140), START)
    assert len(prompt) + max_tokens <= MAX_POSITIONS


async def test_windows_follow_each_other_when_asked_and_forget_what_was_too_warm(folder: Path) -> None:
    warm = [DOUBTED] * 3 + [GOOD]
    decoder = Scripted([GOOD, *warm, GOOD])
    await heard(folder, decoder, noise(3.0), follows=True)
    prompts = [prompt for prompt, _, _ in decoder.asked]
    assert prompts[0] == (START,)
    assert prompts[1] == (BEFORE, at(0), 7, at(50), START)
    assert prompts[-1] == (BEFORE, at(0), 7, at(50), START), "only the last window's words"


async def test_a_language_is_drawn_first_and_kept(languages: Path) -> None:
    french = FIRST_LANGUAGE + 1
    script = [((french, TRANSCRIBE, *said(7)), SURE, 0.1)] * 2
    decoder = Scripted(script)
    windows = await heard(languages, decoder, noise(2.0))
    assert {window.language for window in windows} == {"fr"}
    rules = [sampling.rule for _, sampling, _ in decoder.asked]
    assert all(isinstance(rule, WhisperRule) for rule in rules)
    task = (TRANSCRIBE, TRANSCRIBE + 1)
    assert rules[0].forced == ((FIRST_LANGUAGE, FIRST_LANGUAGE + 4), task)
    assert rules[1].forced == ((french, french + 1), task)
    assert windows[0].segments[0].token_ids == (at(0), 7, at(50)), "without language and task"


async def test_without_times_one_window_is_one_segment(folder: Path) -> None:
    decoder = Scripted([((NO_TIMES, 7, 8, END), SURE, 0.1)])
    (window,) = await heard(folder, decoder, times=False)
    assert [(one.start_s, one.end_s, one.text) for one in window.segments] == [(0.0, 1.0, " 7 8")]
    rule = decoder.asked[0][1].rule
    assert rule is not None
    assert (rule.forced, rule.first_timestamp) == (((NO_TIMES, NO_TIMES + 1),), None)
    long = Scripted([GOOD, GOOD])
    await heard(folder, long, noise(1.5), times=False)
    assert long.asked[0][1].rule.first_timestamp == FIRST_TIME, "windows need times"


async def test_greedy_segments_are_those_of_stock_generation(folder: Path) -> None:
    """Greedy alone, as the stock `generate` is when no thresholds are named."""
    model, samples = tiny_whisper(), noise(0.9, seed=2)
    whole = WholeSpeech(folder, model)
    features = whole.features.window(samples, 0, whole.features.loudest(samples))
    model.generation_config = type(model.generation_config).from_pretrained(folder)
    made = model.generate(features, return_timestamps=True, return_segments=True, max_new_tokens=14)
    windows = await whole.windows(samples, knows_logprobs=False)
    first = [segment for segment in windows[0].segments if segment.temperature == 0]
    stock = [segment["tokens"].tolist() for segment in made["segments"][0]]
    assert first
    for ours, theirs in zip(first, stock, strict=False):
        assert theirs[: len(ours.token_ids)] == list(ours.token_ids)


def test_features_are_the_extractors_of_the_whole_recording(folder: Path) -> None:
    """But for the frames at the edges of windows, where the extractor mirrors what it does not see."""
    extractor = WhisperFeatureExtractor.from_pretrained(folder)
    features, samples = SpeechFeatures(extractor), noise(2.5)
    samples[20_000:30_000] *= 1e-4
    whole = extractor(
        samples, sampling_rate=RATE, return_tensors="pt", truncation=False, padding="longest"
    ).input_features
    loudest = features.loudest(samples)
    assert loudest == pytest.approx(float(whole.max()), abs=0.05)
    for seek in (0, 100, 130):
        window = features.window(samples, seek, loudest)
        assert window.shape == (1, 8, 100)
        assert torch.allclose(window[..., 3:97], whole[..., seek + 3 : seek + 97], atol=1e-4)
    tail = features.window(samples, 200, loudest)
    assert torch.equal(tail[..., 60:], torch.full((1, 8, 40), loudest - 2)), "silence follows"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"no_timestamps_token_id": None}, "damaged"),
        ({"suppress_tokens": ["x"]}, "damaged"),
        ({"eos_token_id": ...}, "names no eos_token_id"),
    ],
)
def test_a_folder_that_says_too_little_is_told(
    folder: Path, tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    stated = json.loads((folder / "generation_config.json").read_text()) | change
    kept = {name: value for name, value in stated.items() if value is not ...}
    (tmp_path / "generation_config.json").write_text(json.dumps(kept))
    with pytest.raises(ModelError, match=message):
        SpeechTokens.read(tmp_path)
    with pytest.raises(ModelError, match=r"no preprocessor_config.json"):
        SpeechFeatures.load(tmp_path)
