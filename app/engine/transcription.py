"""Recordings written down by a model whose decoder lives elsewhere (Whisper): the encoder runs here, window by window.

A window is an answer like any other: its encoder states go to the nodes once, tokens are drawn as in chat. The
recording itself never leaves this machine. The algorithm is in `speech_windows`.
"""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Mapping
from concurrent.futures import Executor
from contextlib import aclosing
from dataclasses import dataclass, field, fields
from functools import partial

import torch

from app.engine.at_home import run_at_home
from app.engine.opened import Opened
from app.engine.over_text import OverText
from app.engine.request import (
    EncodedPrompt,
    Finished,
    GenerationRequest,
    RequestError,
    TextDelta,
    Timings,
)
from app.engine.speech import Segment, Transcribed, TranscriptionEvent, TranscriptionRequest
from app.engine.speech_features import SpeechFeatures
from app.engine.speech_tokens import SpeechTokens
from app.engine.speech_windows import Decoded, Windows, Wishes
from app.engine.text import ChainTextEngine
from slicing.encoder import Encoder
from slicing.errors import ModelError
from slicing.sampler import SamplingParams


def new_engine(opened: Opened) -> TranscriptionEngine:
    """The engine of an opened model. Raises ModelError where its files say too little."""
    folder, config = opened.found.checkpoint.folder, opened.found.checkpoint.config
    features, tokens = SpeechFeatures.load(folder), SpeechTokens.read(folder)
    stride, rest = divmod(features.window_frames, config.max_source_positions)
    if rest:
        raise ModelError(
            f"the encoder has {config.max_source_positions} positions, but a window has {features.window_frames} frames"
        )
    return TranscriptionEngine(
        opened.new_text_engine(),
        opened.home,
        opened.encoding,
        features,
        tokens,
        stride=stride,
        knows_logprobs=opened.ends is not None,
    )


class TranscriptionEngine(OverText):
    """A `SpeechEngine` over a chain of nodes. `knows_logprobs`: the ends are here, so doubts can be measured."""

    def __init__(
        self,
        text: ChainTextEngine,
        encoder: Encoder,
        encoding: Executor,
        features: SpeechFeatures,
        tokens: SpeechTokens,
        *,
        stride: int,
        knows_logprobs: bool,
    ) -> None:
        super().__init__(text)
        self._encoder = encoder
        self._encoding = encoding
        self._features = features
        self._tokens = tokens
        self._stride = stride
        self._knows_logprobs = knows_logprobs
        self.num_running = 0  # recordings

    @property
    def rate(self) -> int:
        return self._features.rate

    @property
    def languages(self) -> Mapping[str, str]:
        return self._tokens.language_names()

    @property
    def is_multilingual(self) -> bool:
        return self._tokens.is_multilingual

    async def transcribe(self, request: TranscriptionRequest) -> AsyncGenerator[TranscriptionEvent, None]:
        began = time.perf_counter()
        self._check(request)
        decoder, wishes = _OverNodes(self, request, began), self._wishes(request)
        windows = Windows(
            request.samples,
            wishes,
            self._tokens,
            self._features,
            decoder,
            read=self.tokenizer.decode,
            max_positions=self.max_positions,
            stride=self._stride,
            executor=self._encoding,
        )
        segments: list[Segment] = []
        language = request.language or next(iter(self.languages))
        self.num_running += 1
        try:
            async with aclosing(windows.heard()) as heard:
                async for window in heard:
                    segments += window.segments
                    language = window.language
                    yield window
        finally:
            self.num_running -= 1
        last = decoder.last
        yield Transcribed(
            tuple(segments),
            language,
            len(request.samples) / self.rate,
            decoder.timings(),
            prompt_tokens=len(wishes.prompt_ids),
            replays=decoder.replays,
            fingerprint=last.fingerprint if last else "",
            route=last.route if last else (),
        )

    def _wishes(self, request: TranscriptionRequest) -> Wishes:
        said = request.prompt.strip()
        return Wishes(
            language=request.language,
            task=request.task,
            prompt_ids=tuple(self.tokenizer.encode(" " + said)) if said else (),
            temperature=request.temperature,
            seed=request.seed,
            times=request.wants_times,
        )

    def _check(self, request: TranscriptionRequest) -> None:
        """Refuse what this model cannot do. Raises RequestError."""
        if request.language is not None and request.language not in self.languages:
            raise RequestError("language", "invalid_value", "the model does not understand this language")
        if request.task == "translate" and not self.is_multilingual:
            message = f"the model `{self.model_name}` understands English only: there is nothing to translate"
            raise RequestError("model", "unsupported_value", message)


@dataclass(slots=True)
class _OverNodes:
    """A `WindowDecoder` for one recording: the encoder here, the decoder over nodes."""

    engine: TranscriptionEngine
    request: TranscriptionRequest
    began: float
    ends: list[Finished] = field(default_factory=list)
    encode_s: float = 0.0

    @property
    def last(self) -> Finished | None:
        return self.ends[-1] if self.ends else None

    @property
    def replays(self) -> int:
        return sum(end.replays for end in self.ends)

    async def encode(self, features: torch.Tensor) -> torch.Tensor:
        engine = self.engine
        began = time.perf_counter()
        dtype = next(engine._encoder.module.parameters()).dtype
        run = partial(engine._encoder.run, input_features=features.to(dtype))
        try:
            return await run_at_home(engine._encoding, run, deadline_s=self._time_left_s())
        finally:
            self.encode_s += time.perf_counter() - began

    async def decode(
        self,
        memory: torch.Tensor,
        prompt_ids: tuple[int, ...],
        sampling: SamplingParams,
        max_tokens: int,
        watched_ids: tuple[int, ...],
    ) -> Decoded:
        engine, request = self.engine, self.request
        asked = GenerationRequest(
            request_id=request.request_id,
            model=request.model,
            prompt_ids=prompt_ids,
            sampling=sampling,
            max_tokens=max_tokens,
            stop_token_ids=frozenset({engine._tokens.end}),
            deadline_s=self._time_left_s(),
            route=request.route,
            tenant=request.tenant,
            draft="off",
            encoded=EncodedPrompt(memory=memory),
            wants_logprobs=engine._knows_logprobs,
            watched_ids=watched_ids if engine._knows_logprobs else (),
        )
        ids: list[int] = []
        logprobs: list[float] = []
        watched: tuple[float, ...] = ()
        async with aclosing(engine._text.generate(asked)) as events:
            async for event in events:
                match event:
                    case TextDelta():
                        ids += event.token_ids
                        logprobs += event.logprobs
                        watched = watched or event.watched
                    case Finished():
                        self.ends.append(event)
        return Decoded(tuple(ids), tuple(logprobs), watched)

    def timings(self) -> Timings:
        """Of all windows and attempts; the encoder's time counts as the gateway's own."""
        summed = {
            one.name: sum(getattr(end.timings, one.name) for end in self.ends) for one in fields(Timings)
        }
        summed["local_s"] += self.encode_s
        summed["total_s"] = time.perf_counter() - self.began
        return Timings(**summed)

    def _time_left_s(self) -> float | None:
        deadline_s = self.request.deadline_s
        return None if deadline_s is None else max(0.0, deadline_s - (time.perf_counter() - self.began))
