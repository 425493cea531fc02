"""Steps: rows of several works, ranges of operations, cancelling, threads."""

import threading

import numpy as np
import pytest
import torch

from slicing.fast import records as r
from slicing.fast.execute import Executor, StepWork, Workspace
from slicing.fast.packing import pack
from slicing.fast.program import Program, ProgramBuilder


@pytest.fixture(scope="module")
def executor():
    made = Executor(2)
    yield made
    made.close()


def doubling(num_layers: int, width: int = 16) -> Program:
    """A program of one buffer that every layer multiplies by two."""
    builder = ProgramBuilder()
    buffer = builder.buffer(width)
    for number in range(num_layers):
        builder.layer(number)
        builder.scale(buffer, width, 2.0)
    return builder.build()


def run_ones(executor: Executor, program: Program, **options: int) -> float:
    workspace = Workspace(program, max_threads=2)
    workspace.begin([StepWork(0, 1)])
    workspace.buffer(0)[:] = 1
    assert executor.run(workspace, **options)
    return float(workspace.buffer(0)[0, 0])


def test_a_range_of_operations_can_be_run(executor) -> None:
    program = doubling(5)
    assert run_ones(executor, program) == 32
    assert run_ones(executor, program, start=program.layers[1], end=program.layers[4]) == 8


@pytest.mark.parametrize("threads", [1, 2])
def test_a_cancelled_step_ends_at_the_next_layer(executor, threads) -> None:
    workspace = Workspace(doubling(4), max_threads=2)
    workspace.begin([StepWork(0, 1)])
    workspace.buffer(0)[:] = 1
    workspace.cancel[0] = 1
    assert not executor.run(workspace, threads=threads)
    assert workspace.buffer(0)[0, 0] == 1
    workspace.begin([StepWork(0, 1)])
    assert executor.run(workspace, threads=threads)
    assert workspace.buffer(0)[0, 0] == 16


def test_another_thread_can_cancel_a_running_step(executor) -> None:
    workspace = Workspace(doubling(50_000, width=1 << 16), max_threads=2)
    workspace.begin([StepWork(0, 1)])
    timer = threading.Timer(0.02, lambda: workspace.cancel.__setitem__(0, 1))
    timer.start()
    assert not executor.run(workspace)
    timer.join()


def test_two_threads_meet_after_every_operation(executor) -> None:
    builder = ProgramBuilder()
    first, second = builder.buffer(256), builder.buffer(256)
    there, back = pack(torch.eye(256).roll(16, 0), "bf16"), pack(torch.eye(256).roll(-16, 0), "bf16")
    for _ in range(500):  # each thread reads what the other has just written
        builder.linear(first, second, there)
        builder.linear(second, first, back)
    workspace = Workspace(builder.build(), max_threads=2)
    workspace.begin([StepWork(0, 3)])
    x = torch.randn(3, 256).numpy()
    workspace.buffer(first)[:] = x
    assert executor.run(workspace, threads=2)
    assert np.array_equal(workspace.buffer(first), x)


def test_rows_know_their_work_and_position(executor) -> None:
    workspace = Workspace(doubling(1))
    assert workspace.begin([StepWork(7, 2, tables=11), StepWork(0, 3, tables=22)], kept=[1, 4]) == 5
    step = workspace.step
    assert step[[r.STEP_ROWS, r.STEP_NUM_WORKS, r.STEP_NUM_KEPT]].tolist() == [5, 2, 2]
    assert read(step[r.STEP_ROW_POSITION], 5) == [7, 8, 0, 1, 2]
    assert read(step[r.STEP_ROW_WORK], 5) == [0, 0, 1, 1, 1]
    works = read(step[r.STEP_WORKS], 2 * r.WORK_WORDS)
    assert works[: r.WORK_TABLES + 1] == [7, 2, 0, 11]
    assert works[r.WORK_WORDS : r.WORK_WORDS + r.WORK_TABLES + 1] == [0, 3, 2, 22]


def test_records_hold_the_step_at_hand_whatever_came_before(executor) -> None:
    workspace = Workspace(doubling(1))
    workspace.begin([StepWork(0, 2)] * 20, kept=range(40))
    workspace.begin([StepWork(9, 1, tables=5), StepWork(3, 2, tables=6)], kept=[2])
    step = workspace.step
    assert step[[r.STEP_ROWS, r.STEP_NUM_WORKS, r.STEP_NUM_KEPT]].tolist() == [3, 2, 1]
    assert read(step[r.STEP_ROW_POSITION], 3) == [9, 3, 4]
    assert read(step[r.STEP_ROW_WORK], 3) == [0, 1, 1]
    assert read(step[r.STEP_KEPT], 1) == [2]
    works = read(step[r.STEP_WORKS], 2 * r.WORK_WORDS)
    assert works[r.WORK_WORDS : r.WORK_WORDS + r.WORK_TABLES + 1] == [3, 2, 1, 6]


def test_after_a_gather_only_the_kept_rows_are_worked_on(executor) -> None:
    builder = ProgramBuilder()
    src, dst = builder.buffer(16), builder.buffer(16)
    builder.gather(src, dst, 16)
    builder.scale(dst, 16, 2.0)
    workspace = Workspace(builder.build())
    workspace.begin([StepWork(0, 4)], kept=[3, 1])
    workspace.buffer(src)[:] = np.arange(4, dtype=np.float32)[:, None]
    executor.run(workspace)
    assert workspace.buffer(dst)[:, 0].tolist() == [6, 2, 0, 0]


def test_memory_grows_with_the_largest_step_and_stays(executor) -> None:
    workspace = Workspace(doubling(1))
    workspace.begin([StepWork(0, 1)])
    small = workspace.size_bytes
    workspace.begin([StepWork(5000, 40)])
    large = workspace.size_bytes
    assert large > small
    workspace.begin([StepWork(0, 2)])
    assert workspace.size_bytes == large


def read(address: np.int64, count: int) -> list[int]:
    import ctypes

    return list((ctypes.c_int64 * count).from_address(int(address)))
