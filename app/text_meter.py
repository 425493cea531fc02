"""Counts one request for text. Knows no HTTP."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import TYPE_CHECKING

from app.engine.request import Finished, Timings
from app.request_meter import RequestMeter

if TYPE_CHECKING:
    from app.metrics import GatewayMetrics


class TextMeter(RequestMeter):
    """Times a request for text: its first token, those that follow, and what each choice took."""

    def __init__(
        self, metrics: GatewayMetrics, *, model: str, endpoint: str, is_stream: bool, arrived: float
    ) -> None:
        super().__init__(metrics, model=model, endpoint=endpoint, arrived=arrived)
        self._is_stream = is_stream
        self._last_token: dict[int, float] = {}  # by choice
        self._generated = metrics.generated_tokens.labels(model)  # looked up once: they count every token
        self._inter_token = metrics.inter_token.labels(model)

    def count_prompt(self, num_tokens: int) -> None:
        self._metrics.prompt_tokens.labels(self._model).inc(num_tokens)

    def count_tokens(self, choice: int, num_tokens: int) -> None:
        """Note generated tokens the moment they come."""
        now = time.perf_counter()
        self._generated.inc(num_tokens)
        previous = self._last_token.get(choice)
        if previous is not None:
            for _ in range(num_tokens):
                self._inter_token.observe((now - previous) / num_tokens)
        elif self._is_stream and not self._last_token:
            self._metrics.first_token.labels(self._model).observe(now - self._arrived)
        self._last_token[choice] = now

    def count_finished(self, finished: Finished) -> None:
        """Note one finished choice."""
        self._metrics.answers.labels(self._model, self.endpoint, finished.reason).inc()
        self._metrics.replays.labels(self._model).inc(finished.replays)
        self._metrics.cached_tokens.labels(self._model).inc(finished.cached_tokens)
        self._metrics.prefix_hits.labels(self._model).inc(finished.cached_tokens > 0)
        self._metrics.drafted.labels(self._model).inc(finished.drafted)
        self._metrics.accepted.labels(self._model).inc(finished.accepted)
        self._metrics.forced.labels(self._model).inc(finished.forced)
        self._metrics.hops.count(self._model, finished)
        self._metrics.prefill_seconds.labels(self._model).observe(finished.timings.prefill_s)
        self._metrics.decode_seconds.labels(self._model).observe(finished.timings.decode_s)
        self._metrics.request_prompt_tokens.labels(self._model).observe(finished.prompt_tokens)
        self._metrics.request_generated_tokens.labels(self._model).observe(finished.completion_tokens)
        for part, seconds in _parts(finished.timings):
            share = seconds / max(1, finished.timings.tokens)
            self._metrics.token_seconds.labels(self._model, part).observe(share)


def _parts(timings: Timings) -> Iterable[tuple[str, float]]:
    yield "compute", timings.compute_s
    yield "network", timings.network_s
    yield "crypto", timings.crypto_s
    yield "queue", timings.queue_s
    yield "local", timings.local_s
