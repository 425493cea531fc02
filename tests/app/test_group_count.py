"""Groups are as many as move the answers of a route on fastest; finding that out costs little."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import pytest

from app.engine.group_count import GroupCount

Time = Callable[[int], float]  # seconds a turn, by number of groups


def play(count: GroupCount, answers: int, stages: int, turn_s: Time, rounds: int) -> Counter[int]:
    """Let turns come back at the pace of the number that is out; returns turns by number."""
    now, seen = 0.0, Counter[int]()
    for _ in range(rounds * answers):
        number = count.number(answers, stages)
        now += turn_s(number)
        seen[number] += 1
        count.note_turn(answers, stages, now)
    return seen


def test_there_are_as_many_groups_as_stages_at_first() -> None:
    assert GroupCount().number(8, 3) == 3


def test_no_more_groups_than_answers() -> None:
    assert GroupCount().number(2, 5) == 2
    assert GroupCount().number(1, 5) == 1


@pytest.mark.parametrize("answers", [2, 3, 8, 37])
def test_one_group_where_stages_share_a_machine(answers: int) -> None:
    count = GroupCount()
    play(count, answers, 2, lambda number: 0.004 + 0.002 * number, 60)
    seen = play(count, answers, 2, lambda number: 0.004 + 0.002 * number, 4000)
    assert seen[1] > 0.97 * seen.total()


def test_as_many_as_stages_stay_where_that_is_fastest_and_trials_cost_little() -> None:
    count = GroupCount()
    seen = play(count, 8, 3, lambda number: 0.012 / number, 4000)
    assert seen[3] > 0.99 * seen.total()


def test_a_number_in_between_is_found() -> None:
    count = GroupCount()
    best = {1: 0.02, 2: 0.012, 3: 0.010, 4: 0.011, 5: 0.013}
    play(count, 16, 5, best.__getitem__, 400)
    seen = play(count, 16, 5, best.__getitem__, 2000)
    assert seen[3] > 0.9 * seen.total()


def test_it_is_found_again_when_things_change() -> None:
    count = GroupCount()
    play(count, 4, 2, lambda number: 0.01 * number, 2000)
    assert play(count, 4, 2, lambda number: 0.01 * number, 10)[1] > 0
    play(count, 4, 2, lambda number: 0.02 / number, 3000)
    seen = play(count, 4, 2, lambda number: 0.02 / number, 500)
    assert seen[2] > 0.9 * seen.total()


def test_a_moment_of_trouble_does_not_decide() -> None:
    count = GroupCount()
    calls = 0

    def with_pauses(number: int) -> float:
        nonlocal calls
        calls += 1
        return 0.5 if calls % 997 == 0 else 0.012 / number

    seen = play(count, 8, 2, with_pauses, 3000)
    assert seen[2] > 0.9 * seen.total()


def test_what_is_best_for_few_answers_is_not_asked_of_many() -> None:
    count = GroupCount()
    play(count, 2, 2, lambda number: 0.01 * number, 100)
    assert count.number(2, 2) == 1
    assert count.number(8, 2) == 2
