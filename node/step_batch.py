"""Several steps in one call of their slice's runner.

Runs on the compute thread. Knows nothing of whose steps go together (see `scheduler`) nor of what becomes of them.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace

import torch

from node.step_job import StepJob
from node.step_rows import RowsOfStep, decode_together
from slicing.batch import Work
from slicing.batching import Part


def run_steps(parts: Sequence[Part[StepJob]]) -> None:
    """Compute parts of steps of one lane and hand each step what it made; one that is wrong by itself fails alone.

    Raises what the model raises; the steps can then be computed again.
    """
    began = time.perf_counter()
    jobs, works = _works(parts)
    if not jobs:
        return
    made = _compute(jobs, works)
    counts = [work.rows for work in works]
    batch_s, batch_rows = time.perf_counter() - began, sum(counts)
    for job, rows, count in zip(jobs, made, counts, strict=True):
        job.take(rows, count, batch_s, batch_rows)


def _works(parts: Sequence[Part[StepJob]]) -> tuple[list[StepJob], list[Work]]:
    """The jobs that have something to compute, and what. The rows of all are decoded at once where that can be."""
    begun = [(part.job, rows) for part in parts if (rows := part.job.begin(part.rows))]
    pieces = [RowsOfStep(job.step, job.entry, job.first_row, rows) for job, rows in begun]
    decoded = decode_together(pieces, begun[0][0].runner) if begun else None
    jobs, works = [], []
    for number, (job, rows) in enumerate(begun):
        work = job.work(rows, None if decoded is None else decoded[number])
        if work is not None:
            jobs.append(job)
            works.append(work)
    return jobs, works


@torch.inference_mode()
def _compute(jobs: Sequence[StepJob], works: Sequence[Work]) -> list[torch.Tensor]:
    """The lane's layers and ends, in one pass unless it has both ends; the closing end where rows of it are wanted."""
    entry, runner = jobs[0].entry, jobs[0].runner

    def is_cancelled() -> bool:
        return all(job.attempt.is_over for job in jobs)

    if entry.run_opening:
        made = runner.run_opening_batch(works, end=entry.end, is_cancelled=is_cancelled)
        if not entry.run_closing:
            return made
        works = [replace(work, inputs=rows) for work, rows in zip(works, made, strict=True)]
    start = entry.end if entry.run_opening else entry.start
    if entry.run_closing and any(work.keep for work in works):
        return runner.run_closing_batch(works, start=start, is_cancelled=is_cancelled)
    return runner.run_layers_batch(works, start=start, end=entry.end, is_cancelled=is_cancelled)
