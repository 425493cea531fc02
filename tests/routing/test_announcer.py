"""When a node speaks of itself, and what it leaves out; time is injected."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from routing.address_policy import AddressPolicy, Scope
from routing.announcement import (
    Announcement,
    Contact,
    Voucher,
    author_of,
    read_announcement,
    sign_voucher,
)
from routing.announcer import LEAST_PAUSE_S, RIVAL_PAUSE_S, WITHDRAW_AFTER_S, Announcer
from routing.identity import Identity
from routing.known_peers import KnownPeers
from routing.types import NodeAddress, SliceSpec
from tests.support.gossip_process import NETWORK_ID, offer

POLICY = AddressPolicy(Scope.LOOPBACK)
UNIX_S = 1_800_000_000.0


class Speaker:
    """An announcer whose time and words a test sets."""

    def __init__(self) -> None:
        self.identity = Identity.generate()
        self.now = 100.0
        self.records: list[bytes] = []
        direct = Contact(NodeAddress(self.identity.node_id, "127.0.0.1", 7000))
        self.draft = Announcement(self.identity.public_key, 0, 0, 0, (direct,), offers=(offer(0, 4),))
        self.announcer = Announcer(
            self.identity,
            NETWORK_ID,
            POLICY,
            KnownPeers(None, self.identity.node_id),
            compose=lambda: self.draft,
            publish=self.records.append,
            clock=self.clock,
            now=lambda: self.now,
        )

    def clock(self) -> float:
        return UNIX_S + self.now

    def change(self, **fields: Any) -> None:
        self.draft = replace(self.draft, **fields)

    def said(self, after_s: float = 0.0) -> int:
        """How many records it signs at once, some time later."""
        self.now += after_s
        before = len(self.records)
        self.announcer.step()
        return len(self.records) - before

    @property
    def last(self) -> Announcement:
        return read_announcement(self.records[-1], NETWORK_ID, POLICY, now_ms=int(self.clock() * 1000))


def test_what_is_new_is_said_at_once_and_figures_after_five_seconds() -> None:
    speaker = Speaker()
    assert speaker.said() == 1
    assert speaker.said() == 0
    speaker.change(offers=(offer(4, 8),))
    assert speaker.said(LEAST_PAUSE_S) == 1
    speaker.change(load=3)
    assert [speaker.said(), speaker.said(4.0), speaker.said(1.1)] == [0, 0, 1]
    assert speaker.last.load == 3


def test_without_news_it_speaks_once_a_minute() -> None:
    speaker = Speaker()
    assert [speaker.said(), speaker.said(59.0), speaker.said(1.1)] == [1, 0, 1]
    assert author_of(speaker.records[1])[1] > author_of(speaker.records[0])[1]


def test_nothing_is_said_while_nobody_can_reach_us() -> None:
    speaker = Speaker()
    speaker.change(contacts=())
    assert speaker.said() == 0
    assert speaker.announcer.leave() is None


def test_the_last_word_is_taken_back_when_all_ways_are_lost_for_long() -> None:
    speaker = Speaker()
    contacts = speaker.draft.contacts
    speaker.said()
    speaker.change(contacts=())
    assert [speaker.said(), speaker.said(WITHDRAW_AFTER_S - 1)] == [0, 0]
    assert speaker.said(1.1) == 1
    assert speaker.last.is_tombstone
    speaker.change(contacts=contacts)
    assert speaker.said() == 1
    assert not speaker.last.is_tombstone


def test_a_short_loss_of_all_ways_withdraws_nothing() -> None:
    speaker = Speaker()
    contacts = speaker.draft.contacts
    speaker.said()
    speaker.change(contacts=())
    speaker.said(WITHDRAW_AFTER_S - 1)
    speaker.change(contacts=contacts)
    assert speaker.said(5.0) == 0


def test_who_has_left_says_no_more() -> None:
    speaker = Speaker()
    speaker.said()
    record = speaker.announcer.leave()
    assert record == speaker.records[-1]
    assert speaker.last.is_tombstone
    assert speaker.announcer.announced is None
    speaker.change(offers=())
    assert speaker.said(100.0) == 0


def test_a_record_does_not_outlive_its_vouchers() -> None:
    speaker, sentinel = Speaker(), Identity.generate()
    expires_ms = int((speaker.clock() + 70) * 1000)
    signature = sign_voucher(sentinel, NETWORK_ID, speaker.identity.node_id, expires_ms)
    address = NodeAddress(speaker.identity.node_id, "127.0.0.1", 7001, sentinel.node_id)
    speaker.change(contacts=(Contact(address, Voucher(sentinel.public_key, expires_ms, signature)),))
    speaker.said()
    assert speaker.last.expires_ms == expires_ms
    assert speaker.said(25.0) == 1  # at a third of its life


def test_a_speed_that_nobody_would_believe_is_bounded() -> None:
    speaker = Speaker()
    slow, unmeasured = replace(offer(0, 1), layer_ms=float("inf")), replace(offer(1, 2), layer_ms=0.0)
    speaker.change(offers=(slow, unmeasured))
    speaker.said()
    assert [0 < it.layer_ms <= 60_000 for it in speaker.last.offers] == [True, True]


def test_what_is_too_much_leaves_out_the_neighbours_first() -> None:
    speaker = Speaker()
    offers = tuple(replace(offer(0, 4), model_name="m" * 110, spec=SliceSpec(0, n % 8 + 1)) for n in range(9))
    neighbours = tuple((bytes([number]) * 8, 1.5) for number in range(8))
    speaker.change(offers=offers, neighbour_ms=neighbours, neighbour_mbps=neighbours)
    speaker.said()
    assert speaker.last.neighbour_ms == speaker.last.neighbour_mbps == ()
    assert len(speaker.last.offers) == 9


def test_slices_that_do_not_fit_are_left_out_with_a_word(caplog: pytest.LogCaptureFixture) -> None:
    speaker = Speaker()
    speaker.change(offers=tuple(replace(offer(0, 4), model_name=str(n) * 60) for n in range(10, 26)))
    speaker.said()
    assert len(speaker.last.offers) == 8
    assert "8 of its slices do not fit" in caplog.text


def test_what_cannot_be_said_at_all_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    speaker = Speaker()
    nowhere = Contact(NodeAddress(speaker.identity.node_id, "0.0.0.0", 7000))
    speaker.change(contacts=(nowhere,))
    assert [speaker.said(), speaker.said(), speaker.said()] == [0, 0, 0]
    assert caplog.text.count("cannot be announced") == 1


def test_a_rival_is_outdone_at_once_and_then_ever_more_slowly() -> None:
    speaker = Speaker()
    speaker.said()
    above = author_of(speaker.records[-1])[1] + 1000
    speaker.announcer.note_rival(above)
    assert speaker.said() == 1
    assert author_of(speaker.records[-1])[1] == above + 1
    speaker.announcer.note_rival(above + 5000)
    assert [speaker.said(), speaker.said(RIVAL_PAUSE_S + 0.1)] == [0, 1]
    speaker.announcer.note_rival(above + 20_000)
    assert [speaker.said(RIVAL_PAUSE_S + 0.1), speaker.said(RIVAL_PAUSE_S + 0.1)] == [0, 1]
