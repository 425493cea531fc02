"""The queue of this node's steps, in front of the one thread that computes them, for all slices that it holds.

Which of them go together is decided in `slicing.batch_choice`, how they are computed in `step_batch`; calls of
diffusion blocks go one at a time, see `call_job`.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from node.call_job import CallJob
from node.step_batch import run_steps
from node.step_job import StepJob
from node.thread_watch import ThreadWatch
from slicing.batching import BatchQueue, Part


class Scheduler(BatchQueue[StepJob | CallJob]):
    """Steps of all sessions: those of one slice and range go together where its runner gains from it."""

    def __init__(self) -> None:
        super().__init__(self._run_watched)
        self.threads: ThreadWatch | None = (
            None  # set once slices are computed with several of torch's threads
        )

    def _run_watched(self, parts: Sequence[Part[StepJob | CallJob]]) -> None:
        if self.threads is None:
            run_parts(parts)
            return
        began, kind = time.perf_counter(), kind_of(parts)
        run_parts(parts)
        self.threads.note(kind, time.perf_counter() - began)


def kind_of(parts: Sequence[Part[StepJob | CallJob]]) -> tuple[object, ...]:
    """Parts of one kind take about as long: as many rows, within a factor of two, and behind as many others."""
    job, rows = parts[0].job, sum(part.rows for part in parts)
    before = job.step.position.bit_length() if isinstance(job, StepJob) else 0
    return job.lane.key, rows.bit_length(), before


def run_parts(parts: Sequence[Part[StepJob | CallJob]]) -> None:
    """Compute parts of one lane: steps together, or one call."""
    first = parts[0].job
    if isinstance(first, CallJob):
        first.run()
    else:
        run_steps(parts)  # type: ignore[arg-type]  # of one lane: all are steps
