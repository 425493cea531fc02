"""How records spread: push of news to a few peers, push-pull anti-entropy with one random peer now and then.

Sans I/O: messages in, messages out, clock and randomness injected. Knows limits per peer and what was asked of
whom. Knows no links, and believes nobody about anybody else: records are signed, and a doubt is a reason to look.
"""

from __future__ import annotations

import math
import random
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Mapping
from enum import StrEnum

from routing.address_policy import AddressPolicy
from routing.admission import TokenBucket
from routing.announcement import (
    PREFIX_SIZE,
    Announcement,
    RecordRefused,
    Refusal,
    author_of,
    read_announcement,
)
from routing.digests import digest_of, lacking, wanted
from routing.errors import LocalError
from routing.gossip_peer import GossipLimits, GossipPeer
from routing.network_wire import MAX_DOUBTS, MAX_RECORDS
from routing.record_table import RecordTable, Room
from routing.types import Digest, Message, NodeId, Pull, Records

Send = tuple[NodeId, Message]

PERIOD_S = 2.0  # transport.md 5.5
JITTER = 0.3
FANOUT = 3
LEAVING_FANOUT = 6  # who leaves has no second chance to tell
FRESH_MS = 10_000  # what was pulled and is older than this has been pushed around already
QUIET_S = 0.5  # between two exchanges that new links begin: many links at once need no exchange each
RIVAL_PAUSE_S = 5.0  # two nodes with one key sign above each other; not faster than this
REFUSED_S = 60.0  # a signed record that found no room is not asked for again so soon
MAX_STRANGERS = 1024  # peers without a link whose limits are remembered
MAX_REFUSED = 4096


class GossipFault(StrEnum):
    """What peers do wrong besides sending refused records; counted by these names."""

    FLOOD = "flood"  # records nobody asked for, above the rate
    DIGEST_FLOOD = "digest_flood"
    DOUBT_FLOOD = "doubt_flood"
    PULL_FLOOD = "pull_flood"
    AUTHOR_FLOOD = "author_flood"  # one author signs too often
    UNANSWERED_PULL = "unanswered_pull"
    TWO_NODES_ONE_KEY = "two_nodes_one_key"
    OWN_PAST = "own_past"  # a record of ours from before this start that is above our own


class Gossip:
    """One peer's share of the gossip; see the module text.

    `on_rival(sequence)`: a record signed with our key is not ours; sign anew above it. `on_doubt(node_id)`: have a
    look whether it lives. `on_change(node_id, announcement)`: a newer record, or None: no live one any more.
    `read` stands in for `read_announcement` where signatures are verified elsewhere.
    """

    def __init__(
        self,
        own_id: NodeId,
        network_id: bytes,
        policy: AddressPolicy,
        *,
        rng: random.Random,
        now: Callable[[], float],
        pinned: frozenset[NodeId] = frozenset(),
        limits: GossipLimits | None = None,
        on_rival: Callable[[int], None] | None = None,
        on_doubt: Callable[[NodeId], None] | None = None,
        on_change: Callable[[NodeId, Announcement | None], None] | None = None,
        read: Callable[..., Announcement] = read_announcement,
    ) -> None:
        self._own_id = own_id
        self._network_id = network_id
        self._policy = policy
        self._rng = rng
        self._now = now
        self._limits = limits or GossipLimits()
        self._on_rival = on_rival
        self._on_doubt = on_doubt
        self._on_change = on_change
        self._read = read
        self._table = RecordTable(policy, self._limits.table, pinned | {own_id})
        self._peers: dict[NodeId, GossipPeer] = {}
        self._strangers: OrderedDict[NodeId, GossipPeer] = OrderedDict()
        self._authors: dict[NodeId, TokenBucket] = {}
        self._refused: OrderedDict[tuple[bytes, int], float] = OrderedDict()  # digest entry -> until
        self._doubts: dict[NodeId, None] = {}  # whom we found dead ourselves, in that order
        self._started_ms = self._now_ms()
        self._last_exchange = -math.inf
        self._last_rival = -math.inf
        self.rival_sequence: int | None = None
        self.faults: Counter[str] = Counter()
        self.num_known = 0  # records received that we had already
        self.next_tick = now() + rng.uniform(0, PERIOD_S)

    @property
    def announcements(self) -> Mapping[NodeId, Announcement]:
        """Everybody's live record, our own among them; a view that changes with the table."""
        self._expire()
        return self._table.live

    @property
    def version(self) -> int:
        """Grows with each change of the table."""
        self._expire()
        return self._table.version

    @property
    def num_records(self) -> int:
        """Slots in use, tombstones among them."""
        return len(self._table)

    def record_of(self, node_id: NodeId) -> bytes | None:
        """Return a record as its author signed it."""
        entry = self._table.get(node_id)
        return None if entry is None else entry.record

    def publish(self, record: bytes) -> list[Send]:
        """Take our own new record and push it to a few peers. Raises `RecordRefused` or `LocalError` on misuse."""
        announcement = self._read(record, self._network_id, self._policy, now_ms=self._now_ms())
        if announcement.node_id != self._own_id:
            raise LocalError("only our own record is published")
        if announcement.sequence <= self._table.known_sequence(self._own_id):
            raise RecordRefused(Refusal.REPLAYED, "our own record must be above our last one")
        self._put(record, announcement)
        if self.rival_sequence is not None and announcement.sequence > self.rival_sequence:
            self.rival_sequence = None
        fanout = LEAVING_FANOUT if announcement.is_tombstone else FANOUT
        return self._push([record], fanout)

    def peer_up(self, peer_id: NodeId) -> list[Send]:
        """A first link to a peer is up: tell it of us, and compare tables unless we just did with another."""
        if peer_id in self._peers or peer_id == self._own_id:
            return []
        peer = self._strangers.pop(peer_id, None) or GossipPeer(self._limits, self._now())
        self._peers[peer_id] = peer
        own = self.record_of(self._own_id)
        sends: list[Send] = [(peer_id, Records((own,)))] if own is not None else []
        if self._now() - self._last_exchange >= QUIET_S:
            sends += self._exchange(peer_id)
        return sends

    def peer_down(self, peer_id: NodeId) -> None:
        """The last link to a peer is gone; its limits are remembered for a while."""
        peer = self._peers.pop(peer_id, None)
        if peer is None:
            return
        peer.forget_pulls()
        self._strangers[peer_id] = peer
        while len(self._strangers) > MAX_STRANGERS:
            self._strangers.popitem(last=False)

    def is_asking(self, peer_id: NodeId) -> bool:
        """Whether records that we asked a peer for are due."""
        peer = self._peers.get(peer_id)
        return peer is not None and peer.is_answering(self._now())

    def tick(self) -> list[Send]:
        """Do what is due: expire records, and compare tables with one random peer."""
        now = self._now()
        self._expire()
        if now < self.next_tick:
            return []
        self.next_tick = now + PERIOD_S * self._rng.uniform(1 - JITTER, 1 + JITTER)
        self._tidy(now)
        return self._exchange(self._rng.choice(list(self._peers))) if self._peers else []

    def receive(self, peer_id: NodeId, message: Digest | Pull | Records) -> list[Send]:
        """Take a peer's message; return what to answer, and to whom else to pass news on."""
        peer = self._peers.get(peer_id)
        if peer is None:
            return []
        match message:
            case Digest():
                return [(peer_id, answer) for answer in self._compare(peer, message)]
            case Pull():
                return [(peer_id, answer) for answer in self._serve(peer, message)]
            case Records():
                return self._take_records(peer_id, peer, message)

    def tell_doubt(self, node_id: NodeId) -> list[Send]:
        """We found a node dead ourselves: tell a few peers now, so that they look too.

        Digests tell others, newcomers above all, until it signs a record, its record expires or `end_doubt`.
        """
        self._doubts[node_id] = None
        hint = Digest((), is_reply=True, doubts=(node_id[:PREFIX_SIZE],))
        return [(peer_id, hint) for peer_id in self._some_peers(FANOUT, without=node_id)]

    def end_doubt(self, node_id: NodeId) -> None:
        """It lives after all."""
        self._doubts.pop(node_id, None)

    # --- digests

    def _exchange(self, peer_id: NodeId) -> list[Send]:
        self._last_exchange = self._now()
        self._peers[peer_id].expect_reply()
        return [(peer_id, digest_of(self._table, self._limits.span_size, self._rng, self._found_dead()))]

    def _found_dead(self) -> tuple[bytes, ...]:
        return tuple(node_id[:PREFIX_SIZE] for node_id in list(self._doubts)[-MAX_DOUBTS:])

    def _compare(self, peer: GossipPeer, digest: Digest) -> list[Message]:
        self._hear_doubts(peer, digest.doubts)
        if digest.is_reply:
            if digest.entries and not peer.take_reply():
                self._count(GossipFault.DIGEST_FLOOD)
                return []
            peer.has_more = len(digest.entries) >= self._limits.span_size
        elif not peer.digests.take(self._now()):
            self._count(GossipFault.DIGEST_FLOOD)
            return []
        if digest.entries:
            news = wanted(self._table, digest.entries)
            peer.wanted = list(
                dict.fromkeys(prefix for prefix, sequence in news if self._is_welcome(prefix, sequence))
            )
        answers = self._next_pull(peer)
        if not digest.is_reply:
            newer = lacking(self._table, digest, self._limits.span_size)
            doubts = tuple(prefix for prefix in self._found_dead() if prefix not in digest.doubts)
            if newer or doubts or not answers:  # an empty one says: there is no more to know here
                answers.append(Digest(newer, is_reply=True, doubts=doubts))
        return answers

    def _is_welcome(self, prefix: bytes, sequence: int) -> bool:
        is_known = self._table.sequence_of(prefix) >= 0
        return (prefix, sequence) not in self._refused and (is_known or self._table.may_have_room_for(prefix))

    def _hear_doubts(self, peer: GossipPeer, prefixes: Iterable[bytes]) -> None:
        if self._on_doubt is None:
            return
        for prefix in prefixes:
            for entry in self._table.with_prefix(prefix):
                if entry.node_id in self._doubts or entry.node_id == self._own_id:
                    continue
                if not peer.doubts.take(self._now()):
                    self._count(GossipFault.DOUBT_FLOOD)
                    return
                self._on_doubt(entry.node_id)

    def _next_pull(self, peer: GossipPeer) -> list[Message]:
        """Ask a peer for the next of what it has and we want, one pull at a time."""
        now = self._now()
        if peer.is_late(now):
            self._count(GossipFault.UNANSWERED_PULL)
        pull = peer.next_pull(now)
        return [pull] if pull is not None else []

    def _serve(self, peer: GossipPeer, pull: Pull) -> list[Message]:
        records: list[bytes] = []
        for prefix in dict.fromkeys(pull.prefixes):
            if not peer.served.take(self._now()):
                self._count(GossipFault.PULL_FLOOD)
                break
            records += [entry.record for entry in self._table.with_prefix(prefix)]
        return _batched(records)

    # --- records

    def _take_records(self, peer_id: NodeId, peer: GossipPeer, message: Records) -> list[Send]:
        claims = self._claims(message.records[:MAX_RECORDS])
        asked, is_end = peer.note_answer([author[:PREFIX_SIZE] for _, author, _ in claims])
        news: list[bytes] = []
        for record, author, sequence in claims:
            was_asked = author[:PREFIX_SIZE] in asked
            asked.discard(author[:PREFIX_SIZE])  # one record was asked for, not as many as fit
            if self._take(peer, record, author, sequence, was_asked):
                news.append(record)
        sends = self._push(news, FANOUT, without=peer_id) if news else []
        if is_end and peer.wanted:
            sends += [(peer_id, pull) for pull in self._next_pull(peer)]
        elif is_end and peer.has_more:
            peer.has_more = False
            sends += self._exchange(peer_id)
        return sends

    def _claims(self, records: Iterable[bytes]) -> list[tuple[bytes, NodeId, int]]:
        """Return (record, author, sequence) of those that have the size of a record, nothing proved."""
        claims = []
        for record in records:
            try:
                claims.append((record, *author_of(record)))
            except RecordRefused as refused:
                self._count(refused.reason)
        return claims

    def _take(self, peer: GossipPeer, record: bytes, author: NodeId, sequence: int, was_asked: bool) -> bool:
        """Read one record into the table; whether it is news that others should hear of at once."""
        if self.record_of(author) == record:
            self.num_known += 1
            return False
        known = self._table.known_sequence(author)
        if author == self._own_id:
            known -= 1  # one of the same sequence is not ours
        if (refusal := self._unread(peer, author, is_new=sequence > known, was_asked=was_asked)) is not None:
            return self._count(refusal)
        try:
            announcement = self._read(
                record, self._network_id, self._policy, now_ms=self._now_ms(), known_sequence=max(known, -1)
            )
        except RecordRefused as refused:
            if refused.reason is Refusal.FORGED:
                peer.note_forgery(self._now())
            return self._count(refused.reason)
        if author == self._own_id:
            return self._meet_rival(announcement)
        is_taken = self._accept(author, record, announcement)
        return is_taken and (not was_asked or self._now_ms() - announcement.issued_ms < FRESH_MS)

    def _unread(self, peer: GossipPeer, author: NodeId, *, is_new: bool, was_asked: bool) -> str | None:
        """Why a record is not worth verifying; None where it is, or is refused for less than that."""
        if not is_new:
            return None
        now = self._now()
        if peer.is_barred(now) or not (was_asked or peer.records.take(now)):
            return GossipFault.FLOOD
        if not self._table.has_slot(author):
            return Room.TABLE_FULL
        return None

    def _accept(self, author: NodeId, record: bytes, announcement: Announcement) -> bool:
        now = self._now()
        if author in self._table.live and not announcement.is_tombstone:
            rate, burst = self._limits.author_rate, self._limits.author_burst
            if not self._authors.setdefault(author, TokenBucket(rate, burst, now)).take(now):
                return self._count(GossipFault.AUTHOR_FLOOD)
        room = self._table.room_for(announcement)
        if room is not Room.YES:
            self._remember_refused(announcement)
            return self._count(room)
        self._doubts.pop(author, None)
        rivals = self._put(record, announcement)
        if rivals and self._on_doubt is not None:
            for node_id in (*sorted(rivals - {self._own_id}), author):
                self._on_doubt(node_id)
        return True

    def _put(self, record: bytes, announcement: Announcement) -> frozenset[NodeId]:
        rivals = self._table.put(record, announcement)
        if self._on_change is not None:
            self._on_change(announcement.node_id, None if announcement.is_tombstone else announcement)
        return rivals

    def _expire(self) -> None:
        for node_id in self._table.expire(self._now_ms()):
            if self._on_change is not None:
                self._on_change(node_id, None)

    def _remember_refused(self, announcement: Announcement) -> None:
        """Only what its author signed comes here, so nobody can keep another's record away."""
        self._refused[announcement.node_id[:PREFIX_SIZE], announcement.sequence] = self._now() + REFUSED_S
        while len(self._refused) > MAX_REFUSED:
            self._refused.popitem(last=False)

    def _meet_rival(self, announcement: Announcement) -> bool:
        """A record signed with our key that is not ours: our own past, or another node with a copy of our key."""
        is_other = announcement.issued_ms >= self._started_ms
        self._count(GossipFault.TWO_NODES_ONE_KEY if is_other else GossipFault.OWN_PAST)
        self.rival_sequence = max(announcement.sequence, self.rival_sequence or 0)
        now = self._now()
        if self._on_rival is not None and now - self._last_rival >= RIVAL_PAUSE_S:
            self._last_rival = now
            self._on_rival(self.rival_sequence)
        return False

    # --- peers and the rest

    def _push(self, records: list[bytes], fanout: int, *, without: NodeId | None = None) -> list[Send]:
        peers = self._some_peers(fanout, without=without)
        return [(peer_id, batch) for peer_id in peers for batch in _batched(records)]

    def _some_peers(self, count: int, *, without: NodeId | None = None) -> list[NodeId]:
        peers = [peer_id for peer_id in self._peers if peer_id != without]
        return self._rng.sample(peers, min(count, len(peers)))

    def _tidy(self, now: float) -> None:
        self._doubts = {node_id: None for node_id in self._doubts if node_id in self._table.live}
        self._authors = {
            author: bucket for author, bucket in self._authors.items() if not bucket.is_full(now)
        }
        while self._refused and next(iter(self._refused.values())) <= now:
            self._refused.popitem(last=False)

    def _count(self, fault: str) -> bool:
        self.faults[str(fault)] += 1
        return False

    def _now_ms(self) -> int:
        return int(self._now() * 1000)


def _batched(records: list[bytes]) -> list[Message]:
    return [Records(tuple(records[at : at + MAX_RECORDS])) for at in range(0, len(records), MAX_RECORDS)]
