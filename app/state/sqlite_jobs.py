"""Video jobs in the state file: they outlive the process, and what is noted of those that run does not."""

from __future__ import annotations

import json
import sqlite3

from app.jobs.job import Job
from app.state.sqlite_file import StateFile
from app.state.state import JobBounds, JobRow


class SqliteJobs:
    """The table `jobs`."""

    def __init__(self, file: StateFile) -> None:
        self._file = file
        self._notes: dict[str, bytes] = {}

    async def add(self, row: JobRow, bounds: JobBounds) -> bool:
        def work(tables: sqlite3.Connection) -> bool:
            num, total = tables.execute("SELECT COUNT(*), COALESCE(SUM(size_bytes), 0) FROM jobs").fetchone()
            if num >= bounds.max_jobs or total + row.size_bytes > bounds.max_bytes:
                return False
            job = row.job
            values = (job.id, job.owner, job.created, job.is_over, _told(job), row.gateway_id, row.size_bytes)
            tables.execute("INSERT INTO jobs VALUES (?, ?, ?, ?, ?, ?, ?)", values)
            return True

        return await self._file.run("jobs", work)

    async def get(self, job_id: str, owner: str) -> JobRow | None:
        asked = "SELECT told, gateway, size_bytes FROM jobs WHERE id = ? AND owner = ?"
        found = await self._file.run("jobs", lambda tables: tables.execute(asked, (job_id, owner)).fetchone())
        return _row(found) if found else None

    async def rows(self, owner: str | None = None) -> list[JobRow]:
        asked = """
            SELECT told, gateway, size_bytes FROM jobs
            WHERE ? IS NULL OR owner = ? ORDER BY created, rowid
        """
        return await self._file.run(  # read apart in the file's thread: there may be a thousand
            "jobs", lambda tables: [_row(one) for one in tables.execute(asked, (owner, owner))]
        )

    async def change(self, job: Job, bounds: JobBounds) -> bool:
        told = "UPDATE jobs SET told = ?, is_over = ? WHERE id = ? AND NOT is_over"
        values = (_told(job), job.is_over, job.id)
        return await self._file.run("jobs", lambda tables: tables.execute(told, values).rowcount == 1)

    async def reserve(self, job_id: str, owner: str, size_bytes: int, bounds: JobBounds) -> bool:
        def work(tables: sqlite3.Connection) -> bool:
            others = "SELECT COALESCE(SUM(size_bytes), 0) FROM jobs WHERE id <> ?"
            (total,) = tables.execute(others, (job_id,)).fetchone()
            if total + size_bytes > bounds.max_bytes:
                return False
            told = "UPDATE jobs SET size_bytes = ? WHERE id = ?"
            return tables.execute(told, (size_bytes, job_id)).rowcount == 1

        return await self._file.run("jobs", work)

    async def remove(self, job_id: str, owner: str) -> None:
        self._notes.pop(job_id, None)
        told = "DELETE FROM jobs WHERE id = ? AND owner = ?"
        await self._file.run("jobs", lambda tables: tables.execute(told, (job_id, owner)))

    async def note(self, job_id: str, told: bytes, lifetime_s: float) -> None:
        self._notes[job_id] = told

    async def noted(self, job_id: str) -> bytes | None:
        return self._notes.get(job_id)


def _told(job: Job) -> str:
    return json.dumps(job.to_json())


def _row(found: tuple[str, str, int]) -> JobRow:
    told, gateway_id, size_bytes = found
    return JobRow(Job.from_json(json.loads(told)), gateway_id, size_bytes)
