"""What a peer that gossips in bad faith can cost: bounded checks, bounded messages, and nobody else's records."""

from __future__ import annotations

from routing import announcement
from routing.announcement import (
    MAX_RELAYED,
    Announcement,
    Contact,
    Refusal,
    Voucher,
    author_of,
    read_announcement,
    sign_voucher,
)
from routing.gossip import Gossip, GossipFault
from routing.gossip_peer import BARRED_S, MAX_FORGERIES, GossipLimits
from routing.identity import Identity
from routing.network_wire import MAX_RECORDS
from routing.record_table import Room, TableLimits
from routing.types import Digest, NodeAddress, NodeId, Pull, Records
from tests.routing.test_gossip import (
    NETWORK_ID,
    OTHER,
    OWN,
    PEER,
    START_MS,
    THIRD,
    Clock,
    gossip_of,
    record_of,
)

HONEST = NodeId(b"h" * 32)


class CountedReads:
    """`read_announcement` with a count of what came so far as to be read."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self, *args: object, **options: object) -> Announcement:
        self.count += 1
        return read_announcement(*args, **options)  # type: ignore[arg-type]


def forged(record: bytes, byte: int = 1) -> bytes:
    return record[:-1] + bytes([record[-1] ^ byte])


def pulled(gossip: Gossip, *records: bytes) -> None:
    """Let the peer tell of records so that they are asked for."""
    told = tuple((author[:8], sequence) for author, sequence in map(author_of, records))
    [(_, pull)] = gossip.receive(PEER, Digest(told))
    assert isinstance(pull, Pull)


def test_one_pull_is_not_a_licence_for_a_batch_of_forgeries() -> None:
    reads = CountedReads()
    gossip = gossip_of(limits=GossipLimits(record_burst=2), read=reads)
    good = record_of(OTHER)
    pulled(gossip, good)
    gossip.receive(PEER, Records(tuple(forged(good, byte) for byte in range(1, MAX_RECORDS + 1))))
    assert reads.count == 3  # the one asked for, and what any peer may send unasked


def test_a_forger_is_not_read_for_a_while_even_where_it_was_asked_and_others_are() -> None:
    clock = Clock()
    gossip = gossip_of(OWN, PEER, HONEST, clock=clock)
    good = record_of(OTHER)
    for byte in range(1, MAX_FORGERIES + 1):
        gossip.receive(PEER, Records((forged(good, byte),)))
    gossip.receive(PEER, Records((good,)))
    told = Digest(((THIRD.node_id[:8], START_MS),))
    assert not [message for _, message in gossip.receive(PEER, told) if isinstance(message, Pull)]
    assert gossip.faults == {Refusal.FORGED: MAX_FORGERIES, GossipFault.FLOOD: 1}
    gossip.receive(HONEST, Records((good,)))
    assert OTHER.node_id in gossip.announcements
    clock.now += BARRED_S
    gossip.receive(PEER, Records((record_of(THIRD),)))
    assert THIRD.node_id in gossip.announcements


def test_a_forger_is_still_barred_on_a_new_link() -> None:
    gossip = gossip_of()
    good = record_of(OTHER)
    for byte in range(1, MAX_FORGERIES + 1):
        gossip.receive(PEER, Records((forged(good, byte),)))
    gossip.peer_down(PEER)
    gossip.peer_up(PEER)
    gossip.receive(PEER, Records((good,)))
    assert OTHER.node_id not in gossip.announcements


def test_replies_that_were_not_asked_for_are_not_compared() -> None:
    clock = Clock()
    gossip = gossip_of(clock=clock)  # the new link began one exchange
    nonsense = Digest(tuple((number.to_bytes(8, "big"), 2**63) for number in range(5000)), is_reply=True)
    for _ in range(50):
        gossip.receive(PEER, nonsense)
    assert gossip.faults[GossipFault.DIGEST_FLOOD] == 49


def test_a_full_table_asks_for_no_strangers_and_verifies_none() -> None:
    reads = CountedReads()
    gossip = gossip_of(limits=GossipLimits(table=TableLimits(size=4)), read=reads)
    for _ in range(3):
        gossip.receive(PEER, Records((record_of(Identity.generate()),)))
    answers = [message for _, message in gossip.receive(PEER, Digest(((OTHER.node_id[:8], START_MS),)))]
    assert not any(isinstance(message, Pull) for message in answers)
    for byte in range(1, 50):
        gossip.receive(PEER, Records((forged(record_of(OTHER), byte),)))
    assert (reads.count, gossip.faults[Room.TABLE_FULL]) == (3, 49)


def test_a_record_with_a_signature_to_check_in_every_contact_is_refused_before_they_are_checked() -> None:
    sentinels = [Identity.generate() for _ in range(MAX_RELAYED + 1)]
    until_ms = START_MS + 100_000
    contacts = tuple(
        Contact(
            NodeAddress(OTHER.node_id, "127.0.0.1", 9000, sentinel.node_id),
            Voucher(
                sentinel.public_key, until_ms, sign_voucher(sentinel, NETWORK_ID, OTHER.node_id, until_ms)
            ),
        )
        for sentinel in sentinels
    )
    gossip = gossip_of()
    gossip.receive(PEER, Records((record_of(OTHER, contacts=contacts[:-1]),)))
    assert OTHER.node_id in gossip.announcements
    record = unchecked_record(OTHER, contacts)
    gossip.receive(PEER, Records((record,)))
    assert gossip.faults == {Refusal.BAD_VOUCHER: 1}


def unchecked_record(identity: Identity, contacts: tuple[Contact, ...]) -> bytes:
    """Sign what an honest node would not."""
    plain = Announcement(identity.public_key, START_MS + 1, START_MS, START_MS + 180_000, contacts)
    signed = announcement._pack(plain, NETWORK_ID)
    return signed + identity.sign(b"diffuse/record/1" + NETWORK_ID + signed)
