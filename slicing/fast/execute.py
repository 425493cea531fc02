"""Runs programs: the compiled loop over operations, the memory of a step, and the threads that share it.

Knows nothing of models, nor of sessions beyond their rows and page tables.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numba import njit
from numpy.typing import NDArray

from slicing.fast import records as r
from slicing.fast.attention import op_append, op_attention
from slicing.fast.barrier import BARRIER_WORDS, STOP, atomic_load, atomic_store, wait
from slicing.fast.compiling import compile_kernels, inner, keeping_code
from slicing.fast.experts import op_experts, op_route
from slicing.fast.linear import op_linear
from slicing.fast.packing import aligned_zeros
from slicing.fast.pointwise import (
    op_activate,
    op_add,
    op_copy,
    op_gate,
    op_gather,
    op_layer_norm,
    op_rms_norm,
    op_rotary,
    op_scale,
    op_softcap,
)
from slicing.fast.program import Program
from slicing.fast.records import field, load_u8, store_i64

POSITIONS_AT_ONCE = 1024  # what scratch grows by


class Workspace:
    """The memory that steps of one program work in: its buffers, its scratch and the records of the step.

    Records stay where they are from step to step, and what changes is written into them number by number through
    memoryviews: between two steps the caches hold the weights, and numpy's way to a number is a long one then.
    """

    def __init__(self, program: Program, max_threads: int = 1) -> None:
        self.program = program
        self.program_address = program.address
        self.max_threads = max_threads
        self.cancel = np.zeros(1, np.uint8)  # set to 1 by another thread to end the step at the next layer
        self._capacity = 0
        self._scratch_bytes = 0
        self._buffers: list[NDArray[np.float32]] = []
        self._scratch: list[NDArray[np.uint8]] = []
        self._barrier = aligned_zeros((BARRIER_WORDS,), np.int64)
        self._strides = np.array(program.widths, np.int64)
        self._addresses = np.zeros(len(program.widths), np.int64)
        self._scratch_addresses = np.zeros(max_threads, np.int64)
        self.step = np.zeros(r.STEP_WORDS, np.int64)
        self.step_address = int(self.step.ctypes.data)
        self._words = self.step.data
        for index, array in (
            (r.STEP_BUFFERS, self._addresses),
            (r.STEP_STRIDES, self._strides),
            (r.STEP_CANCEL, self.cancel),
            (r.STEP_BARRIER, self._barrier),
            (r.STEP_SCRATCH, self._scratch_addresses),
        ):
            self.step[index] = array.ctypes.data
        self._works = self._records(r.STEP_WORKS, r.WORK_WORDS)
        self._row_work = self._records(r.STEP_ROW_WORK, 1)
        self._row_position = self._records(r.STEP_ROW_POSITION, 1)
        self._kept = self._records(r.STEP_KEPT, 1)

    @property
    def size_bytes(self) -> int:
        """Memory it takes; it grows with the largest step."""
        return sum(buffer.nbytes for buffer in self._buffers) + sum(part.nbytes for part in self._scratch)

    def buffer(self, number: int) -> NDArray[np.float32]:
        """Return a buffer's rows [capacity, padded width]; valid until the next `begin`."""
        return self._buffers[number]

    def begin(self, works: Sequence[StepWork], kept: Sequence[int] = ()) -> int:
        """Set up a step of some works' rows, one work after another, and return how many rows that is.

        `kept` are the rows of the step that a GATHER takes. Inputs are written into a buffer after this.
        """
        rows = positions = 0
        for work in works:
            rows += work.rows
            positions = max(positions, work.position + work.rows)
        self._reserve(rows, positions, len(works), len(kept))
        self._write(works)
        for index, row in enumerate(kept):
            self._kept[index] = row
        words = self._words
        words[r.STEP_ROWS], words[r.STEP_NUM_WORKS], words[r.STEP_NUM_KEPT] = rows, len(works), len(kept)
        self._barrier.fill(0)
        self.cancel[0] = 0
        return rows

    def _write(self, works: Sequence[StepWork]) -> None:
        """Write the table of works, and whose each row is and where it stands."""
        table, row_work, row_position = self._works, self._row_work, self._row_position
        row = 0
        for index, work in enumerate(works):
            at = index * r.WORK_WORDS
            table[at + r.WORK_POSITION] = work.position
            table[at + r.WORK_ROWS] = work.rows
            table[at + r.WORK_FIRST_ROW] = row
            table[at + r.WORK_TABLES] = work.tables
            for position in range(work.position, work.position + work.rows):
                row_work[row] = index
                row_position[row] = position
                row += 1

    def _reserve(self, rows: int, positions: int, num_works: int, num_kept: int) -> None:
        """Grow the buffers to so many rows, the scratch to works of so many positions, and the records."""
        if rows > self._capacity:
            self._buffers = []  # freed before what replaces them is taken
            self._buffers = [aligned_zeros((rows, width), np.float32) for width in self.program.widths]
            self._addresses[:] = [buffer.ctypes.data for buffer in self._buffers]
            self._capacity = rows
            self._row_work = self._records(r.STEP_ROW_WORK, rows)
            self._row_position = self._records(r.STEP_ROW_POSITION, rows)
        if num_works * r.WORK_WORDS > len(self._works):
            self._works = self._records(r.STEP_WORKS, num_works * r.WORK_WORDS)
        if num_kept > len(self._kept):
            self._kept = self._records(r.STEP_KEPT, num_kept)
        own = r.SCRATCH_PER_POSITION * (-(-positions // POSITIONS_AT_ONCE) * POSITIONS_AT_ONCE)
        needed = r.LINEAR_SCRATCH + r.OTHER_SCRATCH + own
        if needed > self._scratch_bytes:
            self._scratch = [aligned_zeros((needed,), np.uint8) for _ in range(self.max_threads)]
            self._scratch_addresses[:] = [part.ctypes.data for part in self._scratch]
            self._scratch_bytes = needed
            self._words[r.STEP_SCRATCH_BYTES] = needed

    def _records(self, index: int, count: int) -> memoryview:
        """Return memory for `count` int64, whose address is in the step from now on; the view keeps it alive."""
        made = np.zeros(count, np.int64)
        self.step[index] = made.ctypes.data
        return made.data


class StepWork(NamedTuple):
    """One session's rows in a step."""

    position: int  # of the first row
    rows: int
    tables: int = 0  # address of the addresses of its page tables, one per group


class Executor:
    """Threads that wait for steps. One step at a time; the thread that calls is one of them."""

    def __init__(self, threads: int = 1) -> None:
        self._tasks: list[queue.SimpleQueue[tuple[int, ...] | None]] = []
        self._done: queue.SimpleQueue[None] = queue.SimpleQueue()
        compile_kernels()
        self._grow(threads)

    def run(self, workspace: Workspace, *, start: int = 0, end: int | None = None, threads: int = 1) -> bool:
        """Run operations [start, end) of the workspace's program; False if the step was cancelled."""
        last = workspace.program.num_ops if end is None else end
        program, step = workspace.program_address, workspace.step_address
        threads = min(threads, workspace.max_threads)
        if threads <= 1:
            return not execute(program, start, last, step, 0, 1)
        self._grow(threads)
        for t in range(1, threads):
            self._tasks[t - 1].put((program, start, last, step, t, threads))
        cancelled = execute(program, start, last, step, 0, threads)
        for _ in range(1, threads):
            self._done.get()
        return not cancelled

    def close(self) -> None:
        """End the threads."""
        for tasks in self._tasks:
            tasks.put(None)
        self._tasks = []

    def _grow(self, threads: int) -> None:
        while len(self._tasks) < threads - 1:
            tasks: queue.SimpleQueue[tuple[int, ...] | None] = queue.SimpleQueue()
            name = f"kernels-{len(self._tasks) + 1}"
            threading.Thread(target=self._work, args=(tasks,), name=name, daemon=True).start()
            self._tasks.append(tasks)

    def _work(self, tasks: queue.SimpleQueue[tuple[int, ...] | None]) -> None:
        while (task := tasks.get()) is not None:
            execute(*task)
            self._done.put(None)


@inner
def _is_stopped(step: int, t: int, num_threads: int) -> bool:
    """Whether the step was cancelled: thread 0 looks, so that all threads hear the same."""
    barrier = field(step, r.STEP_BARRIER)
    if t == 0:
        atomic_store(barrier, STOP, load_u8(field(step, r.STEP_CANCEL)))
    wait(step, num_threads)
    stopped = atomic_load(barrier, STOP)
    wait(step, num_threads)
    return stopped != 0


@inner
def _run(code: int, op: int, step: int, t: int, num_threads: int) -> None:
    """Thread t's share of one operation."""
    if code == r.LINEAR:
        op_linear(op, step, t, num_threads)
    elif code == r.RMS_NORM:
        op_rms_norm(op, step, t, num_threads)
    elif code == r.LAYER_NORM:
        op_layer_norm(op, step, t, num_threads)
    elif code == r.ROTARY:
        op_rotary(op, step, t, num_threads)
    elif code == r.APPEND:
        op_append(op, step, t, num_threads)
    elif code == r.ATTENTION:
        op_attention(op, step, t, num_threads)
    elif code == r.GATE:
        op_gate(op, step, t, num_threads)
    elif code == r.ACTIVATE:
        op_activate(op, step, t, num_threads)
    elif code == r.ADD:
        op_add(op, step, t, num_threads)
    elif code == r.SCALE:
        op_scale(op, step, t, num_threads)
    elif code == r.COPY:
        op_copy(op, step, t, num_threads)
    elif code == r.SOFTCAP:
        op_softcap(op, step, t, num_threads)
    elif code == r.ROUTE:
        op_route(op, step, t, num_threads)
    elif code == r.EXPERTS:
        op_experts(op, step, t, num_threads)
    elif code == r.GATHER:
        op_gather(op, step, t, num_threads)


@inner
def _keep_rows(step: int, t: int, num_threads: int) -> None:
    """From here on the step has as many rows as were kept."""
    if t == 0:
        store_i64(step + r.STEP_ROWS * r.WORD, field(step, r.STEP_NUM_KEPT))
    wait(step, num_threads)


def _execute(program: int, first: int, last: int, step: int, t: int, num_threads: int) -> int:
    """Run operations [first, last) as thread t of num_threads; 1 if the step was cancelled, else 0."""
    for index in range(first, last):
        op = program + index * r.OP_WORDS * r.WORD
        code = field(op, 0)
        if code == r.LAYER:
            if _is_stopped(step, t, num_threads):
                return 1
            continue
        _run(code, op, step, t, num_threads)
        wait(step, num_threads)
        if code == r.GATHER:
            _keep_rows(step, t, num_threads)
    return 0


with keeping_code() as _can_keep:
    execute = njit(nogil=True, error_model="numpy", cache=_can_keep)(_execute)
