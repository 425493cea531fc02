"""A speech engine that writes down what it is told to, with the production interface and without a model.

It counts its open recordings, so that a test can see that a client's leaving was noticed.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Mapping
from dataclasses import dataclass, field

from app.engine.request import ModelStatus, RouteHop, Timings
from app.engine.speech import Segment, Transcribed, TranscriptionEvent, TranscriptionRequest, WindowDone
from app.engine.tokenizer import ChatTokenizer

RATE = 16_000
WINDOW_S = 1.0


@dataclass
class FakeScribe:
    """Hears a sentence of `words` in each second. `before_window(n)` may raise, or return something to wait for."""

    tokenizer: ChatTokenizer
    words: tuple[str, ...] = (" Hello there.", " How are you?", " Fine --> I <think> & you?")
    model_name: str = "scribe"
    model_kind: str = "speech"
    takes: tuple[str, ...] = ("audio",)
    max_positions: int = 448
    rate: int = RATE
    languages: Mapping[str, str] = field(default_factory=lambda: {"en": "english", "fr": "french"})
    is_multilingual: bool = True
    knows_logprobs: bool = True
    status: ModelStatus = field(default_factory=lambda: ModelStatus("ready", 4))
    before_window: Callable[[int], object] = lambda _: None
    num_open: int = 0
    requests: list[TranscriptionRequest] = field(default_factory=list)

    def coverage(self) -> ModelStatus:
        return self.status

    async def transcribe(self, request: TranscriptionRequest) -> AsyncGenerator[TranscriptionEvent, None]:
        self.requests.append(request)
        self.num_open += 1
        duration_s = len(request.samples) / self.rate
        language = request.language or "fr"
        segments: list[Segment] = []
        try:
            while len(segments) < duration_s:
                waiting = self.before_window(len(segments))
                if asyncio.iscoroutine(waiting) or asyncio.isfuture(waiting):
                    await waiting
                segments.append(self._segment(len(segments), duration_s))
                done_s = segments[-1].end_s
                yield WindowDone((segments[-1],), language, done_s, duration_s, num_tokens=5)
            timings = Timings(total_s=0.5, tokens=5 * len(segments), compute_s=0.25)
            hops = (RouteHop("0" * 8, 0, 4),)
            yield Transcribed(
                tuple(segments), language, duration_s, timings, prompt_tokens=3, replays=1, route=hops
            )
        finally:
            self.num_open -= 1

    def _segment(self, number: int, duration_s: float) -> Segment:
        knows = self.knows_logprobs
        return Segment(
            number,
            seek=100 * number,
            start_s=number * WINDOW_S,
            end_s=min((number + 1) * WINDOW_S, duration_s),
            text=self.words[number % len(self.words)],
            token_ids=(311, 7, 8, 330),
            temperature=0.0,
            avg_logprob=-0.25 if knows else None,
            compression_ratio=1.1,
            no_speech_prob=0.125 if knows else None,
        )
