from __future__ import annotations

import random

import pytest

from routing.suspicion import AskOthers, Ping, Refuted, Suspected, Suspicion
from routing.types import NodeId

OWN = NodeId(b"o" * 32)
A, B, C, D, E = (NodeId(bytes([letter]) * 32) for letter in b"abcde")


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


class Rig:
    """A `Suspicion` whose clock moves from one thing to do to the next."""

    def __init__(self, *members: NodeId, linked: tuple[NodeId, ...] = ()) -> None:
        self.clock = Clock()
        self.it = Suspicion(OWN, rng=random.Random(1), now=self.clock)
        for node_id in (*members, *linked):
            self.it.note_record(node_id, 1)
        for node_id in linked:
            self.it.note_link(node_id)

    def run(self, duration_s: float) -> list[object]:
        end, actions = self.clock.now + duration_s, []
        while self.it.next_tick <= end:
            self.clock.now = max(self.clock.now, self.it.next_tick)
            actions += self.it.tick()
        self.clock.now = end
        return actions


@pytest.fixture
def rig() -> Rig:
    return Rig(A, linked=(B, C, D, E))


def test_who_answers_is_not_suspected(rig: Rig) -> None:
    for _ in range(20):
        if Ping(A) in rig.run(1.0):
            rig.it.note_alive(A)
    assert rig.it.suspected == frozenset()


def test_who_does_not_answer_is_asked_for_at_three_others_and_then_suspected(rig: Rig) -> None:
    actions = rig.run(4.0)
    asked = next(action for action in actions if isinstance(action, AskOthers))
    assert actions.index(Ping(A)) < actions.index(asked) < actions.index(Suspected(A))
    assert len(set(asked.via) & {B, C, D, E}) == 3
    assert rig.it.suspected == {A}


def test_a_helper_that_reaches_it_clears_it(rig: Rig) -> None:
    rig.it.doubt(A)
    rig.run(1.2)
    rig.it.note_report(A, is_alive=True)
    assert Suspected(A) not in rig.run(0.5)
    assert rig.it.suspected == frozenset()


def test_when_all_helpers_saw_nobody_there_is_nothing_to_wait_for(rig: Rig) -> None:
    rig.it.doubt(A)
    rig.run(0.0)
    rig.it.note_unanswered(A)
    rig.run(0.0)
    for _ in range(3):
        rig.it.note_report(A, is_alive=False)
    assert Suspected(A) in rig.run(0.0)


def test_a_report_that_nobody_asked_for_changes_nothing(rig: Rig) -> None:
    rig.it.note_failed(A)
    rig.it.note_report(A, is_alive=True)
    assert rig.it.suspected == {A}


def test_a_forged_doubt_costs_a_ping_and_is_never_believed(rig: Rig) -> None:
    num_pings = 0
    for _ in range(300):
        rig.it.doubt(A)
        if Ping(A) in rig.run(0.1):
            num_pings += 1
            rig.it.note_alive(A)
        assert rig.it.suspected == frozenset()
    assert num_pings <= 30 + 10  # its turns, and one look in three seconds


def test_a_doubt_soon_after_a_sign_of_life_is_looked_into_a_little_later(rig: Rig) -> None:
    rig.it.note_alive(A)
    rig.it.doubt(A)
    assert Suspected(A) in rig.run(7.0)


def test_who_has_a_link_to_us_is_never_suspected(rig: Rig) -> None:
    rig.it.doubt(B)
    rig.it.note_failed(B)
    actions = rig.run(30.0)
    assert Ping(B) not in actions
    assert B not in rig.it.suspected


def test_a_broken_link_alone_is_no_suspicion_but_a_failed_re_dial_is(rig: Rig) -> None:
    rig.it.note_unlink(B)
    assert B not in rig.it.suspected
    rig.it.note_failed(B, sequence=1)
    assert B in rig.it.suspected
    assert Suspected(B) in rig.run(0.0)


def test_a_failure_at_a_place_it_has_left_is_no_news(rig: Rig) -> None:
    rig.it.note_record(A, 2)
    rig.it.note_failed(A, sequence=1)
    assert rig.it.suspected == frozenset()


def test_a_newer_record_refutes_and_is_looked_into(rig: Rig) -> None:
    rig.it.note_failed(A)
    rig.it.note_record(A, 1)
    assert rig.it.suspected == {A}
    rig.it.note_record(A, 2)
    assert rig.it.suspected == frozenset()
    actions = rig.run(4.0)
    assert Refuted(A) in actions
    assert Suspected(A) in actions  # the record had only come late


def test_a_suspected_member_is_looked_at_again_until_it_is_gone() -> None:
    rig = Rig(A, linked=(B,))
    rig.it.note_failed(A)
    pings = [action for action in rig.run(60.0) if action == Ping(A)]
    assert 2 <= len(pings) <= 12
    assert rig.it.gone == {A}
    assert Ping(A) not in rig.run(300.0)
    rig.it.note_alive(A)
    assert rig.it.suspected == frozenset()


def test_a_suspect_that_answers_again_is_refuted(rig: Rig) -> None:
    rig.it.note_failed(A)
    assert Ping(A) in rig.run(2.5)
    rig.it.note_alive(A)
    assert Refuted(A) in rig.run(0.0)


def test_a_peer_that_fails_itself_waits_longer_for_others(rig: Rig) -> None:
    rig.it.next_tick  # noqa: B018
    rig.clock.now += 30.0  # the process was stopped
    rig.it.tick()
    assert rig.it.health == 1
    rig.it.doubt(A)
    before = rig.clock.now
    while A not in rig.it.suspected:
        rig.run(0.1)
    assert rig.clock.now - before >= 2.0 + 3.0 - 1.0  # both waits are doubled, the first had begun


def test_helpers_that_do_not_even_say_no_speak_against_ourselves(rig: Rig) -> None:
    rig.run(4.0)
    assert rig.it.health > 0


def test_a_member_without_a_record_is_forgotten(rig: Rig) -> None:
    rig.it.note_failed(A)
    rig.it.forget(A)
    assert rig.it.suspected == frozenset()
    assert Ping(A) not in rig.run(10.0)


def test_every_member_has_a_turn_in_each_round() -> None:
    members = [NodeId(bytes([number]) * 32) for number in range(20)]
    rig = Rig(*members)
    pinged = []
    for _ in range(42):
        for action in rig.run(1.0):
            if isinstance(action, Ping):
                pinged.append(action.node_id)
                rig.it.note_alive(action.node_id)
    assert set(pinged) == set(members)
    assert max(pinged.count(member) for member in members) <= 3


def test_doubts_do_not_pile_up() -> None:
    members = [NodeId(number.to_bytes(32, "big")) for number in range(2000)]
    rig = Rig(*members)
    for member in members:
        rig.it.doubt(member)
    assert len([action for action in rig.run(1.0) if isinstance(action, Ping)]) <= 12
