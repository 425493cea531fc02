"""Turns between sessions, and the one compute thread."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from node.scheduler import MAX_DECODE_ROWS, Scheduler
from tests.node.rig import until


class FakeJob:
    """Writes its name down when it runs; the first of a test waits for `gate`."""

    def __init__(self, name: str, rows: int, log: list[str], gate: threading.Event | None = None) -> None:
        self.name, self.rows, self.log, self.gate = name, rows, log, gate
        self.thread: int | None = None
        self.is_finished = False

    def run(self) -> None:
        if self.gate is not None:
            self.gate.wait(10)
        self.thread = threading.get_ident()
        self.log.append(self.name)

    def finish(self) -> None:
        self.is_finished = True


@pytest_asyncio.fixture
async def scheduler() -> AsyncIterator[Scheduler]:
    made = Scheduler()
    yield made
    await made.close()


async def run_queued(scheduler: Scheduler, jobs: list[tuple[str, FakeJob]], log: list[str]) -> list[str]:
    """Queue all jobs behind one that blocks the thread, then let them go; returns the order they ran in."""
    gate = threading.Event()
    scheduler.submit("blocker", FakeJob("blocker", 1, log, gate))
    for session, job in jobs:
        scheduler.submit(session, job)
    gate.set()
    await until(lambda: all(job.is_finished for _, job in jobs))
    return [name for name in log if name != "blocker"]


def jobs_of(session: str, count: int, rows: int, log: list[str]) -> list[tuple[str, FakeJob]]:
    return [(session, FakeJob(f"{session}{n}", rows, log)) for n in range(1, count + 1)]


async def test_sessions_take_turns_and_keep_their_own_order(scheduler: Scheduler) -> None:
    log: list[str] = []
    jobs = jobs_of("a", 3, 1, log) + jobs_of("b", 2, 1, log) + jobs_of("c", 1, 1, log)
    assert await run_queued(scheduler, jobs, log) == ["a1", "b1", "c1", "a2", "b2", "a3"]


async def test_decode_passes_a_waiting_prefill_but_not_for_ever(scheduler: Scheduler) -> None:
    log: list[str] = []
    jobs = jobs_of("p", 2, MAX_DECODE_ROWS + 1, log) + jobs_of("d", 9, 1, log)
    order = await run_queued(scheduler, jobs, log)
    assert order.index("p1") <= 4
    assert order.index("d1") < order.index("p1")
    assert order.index("p2") <= 9


async def test_a_prefill_does_not_hold_up_another_sessions_decode(scheduler: Scheduler) -> None:
    log: list[str] = []
    jobs = jobs_of("p", 8, 512, log) + jobs_of("d", 1, 1, log)
    assert (await run_queued(scheduler, jobs, log))[0] == "d1"


async def test_every_job_runs_on_one_thread_that_is_not_the_loops(scheduler: Scheduler) -> None:
    log: list[str] = []
    jobs = jobs_of("a", 4, 1, log) + jobs_of("b", 4, 1, log)
    await run_queued(scheduler, jobs, log)
    threads = {job.thread for _, job in jobs}
    assert len(threads) == 1
    assert threading.get_ident() not in threads


async def test_discarded_jobs_never_run(scheduler: Scheduler) -> None:
    log: list[str] = []
    gate = threading.Event()
    scheduler.submit("blocker", FakeJob("blocker", 1, log, gate))
    doomed = jobs_of("a", 3, 1, log)
    last = jobs_of("b", 1, 1, log)
    for session, job in doomed + last:
        scheduler.submit(session, job)
    assert scheduler.discard("a") == [job for _, job in doomed]
    assert scheduler.num_queued <= 2
    gate.set()
    await until(lambda: last[0][1].is_finished)
    assert log == ["blocker", "b1"]
    assert scheduler.discard("a") == []


async def test_a_call_runs_on_the_compute_thread_and_brings_its_error_back(scheduler: Scheduler) -> None:
    assert await scheduler.call(threading.get_ident) != threading.get_ident()

    def fail() -> None:
        raise ValueError("as it is")

    with pytest.raises(ValueError, match="as it is"):
        await scheduler.call(fail)


async def test_closing_drops_what_is_queued_and_ends_the_thread() -> None:
    scheduler = Scheduler()
    log: list[str] = []
    gate = threading.Event()
    scheduler.submit("a", FakeJob("a1", 1, log, gate))
    scheduler.submit("b", FakeJob("b1", 1, log))
    async with asyncio.timeout(5):
        closing = asyncio.create_task(scheduler.close())
        await asyncio.sleep(0)
        gate.set()
        await closing
    assert "b1" not in log
    assert not scheduler._thread.is_alive()
