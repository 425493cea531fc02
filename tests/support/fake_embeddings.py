"""An engine that makes vectors without a model or a network, with the production interface.

It counts its open requests, so that a test can see that a client's leaving was noticed.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass, field

import numpy as np

from app.engine.embedding_request import (
    Embedded,
    EmbeddingAdmitted,
    EmbeddingEvent,
    EmbeddingFinished,
    EmbeddingRequest,
    Vector,
)
from app.engine.request import ModelStatus, RequestError, RouteHop, Timings
from app.engine.tokenizer import ChatTokenizer

FINGERPRINT = "fp_vectors"
SIZE = 5


@dataclass
class FakeEmbeddings:
    """The vector of a text tells its tokens. `before_text(n)` may raise, or return something to wait for."""

    tokenizer: ChatTokenizer
    model_name: str = "librarian"
    model_kind: str = "encoder"
    max_positions: int = 32
    vocab_size: int = 400
    cuts: frozenset[int] = frozenset()
    status: ModelStatus = field(default_factory=lambda: ModelStatus("ready", 6))
    before_text: Callable[[int], object] = lambda _: None
    replays: int = 0
    num_open: int = 0
    requests: list[EmbeddingRequest] = field(default_factory=list)

    def coverage(self) -> ModelStatus:
        return self.status

    def encode(self, text: str) -> tuple[int, ...]:
        return (1, *self.tokenizer.encode(text), 2)

    def check(self, request: EmbeddingRequest) -> None:
        if request.dimensions is not None and request.dimensions not in self.cuts | {SIZE}:
            raise RequestError("dimensions", "unsupported_parameter", f"its vectors have {SIZE} dimensions")
        for number, text in enumerate(request.texts):
            if len(text) > self.max_positions:
                message = f"This model's maximum context length is {self.max_positions} tokens"
                raise RequestError(f"input.{number}", "context_length_exceeded", message)

    async def embed(self, request: EmbeddingRequest) -> AsyncGenerator[EmbeddingEvent, None]:
        self.requests.append(request)
        self.num_open += 1
        try:
            yield EmbeddingAdmitted(request.num_tokens)
            for number in reversed(range(len(request.texts))):  # any order will do
                await self._wait(number)
                yield Embedded(number, vector_of(request.texts[number])[: request.dimensions])
            route = (RouteHop("0a1b2c3d", 1, 6),)
            yield EmbeddingFinished(Timings(total_s=0.5, compute_s=0.2), self.replays, FINGERPRINT, route)
        finally:
            self.num_open -= 1

    async def _wait(self, number: int) -> None:
        waiting = self.before_text(number)
        if asyncio.iscoroutine(waiting) or asyncio.isfuture(waiting):
            await waiting
        else:
            await asyncio.sleep(0)


def vector_of(ids: tuple[int, ...]) -> Vector:
    """What stands for the meaning of these tokens."""
    numbers = [len(ids), ids[0], ids[-1], sum(ids), 0.1]
    return np.asarray(numbers, dtype=np.float32)
