"""Where the time of one session's answered steps went, node by node, over all routes it has had.

Bounded by the nodes that were on them. Knows no links; what a hop says of itself is cut to what was waited.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from routing.measurements import believable
from routing.types import Answer, Hop, NodeId, SliceSpec


@dataclass(slots=True)
class HopTime:
    """What one node did for a session, in seconds, as it tells. `spec` are its layers at the last."""

    spec: SliceSpec
    steps: int = 0
    compute_s: float = 0.0
    queue_s: float = 0.0
    crypto_s: float = 0.0


class HopTimes:
    """The nodes of a session's routes, in the order in which they first answered."""

    def __init__(self) -> None:
        self.by_node: dict[NodeId, HopTime] = {}

    def add(self, hops: Sequence[Hop], answer: Answer, took_s: float) -> None:
        """Count the answer of one step, `took_s` after it was sent."""
        traces = believable(answer.traces[: len(hops)], took_s * 1000)
        for hop, trace in zip(hops, traces, strict=False):
            time = self.by_node.get(hop.address.node_id)
            if time is None:
                time = self.by_node[hop.address.node_id] = HopTime(hop.spec)
            time.spec = hop.spec
            time.steps += 1
            time.compute_s += trace.compute_us / 1e6
            time.queue_s += trace.queue_us / 1e6
            time.crypto_s += trace.crypto_us / 1e6
