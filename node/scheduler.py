"""The queue of this node's steps, in front of the one thread that computes them, for all slices that it holds.

Which of them go together is decided in `slicing.batch_choice`, how they are computed in `step_batch`.
"""

from __future__ import annotations

from node.step_batch import run_steps
from node.step_job import StepJob
from slicing.batching import BatchQueue


class Scheduler(BatchQueue[StepJob]):
    """Steps of all sessions: those of one slice and range go together where its runner gains from it."""

    def __init__(self) -> None:
        super().__init__(run_steps)
