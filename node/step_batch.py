"""Several steps in one call of their slice's runner.

Runs on the compute thread. Knows nothing of whose steps go together (see `scheduler`) nor of what becomes of them.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace

import torch

from node.step_job import StepJob
from slicing.batch import Work
from slicing.batching import Part


def run_steps(parts: Sequence[Part[StepJob]]) -> None:
    """Compute parts of steps of one lane and hand each step what it made; one that is wrong by itself fails alone.

    Raises what the model raises; the steps can then be computed again.
    """
    began = time.perf_counter()
    ready = [(part.job, work) for part in parts if (work := part.job.begin(part.rows)) is not None]
    if not ready:
        return
    made = _compute([job for job, _ in ready], [work for _, work in ready])
    batch_s, batch_rows = time.perf_counter() - began, sum(work.rows for _, work in ready)
    for (job, work), rows in zip(ready, made, strict=True):
        job.take(rows, work.rows, batch_s, batch_rows)


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
