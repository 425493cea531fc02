"""Caches of sessions that ended, kept for those that begin in the same way, by the hashes of their blocks.

For nodes and for the gateway's own ends. Whoever asks must know a hash: nothing here tells which tokens it stands for.
Belongs to one thread, the event loop's; only `Fork.make` is called on the thread that computes.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakSet

from slicing.batch import Cache

BLOCK = 16  # positions that one hash stands for: what two sessions share is counted in whole blocks
HASH_BYTES = 150  # that one hash takes in the index, about


@dataclass(slots=True, eq=False)
class Kept:
    """One ended session: its caches (of one slice, or of both ends), which hold at least `length` positions."""

    group: Hashable  # what can use them: a slice that is held, a model's ends
    caches: tuple[Cache, ...] = field(repr=False)
    hashes: tuple[bytes, ...] = field(repr=False)  # of its blocks, from the first on
    size_bytes: int
    last_used: float
    note: Any = None  # of whoever keeps it
    is_taken: bool = False  # its caches are a session's now
    forks: WeakSet[Fork] = field(default_factory=WeakSet, repr=False)

    @property
    def length(self) -> int:
        """Positions that the hashes speak of."""
        return len(self.hashes) * BLOCK

    @property
    def is_awaited(self) -> bool:
        """Whether somebody is about to fork it."""
        return any(not fork.is_over for fork in self.forks)

    def holds(self, length: int, end: bytes) -> bool:
        """Whether the first `length` positions are those that `end` stands for, and can be had."""
        is_known = 0 < length <= self.length and length % BLOCK == 0
        return is_known and self.hashes[length // BLOCK - 1] == end and self.can_fork(length)

    def can_fork(self, length: int) -> bool:
        """Whether every cache can be forked at `length`."""
        return all(cache.can_fork(length) for cache in self.caches)

    def fork(self, length: int) -> Fork:
        """Promise copies of the first `length` positions. They are made, or given up, later."""
        made = Fork(self, length)
        self.forks.add(made)
        return made


@dataclass(slots=True, weakref_slot=True, eq=False)
class Fork:
    """Caches that a session will begin with. The kept ones stay until they are made, given up, or nobody has this."""

    kept: Kept
    length: int
    takes: bool = False  # the kept caches themselves: there is no room for copies
    is_over: bool = False  # with `Kept.is_taken`, all that two threads share

    def make(self, length: int) -> tuple[Cache, ...]:
        """Caches of the first `length` positions, at most as many as promised. Raises CannotRollBack."""
        try:
            if not self.takes:
                return tuple(cache.fork(length) for cache in self.kept.caches)
            for cache in self.kept.caches:
                cache.truncate(length)
            self.kept.is_taken = True
            return self.kept.caches
        finally:
            self.is_over = True

    def give_up(self) -> None:
        """They are not needed."""
        self.is_over = True


class KeptCaches:
    """Kept sessions, the least recently used first; `on_gone` hears of every one that is let go."""

    def __init__(self, on_gone: Callable[[Kept], None] = lambda _: None) -> None:
        self._on_gone = on_gone
        self._kept: dict[Kept, None] = {}  # in the order of their last use
        self._by_hash: dict[bytes, list[Kept]] = {}  # of any of its blocks
        self._by_end: dict[bytes, list[Kept]] = {}  # of its last one
        self._leaving: list[Kept] = []  # let go, but somebody is about to fork them

    def __len__(self) -> int:
        return len(self._kept)

    def __contains__(self, kept: Kept) -> bool:
        return kept in self._kept

    def __iter__(self) -> Iterator[Kept]:
        """The least recently used first; letting go meanwhile is safe."""
        return iter(tuple(self._kept))

    @property
    def size_bytes(self) -> int:
        """What all of them take."""
        return sum(kept.size_bytes for kept in self._kept)

    def add(self, kept: Kept) -> None:
        """Take one in; those that it makes superfluous go."""
        for other in self._superseded(kept):
            self.let_go(other)
        self._kept[kept] = None
        self._by_end.setdefault(kept.hashes[-1], []).append(kept)
        for end in kept.hashes:
            self._by_hash.setdefault(end, []).append(kept)

    def find(self, group: Hashable, prefixes: Iterable[tuple[int, bytes]], now: float) -> Fork | None:
        """A fork of the first of `prefixes` (length, hash of its last block) that is held; that counts as a use."""
        for length, end in prefixes:
            for kept in reversed(self._by_hash.get(end, ())):
                if kept.group == group and kept.holds(length, end):
                    self.note_use(kept, now)
                    return kept.fork(length)
        return None

    def with_hash(self, end: bytes) -> Sequence[Kept]:
        """Those that have a block with this hash, the newest last."""
        return self._by_hash.get(end, ())

    def note_use(self, kept: Kept, now: float) -> None:
        """It is the last to be let go now."""
        kept.last_used = now
        del self._kept[kept]
        self._kept[kept] = None

    def take_over(self, fork: Fork) -> bool:
        """Let a fork have what is kept instead of a copy; false where others wait for it too."""
        kept = fork.kept
        if kept not in self._kept or sum(not other.is_over for other in kept.forks) > 1:
            return False
        fork.takes = True
        self._forget(kept)
        self._leaving.append(kept)
        self._on_gone(kept)
        return True

    def let_go(self, kept: Kept) -> None:
        """Forget one, and free it as soon as nobody is about to fork it."""
        self._forget(kept)
        if kept.is_awaited:
            self._leaving.append(kept)
        else:
            self._free(kept)

    def _forget(self, kept: Kept) -> None:
        del self._kept[kept]
        _take_out(self._by_end, kept.hashes[-1], kept)
        for end in kept.hashes:
            _take_out(self._by_hash, end, kept)

    def sweep(self, now: float, ttl_s: float) -> int:
        """Let go of what was not used for `ttl_s`; returns how many that were."""
        for kept in [kept for kept in self._leaving if not kept.is_awaited]:
            self._leaving.remove(kept)
            self._free(kept)
        old = [kept for kept in self._kept if now - kept.last_used > ttl_s]
        for kept in old:
            self.let_go(kept)
        return len(old)

    def clear(self) -> None:
        """Let go of everything."""
        for kept in self:
            self.let_go(kept)

    def _free(self, kept: Kept) -> None:
        for cache in () if kept.is_taken else kept.caches:
            cache.close()
        self._on_gone(kept)

    def _superseded(self, kept: Kept) -> list[Kept]:
        """Those whose every block is in `kept`, and can be had from there."""
        hashes = dict.fromkeys(kept.hashes)  # a peer may name one twice
        shorter = [other for end in hashes for other in self._by_end.get(end, ())]
        return [other for other in shorter if other.group == kept.group and kept.can_fork(other.length)]


def _take_out(index: dict[bytes, list[Kept]], end: bytes, kept: Kept) -> None:
    holders = index[end]
    holders.remove(kept)
    if not holders:
        del index[end]
