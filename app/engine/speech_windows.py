"""A long recording, window by window: Whisper's own sequential algorithm, over whatever decodes one window.

As in section 3.8 of Radford et al. 2022: a window is decoded with timestamps, the next one begins where the last whole
segment ended, and an answer that repeats itself or that the model doubts is made again at a higher temperature. Knows
no routes and no HTTP: the uncut model under this algorithm is what an answer over nodes is compared with.
"""

from __future__ import annotations

import asyncio
import math
import zlib
from collections.abc import AsyncGenerator, Callable, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, Protocol

from app.engine.speech import Segment, Task, WindowDone
from app.engine.speech_features import SpeechFeatures
from app.engine.speech_tokens import ENGLISH, SpeechTokens
from slicing.sampler import SamplingParams

if TYPE_CHECKING:
    import numpy as np
    import torch

# Section 4.5 of the paper, and the defaults of the implementation that its authors published.
TEMPERATURES: Final = (0.0, 0.2, 0.4, 0.6, 0.8, 1.0)
MAX_COMPRESSION: Final = 2.4  # of the text: beyond, it repeats itself
MIN_AVG_LOGPROB: Final = -1.0
MIN_NO_SPEECH: Final = 0.6
QUIETEST: Final = (
    1e-4  # of the loudest sample, -80 dB: below, nothing is said (asked, the model makes something up)
)
STREAMS_PER_WINDOW: Final = 8  # draws of one attempt have nothing to do with those of another


@dataclass(frozen=True, slots=True)
class Decoded:
    """The tokens drawn for one window, the ending one among them.

    `logprobs` of each, and `watched` logarithms of probabilities at the first; empty where nobody here knows them.
    """

    token_ids: tuple[int, ...] = field(repr=False)
    logprobs: tuple[float, ...] = field(default=(), repr=False)
    watched: tuple[float, ...] = ()


class WindowDecoder(Protocol):
    """One model, cut or whole."""

    async def encode(self, features: torch.Tensor) -> torch.Tensor:
        """Return the encoder's states [rows, hidden] of one window's features [1, mel bins, frames]."""
        ...

    async def decode(
        self,
        memory: torch.Tensor,
        prompt_ids: tuple[int, ...],
        sampling: SamplingParams,
        max_tokens: int,
        watched_ids: tuple[int, ...],
    ) -> Decoded:
        """Draw tokens after a prompt until one ends the answer."""
        ...


@dataclass(frozen=True, slots=True)
class Wishes:
    """How a recording is to be written down; see `TranscriptionRequest`.

    `times`: segments with their times are asked for; without, a recording of one window is written down as one, as the
    stock `generate` does. `follows`: each window is told the words before it, which keeps names alike and lets mistakes
    go on.
    """

    language: str | None = None
    task: Task = "transcribe"
    prompt_ids: tuple[int, ...] = field(default=(), repr=False)
    temperature: float = 0.0
    seed: int = 0
    times: bool = True
    follows: bool = False

    @property
    def temperatures(self) -> tuple[float, ...]:
        return (self.temperature,) if self.temperature else TEMPERATURES


@dataclass(frozen=True, slots=True)
class _Attempt:
    """One decoding of a window, and what speaks for it."""

    token_ids: tuple[int, ...] = field(repr=False)
    text: str = field(repr=False)
    temperature: float
    avg_logprob: float | None
    compression_ratio: float
    no_speech_prob: float | None

    @property
    def is_doubted(self) -> bool:
        return self.avg_logprob is not None and self.avg_logprob < MIN_AVG_LOGPROB

    @property
    def is_silence(self) -> bool:
        return self.is_doubted and self.no_speech_prob is not None and self.no_speech_prob > MIN_NO_SPEECH

    @property
    def is_good(self) -> bool:
        """Whether a higher temperature would not help."""
        return self.is_silence or not (self.is_doubted or self.compression_ratio > MAX_COMPRESSION)


class Windows:
    """One recording under way: float32 `samples` [length] at the features' rate."""

    def __init__(
        self,
        samples: np.ndarray,
        wishes: Wishes,
        tokens: SpeechTokens,
        features: SpeechFeatures,
        decoder: WindowDecoder,
        *,
        read: Callable[[Sequence[int]], str],
        max_positions: int,
        stride: int,
        executor: Executor | None = None,
    ) -> None:
        """`read` turns text tokens into text; `stride` is how many frames a step of timestamps has.

        Features are computed in `executor`; None: in a thread of the loop's own.
        """
        self._samples = samples
        self._wishes = wishes
        self._tokens = tokens
        self._features = features
        self._decoder = decoder
        self._read = read
        self._max_positions = max_positions
        self._stride = stride
        self._executor = executor
        self._language = wishes.language if tokens.is_multilingual else ENGLISH
        self._has_times = True
        self._said: list[int] = []
        self._num_segments = self._num_tokens = 0

    async def heard(self) -> AsyncGenerator[WindowDone, None]:
        """Yield each window once it is written down."""
        num_frames = self._features.num_frames(self._samples)
        self._has_times = self._wishes.times or num_frames > self._features.window_frames
        loop, samples = asyncio.get_running_loop(), self._samples
        loudest = await loop.run_in_executor(self._executor, self._features.loudest, samples)
        seek = number = 0
        while seek < num_frames:
            size = min(self._features.window_frames, num_frames - seek)
            before, advance = self._num_tokens, size
            segments: tuple[Segment, ...] = ()
            if not self._is_quiet(seek):
                features = await loop.run_in_executor(
                    self._executor, self._features.window, samples, seek, loudest
                )
                attempt = await self._decode(await self._decoder.encode(features), number)
                cuts, advance = ([], size) if attempt.is_silence else self._cut(attempt.token_ids, size)
                segments = self._segments(attempt, cuts, seek, num_frames)
                self._remember(segments, attempt)
            seek, number = seek + advance, number + 1
            done_s, total_s = self._seconds(min(seek, num_frames)), self._seconds(num_frames)
            yield WindowDone(segments, self._language or ENGLISH, done_s, total_s, self._num_tokens - before)

    async def _decode(self, memory: torch.Tensor, number: int) -> _Attempt:
        """Try one temperature after the other until an answer is good; the last one is taken anyhow."""
        prompt, tokens = self._prompt(), self._tokens
        for attempt, temperature in enumerate(self._wishes.temperatures):
            rule = tokens.rule(self._language, self._wishes.task, has_times=self._has_times)
            stream = number * STREAMS_PER_WINDOW + attempt
            sampling = SamplingParams(
                temperature=temperature, seed=self._wishes.seed, stream=stream, rule=rule
            )
            room = self._max_positions // 2 + len(rule.forced)
            max_tokens = min(room, self._max_positions - len(prompt))
            decoded = await self._decoder.decode(memory, prompt, sampling, max_tokens, (tokens.no_speech,))
            self._num_tokens += len(decoded.token_ids)
            if self._language is None:
                self._language = tokens.language_of(decoded.token_ids[0])
            judged = self._judge(decoded, len(rule.forced), temperature)
            if judged.is_good:
                break
        return judged

    def _is_quiet(self, seek: int) -> bool:
        """Whether a window has no sound."""
        begin, size = (frames * self._features.hop for frames in (seek, self._features.window_frames))
        return bool(abs(self._samples[begin : begin + size]).max() < QUIETEST)

    def _prompt(self) -> tuple[int, ...]:
        """What came before, if there is anything to tell, and the token that asks for the words."""
        tokens = self._tokens
        said = (*self._wishes.prompt_ids, *self._said)[-(self._max_positions // 2 - 1) :]
        told = (tokens.before, *said) if said and tokens.before is not None else ()
        return (*told, tokens.start)

    def _judge(self, decoded: Decoded, num_forced: int, temperature: float) -> _Attempt:
        ids, logprobs = decoded.token_ids[num_forced:], decoded.logprobs[num_forced:]
        if ids and ids[-1] == self._tokens.end:
            ids = ids[:-1]
        text = self._text(ids)
        raw = text.strip().encode()
        return _Attempt(
            ids,
            text,
            temperature,
            avg_logprob=sum(logprobs) / (len(ids) + 1) if decoded.logprobs else None,
            compression_ratio=len(raw) / len(zlib.compress(raw)),
            no_speech_prob=math.exp(decoded.watched[0]) if decoded.watched else None,
        )

    def _cut(self, ids: tuple[int, ...], size: int) -> tuple[list[_Cut], int]:
        return cut(ids, self._tokens.first_timestamp, size, self._stride)

    def _segments(
        self, attempt: _Attempt, cuts: list[_Cut], seek: int, num_frames: int
    ) -> tuple[Segment, ...]:
        """Give cuts their numbers and times; those without words or length are left out."""
        segments: list[Segment] = []
        for one in cuts:
            start, end = (min(seek + steps * self._stride, num_frames) for steps in (one.start, one.end))
            text = self._text(one.token_ids)
            if start >= end or not text.strip():
                continue
            segments.append(
                Segment(
                    self._num_segments,
                    seek,
                    self._seconds(start),
                    self._seconds(end),
                    text,
                    one.token_ids,
                    attempt.temperature,
                    attempt.avg_logprob,
                    attempt.compression_ratio,
                    attempt.no_speech_prob,
                )
            )
            self._num_segments += 1
        return tuple(segments)

    def _remember(self, segments: tuple[Segment, ...], attempt: _Attempt) -> None:
        """Keep what the next window is told; not what was drawn at so high a temperature that it may be wrong."""
        if not self._wishes.follows:
            return
        if attempt.temperature > TEMPERATURES[2]:
            self._said.clear()
        self._said += [number for segment in segments for number in segment.token_ids]

    def _text(self, ids: Sequence[int]) -> str:
        return self._read([number for number in ids if number < self._tokens.end])

    def _seconds(self, frames: int) -> float:
        return frames * self._features.hop / self._features.rate


@dataclass(frozen=True, slots=True)
class _Cut:
    """One segment of a window: its tokens, and when it begins and ends in steps from the window's beginning."""

    start: int
    end: int
    token_ids: tuple[int, ...] = field(repr=False)


def cut(ids: tuple[int, ...], first: int, size: int, stride: int) -> tuple[list[_Cut], int]:
    """Cut a window's tokens where two timestamps meet; return the cuts and how many frames further the next one is.

    Timestamps are the ids from `first` on, one for each `stride` frames. What follows the last whole segment is dropped
    and heard again, unless the window ends in a single timestamp: then nothing more is said in it.
    """
    is_stamp = [number >= first for number in ids]
    ends = [place for place in range(1, len(ids)) if is_stamp[place - 1] and is_stamp[place]]
    if not ends:
        stamps = [number - first for number in ids if number > first]
        return [_Cut(0, stamps[-1] if stamps else size // stride, ids)], size
    ends_in_one = is_stamp[-2:] == [False, True]
    if ends_in_one:
        ends.append(len(ids))
    cuts = []
    for begin, end in zip([0, *ends], ends, strict=False):
        piece = ids[begin:end]
        cuts.append(_Cut(max(0, piece[0] - first), piece[-1] - first, piece))
    return cuts, size if ends_in_one else max(1, cuts[-1].end * stride)
