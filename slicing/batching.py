"""A fair queue in front of the one thread that computes, several sessions' jobs in a call.

What is queued goes at once; only a piece of a prefill may wait for the decode step that is all but here. What goes
together is decided by `batch_choice`. Batches of decode steps that are known to be short are computed by the event loop
itself, while the thread has nothing to do. Knows nothing of models or links: `run` computes parts of jobs, one batch at
a time, and jobs finish on the event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue
from typing import Generic, Protocol, TypeVar

from slicing.batch_choice import MAX_DECODE_ROWS, Lane, Share, Waiting, choose
from slicing.batch_ledger import Ledger

__all__ = ["MAX_DECODE_ROWS", "BatchCounts", "BatchQueue", "Dropped", "Job", "Lane", "Part"]

logger = logging.getLogger(__name__)
Result = TypeVar("Result")

IDLE_LOOK_S = 0.5  # how exact the idle time is where sessions end meanwhile
# Handing a batch over to the thread and back takes 0.1 to 0.5 ms, more where cores are scarce. The loop does nothing
# else while it computes: whoever has something for it waits for a batch as short as this.
SHORT_MS = 20.0
# Until then the loop goes round so often where several sessions decode: what it has just finished leaves (a link and
# its websocket gather what goes together, each for a turn), and what was sent together has come.
SETTLE_TURNS = 4
HISTOGRAM_POWERS = 13  # 1, 2, 4 ... 4096 rows and more


class Dropped(Exception):
    """The session was discarded while a piece of its job was computed."""


class Job(Protocol):
    """One step of one session."""

    @property
    def session(self) -> Hashable:
        """Whose it is: jobs of a session run one after the other."""

    @property
    def tenant(self) -> Hashable:
        """Whose the session is: tenants get equal turns, however many sessions they have."""

    @property
    def lane(self) -> Lane:
        """What it may share a call with."""

    @property
    def stages(self) -> int:
        """How many places compute a step of its session one after the other, this one included; 1: only this."""

    @property
    def rows(self) -> int:
        """Rows still to compute; 0 once it is computed or has failed."""

    def fail(self, error: Exception) -> None:
        """Keep an error, on the compute thread, and have no rows left; must not raise."""

    def finish(self) -> None:
        """Deliver what was computed or failed, on the event loop."""


SomeJob = TypeVar("SomeJob", bound=Job)


@dataclass(frozen=True, slots=True, eq=False)
class Part(Generic[SomeJob]):
    """So many rows of a job are to be computed now: all, or a piece where its lane can split."""

    job: SomeJob
    rows: int


@dataclass(slots=True)
class BatchCounts:
    """What the thread did; numbers that only grow."""

    batches: int = 0
    works: int = 0  # parts of jobs in all batches
    rows: int = 0
    pieces: int = 0  # batches with a piece of a prefill, or all of one, in them
    repeats: int = 0  # batches that failed, and were computed again one by one
    idle_s: float = 0.0  # without work while sessions were open
    by_rows: list[int] = field(
        default_factory=lambda: [0] * HISTOGRAM_POWERS
    )  # batches of 1, 2-3, 4-7, ... rows

    def add(self, works: int, rows: int, *, has_piece: bool) -> None:
        """Count one more batch."""
        self.batches += 1
        self.works += works
        self.rows += rows
        self.pieces += has_piece
        self.by_rows[min(rows.bit_length(), HISTOGRAM_POWERS) - 1] += 1


class _Queue(Generic[SomeJob]):
    """A session's jobs in order, but for one that is computed now."""

    __slots__ = ("company", "is_begun", "is_decode", "jobs", "since")

    def __init__(self, job: SomeJob, since: int, company: Hashable) -> None:
        self.jobs = deque((job,))
        self.wait(since, company)

    def wait(self, since: int, company: Hashable = None) -> None:
        """The first job is new here."""
        self.since, self.company = since, company
        self.is_decode = self.jobs[0].rows <= MAX_DECODE_ROWS
        self.is_begun = False

    def put_back(self, job: SomeJob) -> None:
        """A piece of a prefill was computed: the rest goes before what came behind it, and waits as long as it did."""
        self.jobs.appendleft(job)
        self.is_decode, self.is_begun = False, True

    def waiting(self) -> Waiting:
        """What the decision knows of the first job."""
        job = self.jobs[0]
        return Waiting(
            job.session,
            job.tenant,
            job.lane,
            job.rows,
            self.is_decode,
            self.since,
            self.company,
            self.is_begun,
        )


class BatchQueue(Generic[SomeJob]):
    """Jobs of many sessions on their way through one compute thread.

    `run` is called with parts of one lane: it computes `part.rows` rows of each job and lowers `job.rows` by them. What
    it raises is not the fault of all: each part is computed again alone, and fails alone.

    `submit`, `discard` and `call` belong to the event loop; choosing belongs to whoever computes next, and that is the
    thread but for batches of decode steps that are expected to take `short_ms` or less (0: always the thread).
    """

    def __init__(
        self,
        run: Callable[[Sequence[Part[SomeJob]]], None],
        *,
        clock: Callable[[], float] = time.perf_counter,
        name: str = "compute",
    ) -> None:
        self.counts = BatchCounts()
        self.is_open: Callable[[], bool] = lambda: False  # whether time without work counts as idle
        self.short_ms = SHORT_MS
        self._run = run
        self._clock = clock
        self._loop = asyncio.get_running_loop()
        self._lock = threading.Lock()  # of what is queued and known
        self._computing = threading.Lock()  # held by whoever computes
        self._wakes: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._queues: dict[Hashable, _Queue[SomeJob]] = {}
        self._ledger = Ledger()
        self._ended = clock()  # when the last batch was done
        self._turn = 0  # the number of what the loop has at hand
        self._will_wake = False  # once the loop has taken in what it has at hand
        self._has_turn = False  # a batch is due among the thread's work
        self._running: tuple[int, float] | None = None  # rows (0: a call) and since when
        self._idle_since: float | None = None  # not counted yet; None: not idle, or no session is open
        self._is_watching = False  # the thread looks now and then whether sessions are open
        self._look_s: float | None = None  # of the thread: how long to wait for what is due
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)
        self._thread.start()

    def submit(self, job: SomeJob, company: Hashable = None) -> None:
        """Queue a job behind its session's earlier ones.

        Those of one `company` may share a batch whatever their stages; None: those of this turn of the loop.
        """
        with self._lock:
            self._ledger.note_arrival(job.session, job.lane, job.stages, job.rows, self._clock())
            since = self._ledger.tick()
            if not self._will_wake:
                self._turn = since
            company = self._turn if company is None else company
            queue = self._queues.get(job.session)
            if queue is None:
                self._queues[job.session] = _Queue(job, since, company)
            else:
                queue.jobs.append(job)
                if len(queue.jobs) == 1:
                    queue.wait(since, company)
        self._wake_soon()

    def discard(self, session: Hashable) -> list[SomeJob]:
        """Drop the session's queued jobs and return them: a prefill between two pieces is one of them.

        A job that is computed now is not; it finishes, with `Dropped` where a piece of it is left.
        """
        with self._lock:
            self._ledger.forget(session)
            queue = self._queues.pop(session, None)
            return [] if queue is None else list(queue.jobs)

    @property
    def num_queued(self) -> int:
        """Jobs that wait for the thread."""
        with self._lock:
            return sum(len(queue.jobs) for queue in self._queues.values())

    @property
    def busy(self) -> tuple[int, float]:
        """Rows of the batch that is computed (0: something else), and for how many seconds it has been; 0: idle."""
        running = self._running  # replaced as a whole
        return (0, 0.0) if running is None else (running[0], self._clock() - running[1])

    async def call(self, work: Callable[[], Result]) -> Result:
        """Run something else on the compute thread (loading, measuring), in between jobs; its exception is raised."""
        future: asyncio.Future[Result] = self._loop.create_future()

        def run() -> None:
            try:
                result = work()
            except BaseException as error:
                self._post(_set_exception, future, error)
            else:
                self._post(_set_result, future, result)

        self._wakes.put(run)
        return await future

    async def close(self) -> None:
        """Let the running batch end, drop the queued jobs and stop the thread."""
        with self._lock:
            self._queues.clear()
        self._wakes.put(None)
        await asyncio.to_thread(self._thread.join)

    def _wake_soon(self) -> None:
        if not self._will_wake:
            self._will_wake = True
            # behind what the loop has at hand: steps that came together go together
            self._loop.call_soon(self._settle, SETTLE_TURNS if self._ledger.num_decoders > 1 else 1)

    def _settle(self, turns: int) -> None:
        if turns > 1:
            self._loop.call_soon(self._settle, turns - 1)
        else:
            self._wake()

    def _wake(self) -> None:
        self._will_wake = False
        ended = self._compute_here() if self._computing.acquire(blocking=False) else []
        if not ended:
            self._hand_over()
            return
        if self._queues:
            self._wake_soon()
        self._finish(ended)

    def _compute_here(self) -> list[SomeJob]:
        """Compute the next batch on the loop if it is a short one; returns the jobs that have ended with it."""
        try:
            with self._lock:
                taken = self._take(self._choose_short())
            if not taken:
                return []
            self._count_idle()
            ended = self._run_taken(taken)
            self._running = None
            if self._is_watching:
                self._idle_since = self._clock()
            elif self.is_open():
                self._wakes.put(_nothing)  # for the thread to look
            return ended
        finally:
            self._computing.release()

    def _hand_over(self) -> None:
        with self._lock:
            self._ask_for_turn()

    # By whoever computes --------------------------------------------------------------------------------------

    def _work(self) -> None:
        while (wake := self._next_wake()) is not None:
            with self._computing:
                self._running = 0, self._clock()
                wake()
                self._running = None

    def _next_wake(self) -> Callable[[], None] | None:
        """Wait for work. Time counts as idle while sessions are open and the loop computes nothing either."""
        while self.is_open() or self._look_s is not None:
            look_s, self._look_s = self._look_s, None
            with self._lock:
                self._is_watching = True
                self._idle_since = self._clock() if self._running is None else None
            try:
                return self._wakes.get(timeout=IDLE_LOOK_S if look_s is None else look_s)
            except Empty:
                if look_s is not None:
                    return self._run_next
            finally:
                self._is_watching = False
                self._count_idle()
        return self._wakes.get()

    def _count_idle(self) -> None:
        with self._lock:
            since, self._idle_since = self._idle_since, None
            if since is not None:
                self.counts.idle_s += self._clock() - since

    def _run_next(self) -> None:
        with self._lock:
            self._has_turn = False
            taken = self._take(self._choose())
        if not taken:  # its job went with an earlier batch, or was discarded; or a prefill waits for company
            self._look_s = self._ledger.patience_s if self._queues else None
            return
        ended = self._run_taken(taken)
        if self._queues:
            self._hand_over()
        self._post(self._finish, ended)

    def _run_taken(self, taken: Sequence[tuple[Part[SomeJob], _Queue[SomeJob]]]) -> list[SomeJob]:
        """Compute a batch, and return the jobs that have ended with it."""
        parts = [part for part, _ in taken]
        began = self._clock()
        idle_ms = (began - self._ended) * 1000
        self._running = sum(part.rows for part in parts), began
        rows_before = [part.job.rows for part in parts]
        self._compute(parts)
        self._ended = self._clock()
        ms = (self._ended - began) * 1000
        for part, before in zip(parts, rows_before, strict=True):
            if part.job.rows >= before:  # a bug of `run`: without this the job would go round for ever
                part.job.fail(AssertionError("a part of a job was neither computed nor refused"))
        with self._lock:
            batch = [Share(part.job.session, part.rows) for part in parts]
            has_piece = self._ledger.note_batch(batch, ms, idle_ms)
            ended = [part.job for part, queue in taken if self._has_ended(part.job, queue)]
        self.counts.add(len(parts), sum(part.rows for part in parts), has_piece=has_piece)
        return ended

    def _ask_for_turn(self) -> None:
        """One batch more, behind what the thread has to do. Under the lock."""
        if not self._has_turn:
            self._has_turn = True
            self._wakes.put(self._run_next)

    def _choose(self) -> list[Share]:
        waiting = [queue.waiting() for queue in self._queues.values()]
        return choose(self._ledger.snapshot(waiting, self._clock())) if waiting else []

    def _choose_short(self) -> list[Share]:
        """The next batch if the loop may compute it: decode steps alone, whose time is known to be short."""
        if self._has_turn or not self._queues or not self.short_ms:
            return []
        firsts = [(queue.jobs[0].lane, queue.is_decode) for queue in self._queues.values()]
        if not all(is_decode and lane.max_works > 1 for lane, is_decode in firsts):
            return []
        shares = self._choose()
        lane, rows = self._queues[shares[0].session].jobs[0].lane, sum(share.rows for share in shares)
        return shares if self._ledger.expected_ms(lane, rows) <= self.short_ms else []

    def _take(self, shares: Sequence[Share]) -> list[tuple[Part[SomeJob], _Queue[SomeJob]]]:
        queues = [self._queues[share.session] for share in shares]
        return [
            (Part(queue.jobs.popleft(), share.rows), queue)
            for share, queue in zip(shares, queues, strict=True)
        ]

    def _compute(self, parts: Sequence[Part[SomeJob]]) -> None:
        before = [part.job.rows for part in parts]
        try:
            self._run(parts)
        except Exception as error:
            if len(parts) == 1:
                parts[0].job.fail(error)
                return
            self.counts.repeats += 1
            for part, rows in zip(parts, before, strict=True):
                if part.job.rows == rows:
                    self._compute([part])

    def _has_ended(self, job: SomeJob, queue: _Queue[SomeJob]) -> bool:
        """Whether a job that was computed has nothing left; else it is queued again, in front. Under the lock."""
        is_there = self._queues.get(job.session) is queue
        if job.rows and not is_there:
            job.fail(Dropped())
        if job.rows:
            queue.put_back(job)
            return False
        if is_there and queue.jobs:
            queue.wait(self._ledger.tick())
        elif is_there:
            del self._queues[job.session]
        return True

    def _finish(self, jobs: Sequence[SomeJob]) -> None:
        if len(jobs) == 1:
            jobs[0].finish()
            return
        for job in jobs:
            self._loop.call_soon(job.finish)  # each by itself: what one raises is not the others' trouble

    def _post(self, call: Callable[..., object], *args: object) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody is left to tell
            self._loop.call_soon_threadsafe(call, *args)


def _nothing() -> None:
    """Work that is over at once."""


def _set_result(future: asyncio.Future[Result], result: Result) -> None:
    if not future.done():
        future.set_result(result)


def _set_exception(future: asyncio.Future[Result], error: BaseException) -> None:
    if not future.done():
        future.set_exception(error)
