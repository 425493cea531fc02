"""The ends of all answers of one model, computed together: on one thread, or by the loop where that is short.

A turn closes what came back for an answer, draws, and opens the step that follows; the turns that are ready share a
call of the runner for each half. Prompts go in pieces between them. Knows tensors and tokens, neither links nor text.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

import torch

from app.engine.ends_jobs import CloseRows, EndsJob, EndsSession, OpenRows, Turn, arrived_together
from app.engine.turn_gate import TurnGate
from routing.errors import WorkError
from routing.types import SliceSpec
from slicing.batch import Cache, Runner, Work
from slicing.batching import BatchCounts, BatchQueue, Lane, Part
from slicing.kept_caches import Fork

SomeJob = TypeVar("SomeJob", bound=EndsJob)


class EndsQueue:
    """A runner of the ends and the queue in front of it. Made in a running loop; `close` it at the end.

    `middle` are the layers that nodes run.
    """

    def __init__(self, runner: Runner, middle: SliceSpec) -> None:
        self.runner = runner
        self._middle = middle
        self.has_first_layers = middle.start > 0
        self.has_last_layers = middle.end < runner.num_layers
        self.turn_lane = Lane("turn", runner.max_works)
        self.opening_lane = Lane("open", runner.max_works, runner.is_invariant)
        self.closing_lane = Lane("close", runner.max_works, runner.is_invariant)
        self._queue: BatchQueue[EndsJob] = BatchQueue(self._run, name="ends")
        self._gate = TurnGate(self._queue.submit)

    @property
    def counts(self) -> BatchCounts:
        """What the thread did so far."""
        return self._queue.counts

    async def run(self, job: EndsJob) -> None:
        """Compute a job, and raise what failed in it."""
        job.done = asyncio.get_running_loop().create_future()
        if isinstance(job, Turn) and job.lane.max_works > 1 and job.session.route is not None:
            self._gate.come(job)
        else:
            self._queue.submit(job)
        await job.done
        if job.error is not None:
            raise job.error

    async def begin(self, session: EndsSession, fork: Fork, num_positions: int) -> None:
        """Let a session go on from what an earlier one left. Raises CannotRollBack."""

        def begin() -> None:
            made = list(fork.make(num_positions))
            if self.has_first_layers:
                session.opening.close()
                session.opening = made.pop(0)
            if self.has_last_layers:
                session.closing.close()
                session.closing = made.pop(0)

        await self._queue.call(begin)

    async def add_memory(self, session: EndsSession, states: torch.Tensor) -> None:
        """Give a new session's layers here the encoder states [rows, hidden] that their blocks attend to."""

        def add() -> None:
            if self.has_first_layers:
                session.opening.add_memory(states.to(self.runner.dtype))
            if self.has_last_layers:
                session.closing.add_memory(states.to(self.runner.dtype))

        await self._queue.call(add)

    def release(self, session: EndsSession) -> tuple[Cache, ...]:
        """Take the caches of a session that computes nothing, those of layers that are here: see `begin`."""
        released: list[Cache] = []
        if self.has_first_layers:
            released.append(session.opening)
            session.opening = self.runner.new_cache()
        if self.has_last_layers:
            released.append(session.closing)
            session.closing = self.runner.new_cache()
        return tuple(released)

    async def free(self, session: EndsSession) -> None:
        """Drop what a session has queued, and free its caches behind what computes now."""
        self._gate.leave(session)
        self._queue.discard(session)

        def free() -> None:
            session.opening.close()
            session.closing.close()

        await self._queue.call(free)

    async def use_threads(self, number: int) -> None:
        """Let torch use so many threads in a call."""
        if number > 1 and not hasattr(self.runner, "set_threads"):  # a fast runner has its own
            self._queue.short_ms = 0.0  # two threads that compute would have a pool of torch's each
        torch.set_num_threads(number)  # of this thread too: it computes short batches
        await self._queue.call(lambda: torch.set_num_threads(number))

    async def close(self) -> None:
        """End the thread; answers must be over."""
        await self._queue.close()

    # By whoever computes, a batch at a time --------------------------------------------------------------------

    def _run(self, parts: Sequence[Part[EndsJob]]) -> None:
        began = time.perf_counter()
        with torch.inference_mode():
            match parts[0].job:  # one lane: jobs of one kind
                case Turn():
                    self._run_turns([part.job for part in parts if isinstance(part.job, Turn)])
                case OpenRows():
                    self._run_openings(
                        [(part.job, part.rows) for part in parts if isinstance(part.job, OpenRows)]
                    )
                case CloseRows():
                    self._run_closings(
                        [(part.job, part.rows) for part in parts if isinstance(part.job, CloseRows)]
                    )
        took_s = time.perf_counter() - began
        for part in parts:
            part.job.session.compute_s += took_s

    def _run_turns(self, turns: Sequence[Turn]) -> None:
        """Close, draw, open. Called again after an error, it draws nothing twice."""
        came = [turn for turn in turns if turn.answer is not None and not turn.drawn]
        closing = self._closing_works(came) if came else []
        if closing:
            works = [work for _, work in closing]
            logits = self.runner.run_closing_batch(works, start=self._middle.end)
            for (turn, _), rows in zip(closing, logits, strict=True):
                self._draw(turn, rows)
        opening = [(turn, turn.onward) for turn in turns if turn.onward is not None]
        if opening:
            works = [work for _, work in opening]
            states = self.runner.run_opening_batch(works, end=self._middle.start)
            for (turn, _), opened in zip(opening, states, strict=True):
                turn.take(opened)
        for turn in turns:
            turn.rows = 0

    def _closing_works(self, turns: Sequence[Turn]) -> list[tuple[Turn, Work]]:
        """What came back for turns, without those that fail at it."""
        arrived = arrived_together(turns, self.runner)
        states = {} if arrived is None else dict(zip(turns, arrived, strict=True))
        return _works(
            turns,
            lambda turn: turn.closing_work(self.runner, states.get(turn), has_layers=self.has_last_layers),
        )

    def _draw(self, turn: Turn, logits: torch.Tensor) -> None:
        try:
            turn.draw(logits, self.runner.max_positions)
        except Exception as error:  # logits without a choice: this answer's trouble alone
            turn.fail(error)

    def _run_openings(self, parts: Sequence[tuple[OpenRows, int]]) -> None:
        works = [job.work(rows) for job, rows in parts]
        states = self.runner.run_opening_batch(works, end=self._middle.start)
        for (job, _), opened in zip(parts, states, strict=True):
            job.take(opened)

    def _run_closings(self, parts: Sequence[tuple[CloseRows, int]]) -> None:
        rows_of = dict(parts)
        works = _works(rows_of, lambda job: job.work(self.runner, rows_of[job]))
        if works:
            made = self.runner.run_closing_batch([work for _, work in works], start=self._middle.end)
            for (job, work), rows in zip(works, made, strict=True):
                job.take(work.rows, rows)


def _works(jobs: Iterable[SomeJob], work_of: Callable[[SomeJob], Work]) -> list[tuple[SomeJob, Work]]:
    """Each job with its work, without those that fail at it."""
    works = []
    for job in jobs:
        try:
            works.append((job, work_of(job)))
        except WorkError as error:
            job.fail(error)
    return works
