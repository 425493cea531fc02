"""What this node keeps of ended sessions for those that begin like them, within the memory that sessions may take.

Kept prefixes are the first to go when live sessions need room. Knows hashes, no tokens, and nothing of links.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from node.budget import MemoryBudget
from node.call_job import CallState
from node.held_slice import HeldSlice
from node.session import Session
from node.stats import NodeStats
from node.step_job import ComputeState
from routing.types import HopEntry, NodeId
from slicing.kept_caches import BLOCK, HASH_BYTES, Fork, Kept, KeptCaches

TTL_S = 900.0  # the next turn of a chat comes within minutes; who comes later waits as for a first one
MAX_KEPT = 4096
MAX_KEPT_OF_GATEWAY = 256  # so that one gateway's chats do not end those of all others


@dataclass(slots=True)
class ForkedState(ComputeState):
    """A session that begins with what an earlier one left: taken over on the compute thread, by its first step."""

    fork: Fork | None = None

    def rewind(self, position: int) -> None:
        if self.fork is not None:
            self._take_over(self.fork, position)
        ComputeState.rewind(self, position)

    def give_up(self) -> None:
        """The session ends, with nothing under way: what it was to begin with is not needed."""
        fork, self.fork = self.fork, None
        if fork is not None:
            fork.give_up()

    def _take_over(self, fork: Fork, position: int) -> None:
        self.fork = None
        if position and self.cache.length == 0:
            (made,) = fork.make(min(position, fork.length))
            self.cache.close()
            self.cache = made
        else:
            fork.give_up()  # the session begins with its first position after all


class PrefixStore:
    """Kept keys and values by slice. Belongs to the event loop."""

    def __init__(self, budget: MemoryBudget, stats: NodeStats, clock: Callable[[], float]) -> None:
        self._budget = budget
        self._stats = stats
        self._clock = clock
        self._kept = KeptCaches(self._note_gone)

    def find(self, held: HeldSlice, entry: HopEntry) -> Fork | None:
        """The longest prefix that an Open names and that is held here."""
        if not entry.prefixes:
            return None
        named = [(prefix.length, prefix.hash) for prefix in entry.prefixes]
        fork = self._kept.find(_group(held, entry), named, self._clock())
        if fork is None:
            self._stats.prefix_misses += 1
        else:
            self._stats.prefix_hits += 1
            self._stats.prefix_tokens += fork.length
        return fork

    def take_over(self, fork: Fork) -> bool:
        """Make room by giving a session what is kept instead of a copy of it."""
        is_taken = self._kept.take_over(fork)
        self._count()
        return is_taken

    def may_keep(self, session: Session, hashes: Sequence[bytes]) -> bool:
        """Whether a session is at rest, and has computed every block that the hashes speak of."""
        if isinstance(session.state, CallState) or session.entry.branches > 1 or session.entry.memory_rows:
            return False
        cache, length = session.state.cache, len(hashes) * BLOCK
        return (
            is_invariant(session.held)
            and session.num_in_flight == 0
            and 0 < length <= min(session.position, cache.length)
            and cache.can_fork(length)
        )

    def keep(self, session: Session, hashes: Sequence[bytes]) -> None:
        """Take over the keys and values of a session that `may_keep`, and that was freed just now but for them."""
        assert isinstance(session.state, ForkedState)
        entry, cache, held = session.entry, session.state.cache, session.held
        length, owner = len(hashes) * BLOCK, session.entry.gateway_id
        reserved = self._budget.release(session)
        size_bytes = min(reserved, held.cache_bytes(entry, cache.length)) + HASH_BYTES * len(hashes)
        kept = Kept(_group(held, entry), (cache,), tuple(hashes), size_bytes, self._clock(), note=owner)
        if size_bytes > self._budget.free_bytes or not cache.can_fork(length):
            cache.close()
            return
        self._limit(owner)
        self._budget.reserve(kept, size_bytes)
        self._kept.add(kept)
        self._stats.prefixes_kept += 1
        self._count()

    def evictable_bytes(self) -> int:
        """What `evict` can free."""
        return sum(kept.size_bytes for kept in self._kept if not kept.is_awaited)

    def evict(self, needed_bytes: int) -> None:
        """Let the least recently used go until so much more is free, or nothing is left to let go."""
        enough = self._budget.free_bytes + needed_bytes
        for kept in self._kept:
            if self._budget.free_bytes >= enough:
                return
            if not kept.is_awaited:
                self._let_go(kept)

    def sweep(self) -> None:
        """Let go of what was not used for long, and of what is too much since weights need more memory."""
        if self._budget.free_bytes < 0:
            self.evict(-self._budget.free_bytes)
        self._stats.prefixes_evicted += self._kept.sweep(self._clock(), TTL_S)
        self._count()

    def drop(self, held: HeldSlice) -> None:
        """A slice is not here any more."""
        for kept in self._kept:
            if kept.group[0] is held:  # type: ignore[index]  # see `_group`
                self._let_go(kept)

    def clear(self) -> None:
        """Let go of everything."""
        self._kept.clear()
        self._count()

    def _limit(self, owner: NodeId) -> None:
        own = [kept for kept in self._kept if kept.note == owner]
        for kept in own[: max(0, len(own) + 1 - MAX_KEPT_OF_GATEWAY)]:
            self._let_go(kept)
        if len(self._kept) >= MAX_KEPT:
            self._let_go(next(iter(self._kept)))

    def _let_go(self, kept: Kept) -> None:
        self._kept.let_go(kept)
        self._stats.prefixes_evicted += 1
        self._count()

    def _note_gone(self, kept: Kept) -> None:
        self._budget.release(kept)

    def _count(self) -> None:
        self._stats.num_prefixes = len(self._kept)
        self._stats.prefix_bytes = self._kept.size_bytes


def is_invariant(held: HeldSlice) -> bool:
    """Whether a slice's keys and values do not depend on how rows came: only then can others go on with them."""
    return bool(getattr(held.runner, "is_invariant", False))


def _group(held: HeldSlice, entry: HopEntry) -> tuple[HeldSlice, int, int, bool]:
    """Sessions of the same layers of a slice; one that embeds has nothing else in them, but came another way."""
    return held, entry.start, entry.end, entry.run_opening
