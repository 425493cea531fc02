"""A step's way through this node: admitted, queued, computed, sent on, or failed; and what that holds meanwhile.

After a re-route it sends again what the next hop lacks. On the event loop. Knows nothing of how sessions open and
end (see `openings` and `server`).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TypeVar

from node.budget import MemoryBudget
from node.call_job import BUSY_RETRY_MS, CallJob, CallState
from node.history import DoneStep
from node.outbox import Gone, Outbox
from node.return_path import ReturnPath
from node.scheduler import Scheduler
from node.session import Admission, Session
from node.slice_table import SliceTable
from node.stats import NodeStats
from node.step_job import StepJob
from node.step_rows import in_wire
from routing.errors import ErrorCode, ProtocolError, RemoteError, WorkError
from routing.link import Link
from routing.parts import parts_of
from routing.types import Answer, AnswerKind, Buffer, Step, StepFlag, WireDtype

# Steps accepted and not yet sent on. A replay comes in one burst: at most one step for each position of the session
# and each row of its memory, 8192 rows of 4096 float32 numbers are 128 MiB. All sessions together: transport.md 5.6,
# "global".
SPARE_STEPS = 64  # beyond the positions: repeats and roll-backs on their way
MAX_PENDING_BYTES = 256 << 20
MAX_PENDING_IN_ALL = 1 << 30
MAX_PENDING_CALLS = (
    64  # of a session: patches of a step and the branches' next ones; their bytes are counted besides
)
_TRACE = int(StepFlag.TRACE)
SomeOutput = TypeVar("SomeOutput", Step, Answer)


class StepFlow:
    """Takes steps of live sessions and sees to it that each ends in an output, a failure, or nothing wanted."""

    def __init__(
        self,
        slices: SliceTable,
        max_rows: int,
        *,
        scheduler: Scheduler,
        budget: MemoryBudget,
        outbox: Outbox,
        returns: ReturnPath,
        stats: NodeStats,
        on_broken: Callable[[Session], None],
    ) -> None:
        self._slices = slices
        self._max_rows = max_rows
        self._scheduler = scheduler
        self._budget = budget
        self._outbox = outbox
        self._returns = returns
        self._stats = stats
        self._on_broken = on_broken
        self._pending_bytes = 0
        stats.batches = scheduler.counts
        scheduler.is_open = lambda: stats.num_sessions > 0

    def take(self, session: Session, link: Link, step: Step) -> None:
        """Judge a step and start, repeat or drop it. Raises WorkError or ProtocolError, changing nothing."""
        arrived = time.perf_counter()
        held = session.held
        admission = session.admit(step, hidden_size=held.runner.hidden_size, max_rows=self._max_rows)
        if admission is Admission.DROP:
            return
        if session.is_next_lost:
            raise hop_lost(session, "the next hop is lost")
        crypto_us = self._crypto_us(session, link, step)
        job: StepJob | CallJob
        if not session.entry.calls:
            self._check_pending(session, step)
            layers = held.layers
            if step.position and not layers.is_causal:
                raise ProtocolError(
                    ErrorCode.MALFORMED, "a step that is no whole text, where each row sees all"
                )
            job = StepJob(session, step, layers, self._finish, arrived, crypto_us)
            if admission is Admission.RUN:
                self._reserve(session, step)
        elif admission is Admission.REPEAT:
            job = CallJob(session, step, (), held.blocks, self._finish, arrived, crypto_us)
        elif (payloads := self._take_part(session, step)) is not None:
            job = CallJob(session, step, payloads, held.blocks, self._finish, arrived, crypto_us, self._spare)
        else:
            return  # the rest of the call is on its way
        if admission is Admission.REPEAT:
            self._stats.steps_repeated += 1
            self._hold(job)
            job.output = session.history.output_of(step)
            self._send_output(job)
        else:
            session.accept(step)
            self._hold(job)
            self._scheduler.submit(job)

    def _take_part(self, session: Session, step: Step) -> list[Buffer] | None:
        """Take in a part of a call; returns all of it with the last one.

        Raises WorkError or ProtocolError, and the session is over then: what later calls build on did not come.
        """
        try:
            if session.pending.steps >= MAX_PENDING_CALLS:
                raise WorkError(
                    ErrorCode.BUSY, f"{session.pending.steps} calls are pending", retry_ms=BUSY_RETRY_MS
                )
            self._reserve_call(session, len(step.payload))
            return session.add_part(step)
        except RemoteError:
            self._on_broken(session)
            raise

    def _reserve_call(self, session: Session, more: int) -> None:
        """Count what has arrived, what is remembered of it, and what is set aside for keys and values."""
        entry, state = session.entry, session.state
        assert isinstance(state, CallState)
        size_bytes = (
            session.held.cache_bytes(entry, entry.room) + state.size_bytes + session.arrived_bytes + more
        )
        if not self._budget.reserve(session, size_bytes):
            text = f"no memory for a call: {size_bytes} B, {self._budget.free_bytes} B are free"
            raise WorkError(ErrorCode.BUSY, text, retry_ms=BUSY_RETRY_MS)

    def _spare(self) -> int:
        """Memory that a call may take beside its own size. Asked on the compute thread: the number may be a bit old."""
        return max(0, self._budget.available_bytes)

    def _settle(self, job: CallJob) -> None:
        """Count what the session remembers now: it may be far more than what arrived. Or fail the call."""
        try:
            self._reserve_call(job.session, 0)
        except WorkError as error:
            job.error, job.output = error, None

    def next_hop_takes(self, session: Session, number: int) -> None:
        """The next hop takes steps from this number on: send what it lacks.

        A session that held something before this route sends from its history. Where that begins too late, it undoes
        the steps that the next hop lacks, so that they come again.
        """
        session.onward_from = number
        waiting, session.waiting = session.waiting, []
        if session.is_fresh:
            for job in waiting:
                self._send_output(job)
            return
        for job in waiting:
            self._release(job)
        if not session.history.holds_from(number):
            self.undo_from(session, number)
        for done in session.history.steps_from(number):
            self._send_again(session, done)

    def answers_from_here(self, session: Session) -> None:
        """Last hop, re-routed: send the answers that the gateway lacks; undo the steps whose answers are gone."""
        answered = session.entry.answered
        if (due := session.history.first_due(answered)) is not None:
            self.undo_from(session, due)
        for done in session.history.steps_from(answered + 1):
            self._send_again(session, done)

    def undo_from(self, session: Session, number: int) -> None:
        """Take the steps from this number on back: they come again."""
        self._stats.steps_undone += len(session.history.steps_from(number))
        self.drop(session)
        session.undo_from(number)

    def drop(self, session: Session) -> list[StepJob | CallJob]:
        """Take a session's steps out of the queues; returns those that were not started."""
        waiting, session.waiting = session.waiting, []
        for job in waiting:
            self._release(job)
        return self._drop_queued(session)

    def _drop_queued(self, session: Session) -> list[StepJob | CallJob]:
        session.attempt.is_over = True
        queued = self._scheduler.discard(session)
        session.num_in_flight -= len(queued)
        for job in queued:
            self._release(job)
        return queued

    def free_state(self, session: Session) -> None:
        """Free a dead session's keys and values, now or when the job that uses them has ended."""
        if session.num_in_flight == 0:
            session.state.close()
            self._budget.release(session)

    def _check_pending(self, session: Session, step: Step) -> None:
        pending, more = session.pending, len(step.payload)
        if (
            pending.steps >= session.entry.max_positions + session.entry.memory_rows + SPARE_STEPS
            or pending.size_bytes + more > MAX_PENDING_BYTES
            or self._pending_bytes + more > MAX_PENDING_IN_ALL
        ):
            raise WorkError(ErrorCode.BUSY, f"{pending.steps} steps are pending", retry_ms=BUSY_RETRY_MS)

    def _reserve(self, session: Session, step: Step) -> None:
        end = step.end(session.entry.branches)
        if not self._budget.reserve(session, session.held.cache_bytes(session.entry, end)):
            raise WorkError(ErrorCode.BUSY, f"no memory for {end} positions", retry_ms=BUSY_RETRY_MS)

    def _finish(self, job: StepJob | CallJob) -> None:
        session = job.session
        session.num_in_flight -= 1
        self._count(job)
        if isinstance(job, CallJob) and job.error is None and not session.is_freed:
            self._settle(job)
        if session.is_freed or job.attempt.is_undone:
            self._release(job)  # nobody waits for it any more
            if session.is_freed:
                self.free_state(session)
        elif job.error is not None:
            self._fail(job, job.error)
        else:
            session.note_done(job.step, job.output, job.entry.wire_out)
            self._send_output(job)

    def _fail(self, job: StepJob | CallJob, error: RemoteError) -> None:
        session = job.session
        self._release(job)
        self._returns.report(session, job.step.step, error)
        if (
            error.code is ErrorCode.COMPUTE or session.entry.calls
        ):  # later calls build on what this one brought
            self._on_broken(session)
        elif job.attempt is session.attempt:
            for later in self._drop_queued(session):
                self._returns.report(
                    session, later.step.step, WorkError(ErrorCode.STEP, "an earlier step failed")
                )
            session.roll_back(job.step)

    def _send_output(self, job: StepJob | CallJob) -> None:
        session, output = job.session, job.output
        if output is None:
            self._release(job)
        elif isinstance(output, Answer):
            self._send_answer(session, output, partial(self._release, job))
        elif session.next_link is None or session.onward_from is None:
            session.waiting.append(job)
        elif output.step < session.onward_from:
            self._release(job)  # computed for our own keys and values: the next hop has it
        else:
            onward = replace(output, deadline_ms=job.left_ms) if job.step.deadline_ms else output
            self._send_onward(session, onward, job.entry.wire_out, partial(self._release, job))

    def _send_answer(self, session: Session, answer: Answer, gone: Gone | None = None) -> None:
        if answer.step > session.entry.answered:
            self._return(session, _of_epoch(answer, session), gone)
        elif gone is not None:
            gone()  # the gateway has it

    def _return(self, session: Session, answer: Answer, gone: Gone | None) -> None:
        if answer.kind is not AnswerKind.CALL:
            self._returns.send(session, answer, gone)
            return
        for part in parts_of(answer):
            self._returns.send(session, part, gone if part.rows == 1 else None)

    def _send_again(self, session: Session, done: DoneStep) -> None:
        self._stats.steps_repeated += 1
        if isinstance(done.output, Answer):
            self._send_answer(session, done.output)
        elif done.output is not None:
            again = replace(done.output, flags=done.output.flags | StepFlag.REPLAY, deadline_ms=0)
            self._send_onward(session, again, done.wire)

    def _send_onward(self, session: Session, step: Step, wire: WireDtype, gone: Gone | None = None) -> None:
        """Send a step to the next hop, on the present route and in its element type."""
        assert session.next_link is not None
        entry = session.entry
        if wire is not entry.wire_out:
            axes = 0 if step.is_memory else entry.axes
            step = replace(step, payload=in_wire(step.payload, step.rows, axes, wire, entry.wire_out))
        step = _of_epoch(step, session)
        for part in parts_of(step) if session.entry.calls else (step,):
            is_last = part is step or part.rows == 1
            error = self._outbox.put(session.next_link, part, gone if is_last else None)
            if isinstance(error, ProtocolError):  # too big for the next hop; a lost link is told by itself
                self._returns.report(session, step.step, error)

    def _hold(self, job: StepJob | CallJob) -> None:
        size_bytes = job.size_bytes
        job.session.pending.add(size_bytes)
        self._count_pending(job, size_bytes)

    def _release(self, job: StepJob | CallJob) -> None:
        size_bytes = job.size_bytes
        job.session.pending.remove(size_bytes)
        self._count_pending(job, -size_bytes)

    def _count_pending(self, job: StepJob | CallJob, more: int) -> None:
        """Calls may be far larger than steps; the memory budget counts them, so steps keep the limit to themselves."""
        if isinstance(job, CallJob):
            self._outbox.call_bytes += more
        else:
            self._pending_bytes += more

    def _crypto_us(self, session: Session, link: Link, step: Step) -> int:
        """Opening this step, and sealing the last message that went the way its output will go."""
        if not int(step.flags) & _TRACE:
            return 0
        onward = session.next_link or session.returned_on or link
        return int(link.last_open_us + onward.last_seal_us)

    def _count(self, job: StepJob | CallJob) -> None:
        """What was computed, whether somebody waits for it or not."""
        if job.error is not None or not job.compute_s:
            return
        if job.session.trace is not None:
            job.session.trace.note(job)
        done = job.session.done
        done.steps += 1
        done.rows += job.step.rows
        done.compute_s += job.compute_s
        done.queue_s += job.queue_s
        stats = self._stats
        stats.steps_run += 1
        stats.rows_run += job.step.rows
        stats.queue_s += job.queue_s
        stats.compute_s += job.compute_s
        if isinstance(job, CallJob):
            stats.calls_run += 1
            stats.call_bytes += job.size_bytes
        elif job.was_alone:
            self._slices.note_compute(job.session.held, job.entry, job.step.rows, job.compute_s)


def _of_epoch(output: SomeOutput, session: Session) -> SomeOutput:
    """An output of an older route, marked for the present one."""
    return output if output.epoch == session.epoch else replace(output, epoch=session.epoch)


def hop_lost(session: Session, text: str) -> WorkError:
    """The failure that tells a gateway to plan without the node after this one."""
    return WorkError(ErrorCode.HOP_LOST, text, hop=session.entry.hop + 1)
