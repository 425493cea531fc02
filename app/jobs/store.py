"""The video jobs that a gateway knows, and their files, within a bound of bytes and of time.

The jobs are in the gateway's state, the files there too or in a folder. Where gateways share the state, each makes its
own jobs and answers for all; a job whose gateway died has failed. Knows nothing of engines and HTTP.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Literal

from app.jobs.errors import RemovedError, StorageError
from app.jobs.folder import JobFolder
from app.jobs.job import INTERRUPTED, Job
from app.state.state import JobBounds, JobFile, JobFiles, JobRow, State, StateError, StateFullError

RECORD_BYTES = 4096  # what a job takes beside its files
MAX_JOBS = 1000
FILES_SPARE_S = 60.0  # how much longer than the job its files may live
INTERRUPTION = "the gateway ended while the job was waiting or running: ask again"


class JobStore:
    """Jobs of one gateway or of its fleet. `open` first."""

    def __init__(self, state: State, folder: JobFolder | None, *, max_bytes: int, lifetime_s: float) -> None:
        """`folder` is for the files, where the state does not keep them itself."""
        self.lifetime_s = lifetime_s
        self._state = state
        self._jobs = state.jobs
        self._folder = folder
        self._bounds = JobBounds(MAX_JOBS, max_bytes, lifetime_s)
        self._owed: dict[str, Job] = {}  # ends that the state could not be told

    @property
    def is_shared(self) -> bool:
        return self._state.is_shared

    @property
    def _files(self) -> JobFiles:
        files = self._state.files or self._folder
        assert files is not None, "files of jobs need a place"
        return files

    async def open(self) -> None:
        """See what an earlier process left; jobs that it did not end have failed. Raises StorageError, StateError."""
        await self.sweep()
        if self._folder is None:
            return
        rows = await self._jobs.rows()
        await self._folder.clean([row.job.id for row in rows])
        for row in rows:
            if row.job.status == "completed" and not (self._folder.path / row.job.id).is_dir():
                await self.remove(row.job)

    async def close(self) -> None:
        if self._folder is not None:
            await self._folder.close()

    # Reading --------------------------------------------------------------------------------------------------

    async def get(self, job_id: str, owner: str) -> Job | None:
        """Return a job to whom it belongs. Raises StateError."""
        row = await self._jobs.get(job_id, owner)
        return None if row is None or _is_expired(row.job) else (await self._checked([row]))[0]

    async def page(
        self, owner: str, *, limit: int, after: str | None = None, order: Literal["asc", "desc"] = "desc"
    ) -> tuple[list[Job], bool]:
        """Return up to `limit` jobs behind the job `after`, and whether there are more.

        Raises KeyError where there is no such job, StateError.
        """
        rows = [row for row in await self._jobs.rows(owner) if not _is_expired(row.job)]
        if order == "desc":
            rows.reverse()
        if after is not None:
            ids = [row.job.id for row in rows]
            if after not in ids:
                raise KeyError(after)
            rows = rows[ids.index(after) + 1 :]
        return await self._checked(rows[:limit]), len(rows) > limit

    async def file(self, job_id: str, name: str) -> JobFile | None:
        """Open one of a job's files, if it is there."""
        return await self._files.open(job_id, name)

    async def noted(self, job_id: str) -> bytes | None:
        """What the gateway that makes a job told of it last."""
        return await self._jobs.noted(job_id)

    async def is_wanted(self, job: Job) -> bool:
        """Whether a job is still to be made."""
        row = await self._jobs.get(job.id, job.owner)
        return row is not None and not row.job.is_over

    # Changing -------------------------------------------------------------------------------------------------

    async def add(self, job: Job) -> None:
        """Keep a new job. Raises StorageError, StateError."""
        if self._folder is not None:
            await self._folder.prepare()
        row = JobRow(job, self._state.gateway_id, RECORD_BYTES)
        with _full_is_ours():
            await self._find_room(job, RECORD_BYTES, lambda: self._jobs.add(row, self._bounds))

    async def update(self, job: Job) -> None:
        """Keep a job's new state, if the state can be reached. Raises RemovedError."""
        with suppress(StateError):
            if not await self._jobs.change(job, self._bounds):
                raise RemovedError

    async def fail(self, job: Job, code: str, message: str) -> None:
        """A job has failed, unless it is over already or was removed. A state that is away is told later."""
        self._owed[job.id] = job.failed(code, message, self.lifetime_s)
        with suppress(StateError):
            await self._pay(job.id)

    async def note(self, job: Job, told: bytes) -> None:
        """Tell the other gateways how far a job is. Raises StateError."""
        await self._jobs.note(job.id, told, self.lifetime_s)

    async def complete(self, job: Job, files: dict[str, bytes]) -> None:
        """Keep a job that is done, with its files: all of them or none.

        Where there is no room, the oldest finished jobs of the same owner are let go. Raises StorageError,
        RemovedError, StateError.
        """
        with _full_is_ours():
            await self._complete(job, files)

    async def remove(self, job: Job) -> None:
        """Forget a job and its files. Raises StateError."""
        self._owed.pop(job.id, None)
        await self._jobs.remove(job.id, job.owner)
        await self._files.remove(job.id)

    async def sweep(self) -> int:
        """Forget the jobs whose time is over, fail those whose gateway died, and return how many there are.

        Raises StateError.
        """
        for job_id in tuple(self._owed):
            await self._pay(job_id)
        rows = await self._jobs.rows()
        for row in rows:
            if _is_expired(row.job):
                await self.remove(row.job)
        left = [row for row in rows if not _is_expired(row.job)]
        await self._checked(left)
        return len(left)

    async def _complete(self, job: Job, files: dict[str, bytes]) -> None:
        if not await self.is_wanted(job):
            raise RemovedError
        size_bytes = RECORD_BYTES + sum(map(len, files.values()))
        await self._find_room(job, size_bytes, lambda: self._reserve(job, size_bytes))
        try:
            await self._files.put(job.id, files, self.lifetime_s + FILES_SPARE_S)
            if not await self._jobs.change(job, self._bounds):
                raise RemovedError
        except (StorageError, RemovedError, StateError):
            with suppress(StateError):
                await self._files.remove(job.id)
                await self._reserve(job, RECORD_BYTES)
            raise

    async def _pay(self, job_id: str) -> None:
        """Tell the state of an end, unless another that looks has done it, or the job was removed meanwhile."""
        if (job := self._owed.get(job_id)) is not None:
            await self._jobs.change(job, self._bounds)
            self._owed.pop(job_id, None)

    async def _reserve(self, job: Job, size_bytes: int) -> bool:
        return await self._jobs.reserve(job.id, job.owner, size_bytes, self._bounds)

    async def _checked(self, rows: list[JobRow]) -> list[Job]:
        """The jobs of these rows, where those whose gateway died have failed."""
        others = [row for row in rows if not row.job.is_over and row.gateway_id != self._state.gateway_id]
        makers = {row.gateway_id for row in others}
        living = await self._state.living(makers) if makers else frozenset()
        dead = {row.job.id for row in others if row.gateway_id not in living}
        jobs = [
            row.job.failed(INTERRUPTED, INTERRUPTION, self.lifetime_s) if row.job.id in dead else row.job
            for row in rows
        ]
        for job in jobs:
            if job.id in dead:
                await self._jobs.change(job, self._bounds)
        return jobs

    async def _find_room(self, job: Job, size_bytes: int, take: Callable[[], Awaitable[bool]]) -> None:
        """Take room for a job, letting go of old ones of the same owner until there is some."""
        await self.sweep()
        while not await take():
            old = [row.job for row in await self._jobs.rows(job.owner) if row.job.is_over]
            if not old:
                message = (
                    f"the videos kept here may take {self._bounds.max_bytes} bytes together, and this one needs "
                    f"{size_bytes} more: delete some, or make it shorter or smaller"
                )
                raise StorageError("storage_full", message)
            await self.remove(old[0])


@contextmanager
def _full_is_ours() -> Iterator[None]:
    """A store without room is no store that is away."""
    try:
        yield
    except StateFullError:
        raise StorageError("storage_full", "the store that the gateway keeps videos in is full") from None


def _is_expired(job: Job) -> bool:
    return job.expires is not None and job.expires <= time.time()
