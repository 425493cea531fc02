"""Counts one request for vectors, in the metrics that answers of text have too. Knows no HTTP."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from app.engine.embedding_request import Embedded, EmbeddingAdmitted, EmbeddingEvent, EmbeddingFinished

if TYPE_CHECKING:
    from app.metrics import GatewayMetrics

FINISHED = "stop"  # the reason under which whole answers are counted, as those of text


class EmbeddingMeter:
    """Times one accepted request, which ends as finished, failed or aborted."""

    def __init__(self, metrics: GatewayMetrics, *, model: str, endpoint: str, arrived: float) -> None:
        self._metrics = metrics
        self._model = model
        self.endpoint = endpoint
        self._arrived = arrived  # on time.perf_counter

    def begin(self) -> None:
        self._metrics.running.labels(self._model).inc()

    def end(self) -> None:
        self._metrics.running.labels(self._model).dec()

    def count(self, event: EmbeddingEvent) -> None:
        """Note what an event says."""
        match event:
            case EmbeddingAdmitted():
                self._metrics.prompt_tokens.labels(self._model).inc(event.prompt_tokens)
            case Embedded():
                self._metrics.embedded.labels(self._model).inc()
            case EmbeddingFinished():
                self._metrics.answers.labels(self._model, self.endpoint, FINISHED).inc()
                self._metrics.replays.labels(self._model).inc(event.replays)

    def count_answered(self) -> None:
        """Note that the whole request succeeded."""
        took = time.perf_counter() - self._arrived
        self._metrics.request_seconds.labels(self._model, self.endpoint).observe(took)

    def count_aborted(self) -> None:
        self._metrics.aborts.labels(self.endpoint).inc()
