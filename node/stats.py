"""Counts of what a node did, for tests and metrics. Knows no contents and no identities."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class NodeStats:
    """Plain numbers that only grow, but for the two gauges at the top."""

    num_sessions: int = 0  # gauge: live now
    kv_bytes: int = 0  # gauge: reserved for keys and values now
    sessions_opened: int = 0
    sessions_rerouted: int = 0
    sessions_cancelled: int = 0
    sessions_expired: int = 0
    steps_run: int = 0
    steps_repeated: int = 0  # answered from the kept outputs, not computed again
    rows_run: int = 0
    failures_sent: int = 0
    compute_s: float = 0.0
    queue_s: float = 0.0
