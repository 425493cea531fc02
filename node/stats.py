"""Counts of what a node did, for tests and metrics. Knows no contents and no identities."""

from __future__ import annotations

from dataclasses import dataclass, field

from slicing.batching import BatchCounts


@dataclass(slots=True)
class NodeStats:
    """Plain numbers that only grow, but for the gauges at the top."""

    num_sessions: int = 0  # gauge: live now
    kv_bytes: int = 0  # gauge: reserved for keys and values now
    num_slices: int = 0  # gauge: held now, those that drain too
    num_draining: int = 0  # gauge: of those, on their way out
    weights_bytes: int = 0  # gauge: of all slices held
    history_bytes: int = 0  # gauge: outputs kept for rebuilding neighbours
    num_prefixes: int = 0  # gauge: ended sessions that are kept now
    prefix_bytes: int = 0  # gauge: of `kv_bytes`, theirs
    sessions_opened: int = 0
    sessions_rerouted: int = 0
    sessions_cancelled: int = 0
    sessions_expired: int = 0
    sessions_evicted: int = 0  # idle ones that others needed the room of
    sessions_refused: int = 0  # for want of room
    prefixes_kept: int = 0
    prefixes_evicted: int = 0  # for room, or because of their age
    prefix_hits: int = 0  # sessions that began with one
    prefix_misses: int = 0  # that might have, and nothing was held
    prefix_tokens: int = 0  # positions that needed no step
    steps_run: int = 0
    calls_run: int = 0  # of the steps: calls of diffusion blocks
    call_bytes: int = 0  # that arrived for them
    steps_repeated: int = 0  # sent again from the kept outputs, not computed again
    steps_undone: int = 0  # computed, and rolled back since the next hop needs what is not kept any more
    rows_run: int = 0
    failures_sent: int = 0
    compute_s: float = 0.0
    queue_s: float = 0.0
    slices_loaded: int = 0
    loads_failed: int = 0
    slices_drained: int = 0  # taken away after their last session, or after the limit
    sessions_cut: int = 0  # of those: sessions that had not ended by then
    slices_moved: int = 0  # changes of what is held that were completed
    batches: BatchCounts = field(
        default_factory=BatchCounts
    )  # of the compute thread: rows together, idle time
