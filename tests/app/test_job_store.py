"""The store of video jobs, asked by several at once."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import pytest

from app.jobs.folder import JobFolder
from app.jobs.job import Job
from app.jobs.store import JobStore
from app.state.memory import MemoryJobs, MemoryState
from app.state.state import JobBounds


class SlowJobs(MemoryJobs):
    """A table that others are asked of while it works."""

    async def change(self, job: Job, bounds: JobBounds) -> bool:
        await asyncio.sleep(0.02)
        return await super().change(job, bounds)


async def test_an_end_that_several_tell_at_once_is_told(tmp_path: Path) -> None:
    """While a job fails, requests look at the store, which make up for what is owed."""
    state = MemoryState()
    state.jobs = SlowJobs()
    folder = JobFolder(tmp_path / "videos", is_temporary=True)
    store = JobStore(state, folder, max_bytes=1 << 20, lifetime_s=60.0)
    job = Job("video_1", "me", "filmer", "waves", "64x48", "1")
    await store.add(job)
    await asyncio.gather(store.fail(job, "late", "it was late"), store.sweep(), store.sweep())
    assert (found := await store.get("video_1", "me")) is not None
    assert found.status == "failed"
    await asyncio.gather(store.fail(job, "late", "it was late"), store.remove(job))
    await store.close()


async def test_the_first_jobs_of_a_folder_may_come_at_the_same_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def slow(descriptor: int, how: int) -> None:
        real(descriptor, how)
        time.sleep(0.02)

    fcntl = pytest.importorskip("fcntl")
    real = fcntl.flock
    monkeypatch.setattr(fcntl, "flock", slow)
    folder = JobFolder(tmp_path / "videos", is_temporary=True)
    await asyncio.gather(*(folder.prepare() for _ in range(4)))
    await folder.close()
