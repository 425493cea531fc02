"""Turns of one route go in as many groups as it has stages; nobody is held up by others for long."""

from __future__ import annotations

import asyncio
import secrets
from dataclasses import dataclass, field
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from app.engine.ends_jobs import EndsSession, Turn
from app.engine.turn_gate import TurnGate
from routing.types import Answer, SessionId, WireDtype
from slicing.batching import Lane
from tests.node.rig import until

UNUSED: Any = None
ROUND_S = 0.02


@dataclass
class Gate:
    """A gate, and the groups of answers that it let go in one turn of the loop."""

    groups: list[list[EndsSession]] = field(default_factory=list)
    now: float = 0.0
    _is_new: bool = True

    def __post_init__(self) -> None:
        self.gate = TurnGate(self._take, clock=lambda: self.now)

    def _take(self, turn: Turn, _: object) -> None:
        if self._is_new:
            self.groups.append([])
            self._is_new = False
            asyncio.get_running_loop().call_soon(self._close)
        self.groups[-1].append(turn.session)

    def _close(self) -> None:
        self._is_new = True

    async def come(self, *sessions: EndsSession) -> None:
        for session in sessions:
            self.gate.come(turn_of(session))
        await settle()

    async def opened(self, count: int, **options: Any) -> list[EndsSession]:
        """Answers whose first turn came back: each goes round alone, and how long that takes is known."""
        sessions = [session_of(**options) for _ in range(count)]
        await self.come(*sessions)
        for session in sessions:
            await self.come(session)
        self.now += ROUND_S
        self.groups.clear()
        return sessions

    async def grouped(self, count: int) -> tuple[list[EndsSession], list[EndsSession]]:
        """Answers that are out in two groups."""
        everybody = await self.opened(count)
        await self.come(*everybody)
        self.now += ROUND_S
        self.groups.clear()
        return everybody[: count // 2], everybody[count // 2 :]


async def settle() -> None:
    for _ in range(4):
        await asyncio.sleep(0)


def session_of(*, route: str = "a-b", stages: int = 2, tenant: str = "") -> EndsSession:
    return EndsSession(UNUSED, UNUSED, UNUSED, UNUSED, num_stages=stages, route=route, tenant=tenant)


def turn_of(session: EndsSession) -> Turn:
    answer = Answer(SessionId(secrets.token_bytes(16)), 1, 1, 0, 1, b"")
    float32 = WireDtype.FLOAT32
    return Turn(session, Lane("turn", 8), answer, 1, (), float32, float32, False, 1)


async def test_answers_that_drifted_apart_come_together_again() -> None:
    gate = Gate()
    everybody = await gate.opened(6)
    for session in everybody:  # two stages: the others are on their way until the last but one is back
        await gate.come(session)
    assert gate.groups == [everybody[:3], everybody[3:]]


async def test_a_group_goes_when_no_more_than_the_other_stages_have_one() -> None:
    gate = Gate()
    first, second = await gate.grouped(8)
    await gate.come(*first)
    assert gate.groups == [first]
    await gate.come(*second[:2])
    assert gate.groups == [first]  # the rest of their group is nearly back
    await gate.come(*second[2:])
    assert gate.groups == [first, second]


async def test_the_first_turn_of_an_answer_waits_for_nobody() -> None:
    gate = Gate()
    await gate.grouped(4)
    late = session_of()
    await gate.come(late)
    assert gate.groups == [[late]]


async def test_another_route_is_not_waited_for() -> None:
    gate = Gate()
    await gate.grouped(4)
    others = await gate.opened(4, route="c-d")
    await gate.come(*others)
    assert gate.groups == [others[:2], others[2:]] or gate.groups == [others]


async def test_a_group_that_is_stuck_is_waited_for_two_rounds_at_most() -> None:
    gate = Gate()
    first, _ = await gate.grouped(8)
    await gate.come(first[0])
    assert gate.groups == []
    gate.now += 2 * ROUND_S
    await until(lambda: gate.groups == [[first[0]]])


async def test_the_last_third_of_a_group_is_not_waited_for() -> None:
    gate = Gate()
    first, _ = await gate.grouped(6)
    await gate.come(*first[:2])
    assert gate.groups == [first[:2]]


async def test_answers_that_end_are_not_waited_for_and_leave_nothing_behind() -> None:
    gate = Gate()
    first, second = await gate.grouped(6)
    await gate.come(first[0])
    gate.gate.leave(first[1])
    gate.gate.leave(first[2])
    await settle()
    assert gate.groups == [[first[0]]]
    for session in (first[0], *second):
        gate.gate.leave(session)
    assert not gate.gate._ways
    assert not gate.gate._way_of


async def test_tenants_go_in_turn() -> None:
    gate = Gate()
    many, one = await gate.opened(5, tenant="many"), await gate.opened(1, tenant="one")
    await gate.come(*many, *one)
    assert one[0] in gate.groups[0]


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 5), st.sampled_from(["come", "leave", "move"])), max_size=60))
def test_every_turn_goes_once_whatever_happens(events: list[tuple[int, str]]) -> None:
    async def play() -> None:
        gone: list[Turn] = []
        gate = TurnGate(lambda turn, _: gone.append(turn))
        sessions = [session_of() for _ in range(6)]
        due: list[Turn] = []
        for number, event in events:
            session = sessions[number]
            is_here = all(turn in gone for turn in due if turn.session is session)
            if event == "come" and is_here:
                due.append(turn_of(session))
                gate.come(due[-1])
            elif event == "move" and is_here:
                session.route = secrets.token_hex(1)
            elif event == "leave":
                gate.leave(session)
                due = [turn for turn in due if turn.session is not session or turn in gone]
            await settle()
        await asyncio.wait_for(until(lambda: {id(turn) for turn in due} == {id(turn) for turn in gone}), 5.0)
        assert len(gone) == len({id(turn) for turn in gone})

    asyncio.run(play())
