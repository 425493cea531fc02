"""What this gateway keeps of answers for those that begin like them, for Prometheus.

Asks when Prometheus asks, so the numbers are never stale. Knows nothing of tokens or HTTP.
"""

from __future__ import annotations

from collections.abc import Iterable

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from app.engine.request import Library


class PrefixMetrics(Collector):
    """Of every model that is open; one that is closed and opened again begins anew."""

    def __init__(self, library: Library) -> None:
        self._library = library

    def collect(self) -> Iterable[Metric]:
        kept = GaugeMetricFamily("diffuse_prefixes", "Answers that can be gone on from", labels=["model"])
        size = GaugeMetricFamily("diffuse_prefix_bytes", "What our own ends hold of them", labels=["model"])
        misses = CounterMetricFamily(
            "diffuse_prefix_misses", "Times that nodes held nothing of what they should", labels=["model"]
        )
        evicted = CounterMetricFamily(
            "diffuse_prefixes_evicted", "Answers let go for room or age", labels=["model"]
        )
        for known in self._library.models():
            if (counts := known.prefixes) is not None:
                kept.add_metric([known.name], counts.num_kept)
                size.add_metric([known.name], counts.size_bytes)
                misses.add_metric([known.name], counts.misses)
                evicted.add_metric([known.name], counts.evicted)
        return [kept, size, misses, evicted]
