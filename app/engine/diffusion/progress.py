"""How long the steps of one picture take and how busy its stages are meanwhile. Knows numbers only."""

from __future__ import annotations

import time

from app.engine.diffusion.branches import BranchCounts
from app.engine.diffusion.remote_stacks import RemoteStacks
from app.engine.diffusion.request import DiffusionTimings
from routing.types import NodeId


class StepClock:
    """Told by the pipeline's thread when encoding ends, a step is done, decoding begins."""

    def __init__(self, remote: RemoteStacks, branches: BranchCounts) -> None:
        self.begun_at = 0.0  # of the steps, on time.perf_counter; 0: not yet
        self.steps = 0
        self._remote = remote
        self._branches = branches
        self._created_at = time.perf_counter()
        self._ended_at = 0.0
        self._step_at = 0.0
        self._node_s: dict[NodeId, float] = {}

    def begin(self) -> None:
        """The first step begins."""
        self.begun_at = self._step_at = time.perf_counter()

    def step(self) -> tuple[float, tuple[float, ...]]:
        """A step is done: its seconds, and the share of them that each stage computed, as it tells."""
        now = time.perf_counter()
        seconds, self._step_at = now - self._step_at, now
        self.steps += 1
        before, self._node_s = self._node_s, self._computed()
        spent = [max(0.0, total - before.get(node, 0.0)) for node, total in self._node_s.items()]
        return seconds, tuple(_share(node_s, seconds) for node_s in spent)

    def end(self) -> None:
        """The steps are done."""
        self._ended_at = time.perf_counter()

    def timings(self) -> DiffusionTimings:
        """All of it so far."""
        now = time.perf_counter()
        begun, ended = self.begun_at or now, self._ended_at or now
        sessions = self._remote.session_counts()
        steps_s = ended - begun
        return DiffusionTimings(
            total_s=now - self._created_at,
            encode_s=begun - self._created_at,
            steps_s=steps_s,
            decode_s=now - ended,
            steps=self.steps,
            compute_s=sum(counts.compute_s for counts in sessions),
            network_s=sum(counts.network_s for counts in sessions),
            crypto_s=sum(counts.crypto_s for counts in sessions),
            queue_s=sum(counts.queue_s for counts in sessions),
            passes=self._remote.counts.passes,
            patched=self._remote.counts.patched,
            prefetched=self._branches.guesses,
            hits=self._branches.hits,
            bytes_sent=sum(counts.bytes_sent for counts in sessions),
            bytes_received=sum(counts.bytes_received for counts in sessions),
            busy=tuple(_share(node_s, steps_s) for node_s in self._computed().values()),
        )

    def _computed(self) -> dict[NodeId, float]:
        """Seconds that each node computed, in the order of the routes."""
        total: dict[NodeId, float] = {}
        for counts in self._remote.session_counts():
            for node, seconds in list(counts.node_s.items()):
                total[node] = total.get(node, 0.0) + seconds
        return total


def _share(part_s: float, whole_s: float) -> float:
    return round(min(1.0, part_s / whole_s), 3) if whole_s > 0 else 0.0
