"""State that goes with the process: for one gateway, and for tests. The other forms are measured by it."""

from __future__ import annotations

import secrets
import time
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Collection

from app.jobs.job import Job
from app.state.state import Allowance, Bound, JobBounds, JobRow, JobTable, Kept, Shelf, ShelfName
from app.state.trouble import Part

WINDOW_S = 60.0


class MemoryState:
    """All of it in dictionaries."""

    is_shared = False
    files = None

    def __init__(self) -> None:
        self.gateway_id = secrets.token_hex(8)
        self.on_error: Callable[[Part, str], None] = lambda part, reason: None
        self.jobs: JobTable = MemoryJobs()
        self._taken: dict[str, deque[float]] = {}
        self._held: defaultdict[str, dict[str, int]] = defaultdict(dict)
        self._shelves: dict[ShelfName, Shelf] = {}

    def shelf(self, name: ShelfName, bound: Bound) -> Shelf:
        return self._shelves.setdefault(name, MemoryShelf(bound))

    async def living(self, gateway_ids: Collection[str]) -> frozenset[str]:
        return frozenset({self.gateway_id}).intersection(gateway_ids)

    async def take(self, key: str, per_minute: int, cost: int = 1) -> Allowance:
        taken, now = self._taken.setdefault(key, deque()), time.monotonic()
        while taken and taken[0] <= now - WINDOW_S:
            taken.popleft()
        is_granted = len(taken) + cost <= per_minute
        if is_granted:
            taken.extend([now] * cost)
        return allowance(is_granted, len(taken), taken[0] if taken else None, now, per_minute)

    async def hold(self, key: str, most: int, cost: int = 1) -> str | None:
        held = self._held[key]
        if sum(held.values()) + cost > most:
            return None
        lease = f"{secrets.token_hex(8)} {key}"
        held[lease] = cost
        return lease

    async def release(self, lease: str) -> None:
        key = lease.partition(" ")[2]
        if key in self._held:
            self._held[key].pop(lease, None)
            if not self._held[key]:
                del self._held[key]


def allowance(is_granted: bool, num_taken: int, oldest: float | None, now: float, most: int) -> Allowance:
    """Put together what is told of a limit; `oldest` is when the first of the places was taken, on `now`'s clock."""
    reset_s = 0.0 if oldest is None else min(max(0.0, oldest + WINDOW_S - now), WINDOW_S)
    wait_s = 0.0 if is_granted else max(0.001, reset_s or WINDOW_S)
    return Allowance(wait_s, max(0, most - num_taken), reset_s)


class MemoryShelf:
    """Values by name, the oldest first."""

    def __init__(self, bound: Bound) -> None:
        self._bound = bound
        self._kept: OrderedDict[str, tuple[bytes, float]] = OrderedDict()  # with the end of its time
        self._total = 0

    async def put(self, name: str, value: bytes) -> None:
        if self._weight(value) > self._bound.total:
            return
        await self.remove(name)
        self._kept[name] = value, time.monotonic() + self._bound.lifetime_s
        self._total += self._weight(value)
        self._drop_old()

    async def get(self, name: str) -> Kept | None:
        self._drop_old()
        value, until = self._kept.get(name, (b"", 0.0))
        left = until - time.monotonic()
        return Kept(value, left) if left > 0 else None

    async def remove(self, name: str) -> None:
        value, until = self._kept.pop(name, (b"", 0.0))
        self._total -= self._weight(value) if until else 0

    def _weight(self, value: bytes) -> int:
        return len(value) if self._bound.counts_bytes else 1

    def _drop_old(self) -> None:
        now = time.monotonic()
        while self._kept:
            name, (value, until) = next(iter(self._kept.items()))
            if until > now and self._total <= self._bound.total:
                return
            del self._kept[name]
            self._total -= self._weight(value)


class MemoryJobs:
    """Jobs by id, and what is noted of those that run."""

    def __init__(self) -> None:
        self._rows: dict[str, JobRow] = {}
        self._notes: dict[str, bytes] = {}

    async def add(self, row: JobRow, bounds: JobBounds) -> bool:
        total = sum(one.size_bytes for one in self._rows.values())
        if len(self._rows) >= bounds.max_jobs or total + row.size_bytes > bounds.max_bytes:
            return False
        self._rows[row.job.id] = row
        return True

    async def get(self, job_id: str, owner: str) -> JobRow | None:
        row = self._rows.get(job_id)
        return row if row is not None and row.job.owner == owner else None

    async def rows(self, owner: str | None = None) -> list[JobRow]:
        mine = [row for row in self._rows.values() if owner is None or row.job.owner == owner]
        return sorted(mine, key=lambda row: row.job.created)

    async def change(self, job: Job, bounds: JobBounds) -> bool:
        row = self._rows.get(job.id)
        if row is None or row.job.is_over:
            return False
        self._rows[job.id] = JobRow(job, row.gateway_id, row.size_bytes)
        return True

    async def reserve(self, job_id: str, owner: str, size_bytes: int, bounds: JobBounds) -> bool:
        row = self._rows.get(job_id)
        others = sum(one.size_bytes for one in self._rows.values() if one is not row)
        if row is None or others + size_bytes > bounds.max_bytes:
            return False
        self._rows[job_id] = JobRow(row.job, row.gateway_id, size_bytes)
        return True

    async def remove(self, job_id: str, owner: str) -> None:
        self._rows.pop(job_id, None)
        self._notes.pop(job_id, None)

    async def note(self, job_id: str, told: bytes, lifetime_s: float) -> None:
        if job_id in self._rows:
            self._notes[job_id] = told

    async def noted(self, job_id: str) -> bytes | None:
        return self._notes.get(job_id)
