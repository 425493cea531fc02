"""What the ends of the open models computed, for Prometheus: calls, and the rows that shared them.

Asks when Prometheus asks, so the numbers are never stale. Knows nothing of models or HTTP.
"""

from __future__ import annotations

from collections.abc import Iterable

from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from app.engine.request import Library


class EndsMetrics(Collector):
    """Of every model whose ends are here; a model that is closed and opened again begins anew."""

    def __init__(self, library: Library) -> None:
        self._library = library

    def collect(self) -> Iterable[Metric]:
        rows = HistogramMetricFamily(
            "diffuse_ends_batch_rows", "Rows of a batch of the ends", labels=["model"]
        )
        works = CounterMetricFamily(
            "diffuse_ends_works", "Answers' parts in all batches of the ends", labels=["model"]
        )
        for known in self._library.models():
            if (counts := known.ends) is not None:
                rows.add_metric([known.name], _buckets(counts.by_rows), counts.rows)
                works.add_metric([known.name], counts.works)
        return [rows, works]


def _buckets(by_rows: list[int]) -> list[tuple[str, float]]:
    """Batches of 1, 2-3, 4-7, ... rows, summed up to each bound."""
    total, buckets = 0, []
    for power, batches in enumerate(by_rows):
        total += batches
        is_last = power + 1 == len(by_rows)
        buckets.append(("+Inf" if is_last else str(float(2 ** (power + 1) - 1)), float(total)))
    return buckets
