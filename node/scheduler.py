"""Whose step is computed next, and the one thread that computes it.

Sessions take turns: one job each, then to the back. Small steps (decode) go before large ones (prefill) that wait,
but only a few in a row, so that neither starves. What is queued goes at once; nothing waits for company. Knows
nothing of models or links: a job is something that runs on the thread and finishes on the event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Hashable
from queue import SimpleQueue
from typing import Generic, Protocol, TypeVar

logger = logging.getLogger(__name__)
Result = TypeVar("Result")

MAX_DECODE_ROWS = 16  # a decode step with drafts is about this long; a longer step costs like a prefill
MAX_DECODE_RUN = 4  # decode steps that may pass a waiting prefill: it gets at least every fifth turn


class Job(Protocol):
    """One step of one session."""

    @property
    def rows(self) -> int:
        """Rows of the step: what tells decode from prefill."""

    def run(self) -> None:
        """Compute, on the compute thread. Keeps its own result or error; must not raise."""

    def finish(self) -> None:
        """Deliver what `run` kept, on the event loop."""


SomeJob = TypeVar("SomeJob", bound=Job)


class Scheduler(Generic[SomeJob]):
    """A fair queue in front of one compute thread.

    `submit`, `discard` and `call` belong to the event loop; picking belongs to the thread; one lock lies between.
    """

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._lock = threading.Lock()
        self._wakes: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._queues: dict[Hashable, deque[SomeJob]] = {}
        self._decodes: deque[Hashable] = deque()
        self._prefills: deque[Hashable] = deque()
        self._decode_run = 0
        self._running: tuple[int, float] | None = None  # rows (0: a call) and since when, of the thread
        self._thread = threading.Thread(target=self._work, name="compute", daemon=True)
        self._thread.start()

    def submit(self, session: Hashable, job: SomeJob) -> None:
        """Queue a job behind the session's earlier ones."""
        with self._lock:
            queue = self._queues.get(session)
            if queue is None:
                self._queues[session] = deque((job,))
                self._line_up(session, job)
            else:
                queue.append(job)
        self._wakes.put(self._run_next)

    def discard(self, session: Hashable) -> list[SomeJob]:
        """Drop the session's queued jobs and return them; one that has started is not among them and will finish."""
        with self._lock:
            queue = self._queues.pop(session, None)
            if queue is None:
                return []
            (self._decodes if session in self._decodes else self._prefills).remove(session)
            return list(queue)

    @property
    def num_queued(self) -> int:
        """Jobs that wait for the thread."""
        with self._lock:
            return sum(len(queue) for queue in self._queues.values())

    @property
    def busy(self) -> tuple[int, float]:
        """Rows of the step that the thread computes (0: something else), and for how many seconds it has; 0: idle."""
        running = self._running  # replaced as a whole by the thread
        return (0, 0.0) if running is None else (running[0], time.monotonic() - running[1])

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
        """Let the running job end, drop the queued ones and stop the thread."""
        with self._lock:
            self._queues.clear()
            self._decodes.clear()
            self._prefills.clear()
        self._wakes.put(None)
        await asyncio.to_thread(self._thread.join)

    def _work(self) -> None:
        while (wake := self._wakes.get()) is not None:
            self._running = 0, time.monotonic()
            wake()
            self._running = None

    def _run_next(self) -> None:
        with self._lock:
            picked = self._pick()
        if picked is None:
            return  # its job was discarded
        self._running = picked.rows, time.monotonic()
        try:
            picked.run()
        finally:
            self._post(picked.finish)

    def _pick(self) -> SomeJob | None:
        if self._decodes and not (self._prefills and self._decode_run >= MAX_DECODE_RUN):
            session = self._decodes.popleft()
            self._decode_run += 1
        elif self._prefills:
            session = self._prefills.popleft()
            self._decode_run = 0
        else:
            return None
        queue = self._queues[session]
        job = queue.popleft()
        if queue:
            self._line_up(session, queue[0])
        else:
            del self._queues[session]
        return job

    def _line_up(self, session: Hashable, job: SomeJob) -> None:
        (self._decodes if job.rows <= MAX_DECODE_ROWS else self._prefills).append(session)

    def _post(self, call: Callable[..., object], *args: object) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody is left to tell
            self._loop.call_soon_threadsafe(call, *args)


def _set_result(future: asyncio.Future[Result], result: Result) -> None:
    if not future.done():
        future.set_result(result)


def _set_exception(future: asyncio.Future[Result], error: BaseException) -> None:
    if not future.done():
        future.set_exception(error)
