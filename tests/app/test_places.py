"""Who gets a place, who waits, and who is sent away: with a clock that stands still and no gateway."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.places import NoPlaceError, Places, Ticket
from tests.app.conftest import patient

ANNA, BERT, CARL = b"anna", b"bert", b"carl"


@dataclass
class Clock:
    now: float = 1000.0

    def __call__(self) -> float:
        return self.now


@dataclass
class Door:
    """Places with a clock, and who got in, in order."""

    num_places: int = 1
    max_queued: int = 100
    clock: Clock = field(default_factory=Clock)

    def __post_init__(self) -> None:
        self.places = Places(self.num_places, self.max_queued, clock=self.clock)

    def fill(self) -> list[Ticket]:
        """Somebody else has every place."""
        return [self.places.enter(b"others", 1) for _ in range(self.num_places)]


def order_in(door: Door, waiting: dict[str, Ticket], running: list[Ticket]) -> list[str]:
    """Let answers end one by one; return the names of those who come in."""
    came: list[str] = []
    while running or len(came) < len(waiting):
        door.places.leave(running.pop(0))
        for name, ticket in waiting.items():
            if ticket.is_in and name not in came:
                came.append(name)
                running.append(ticket)
    return came


async def test_within_a_key_who_came_first_goes_first() -> None:
    door = Door()
    running = door.fill()
    waiting = {str(number): door.places.enter(ANNA, 1) for number in range(5)}
    assert order_in(door, waiting, running) == ["0", "1", "2", "3", "4"]


async def test_keys_take_turns() -> None:
    door = Door()
    running = door.fill()
    waiting = {f"anna{number}": door.places.enter(ANNA, 1) for number in range(4)}
    waiting |= {f"bert{number}": door.places.enter(BERT, 1) for number in range(2)}
    waiting |= {"carl0": door.places.enter(CARL, 1)}
    assert order_in(door, waiting, running) == ["anna0", "bert0", "carl0", "anna1", "bert1", "anna2", "anna3"]


async def test_the_key_with_the_fewest_places_gets_the_next_one() -> None:
    door = Door(num_places=3)
    long = [door.places.enter(ANNA, 1), door.places.enter(ANNA, 1)]
    other = door.places.enter(b"others", 1)
    more, first = door.places.enter(ANNA, 1), door.places.enter(BERT, 1)
    door.places.leave(other)
    assert (first.is_in, more.is_in) == (True, False)
    door.places.leave(long[0])
    assert more.is_in


async def test_a_request_for_many_places_is_not_passed_by_small_ones() -> None:
    door = Door(num_places=4)
    running = door.fill()
    large = door.places.enter(ANNA, 4)
    small = [door.places.enter(BERT, 1) for _ in range(3)]
    for ticket in running:
        assert not any(ticket.is_in for ticket in small)
        door.places.leave(ticket)
    assert large.is_in
    door.places.leave(large)
    assert all(ticket.is_in for ticket in small)


async def test_requests_for_many_places_do_not_keep_others_out() -> None:
    door = Door(num_places=4)
    first = door.places.enter(ANNA, 4)
    second, small, third = door.places.enter(ANNA, 4), door.places.enter(BERT, 1), door.places.enter(ANNA, 4)
    door.places.leave(first)
    assert second.is_in or small.is_in
    door.places.leave(second)
    assert small.is_in
    assert not third.is_in
    door.places.leave(small)
    assert third.is_in


async def test_nobody_passes_those_who_wait_though_there_is_room_for_them() -> None:
    door = Door(num_places=4)
    running = [door.places.enter(ANNA, 1) for _ in range(2)]
    door.places.enter(BERT, 3)
    assert not door.places.enter(CARL, 1).is_in
    assert door.places.num_taken == len(running)


async def test_a_full_queue_refuses_at_once() -> None:
    door = Door(max_queued=2)
    door.fill()
    for _ in range(2):
        door.places.enter(ANNA, 1)
    with pytest.raises(NoPlaceError):
        door.places.enter(ANNA, 1)
    assert door.places.num_queued == 2


async def test_a_queue_full_of_one_keys_requests_makes_room_for_another_key() -> None:
    door = Door(max_queued=3)
    door.fill()
    crowd = [door.places.enter(ANNA, 1) for _ in range(3)]
    other = door.places.enter(BERT, 1)
    assert crowd[-1].turn is not None
    assert crowd[-1].turn.result() == "overloaded"
    assert door.places.num_queued == 3
    with pytest.raises(NoPlaceError):
        door.places.enter(BERT, 1)  # with two each nobody would have gained
    assert other.turn is not None
    assert not other.turn.done()


async def test_who_leaves_the_queue_frees_its_place_there_at_once() -> None:
    door = Door(max_queued=1)
    running = door.fill()
    gone = door.places.enter(ANNA, 1)
    door.places.leave(gone)
    assert door.places.num_queued == 0
    next_one = door.places.enter(ANNA, 1)
    door.places.leave(running[0])
    assert next_one.is_in


async def test_who_was_next_and_leaves_lets_those_behind_it_in() -> None:
    door = Door(num_places=2)
    door.places.enter(ANNA, 1)
    large, small = door.places.enter(BERT, 2), door.places.enter(CARL, 1)
    assert not small.is_in
    door.places.leave(large)
    assert small.is_in


async def test_all_who_wait_are_sent_away_when_the_gateway_stops() -> None:
    door = Door()
    running = door.fill()
    waiting = [door.places.enter(tenant, 1) for tenant in (ANNA, ANNA, BERT)]
    door.places.close()
    with pytest.raises(NoPlaceError, match="shutting_down"):
        door.places.enter(CARL, 1)
    assert [ticket.turn.result() for ticket in waiting if ticket.turn] == ["shutting_down"] * 3
    for ticket in waiting:
        door.places.leave(ticket)
    assert not door.places.idle.is_set()
    door.places.leave(running[0])
    assert door.places.idle.is_set()


# When a place is expected -----------------------------------------------------------------------------------


def ended_after(door: Door, seconds: float, times: int = 60) -> None:
    for _ in range(times):
        ticket = door.places.enter(ANNA, 1)
        door.clock.now += seconds
        door.places.leave(ticket)


async def test_the_estimate_follows_how_long_places_are_held_and_how_many_wait() -> None:
    door = Door(num_places=4)
    ended_after(door, 8.0)
    for _ in range(4):
        door.places.enter(ANNA, 1)
    assert door.places.retry_s() == 2  # 4 places of 8 s each: one every 2 s
    for _ in range(3):
        door.places.enter(ANNA, 1)
    assert door.places.retry_s() == 8


async def test_answers_that_run_for_long_tell_more_than_short_ones_that_ended() -> None:
    door = Door(num_places=2)
    ended_after(door, 1.0)
    door.fill()
    door.clock.now += 30
    assert door.places.retry_s() == 15


async def test_the_estimate_stays_within_what_clients_may_be_told() -> None:
    door = Door(num_places=1)
    ended_after(door, 1000.0)
    door.fill()
    assert door.places.retry_s() == 30
    assert Door().places.retry_s() == 1


# Whatever happens -------------------------------------------------------------------------------------------

Moves = st.lists(
    st.one_of(
        st.tuples(st.just("enter"), st.integers(0, 3), st.integers(1, 4)),
        st.tuples(st.just("leave"), st.integers(0, 30), st.just(0)),
    ),
    max_size=60,
)


@patient
@given(moves=Moves)
async def test_places_and_queue_are_bounded_and_everybody_gets_in_at_last(
    moves: list[tuple[str, int, int]],
) -> None:
    door = Door(num_places=4, max_queued=5)
    held: list[Ticket] = []
    for move, number, num_places in moves:
        if move == "enter":
            try:
                held.append(door.places.enter(bytes([number]), num_places))
            except NoPlaceError:
                assert door.places.num_queued == 5
        elif held:
            door.places.leave(held.pop(number % len(held)))
        held = [ticket for ticket in held if ticket.turn is None or not _is_sent_away(ticket)]
        assert door.places.num_taken == sum(ticket.num_places for ticket in held if ticket.is_in) <= 4
        assert door.places.num_queued == sum(not ticket.is_in for ticket in held) <= 5
        assert not held or any(ticket.is_in for ticket in held)
    while held:
        door.places.leave(next(ticket for ticket in held if ticket.is_in))
        held = [ticket for ticket in held if ticket.is_in or (ticket.turn and not ticket.turn.done())]
    assert (door.places.num_taken, door.places.num_queued) == (0, 0)
    assert door.places.idle.is_set()


def _is_sent_away(ticket: Ticket) -> bool:
    return ticket.turn is not None and ticket.turn.done() and ticket.turn.result() is not None
