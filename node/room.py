"""Who gets room on a node: memory is set aside when a session opens, and idle sessions make way for new ones.

The rule: what was kept of ended sessions goes first, the least recently used before the others; then sessions that
were idle for ten seconds (of calls: five minutes), the longest idle first, never one with a step under way. They are
rebuilt by replay when they come back. A full node says when to ask again. Knows nothing of links and tensors.
"""

from __future__ import annotations

from collections.abc import Callable

from node.budget import MemoryBudget
from node.held_slice import HeldSlice
from node.prefix_store import PrefixStore
from node.session import Session
from node.session_table import SessionTable
from node.stats import NodeStats
from routing.errors import ErrorCode, WorkError
from routing.types import HopEntry, NodeId

EVICT_IDLE_S = (
    10.0  # a session whose gateway waits for somebody is back sooner; beyond it a client reads nothing
)
# A session of calls waits for the other hops' part of a pass, which may be long, and what it loses is a pass' keys:
# two that took each other's room in turn would both begin anew with every step.
EVICT_CALLS_IDLE_S = 300.0
FRESH_S = 1.0  # how long a session is taken to last that has computed nothing yet: about a short answer
MIN_RETRY_MS, MAX_RETRY_MS = 100, 30_000


class Room:
    """Admission of sessions. `evict` ends one here, for the time being."""

    def __init__(
        self,
        budget: MemoryBudget,
        sessions: SessionTable,
        prefixes: PrefixStore,
        stats: NodeStats,
        *,
        clock: Callable[[], float],
        evict: Callable[[Session], None],
    ) -> None:
        self._budget = budget
        self._sessions = sessions
        self._prefixes = prefixes
        self._stats = stats
        self._clock = clock
        self._evict = evict
        budget.make_room = self.make

    def check(self, peer_id: NodeId, held: HeldSlice, entry: HopEntry) -> None:
        """Refuse a session that there is no place or memory for, or make way for it.

        Raises WorkError BUSY with when to ask again, or NO_ROOM with how many positions there can ever be.
        """
        needed = self.needed_bytes(held, entry)
        if needed > self._budget.limit_bytes:
            most, unit = self._most(held, entry), _unit(entry)
            text = f"{entry.room} {unit} asked, there is room for {most}"
            raise WorkError(ErrorCode.NO_ROOM, text, room=most)
        while (full := self._sessions.full_for(peer_id)) is not None:
            idle = [session for session in self._idle() if full.is_of_all or session.peer_id == peer_id]
            if not idle:
                raise WorkError(ErrorCode.BUSY, full.text, retry_ms=self._retry_ms(0))
            self._end(idle[0])
        if needed > self._budget.free_bytes and not self.make(needed):
            unit, free = _unit(entry), self._budget.free_bytes
            text = f"no memory for {entry.room} {unit}: {needed} B, {free} B are free"
            raise WorkError(ErrorCode.BUSY, text, retry_ms=self._retry_ms(needed))

    def take(self, session: Session) -> None:
        """Set aside what a session that was checked asked for."""
        self._budget.reserve(session, self.needed_bytes(session.held, session.entry))

    def needed_bytes(self, held: HeldSlice, entry: HopEntry) -> int:
        """What is set aside for a session when it opens; memory counts in full, and comes soon."""
        positions = entry.room if entry.calls else min(entry.room, entry.max_positions)
        return held.cache_bytes(entry, positions) if positions or entry.memory_rows else 0

    def make(self, needed_bytes: int) -> bool:
        """Get so many bytes free, if that can be, and touch nothing if not."""
        idle = self._idle()
        freeable = self._prefixes.evictable_bytes() + sum(self._budget.reserved(each) for each in idle)
        if self._budget.free_bytes + freeable < needed_bytes:
            return False
        self._prefixes.evict(needed_bytes - self._budget.free_bytes)
        for session in idle:
            if self._budget.free_bytes >= needed_bytes:
                break
            self._end(session)
        return self._budget.free_bytes >= needed_bytes

    def _idle(self) -> list[Session]:
        """Sessions that may be ended for others, the longest idle first."""
        now = self._clock()
        idle = [each for each in self._sessions if _is_idle(each, now) and _is_at_rest(each)]
        return sorted(idle, key=lambda session: session.last_seen)

    def _end(self, session: Session) -> None:
        self._stats.sessions_evicted += 1
        self._evict(session)

    def _most(self, held: HeldSlice, entry: HopEntry) -> int:
        """Positions (KiB a block, for calls) that a session of this work can have when it is alone."""
        low, high = 0, entry.room
        while low < high:
            middle = (low + high + 1) // 2
            fits = held.cache_bytes(entry, middle) <= self._budget.limit_bytes
            low, high = (middle, high) if fits else (low, middle - 1)
        return low

    def _retry_ms(self, needed_bytes: int) -> int:
        """When so much is likely to be free: sessions end at their present speed, or are idle for too long."""
        now = self._clock()
        free_bytes, ends = self._budget.free_bytes, sorted(self._ends(now), key=lambda end: end[0])
        for ends_in_s, size_bytes in ends:
            free_bytes += size_bytes
            if free_bytes >= needed_bytes:
                return max(MIN_RETRY_MS, min(int(ends_in_s * 1000), MAX_RETRY_MS))
        return MAX_RETRY_MS

    def _ends(self, now: float) -> list[tuple[float, int]]:
        """In how many seconds each session may end, and what it has."""
        return [(_ends_in_s(session, now), self._budget.reserved(session)) for session in self._sessions]


def _unit(entry: HopEntry) -> str:
    return "KiB a block" if entry.calls else "positions"


def _is_idle(session: Session, now: float) -> bool:
    return now - session.last_seen >= (EVICT_CALLS_IDLE_S if session.entry.calls else EVICT_IDLE_S)


def _is_at_rest(session: Session) -> bool:
    return session.num_in_flight == 0 and not session.waiting and session.pending.steps == 0


def _ends_in_s(session: Session, now: float) -> float:
    done = session.position - session.first_position
    if done <= 0:
        return FRESH_S
    entry = session.entry
    limit = entry.max_positions if entry.calls else entry.room or entry.max_positions
    speed = max(done, 1) / max(now - session.opened_at, 0.001)  # positions per second
    return max(0, limit - session.position) / speed
