"""The rules of a session by themselves: what is admitted, what is kept, what a budget allows."""

from __future__ import annotations

from typing import Any, cast

import pytest

from node.budget import MemoryBudget, default_budget_bytes, peak_memory_bytes
from node.session import KEPT_STEPS, Admission, KeptOutputs, Session
from node.stats import NodeStats
from routing.errors import ErrorCode, WorkError
from routing.types import HopEntry, NodeId, SessionId, Step, WireDtype
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
    return Session(SessionId(bytes(16)), 1, entry, cast(Any, None), NodeId(bytes(32)), [], 0.0)


def new_step(number: int, position: int, rows: int = 1, epoch: int = 1) -> Step:
    return Step(SessionId(bytes(16)), epoch, number, position, rows, bytes(rows * 4 * HIDDEN_SIZE))


def admit(session: Session, step: Step) -> Admission:
    return session.admit(step, hidden_size=HIDDEN_SIZE, max_rows=50)


def run(session: Session, step: Step) -> None:
    assert admit(session, step) is Admission.RUN
    session.accept(step)
    session.note_done(step, step)


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


def test_only_the_last_few_outputs_are_kept() -> None:
    kept = KeptOutputs()
    for number in range(1, 8):
        kept.put(new_step(number, number), new_step(number, number))
    assert [number for number in range(1, 8) if kept.holds(new_step(number, number))] == [4, 5, 6, 7]
    assert kept.size_bytes == KEPT_STEPS * 4 * HIDDEN_SIZE


def test_large_outputs_are_let_go_earlier() -> None:
    kept = KeptOutputs(max_bytes=100)
    kept.put(new_step(1, 0, 10), new_step(1, 0, 10))
    kept.put(new_step(2, 10, 5), new_step(2, 10, 5))
    assert not kept.holds(new_step(1, 0, 10))
    assert kept.holds(new_step(2, 10, 5))
    kept.put(new_step(3, 15, 20), new_step(3, 15, 20))  # alone more than the budget
    assert kept.size_bytes == 0


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
