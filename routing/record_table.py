"""The records a peer holds: the newest of each author, within caps, until they expire.

Knows which record supersedes which, who may take a slot, and who claims whose place. Verifies nothing, sends
nothing; the clock is passed in.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from types import MappingProxyType

from routing.address_policy import AddressPolicy, prefixes_of
from routing.announcement import MAX_LIFETIME_MS, PREFIX_SIZE, Announcement
from routing.types import NodeId

Place = tuple[str, int]  # (host, port) of a direct contact


@dataclass(frozen=True, slots=True)
class TableLimits:
    """Caps of one table (transport.md 5.5, 5.6)."""

    size: int = 10_000
    pinned_share: float = 0.25  # of the slots, kept free for pinned peers
    per_narrow_prefix: int = 4  # /24, /48
    per_wide_prefix: int = 16  # /16, /32
    relayed_per_prefix: int = (
        64  # nodes behind one /24 of sentinels that nobody pinned: keys are free there too
    )


class Room(StrEnum):
    """Whether a record may have a slot."""

    YES = "yes"
    TABLE_FULL = "table_full"
    PREFIX_FULL = "prefix_full"


@dataclass(frozen=True, slots=True)
class Entry:
    """One author's newest record."""

    record: bytes
    announcement: Announcement
    node_id: NodeId
    digest: tuple[bytes, int]  # (id prefix, sequence)
    prefixes: tuple[tuple[bytes, int], ...]  # what it is counted under, with the cap
    places: frozenset[Place]  # of its direct contacts


class RecordTable:
    """Records by author. A sequence is remembered longer than its record, so that no older one comes back."""

    def __init__(self, policy: AddressPolicy, limits: TableLimits, pinned: frozenset[NodeId]) -> None:
        self._has_prefix_caps = policy.has_prefix_caps
        self._limits = limits
        self._pinned = pinned
        self._pinned_prefixes = frozenset(node_id[:PREFIX_SIZE] for node_id in pinned)
        self._entries: dict[NodeId, Entry] = {}
        self._live: dict[NodeId, Announcement] = {}
        self._by_prefix: dict[bytes, list[NodeId]] = {}
        self._by_place: dict[Place, set[NodeId]] = {}
        self._counts: Counter[bytes] = Counter()
        self._num_pinned = 0
        self._ends: list[tuple[int, NodeId, int]] = []  # heap of (expires ms, author, sequence)
        self._graves: dict[NodeId, tuple[int, int]] = {}  # author -> (sequence, until ms)
        self._sequences: dict[bytes, int] = {}  # id prefix -> the highest sequence known, graves included
        self.live: Mapping[NodeId, Announcement] = MappingProxyType(self._live)
        self.version = 0
        self._num_shared = 0  # prefixes that several authors have
        self.digest: set[tuple[bytes, int]] = set()  # (id prefix, sequence) of every record

    def __len__(self) -> int:
        return len(self._entries)

    def is_shared(self, prefix: bytes) -> bool:
        """Whether several authors' ids begin so."""
        return self._num_shared > 0 and len(self._by_prefix.get(prefix, ())) > 1

    def get(self, node_id: NodeId) -> Entry | None:
        return self._entries.get(node_id)

    def with_prefix(self, prefix: bytes) -> list[Entry]:
        """Return every record whose author's id begins so: one, but for a rare or a forced collision."""
        return [self._entries[node_id] for node_id in self._by_prefix.get(prefix, ())]

    def known_sequence(self, node_id: NodeId) -> int:
        """Return the highest sequence seen of an author, -1 for a stranger."""
        if entry := self._entries.get(node_id):
            return entry.announcement.sequence
        return self._graves.get(node_id, (-1, 0))[0]

    def sequence_of(self, prefix: bytes) -> int:
        """Return the highest sequence seen of any author with this id prefix."""
        return self._sequences.get(prefix, -1)

    def has_slot(self, node_id: NodeId) -> bool:
        """Whether an author's record, whatever it says, could have a place."""
        return node_id in self._entries or self._has_slot(node_id in self._pinned)

    def may_have_room_for(self, prefix: bytes) -> bool:
        """Whether a record of an unknown author could have a place; only the beginning of its id is known."""
        return self._has_slot(is_pinned=False) or prefix in self._pinned_prefixes

    def room_for(self, announcement: Announcement) -> Room:
        """Say whether a record fits the caps; a pinned author's and a known author's newer one nearly always do."""
        node_id = announcement.node_id
        old = self._entries.get(node_id)
        is_pinned = node_id in self._pinned
        if old is None and not self._has_slot(is_pinned):
            return Room.TABLE_FULL
        before = () if old is None else old.prefixes
        for counted in () if is_pinned else self._prefixes(announcement):
            if counted not in before and self._counts[counted[0]] >= counted[1]:
                return Room.PREFIX_FULL
        return Room.YES

    def put(self, record: bytes, announcement: Announcement) -> frozenset[NodeId]:
        """Take an author's newest record; return the other live authors who claim one of its direct places."""
        node_id = announcement.node_id
        self._drop(node_id)
        self._graves.pop(node_id, None)
        prefix = node_id[:PREFIX_SIZE]
        is_pinned = node_id in self._pinned
        counted = () if is_pinned else self._prefixes(announcement)
        entry = Entry(
            record, announcement, node_id, (prefix, announcement.sequence), counted, _places(announcement)
        )
        self._entries[node_id] = entry
        self._num_pinned += is_pinned
        self._counts.update(counted_prefix for counted_prefix, _ in counted)
        alike = self._by_prefix.setdefault(prefix, [])
        alike.append(node_id)
        self._num_shared += len(alike) == 2
        self.digest.add(entry.digest)
        self._sequences[prefix] = max(announcement.sequence, self.sequence_of(prefix))
        heapq.heappush(self._ends, (announcement.expires_ms, node_id, announcement.sequence))
        self.version += 1
        if announcement.is_tombstone:
            return frozenset()
        self._live[node_id] = announcement
        return self._settle(entry)

    def expire(self, now_ms: int) -> list[NodeId]:
        """Forget records that are over; return whose. Sequences go once nothing valid can be below them."""
        gone: list[NodeId] = []
        while self._ends and self._ends[0][0] <= now_ms:
            _, node_id, sequence = heapq.heappop(self._ends)
            entry = self._entries.get(node_id)
            if entry is not None and entry.announcement.sequence == sequence:
                self._drop(node_id)
                self._graves[node_id] = (sequence, entry.announcement.issued_ms + MAX_LIFETIME_MS)
                self.version += 1
                gone.append(node_id)
        while self._graves:
            node_id, (_, until_ms) = next(iter(self._graves.items()))
            if until_ms > now_ms and len(self._graves) <= self._limits.size:
                break
            self._bury(node_id)
        return gone

    def _bury(self, node_id: NodeId) -> None:
        del self._graves[node_id]
        if node_id[:PREFIX_SIZE] not in self._by_prefix:
            self._sequences.pop(node_id[:PREFIX_SIZE], None)

    def _has_slot(self, is_pinned: bool) -> bool:
        if len(self._entries) >= self._limits.size:
            return False
        kept = int(self._limits.size * self._limits.pinned_share)
        return is_pinned or len(self._entries) - self._num_pinned < self._limits.size - kept

    def _settle(self, entry: Entry) -> frozenset[NodeId]:
        rivals: set[NodeId] = set()
        for place in entry.places:
            holders = self._by_place.setdefault(place, set())
            rivals |= holders
            holders.add(entry.node_id)
        return frozenset(rivals - {entry.node_id})

    def _drop(self, node_id: NodeId) -> None:
        entry = self._entries.pop(node_id, None)
        if entry is None:
            return
        self._num_pinned -= node_id in self._pinned
        self._counts.subtract(prefix for prefix, _ in entry.prefixes)
        prefix = node_id[:PREFIX_SIZE]
        self._by_prefix[prefix].remove(node_id)
        self._num_shared -= len(self._by_prefix[prefix]) == 1
        self.digest.discard(entry.digest)
        if not self._by_prefix[prefix]:
            del self._by_prefix[prefix]
        if self._live.pop(node_id, None) is not None:
            self._leave_places(entry)

    def _leave_places(self, entry: Entry) -> None:
        for place in entry.places:
            self._by_place[place].discard(entry.node_id)
            if not self._by_place[place]:
                del self._by_place[place]

    def _prefixes(self, announcement: Announcement) -> tuple[tuple[bytes, int], ...]:
        """Return what a record is counted under: the prefixes of its own addresses, or else of its sentinels."""
        if not self._has_prefix_caps:
            return ()
        counted: dict[bytes, int] = {}
        for place in _places(announcement):
            narrow, wide = prefixes_of(place[0])
            counted |= {narrow: self._limits.per_narrow_prefix, wide: self._limits.per_wide_prefix}
        if counted:
            return tuple(counted.items())
        relays = [contact.address for contact in announcement.contacts]
        if any(relay.relay_id in self._pinned for relay in relays):
            return ()
        cap = self._limits.relayed_per_prefix
        return tuple({b"relay" + prefixes_of(relay.host)[0]: cap for relay in relays}.items())


def _places(announcement: Announcement) -> frozenset[Place]:
    return frozenset(
        (contact.address.host, contact.address.port)
        for contact in announcement.contacts
        if not contact.address.is_relayed
    )
