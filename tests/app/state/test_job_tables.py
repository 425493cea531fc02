"""Video jobs, the same over every form of state."""

from __future__ import annotations

import asyncio
from dataclasses import replace

from app.jobs.job import Job
from app.state.state import JobBounds, JobRow, State

BOUNDS = JobBounds(max_jobs=3, max_bytes=1000, lifetime_s=60.0)


def job(number: int, owner: str = "me") -> Job:
    return Job(f"video_{number}", owner, "filmer", "waves \ud800", "64x48", "1", created=float(number))


async def add(state: State, one: Job, size: int = 100, gateway_id: str = "") -> bool:
    return await state.jobs.add(JobRow(one, gateway_id or state.gateway_id, size), BOUNDS)


async def test_a_job_is_found_by_its_owner_alone_as_it_was_told(state: State) -> None:
    assert await add(state, job(1))
    found = await state.jobs.get("video_1", "me")
    assert found == JobRow(job(1), state.gateway_id, 100)
    assert await state.jobs.get("video_1", "you") is None
    assert await state.jobs.get("video_1", "") is None
    assert await state.jobs.get("video_2", "me") is None


async def test_jobs_of_one_or_all_come_oldest_first(state: State) -> None:
    for one in (job(2), job(1), job(3, owner="")):
        assert await add(state, one)
    assert [row.job.id for row in await state.jobs.rows("me")] == ["video_1", "video_2"]
    assert [row.job.id for row in await state.jobs.rows("")] == ["video_3"]
    assert [row.job.id for row in await state.jobs.rows()] == ["video_1", "video_2", "video_3"]
    assert await state.jobs.rows("nobody") == []


async def test_number_and_bytes_are_bounded_over_all_owners(state: State) -> None:
    assert await add(state, job(1), 600)
    assert not await add(state, job(2, "you"), 401)
    assert await add(state, job(2, "you"), 1)
    assert await add(state, job(3), 1)
    assert not await add(state, job(4), 1)


async def test_additions_at_the_same_time_keep_the_bound(state: State) -> None:
    added = await asyncio.gather(*(add(state, job(number)) for number in range(8)))
    assert sum(added) == 3


async def test_room_is_taken_once_a_size_is_known(state: State) -> None:
    await add(state, job(1))
    await add(state, job(2))
    assert await state.jobs.reserve("video_1", "me", 900, BOUNDS)
    assert not await state.jobs.reserve("video_2", "me", 101, BOUNDS)
    assert await state.jobs.reserve("video_1", "me", 100, BOUNDS)
    assert await state.jobs.reserve("video_2", "me", 101, BOUNDS)
    assert not await state.jobs.reserve("video_3", "me", 1, BOUNDS)
    row = await state.jobs.get("video_2", "me")
    assert row is not None
    assert row.size_bytes == 101


async def test_a_job_changes_until_it_is_over(state: State) -> None:
    await add(state, job(1), gateway_id="maker")
    running = replace(job(1), status="in_progress")
    assert await state.jobs.change(running, BOUNDS)
    failed = running.failed("no_route", "layers 2:4", 60.0)
    assert await state.jobs.change(failed, BOUNDS)
    assert not await state.jobs.change(running.done("1", 60.0), BOUNDS)
    assert await state.jobs.get("video_1", "me") == JobRow(failed, "maker", 100)


async def test_a_job_that_was_removed_stays_so(state: State) -> None:
    await add(state, job(1))
    await state.jobs.note("video_1", b"half", 60.0)
    await state.jobs.remove("video_1", "me")
    assert not await state.jobs.change(job(1), BOUNDS)
    assert await state.jobs.get("video_1", "me") is None
    assert await state.jobs.rows() == []
    assert await state.jobs.noted("video_1") is None
    assert await add(state, job(2), 1000)


async def test_the_last_note_is_found(state: State) -> None:
    await add(state, job(1))
    assert await state.jobs.noted("video_1") is None
    await state.jobs.note("video_1", b"\x01", 60.0)
    await state.jobs.note("video_1", b"\x02", 60.0)
    assert await state.jobs.noted("video_1") == b"\x02"
