"""What a session keeps of its steps: cut by roll-backs, within budgets, the oldest gone first."""

from __future__ import annotations

from node.history import History, HistoryBudget
from node.stats import NodeStats
from routing.types import Answer, SessionId, Step, Want, WireDtype

SESSION = SessionId(bytes(16))
ROW = 8  # B


def a_step(number: int, position: int, rows: int = 1, want: Want = Want.LAST) -> Step:
    payload = bytes([number]) * (rows * ROW)
    return Step(SESSION, 1, number, position, rows, payload, want)


def an_answer(number: int, position: int) -> Answer:
    return Answer(SESSION, 1, number, position, 1, bytes(ROW))


def a_history(max_bytes: int = 1 << 20, max_outputs: int | None = None, limit: int = 1 << 20) -> History:
    budget = HistoryBudget(NodeStats(), limit)
    return History(budget, max_bytes=max_bytes, max_outputs=max_outputs)


def add(history: History, number: int, position: int, rows: int = 1, want: Want = Want.LAST) -> None:
    history.add(a_step(number, position, rows, want), a_step(number, position, rows, want), WireDtype.FLOAT32)


def spans(history: History, number: int = 1) -> list[tuple[int, int, int]]:
    return [(done.number, done.position, done.rows) for done in history.steps_from(number)]


def test_steps_are_kept_with_their_row_groups() -> None:
    history = a_history()
    add(history, 1, 0, 5)
    add(history, 2, 5)
    assert spans(history) == [(1, 0, 5), (2, 5, 1)]
    assert spans(history, 2) == [(2, 5, 1)]
    assert history.size_bytes == 6 * ROW


def test_a_roll_back_cuts_what_was_kept() -> None:
    history = a_history()
    add(history, 1, 0, 5, Want.ALL)
    add(history, 2, 5, 3)
    add(history, 3, 2)
    assert spans(history) == [(1, 0, 2), (3, 2, 1)]
    first = history.steps_from(1)[0].output
    assert isinstance(first, Step)
    assert (first.rows, bytes(first.payload), first.want, first.want_rows) == (
        2,
        b"\1" * (2 * ROW),
        Want.LIST,
        (0, 1),
    )
    assert history.size_bytes == 3 * ROW


def test_beyond_its_bytes_a_history_starts_later() -> None:
    history = a_history(max_bytes=3 * ROW)
    for number in range(1, 6):
        add(history, number, number - 1)
    assert not history.holds_from(2)
    assert history.holds_from(3)
    assert history.holds_from(9)
    assert history.size_bytes == 3 * ROW
    assert history.roll_back(2) == 1  # where steps end is known all the same
    assert spans(history) == [(1, 0, 1)]
    assert history.size_bytes == 0


def test_the_largest_history_gives_first_when_the_node_has_too_much() -> None:
    stats = NodeStats()
    budget = HistoryBudget(stats, 10 * ROW)
    large, small = (History(budget, max_bytes=1 << 20) for _ in range(2))
    add(small, 1, 0, 2)
    for number in range(1, 12):
        add(large, number, number - 1)
    assert stats.history_bytes == 10 * ROW
    assert small.holds_from(1)
    assert large.num_held == 8
    large.close()
    assert stats.history_bytes == 2 * ROW
    small.close()
    assert stats.history_bytes == 0


def test_an_output_larger_than_everything_is_not_kept() -> None:
    history = a_history(limit=4 * ROW)
    add(history, 1, 0, 5)
    assert not history.holds_from(1)
    assert history.size_bytes == 0


def test_only_the_last_few_answers_are_kept_and_what_is_due_is_known() -> None:
    history = a_history(max_outputs=4)
    for number in range(1, 8):
        want = Want.NONE if number == 2 else Want.LAST
        output = None if number == 2 else an_answer(number, number - 1)
        history.add(a_step(number, number - 1, want=want), output, WireDtype.FLOAT32)
    assert [n for n in range(1, 8) if history.holds(a_step(n, n - 1))] == [4, 5, 6, 7]
    assert history.first_due(3) is None
    assert history.first_due(2) == 3
    assert history.first_due(1) == 3
    assert history.first_due(0) == 1


def test_a_repeat_is_held_only_if_it_is_the_same_step() -> None:
    history = a_history()
    add(history, 1, 0, 3)
    add(history, 4, 3)
    assert history.holds(a_step(1, 0, 3))
    assert not any(history.holds(step) for step in (a_step(1, 0, 2), a_step(1, 1, 3), a_step(2, 3)))
