"""Where answers spend their time, by the place of a hop on its route: names of nodes would make series without end."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter

from app.engine.request import Finished

MAX_STAGES = 16  # of their own label; the rest share the last one


class HopMetrics:
    """Seconds and steps of each stage."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.seconds = Counter(
            "diffuse_hop_seconds",
            "Seconds of answers at a hop and on the way to it, by its place on the route",
            ["model", "stage", "part"],
            registry=registry,
        )
        self.steps = Counter(
            "diffuse_hop_steps", "Steps that a hop took part in", ["model", "stage"], registry=registry
        )

    def count(self, model: str, finished: Finished) -> None:
        """Note what the nodes of an answer did; those that took over from another share its place."""
        starts = sorted({use.hop.start for use in finished.hops})
        for use in finished.hops:
            stage = str(min(starts.index(use.hop.start), MAX_STAGES - 1))
            self.steps.labels(model, stage).inc(use.steps)
            for part, seconds in (
                ("compute", use.compute_s),
                ("network", use.network_s),
                ("crypto", use.crypto_s),
                ("queue", use.queue_s),
            ):
                self.seconds.labels(model, stage, part).inc(seconds)
