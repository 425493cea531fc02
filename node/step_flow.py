"""A step's way through this node: admitted, queued, computed, sent on, or failed; and what that holds meanwhile.

On the event loop. Knows nothing of how sessions open and end (see `server`).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial

from node.budget import MemoryBudget
from node.held_slice import HeldSlice
from node.outbox import Outbox
from node.return_path import ReturnPath
from node.scheduler import Scheduler
from node.session import Admission, Session
from node.stats import NodeStats
from node.step_job import StepJob
from routing.errors import ErrorCode, ProtocolError, RemoteError, WorkError
from routing.link import Link
from routing.types import Answer, Step, StepFlag

# Steps accepted and not yet sent on. A replay comes in one burst: at most one step for each position of the session,
# 8192 rows of 4096 float32 numbers are 128 MiB. All sessions together: transport.md 5.6, "global".
SPARE_STEPS = 64  # beyond the positions: repeats and roll-backs on their way
MAX_PENDING_BYTES = 256 << 20
MAX_PENDING_IN_ALL = 1 << 30
BUSY_RETRY_MS = 1000  # about the length of a short answer, after which memory comes back


class StepFlow:
    """Takes steps of live sessions and sees to it that each ends in an output, a failure, or nothing wanted."""

    def __init__(
        self,
        held: HeldSlice,
        max_rows: int,
        *,
        scheduler: Scheduler[StepJob],
        budget: MemoryBudget,
        outbox: Outbox,
        returns: ReturnPath,
        stats: NodeStats,
        on_broken: Callable[[Session], None],
    ) -> None:
        self._held = held
        self._max_rows = max_rows
        self._scheduler = scheduler
        self._budget = budget
        self._outbox = outbox
        self._returns = returns
        self._stats = stats
        self._on_broken = on_broken
        self._pending_bytes = 0

    def take(self, session: Session, link: Link, step: Step) -> None:
        """Judge a step and start, repeat or drop it. Raises WorkError or ProtocolError, changing nothing."""
        arrived = time.perf_counter()
        runner = self._held.runner
        admission = session.admit(step, hidden_size=runner.hidden_size, max_rows=self._max_rows)
        if admission is Admission.DROP:
            return
        if session.is_next_lost:
            raise hop_lost(session, "the next hop is lost")
        self._check_pending(session, step)
        job = StepJob(session, step, runner, self._finish, arrived, self._crypto_us(session, link, step))
        if admission is Admission.REPEAT:
            self._stats.steps_repeated += 1
            self._hold(job)
            job.output = session.kept.output_of(step)
            self._send_output(job)
        else:
            self._reserve(session, step)
            session.accept(step)
            self._hold(job)
            self._scheduler.submit(session, job)

    def next_hop_up(self, session: Session) -> None:
        """The session's next link is there: send what waited for it."""
        waiting, session.waiting = session.waiting, []
        for job in waiting:
            self._send_output(job)

    def drop(self, session: Session) -> list[StepJob]:
        """Take a session's steps out of the queues; returns those that were not started."""
        session.attempt.is_over = True
        waiting, session.waiting = session.waiting, []
        queued = self._scheduler.discard(session)
        session.num_in_flight -= len(queued)
        for job in [*waiting, *queued]:
            self._release(job)
        return queued

    def free_state(self, session: Session) -> None:
        """Free a dead session's keys and values, now or when the job that uses them has ended."""
        if session.num_in_flight == 0:
            session.state.cache.close()
            self._budget.release(session)

    def _check_pending(self, session: Session, step: Step) -> None:
        pending, more = session.pending, len(step.payload)
        if (
            pending.steps >= session.entry.max_positions + SPARE_STEPS
            or pending.size_bytes + more > MAX_PENDING_BYTES
            or self._pending_bytes + more > MAX_PENDING_IN_ALL
        ):
            raise WorkError(ErrorCode.BUSY, f"{pending.steps} steps are pending", retry_ms=BUSY_RETRY_MS)

    def _reserve(self, session: Session, step: Step) -> None:
        end = step.position + step.rows
        if not self._budget.reserve(session, self._held.cache_bytes(session.entry, end)):
            raise WorkError(ErrorCode.BUSY, f"no memory for {end} positions", retry_ms=BUSY_RETRY_MS)

    def _finish(self, job: StepJob) -> None:
        session = job.session
        session.num_in_flight -= 1
        if session.is_freed or job.step.epoch != session.epoch:
            self._release(job)  # nobody waits for it any more
            if session.is_freed:
                self.free_state(session)
        elif job.error is not None:
            self._fail(job, job.error)
        else:
            self._count(job)
            session.note_done(job.step, job.output)
            self._send_output(job)

    def _fail(self, job: StepJob, error: RemoteError) -> None:
        session = job.session
        self._release(job)
        self._returns.report(session, job.step.step, error)
        if error.code is ErrorCode.COMPUTE:
            self._on_broken(session)
        elif job.attempt is session.attempt:
            for later in self.drop(session):
                self._returns.report(
                    session, later.step.step, WorkError(ErrorCode.STEP, "an earlier step failed")
                )
            session.roll_back(job.step)

    def _send_output(self, job: StepJob) -> None:
        session, output = job.session, job.output
        if output is None:
            self._release(job)
        elif isinstance(output, Answer):
            self._returns.send(session, output, partial(self._release, job))
        elif session.next_link is None:
            session.waiting.append(job)
        else:
            onward = replace(output, deadline_ms=job.left_ms) if job.step.deadline_ms else output
            error = self._outbox.put(session.next_link, onward, partial(self._release, job))
            if isinstance(error, ProtocolError):  # too big for the next hop; a lost link is told by itself
                self._returns.report(session, job.step.step, error)

    def _hold(self, job: StepJob) -> None:
        job.session.pending.add(job.size_bytes)
        self._pending_bytes += job.size_bytes

    def _release(self, job: StepJob) -> None:
        job.session.pending.remove(job.size_bytes)
        self._pending_bytes -= job.size_bytes

    def _crypto_us(self, session: Session, link: Link, step: Step) -> int:
        """Opening this step, and sealing the last message that went the way its output will go."""
        if StepFlag.TRACE not in step.flags:
            return 0
        onward = session.next_link or self._returns.gateway_link(session) or link
        return int(link.last_open_us + onward.last_seal_us)

    def _count(self, job: StepJob) -> None:
        stats = self._stats
        stats.steps_run += 1
        stats.rows_run += job.rows
        stats.queue_s += job.queue_s
        stats.compute_s += job.compute_s


def hop_lost(session: Session, text: str) -> WorkError:
    """The failure that tells a gateway to plan without the node after this one."""
    return WorkError(ErrorCode.HOP_LOST, text, hop=session.entry.hop + 1)
