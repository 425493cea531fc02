"""The rules of a session by themselves: what is admitted, what is kept, what a budget allows."""

from __future__ import annotations

from typing import Any, cast

import pytest

from node.budget import MemoryBudget, default_budget_bytes, peak_memory_bytes
from node.history import History, HistoryBudget
from node.session import Admission, Session
from node.stats import NodeStats
from routing.errors import ErrorCode, WorkError
from routing.types import HopEntry, NodeId, SessionId, Step, StepFlag, WireDtype
from tests.node.rig import DIGEST

HIDDEN_SIZE = 2


def new_session(**changes: Any) -> Session:
    entry = HopEntry(
        route_key=bytes(32),
        hop=0,
        num_hops=1,
        gateway_id=NodeId(bytes(32)),
        model_digest=DIGEST,
        start=0,
        end=2,
        wire_in=WireDtype.FLOAT32,
        wire_out=WireDtype.FLOAT32,
        max_positions=100,
        idle_timeout_s=60,
        **changes,
    )
    held = state = cast(Any, None)
    history = History(HistoryBudget(NodeStats()), max_bytes=1 << 20)
    return Session(SessionId(bytes(16)), 1, entry, held, state, history, NodeId(bytes(32)), [], 0.0)


def new_step(number: int, position: int, rows: int = 1, *, flags: StepFlag = StepFlag.NONE) -> Step:
    return Step(SessionId(bytes(16)), 1, number, position, rows, bytes(rows * 4 * HIDDEN_SIZE), flags=flags)


def admit(session: Session, step: Step) -> Admission:
    return session.admit(step, hidden_size=HIDDEN_SIZE, max_rows=50)


def run(session: Session, step: Step) -> None:
    assert admit(session, step) is Admission.RUN
    session.accept(step)
    session.note_done(step, step, WireDtype.FLOAT32)


def test_judging_a_step_changes_nothing() -> None:
    session = new_session()
    for _ in range(3):
        assert admit(session, new_step(1, 0)) is Admission.RUN


def test_a_repeat_counts_only_if_it_is_the_same_step() -> None:
    session = new_session()
    run(session, new_step(1, 0, 3))
    assert admit(session, new_step(1, 0, 3)) is Admission.REPEAT
    with pytest.raises(WorkError) as wrong:
        admit(session, new_step(1, 0, 2))
    assert wrong.value.code is ErrorCode.STEP


def test_a_failed_step_may_come_again() -> None:
    session = new_session()
    run(session, new_step(1, 0))
    for step in (new_step(2, 1), new_step(3, 2)):
        session.accept(step)
    session.roll_back(new_step(2, 1))
    assert admit(session, new_step(2, 1)) is Admission.RUN
    with pytest.raises(WorkError):
        admit(session, new_step(3, 2))


def test_a_repeat_of_an_older_route_may_leave_out_numbers_that_were_undone() -> None:
    session = new_session()
    run(session, new_step(1, 0, 3))
    with pytest.raises(WorkError):
        admit(session, new_step(5, 2))
    run(session, new_step(5, 2, flags=StepFlag.REPLAY))
    assert (session.next_step, session.position) == (6, 3)
    with pytest.raises(WorkError):
        admit(session, new_step(9, 4, flags=StepFlag.REPLAY))  # rows between would be missing


def test_undone_steps_come_again_and_what_runs_of_them_is_for_nobody() -> None:
    session = new_session()
    for number in (1, 2, 3):
        run(session, new_step(number, number - 1))
    under_way = session.attempt
    session.undo_from(2)
    assert (session.next_step, session.last_done, session.position) == (2, 1, 1)
    assert under_way.is_over
    assert under_way.is_undone
    run(session, new_step(2, 1))


def test_a_budget_is_never_overdrawn_and_gives_back_what_was_taken() -> None:
    stats = NodeStats()
    budget = MemoryBudget(100, stats)
    assert budget.reserve("a", 60)
    assert budget.reserve("a", 40)  # less than it has: nothing to do
    assert not budget.reserve("b", 41)
    assert budget.reserve("b", 40)
    assert not budget.reserve("a", 61)
    assert (stats.kv_bytes, budget.free_bytes) == (100, 0)
    budget.release("a")
    budget.release("a")
    assert stats.kv_bytes == 40


def test_the_default_budget_leaves_most_of_the_free_memory_alone() -> None:
    assert 0 < default_budget_bytes() < 1 << 50
    assert peak_memory_bytes() > 10 << 20
