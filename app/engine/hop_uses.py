"""What each node did for an answer: its own account, and its part of the time that went by between machines.

Nobody measures a leg between two nodes for one answer: the time on the network is laid on the legs as the round trips
known here are, with those between nodes guessed from ours to them (no nearer than the nearer of two is to us).
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise

from app.engine.coverage import SHORT_DIGITS
from app.engine.request import HopUse, RouteHop
from routing.hop_times import HopTimes
from routing.link import Link
from routing.types import NodeId

LEAST_MS = 0.05  # of a leg whose round trip is not known, or too short to be seen


def hop_uses(times: HopTimes, network_s: float, links: Mapping[NodeId, Link | None]) -> tuple[HopUse, ...]:
    """The nodes of a session's routes, with their links where those are up."""
    found = links.items()
    rtts = [(link.rtt_ms or 0.0) if link is not None else 0.0 for _, link in found]
    shares = _shares(rtts, [times.by_node[node_id].steps for node_id, _ in found])
    uses = []
    for (node_id, link), share in zip(found, shares, strict=True):
        time = times.by_node[node_id]
        is_relayed = link is not None and link.is_relayed
        hop = RouteHop(node_id.hex()[:SHORT_DIGITS], time.spec.start, time.spec.end, is_relayed)
        uses.append(HopUse(hop, time.steps, time.compute_s, time.queue_s, time.crypto_s, network_s * share))
    return tuple(sorted(uses, key=lambda use: use.hop.start))


def _shares(rtts_ms: list[float], steps: list[int]) -> list[float]:
    """Each hop's part of the network's time; they sum up to one."""
    if not rtts_ms:
        return []
    into = [rtts_ms[0], *(min(pair) for pair in pairwise(rtts_ms))]
    legs = [max(rtt_ms, LEAST_MS) for rtt_ms in into]
    legs[-1] += max(rtts_ms[-1], LEAST_MS)
    weights = [leg * count for leg, count in zip(legs, steps, strict=True)]
    whole = sum(weights) or 1.0
    return [weight / whole for weight in weights]
