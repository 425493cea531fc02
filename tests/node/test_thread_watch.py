"""When several threads give way to one, and when they come back."""

from __future__ import annotations

import pytest

from node.thread_watch import FIRST_PAUSE_S, SLOW_STEPS, ThreadWatch


class Machine:
    """Counts what is set, and tells a time that tests move."""

    def __init__(self, threads: int = 2) -> None:
        self.now = 0.0
        self.chosen: list[int] = []
        self.watch = ThreadWatch(threads, self.chosen.append, lambda: self.now)

    def step(self, took_s: float, times: int = 1, kind: object = "pass") -> None:
        for _ in range(times):
            self.watch.note(kind, took_s)


@pytest.fixture
def machine() -> Machine:
    return Machine()


def test_threads_that_fight_give_way_to_one(machine: Machine) -> None:
    machine.step(0.02, 5)
    machine.step(2.0, SLOW_STEPS)
    assert machine.chosen == [1]


def test_single_slow_steps_and_other_kinds_change_nothing(machine: Machine) -> None:
    for _ in range(20):
        machine.step(0.02, 3)
        machine.step(1.0)
        machine.step(5.0, kind="a longer one")
    assert machine.chosen == []


def test_the_threads_are_tried_again_after_a_pause_that_grows(machine: Machine) -> None:
    machine.step(0.02, 5)
    for pause_s in (FIRST_PAUSE_S, 2 * FIRST_PAUSE_S):
        machine.step(2.0, SLOW_STEPS)
        assert machine.chosen[-1] == 1
        machine.now += pause_s - 1
        machine.step(0.03)
        assert machine.chosen[-1] == 1
        machine.now += 1
        machine.step(0.03)
        assert machine.chosen[-1] == 2


def test_one_thread_is_left_alone() -> None:
    machine = Machine(threads=1)
    machine.step(0.02, 5)
    machine.step(9.0, 9)
    assert machine.chosen == []
