"""Our linear kernels against torch's F.linear, by form, rows and threads, alternated inside one run.

Weights are walked through memory, as a model's are: each call takes the next of several copies.
One thread is measured by its own time, so that a busy machine's other work does not count; two by the wall's clock.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import get_args

import torch

from bench.report import Report
from slicing.fast.execute import Executor, StepWork, Workspace
from slicing.fast.packing import Form, pack
from slicing.fast.program import ProgramBuilder

COLUMNS, OUTPUTS = 576, 3072  # gate and up of SmolLM2-135M
ROWS = (1, 2, 4, 8, 16, 128, 512)
THREADS = (1, 2)
WALKED_BYTES = 96 << 20  # of copies: three times the last-level cache of the measured machine
SECONDS = 0.4  # for a row of the table
BARS = {("int8", 1): ">= 2.5", ("int8", 4): ">= 3"}

Call = Callable[[int], object]


def measure_kernels(report: Report) -> None:
    """int8 at least 2.5 times F.linear at one row and 3 times at four; 80 GFLOP/s from 64 rows on in every form."""
    report.section("kernels")
    weight = torch.randn(OUTPUTS, COLUMNS)
    before = torch.get_num_threads()
    for threads in THREADS:
        torch.set_num_threads(threads)
        executor = Executor(threads)
        for rows in ROWS:
            x = torch.randn(rows, COLUMNS)
            calls = {form: _ours(executor, weight, form, x, threads) for form in get_args(Form)}
            _measure(report, rows, threads, {**calls, "F.linear": _theirs(weight, x)})
        executor.close()
    torch.set_num_threads(before)


def _measure(report: Report, rows: int, threads: int, calls: dict[str, Call]) -> None:
    times: dict[str, list[float]] = {name: [] for name in calls}
    clock = time.thread_time if threads == 1 else time.perf_counter
    end = time.perf_counter() + SECONDS
    turn = 0
    while turn < 5 or time.perf_counter() < end:
        for name, call in calls.items():
            begun = clock()
            call(turn)
            times[name].append(clock() - begun)
        turn += 1
    medians = {name: statistics.median(values) for name, values in times.items()}
    theirs = medians.pop("F.linear")
    place = f"{rows} row(s), {threads} thread(s)"
    report.add("kernels", f"{place}: F.linear", theirs * 1e3, "ms")
    for form, ours in medians.items():
        operations = 2 * rows * COLUMNS * OUTPUTS
        bar = BARS.get((form, rows), "GFLOP/s >= 80" if rows > 64 and threads == 1 else "")
        figures = {
            "ms": ours * 1e3,
            "GFLOP/s": round(operations / ours / 1e9),
            "at best": round(operations / min(times[form]) / 1e9),
            "times F.linear": theirs / ours,
        }
        report.add("kernels", f"{place}: {form}", figures, "", bar)


def _ours(executor: Executor, weight: torch.Tensor, form: Form, x: torch.Tensor, threads: int) -> Call:
    builder = ProgramBuilder()
    src, dst = builder.buffer(COLUMNS), builder.buffer(OUTPUTS)
    first = pack(weight, form)
    copies = max(1, WALKED_BYTES // first.nbytes)
    for packed in (first, *(pack(weight, form) for _ in range(copies - 1))):
        builder.linear(src, dst, packed)
    workspace = Workspace(builder.build(), max_threads=threads)
    workspace.begin([StepWork(0, len(x))])
    workspace.buffer(src)[: len(x), :COLUMNS] = x.numpy()

    def call(turn: int) -> object:
        index = turn % copies
        return executor.run(workspace, start=index, end=index + 1, threads=threads)

    return call


def _theirs(weight: torch.Tensor, x: torch.Tensor) -> Call:
    copies = [weight.clone() for _ in range(max(1, WALKED_BYTES // weight.nbytes))]
    return lambda turn: torch.nn.functional.linear(x, copies[turn % len(copies)])
