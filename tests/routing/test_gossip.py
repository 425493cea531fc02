from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from routing import network_wire
from routing.address_policy import AddressPolicy, Scope
from routing.announcement import (
    Announcement,
    Contact,
    RecordRefused,
    Refusal,
    Voucher,
    sign_announcement,
    sign_voucher,
)
from routing.digests import lacking, wanted
from routing.errors import LocalError
from routing.gossip import Gossip, GossipFault
from routing.gossip_peer import GossipLimits
from routing.identity import Identity
from routing.network_wire import MAX_DIGEST, MAX_RECORDS
from routing.record_table import RecordTable, Room, TableLimits
from routing.types import Digest, Message, NodeAddress, NodeId, Pull, Records
from routing.wire import decode, encode

NETWORK_ID = b"n" * 32
LOCAL = AddressPolicy(Scope.LOOPBACK)
OPEN = AddressPolicy(Scope.PUBLIC)
START_S = 1_700_000_000.0
START_MS = int(START_S * 1000)
OWN, OTHER, THIRD = Identity.generate(), Identity.generate(), Identity.generate()
PEER = NodeId(b"p" * 32)


class Clock:
    def __init__(self) -> None:
        self.now = START_S

    def __call__(self) -> float:
        return self.now


def record_of(identity: Identity, sequence: int = START_MS, **changes: Any) -> bytes:
    issued_ms = changes.pop("issued_ms", START_MS)
    policy, host, port = (
        changes.pop("policy", LOCAL),
        changes.pop("host", "127.0.0.1"),
        changes.pop("port", 9000),
    )
    contacts = () if changes.get("has_left") else (Contact(NodeAddress(identity.node_id, host, port)),)
    plain = Announcement(identity.public_key, sequence, issued_ms, issued_ms + 180_000, contacts)
    return sign_announcement(identity, NETWORK_ID, replace(plain, **changes), policy)


def gossip_of(identity: Identity = OWN, *peers: NodeId, clock: Clock | None = None, **options: Any) -> Gossip:
    policy = options.pop("policy", LOCAL)
    gossip = Gossip(
        identity.node_id, NETWORK_ID, policy, rng=random.Random(1), now=clock or Clock(), **options
    )
    for peer_id in peers or (PEER,):
        gossip.peer_up(peer_id)
    return gossip


def peers(count: int) -> list[NodeId]:
    return [NodeId(number.to_bytes(32, "big")) for number in range(1, count + 1)]


def exchange(one: Gossip, one_id: NodeId, other: Gossip, other_id: NodeId, sends: list[Any]) -> Counter[str]:
    """Carry messages between two peers, through their bytes, until both are silent."""
    counts: Counter[str] = Counter()
    queue = [(one, other, one_id, other_id, message) for to, message in sends if to == other_id]
    while queue:
        sender, target, sender_id, target_id, message = queue.pop(0)
        counts[type(message).__name__] += 1
        assert sum(counts.values()) < 2000
        kind, buffers = encode(message)
        content = decode(kind, memoryview(b"".join(buffers)))
        assert isinstance(content, (Digest, Pull, Records))
        for to, answer in target.receive(sender_id, content):
            if to == sender_id:
                queue.append((target, sender, target_id, sender_id, answer))
    return counts


# --- spreading


def test_news_is_pushed_to_three_peers_and_never_back() -> None:
    known = peers(8)
    gossip = gossip_of(OWN, *known)
    sends = gossip.receive(known[0], Records((record_of(OTHER),)))
    targets = [target for target, _ in sends]
    assert len(set(targets)) == 3
    assert known[0] not in targets
    assert all(message == Records((record_of(OTHER),)) for _, message in sends)


def test_original_bytes_are_passed_on() -> None:
    record = record_of(OTHER)
    gossip = gossip_of(OWN, PEER, *peers(2))
    gossip.receive(PEER, Records((record,)))
    assert gossip.record_of(OTHER.node_id) == record
    answers = gossip.receive(PEER, Pull((OTHER.node_id[:8],)))
    assert answers == [(PEER, Records((record,)))]


def test_what_is_known_goes_no_further() -> None:
    gossip = gossip_of(OWN, PEER, *peers(5))
    gossip.receive(PEER, Records((record_of(OTHER),)))
    assert gossip.receive(PEER, Records((record_of(OTHER),))) == []
    assert gossip.num_known == 1
    assert gossip.faults == Counter()


def test_a_new_link_tells_of_us_and_compares_tables() -> None:
    gossip = gossip_of(OWN, *peers(1))
    gossip.publish(record_of(OWN))
    sends = gossip.peer_up(PEER)
    assert sends[0] == (PEER, Records((record_of(OWN),)))
    assert gossip.peer_up(PEER) == []  # a second link to it


def test_two_tables_are_the_same_after_one_exchange() -> None:
    one, other = gossip_of(OWN, OTHER.node_id), gossip_of(OTHER, OWN.node_id)
    one.publish(record_of(OWN))
    other.publish(record_of(OTHER))
    for number in range(60):
        (one, other)[number % 2].receive(
            (OTHER, OWN)[number % 2].node_id, Records((record_of(Identity.generate()),))
        )
    one.next_tick = START_S
    exchange(one, OWN.node_id, other, OTHER.node_id, one.tick())
    assert dict(one.announcements) == dict(other.announcements)
    assert len(one.announcements) == 62


def test_equal_tables_cost_a_question_and_an_empty_answer() -> None:
    one, other = gossip_of(OWN, OTHER.node_id), gossip_of(OTHER, OWN.node_id)
    for gossip, peer in ((one, OTHER), (other, OWN)):
        gossip.receive(peer.node_id, Records((record_of(THIRD),)))
    one.next_tick = START_S
    assert exchange(one, OWN.node_id, other, OTHER.node_id, one.tick()) == {"Digest": 2}


def test_a_newcomer_fills_its_table_at_once() -> None:
    old = gossip_of(OWN, OTHER.node_id, limits=GossipLimits(record_burst=1000))
    new = gossip_of(OTHER, OWN.node_id)
    for _ in range(400):
        old.receive(OTHER.node_id, Records((record_of(Identity.generate()),)))
    new.next_tick = START_S
    counts = exchange(new, OTHER.node_id, old, OWN.node_id, new.tick())
    assert len(new.announcements) == 400
    assert counts["Pull"] <= 6
    assert new.faults == Counter()


def test_ticks_come_every_two_seconds_more_or_less() -> None:
    clock = Clock()
    gossip = gossip_of(clock=clock)
    gaps = []
    for _ in range(50):
        clock.now = gossip.next_tick
        assert len(gossip.tick()) == 1
        gaps.append(gossip.next_tick - clock.now)
    assert 1.4 <= min(gaps) < max(gaps) <= 2.6


def test_a_large_table_is_compared_a_part_at_a_time() -> None:
    limits = GossipLimits(span_size=64, record_burst=1e6, digest_burst=1e6)
    one, other = gossip_of(OWN, OTHER.node_id, limits=limits), gossip_of(OTHER, OWN.node_id, limits=limits)
    for _ in range(300):
        one.receive(OTHER.node_id, Records((record_of(Identity.generate()),)))
    rounds = 0
    while len(other.announcements) < 300:
        rounds += 1
        assert rounds < 60
        one.next_tick = START_S
        [(_, digest)] = one.tick()
        assert isinstance(digest, Digest)
        assert len(digest.entries) < 128
        exchange(one, OWN.node_id, other, OTHER.node_id, [(OTHER.node_id, digest)])


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_any_order_of_delivery_ends_in_the_same_table_and_no_sequence_goes_back(data: st.DataObject) -> None:
    order = data.draw(st.permutations(_SPREAD * 2))
    gossip = gossip_of(limits=GossipLimits(author_burst=1000))
    highest: dict[NodeId, int] = {}
    for record in order:
        gossip.receive(PEER, Records((record,)))
        for node_id, known in gossip.announcements.items():
            assert known.sequence >= highest.get(node_id, 0)
            highest[node_id] = known.sequence
    assert {node_id: known.sequence for node_id, known in gossip.announcements.items()} == {
        OTHER.node_id: START_MS + 4
    }
    assert gossip.num_records == 2  # and the tombstone of the third


_SPREAD = [record_of(OTHER, START_MS + step) for step in range(5)]
_SPREAD += [record_of(THIRD, START_MS + step) for step in range(3)]
_SPREAD += [record_of(THIRD, START_MS + 3, has_left=True)]


# --- leaving, expiring, coming back


def test_a_tombstone_hides_its_node_and_still_spreads() -> None:
    gossip = gossip_of()
    gossip.receive(PEER, Records((record_of(OTHER),)))
    gossip.receive(PEER, Records((record_of(OTHER, START_MS + 1, has_left=True),)))
    assert OTHER.node_id not in gossip.announcements
    [(_, answer)] = gossip.receive(PEER, Digest(()))
    assert answer == Digest(((OTHER.node_id[:8], START_MS + 1),), is_reply=True)


def test_an_older_record_does_not_bring_back_who_left_even_after_the_tombstone_expired() -> None:
    clock = Clock()
    gossip = gossip_of(clock=clock)
    longer = record_of(OTHER, START_MS, expires_ms=START_MS + 600_000)
    gossip.receive(PEER, Records((longer,)))
    gossip.receive(PEER, Records((record_of(OTHER, START_MS + 1, has_left=True),)))
    clock.now += 200
    assert dict(gossip.announcements) == {}
    gossip.receive(PEER, Records((longer,)))
    assert dict(gossip.announcements) == {}
    assert gossip.faults[Refusal.REPLAYED] == 1


def test_a_record_is_gone_when_it_expires_and_a_change_is_told() -> None:
    clock, changes = Clock(), []
    gossip = gossip_of(clock=clock, on_change=lambda node_id, told: changes.append((node_id, told is None)))
    gossip.receive(PEER, Records((record_of(OTHER),)))
    before = gossip.version
    clock.now += 180
    assert OTHER.node_id not in gossip.announcements
    assert gossip.version > before
    assert changes == [(OTHER.node_id, False), (OTHER.node_id, True)]


# --- two nodes with one key


def test_a_record_of_ours_that_another_signed_is_told_and_outsigned() -> None:
    told: list[int] = []
    gossip = gossip_of(on_rival=told.append)
    gossip.publish(record_of(OWN, START_MS))
    gossip.receive(PEER, Records((record_of(OWN, START_MS + 50, port=9999),)))
    assert told == [START_MS + 50]
    assert gossip.rival_sequence == START_MS + 50
    assert gossip.faults == {GossipFault.TWO_NODES_ONE_KEY: 1}
    assert gossip.announcements[OWN.node_id].sequence == START_MS  # ours stays ours
    gossip.publish(record_of(OWN, START_MS + 51))
    assert gossip.rival_sequence is None


def test_two_nodes_with_one_key_do_not_sign_at_the_speed_of_the_network() -> None:
    clock, told = Clock(), []
    gossip = gossip_of(clock=clock, on_rival=told.append)
    for step in range(100):
        clock.now += 0.1
        gossip.receive(PEER, Records((record_of(OWN, START_MS + step),)))
    assert len(told) <= 2
    assert gossip.faults[GossipFault.TWO_NODES_ONE_KEY] == 100


def test_our_own_past_is_told_apart_from_a_copy_of_our_key() -> None:
    told: list[int] = []
    gossip = gossip_of(on_rival=told.append)
    gossip.receive(PEER, Records((record_of(OWN, START_MS + 9, issued_ms=START_MS - 5000),)))
    assert gossip.faults == {GossipFault.OWN_PAST: 1}
    assert told == [START_MS + 9]


def test_only_our_own_newer_record_is_published() -> None:
    gossip = gossip_of()
    gossip.publish(record_of(OWN, START_MS))
    with pytest.raises(RecordRefused):
        gossip.publish(record_of(OWN, START_MS))
    with pytest.raises(LocalError):
        gossip.publish(record_of(OTHER))


# --- bad input


def test_each_bad_record_is_counted_by_name_and_the_good_one_beside_it_is_taken() -> None:
    good = record_of(OTHER)
    forged = good[:-1] + bytes([good[-1] ^ 1])
    bad = {
        Refusal.OVERSIZED: bytes(3000),
        Refusal.MALFORMED: b"short",
        Refusal.FORGED: forged,
        Refusal.EXPIRED: record_of(THIRD, issued_ms=START_MS - 180_000),
        Refusal.FUTURE_DATED: record_of(THIRD, issued_ms=START_MS + 61_000),
        Refusal.TOO_LONG_LIVED: record_of(THIRD, expires_ms=START_MS + 600_001),
    }
    gossip = gossip_of()
    gossip.receive(PEER, Records((*bad.values(), good)))
    assert gossip.faults == dict.fromkeys(bad, 1)
    assert set(gossip.announcements) == {OTHER.node_id}


def test_a_record_from_a_narrower_swarm_is_refused() -> None:
    gossip = gossip_of(policy=OPEN)
    gossip.receive(PEER, Records((record_of(OTHER),)))
    assert gossip.faults == {Refusal.BAD_ADDRESS: 1}


def test_a_flood_is_cut_off_and_others_are_still_heard() -> None:
    clock, good_peer = Clock(), peers(1)[0]
    gossip = gossip_of(OWN, PEER, good_peer, clock=clock)
    flood = [record_of(Identity.generate()) for _ in range(130)]
    for record in flood:
        gossip.receive(PEER, Records((record,)))
    assert len(gossip.announcements) == 100
    assert gossip.faults == {GossipFault.FLOOD: 30}
    gossip.receive(good_peer, Records((record_of(OTHER),)))
    assert OTHER.node_id in gossip.announcements
    clock.now += 1
    for record in flood[100:]:
        gossip.receive(PEER, Records((record,)))
    assert len(gossip.announcements) == 100 + 1 + 20


def test_a_new_link_does_not_bring_a_new_burst() -> None:
    gossip = gossip_of(limits=GossipLimits(record_burst=2))
    for _ in range(3):
        gossip.receive(PEER, Records((record_of(Identity.generate()),)))
        gossip.peer_down(PEER)
        gossip.peer_up(PEER)
    assert gossip.faults == {GossipFault.FLOOD: 1}


def test_forged_records_take_part_in_the_rate() -> None:
    gossip = gossip_of(limits=GossipLimits(record_burst=3))
    good = record_of(OTHER)
    for byte in range(1, 20):
        gossip.receive(PEER, Records((good[:-1] + bytes([good[-1] ^ byte]),)))
    assert gossip.faults == {Refusal.FORGED: 3, GossipFault.FLOOD: 16}


def test_an_author_that_signs_without_pause_is_slowed_down() -> None:
    gossip = gossip_of()
    for step in range(40):
        gossip.receive(PEER, Records((record_of(OTHER, START_MS + step),)))
    assert gossip.faults == {GossipFault.AUTHOR_FLOOD: 19}
    gossip.receive(PEER, Records((record_of(OTHER, START_MS + 99, has_left=True),)))
    assert OTHER.node_id not in gossip.announcements  # leaving is never refused


def test_a_digest_of_nonsense_costs_one_small_pull() -> None:
    clock = Clock()
    gossip = gossip_of(clock=clock)
    nonsense = Digest(tuple((number.to_bytes(8, "big"), 2**63) for number in range(MAX_DIGEST)))
    [(_, pull)] = gossip.receive(PEER, nonsense)
    assert isinstance(pull, Pull)
    assert len(pull.prefixes) <= 96
    assert gossip.receive(PEER, nonsense) == [(PEER, Digest((), is_reply=True))]  # no more until it answered
    for _ in range(20):
        gossip.receive(PEER, nonsense)
    assert gossip.faults[GossipFault.DIGEST_FLOOD] == 12
    clock.now += 10
    gossip.receive(PEER, nonsense)
    assert gossip.faults[GossipFault.UNANSWERED_PULL] == 1


def test_an_empty_digest_again_and_again_does_not_make_us_send_our_table_each_time() -> None:
    gossip = gossip_of(limits=GossipLimits(record_burst=1000, span_size=50))
    for _ in range(200):
        gossip.receive(PEER, Records((record_of(Identity.generate()),)))
    answers = [answer for _ in range(100) for _, answer in gossip.receive(PEER, Digest(()))]
    assert len(answers) == 10
    assert all(isinstance(answer, Digest) and len(answer.entries) <= 50 for answer in answers)


def test_pulls_beyond_the_rate_are_not_served() -> None:
    gossip = gossip_of(limits=GossipLimits(pull_burst=10))
    gossip.receive(PEER, Records((record_of(OTHER),)))
    served = [answer for _ in range(30) for answer in gossip.receive(PEER, Pull((OTHER.node_id[:8],)))]
    assert len(served) == 10
    assert gossip.faults == {GossipFault.PULL_FLOOD: 20}


def test_a_pull_that_names_one_id_often_is_served_once() -> None:
    gossip = gossip_of()
    gossip.receive(PEER, Records((record_of(OTHER),)))
    [(_, answer)] = gossip.receive(PEER, Pull((OTHER.node_id[:8],) * 256))
    assert answer == Records((record_of(OTHER),))


def test_strangers_are_not_listened_to() -> None:
    gossip = gossip_of()
    assert gossip.receive(NodeId(b"s" * 32), Records((record_of(OTHER),))) == []
    assert gossip.num_records == 0


def test_a_full_table_takes_nobody_but_pinned_peers_and_does_not_ask_again() -> None:
    limits = GossipLimits(table=TableLimits(size=8))
    pinned = Identity.generate()
    gossip = gossip_of(limits=limits, pinned=frozenset({pinned.node_id}))
    known = [Identity.generate() for _ in range(6)]
    for identity in known:
        gossip.receive(PEER, Records((record_of(identity),)))
    gossip.receive(PEER, Records((record_of(OTHER),)))
    assert gossip.faults == {Room.TABLE_FULL: 1}
    assert gossip.receive(PEER, Digest(((OTHER.node_id[:8], START_MS),), is_reply=True)) == []
    gossip.receive(PEER, Records((record_of(pinned),)))
    gossip.receive(PEER, Records((record_of(known[0], START_MS + 1),)))
    assert gossip.announcements[pinned.node_id]
    assert gossip.announcements[known[0].node_id].sequence == START_MS + 1


def test_addresses_bound_the_influence_of_free_identities_in_open_swarms_only() -> None:
    crowd = [record_of(Identity.generate(), host=f"1.2.3.{last}", policy=OPEN) for last in range(1, 7)]
    crowd += [record_of(Identity.generate(), host=f"1.2.{third}.1", policy=OPEN) for third in range(10, 30)]
    private = AddressPolicy(Scope.PUBLIC, is_private_swarm=True)
    for policy, expected, faults in (
        (OPEN, 16, {Room.PREFIX_FULL: 10}),
        (private, 26, {}),
        (LOCAL, 26, {}),
    ):
        gossip = gossip_of(policy=policy)
        for record in crowd:
            gossip.receive(PEER, Records((record,)))
        assert (len(gossip.announcements), dict(gossip.faults)) == (expected, faults)


def test_nodes_behind_an_unknown_sentinel_are_bounded_and_behind_a_pinned_one_are_not() -> None:
    sentinel = Identity.generate()
    limits = GossipLimits(table=TableLimits(relayed_per_prefix=3))
    for pinned, expected in ((frozenset(), 3), (frozenset({sentinel.node_id}), 6)):
        gossip = gossip_of(policy=OPEN, limits=limits, pinned=pinned)
        for _ in range(6):
            gossip.receive(PEER, Records((relayed_record(Identity.generate(), sentinel),)))
        assert len(gossip.announcements) == expected


def relayed_record(identity: Identity, sentinel: Identity) -> bytes:
    expires_ms = START_MS + 180_000
    voucher = Voucher(
        sentinel.public_key,
        expires_ms,
        sign_voucher(sentinel, NETWORK_ID, identity.node_id, expires_ms),
    )
    address = NodeAddress(identity.node_id, "1.2.3.4", 4000, sentinel.node_id)
    return record_of(identity, contacts=(Contact(address, voucher),), policy=OPEN)


def test_records_whose_ids_begin_alike_do_not_hide_each_other() -> None:
    shared = b"p" * 8
    first, second = (replace(_told(identity), sequence=7 + n) for n, identity in enumerate((OWN, THIRD)))
    both = _Alike(shared, {OWN.public_key: b"1", THIRD.public_key: b"2"})
    both.put(first)
    both.put(second)
    news = both.lacking(Digest(((shared, 8),)))
    assert set(news) == {(shared, 7)}
    assert both.wanted([(shared, 8), (shared, 6)]) == [(shared, 6)]


def _told(identity: Identity) -> Announcement:
    return Announcement(
        identity.public_key,
        1,
        START_MS,
        START_MS + 1000,
        (Contact(NodeAddress(identity.node_id, "127.0.0.1", 1)),),
    )


class _Alike:
    """A table of authors whose ids were made to begin alike, which takes 2^32 keys to do for real."""

    def __init__(self, prefix: bytes, ends: dict[bytes, bytes]) -> None:
        self._ids = {key: NodeId(prefix + end.rjust(24, b"x")) for key, end in ends.items()}
        self._table = RecordTable(LOCAL, TableLimits(), frozenset())

    def put(self, announcement: Announcement) -> None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("routing.announcement.node_id", lambda key: self._ids[key])
            self._table.put(b"record", announcement)

    def lacking(self, digest: Digest) -> tuple[tuple[bytes, int], ...]:
        return lacking(self._table, digest, 100)

    def wanted(self, entries: list[tuple[bytes, int]]) -> list[tuple[bytes, int]]:
        return wanted(self._table, entries)


# --- doubts


def test_what_we_found_dead_is_told_to_three_and_then_in_digests_until_it_signs_again() -> None:
    gossip = gossip_of(OWN, PEER, *peers(6))
    gossip.receive(PEER, Records((record_of(OTHER),)))
    hints = gossip.tell_doubt(OTHER.node_id)
    assert [message for _, message in hints] == [Digest((), is_reply=True, doubts=(OTHER.node_id[:8],))] * 3
    assert _digest_at_tick(gossip).doubts == (OTHER.node_id[:8],)
    gossip.receive(PEER, Records((record_of(OTHER, START_MS + 1),)))
    assert _digest_at_tick(gossip).doubts == ()


def _digest_at_tick(gossip: Gossip) -> Digest:
    gossip.next_tick = START_S
    [(_, digest)] = gossip.tick()
    assert isinstance(digest, Digest)
    return digest


def test_a_doubt_heard_is_looked_into_and_not_passed_on() -> None:
    looked: list[NodeId] = []
    gossip = gossip_of(OWN, PEER, *peers(3), on_doubt=looked.append)
    gossip.receive(PEER, Records((record_of(OTHER),)))
    hint = Digest((), is_reply=True, doubts=(OTHER.node_id[:8], b"unknown!", OWN.node_id[:8]))
    assert gossip.receive(PEER, hint) == []
    assert looked == [OTHER.node_id]
    assert _digest_at_tick(gossip).doubts == ()
    assert OTHER.node_id in gossip.announcements


def test_hints_are_limited() -> None:
    looked: list[NodeId] = []
    gossip = gossip_of(on_doubt=looked.append)
    gossip.receive(PEER, Records((record_of(OTHER),)))
    for _ in range(100):
        gossip.receive(PEER, Digest((), is_reply=True, doubts=(OTHER.node_id[:8],)))
    assert len(looked) == 64
    assert gossip.faults == {GossipFault.DOUBT_FLOOD: 36}


def test_two_nodes_at_one_place_are_both_looked_at() -> None:
    looked: list[NodeId] = []
    gossip = gossip_of(on_doubt=looked.append)
    gossip.receive(PEER, Records((record_of(OTHER),)))
    assert looked == []
    gossip.receive(PEER, Records((record_of(THIRD),)))
    assert looked == [OTHER.node_id, THIRD.node_id]


# --- bytes


@pytest.mark.parametrize(
    "message",
    [
        Digest(()),
        Digest(((b"12345678", 2**63), (b"\0" * 8, 0)), is_reply=True),
        Digest((), first=b"a" * 8, last=b"b" * 8, doubts=(b"12345678", b"87654321")),
    ],
)
def test_a_digest_crosses_the_wire(message: Message) -> None:
    kind, buffers = encode(message)
    assert decode(kind, memoryview(b"".join(buffers))) == message


def test_a_full_digest_fits_its_limit() -> None:
    entries = tuple((number.to_bytes(8, "big"), number) for number in range(MAX_DIGEST))
    doubts = tuple(prefix for prefix, _ in entries[: network_wire.MAX_DOUBTS])
    kind, buffers = encode(Digest(entries, first=b"a" * 8, doubts=doubts))
    assert decode(kind, memoryview(b"".join(buffers))) == Digest(entries, first=b"a" * 8, doubts=doubts)


def test_records_travel_in_messages_that_never_hold_up_a_token_for_long() -> None:
    gossip = gossip_of(limits=GossipLimits(record_burst=1000))
    identities = [Identity.generate() for _ in range(50)]
    for identity in identities:
        gossip.receive(PEER, Records((record_of(identity),)))
    answers = gossip.receive(PEER, Pull(tuple(identity.node_id[:8] for identity in identities)))
    assert [len(message.records) for _, message in answers if isinstance(message, Records)] == [24, 24, 2]
    assert MAX_RECORDS == 24
