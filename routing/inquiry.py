"""How long a step may take on a route, and which hop it hangs at when it takes longer.

Pure: times and what hops say are passed in. Nodes are judged by what was measured of them; knows no links.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from routing.measurements import MAX_DECODE_ROWS, Measured
from routing.types import Hop, NodeId, Standing

# A machine that is shared, or grows hot, is several times slower than its own mean; eight times is another thing.
SLOWER_BY = 8.0
SLACK_S = (
    2.0  # what a wake-up, a garbage collection and a queue of other people's decode steps take, generously
)
FIRST_SLACK_S = 30.0  # until the first answer of a session: a slice may be loading, its pages are cold
SLOWEST_BYTES_PER_S = 128 << 10  # of a home uplink: a chunk of a prompt may be on its way for long
UNKNOWN_LAYER_MS = 10.0  # one row, one layer, where nothing was measured: a large layer on a slow CPU


@dataclass(frozen=True, slots=True)
class Behind:
    """The first hop that has not finished a step. `has_it`: it is there; otherwise it did not get so far."""

    hop: int
    has_it: bool
    told: Standing | None = None  # what that hop says itself


def patience_s(
    hops: Sequence[Hop], steps: Iterable[tuple[int, int]], measured: Mapping[NodeId, Measured]
) -> float:
    """How long steps of so many (rows, bytes) may take on a route, by what its nodes took before."""
    costs = [_costs(hop, measured.get(hop.address.node_id)) for hop in hops]
    computing_ms, num_bytes = 0.0, 0
    for rows, size_bytes in steps:
        num_bytes += size_bytes
        for decode_ms, prefill_ms, queue_ms in costs:
            computing_ms += queue_ms + rows * (decode_ms if rows <= MAX_DECODE_ROWS else prefill_ms)
    return SLOWER_BY * computing_ms / 1000 + len(costs) * num_bytes / SLOWEST_BYTES_PER_S


def first_behind(standings: Mapping[int, Standing], num_hops: int, epoch: int, step: int) -> Behind | None:
    """Who holds up a step, by what the hops say; hops that say nothing are taken to be no worse than the next.

    None: all have done it, and what is missing is the answer. Step 0: who does not have the route yet.
    """
    for hop in range(num_hops):
        told = standings.get(hop)
        if told is None:
            continue
        if told.epoch < epoch or told.next_step <= step:
            before = hop - 1
            return Behind(before, True) if before >= 0 and before not in standings else Behind(hop, False)
        if told.last_done < step:
            return Behind(hop, True, told)
    return None


def is_stuck(hop: Hop, told: Standing, measured: Measured | None) -> bool:
    """Whether what a node computes now takes longer than its speed explains.

    A step of ours that waits behind other people's prompts is slow; the node is not to blame.
    """
    if not told.busy_rows:
        return told.busy_ms == 0 or told.busy_ms > FIRST_SLACK_S * 1000
    decode_ms, prefill_ms, _ = _costs(hop, measured)
    row_ms = decode_ms if told.busy_rows <= MAX_DECODE_ROWS else prefill_ms
    return told.busy_ms > SLACK_S * 1000 + SLOWER_BY * told.busy_rows * row_ms


def _costs(hop: Hop, measured: Measured | None) -> tuple[float, float, float]:
    """Milliseconds: of a decode row, of a prefill row, and of waiting at each step."""
    num_layers = hop.spec.end - hop.spec.start
    known_ms = measured.layer_ms if measured else None
    layer_ms = known_ms or hop.offer.layer_ms or UNKNOWN_LAYER_MS
    prefill_ms = (measured.prefill_ms if measured else None) or layer_ms
    return layer_ms * num_layers, prefill_ms * num_layers, measured.queue_ms if measured else 0.0
