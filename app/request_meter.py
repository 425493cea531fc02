"""Counts one request, whatever its model makes. Knows no HTTP."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from app.metrics import GatewayMetrics


class RequestMeter:
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

    def count_answered(self) -> None:
        """Note that the whole request succeeded."""
        took = time.perf_counter() - self._arrived
        self._metrics.request_seconds.labels(self._model, self.endpoint).observe(took)

    def count_aborted(self) -> None:
        self._metrics.aborts.labels(self.endpoint).inc()
