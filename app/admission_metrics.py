"""Metrics of who waits and who is sent away."""

from __future__ import annotations

from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

QUEUE_BUCKETS = (0.001, 0.01, 0.1, 0.25, 0.5, 1, 2, 5, 10, 20, 30, 60, 120, 300)


class AdmissionMetrics:
    """Counts of the queue and of the limits."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.queued = Gauge("diffuse_requests_queued", "Requests that wait for a place", registry=registry)
        self.queue_seconds = Histogram(
            "diffuse_queue_seconds",
            "From a request's admission to its place, of requests that got one",
            buckets=QUEUE_BUCKETS,
            registry=registry,
        )
        self.limited = Counter(
            "diffuse_requests_limited",
            "Requests sent away by a limit, by the code that they were told",
            ["reason"],
            registry=registry,
        )

    def watch_queue(self, num_queued: Callable[[], int]) -> None:
        """Report at every scrape how many wait."""
        self.queued.set_function(num_queued)

    def count_limited(self, reason: str) -> None:
        self.limited.labels(reason).inc()
