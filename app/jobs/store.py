"""Jobs and their videos in one folder, kept over restarts, within a bound of bytes and of time.

A job is a folder of its own: `job.json`, and once it is completed its files. Blocking, and meant for one thread at a
time; the gateway's loop calls it through threads where files are written. Knows nothing of engines and HTTP.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Literal

from app.jobs.files import UNFINISHED, is_disk_full, write_whole
from app.jobs.job import INTERRUPTED, Job

log = logging.getLogger(__name__)

RECORD = "job.json"
LOCK = "lock"
RECORD_BYTES = 4096  # what a job takes beside its files, at least: one block
MAX_JOBS = 1000
MAX_RECORD_BYTES = 1 << 20
OWNER_ONLY = 0o700


class StorageError(Exception):
    """A job or its video cannot be kept; the text says whose bound it is, and names no path."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


class JobStore:
    """The jobs of one gateway. `open` first; the folder is made when the first job comes."""

    def __init__(
        self, folder: Path, *, max_bytes: int, lifetime_s: float, is_temporary: bool = False
    ) -> None:
        self.folder = folder
        self.lifetime_s = lifetime_s
        self._is_temporary = is_temporary  # then the folder goes when the process does
        self._max_bytes = max_bytes
        self._jobs: dict[str, Job] = {}  # oldest first
        self._sizes: dict[str, int] = {}
        self._lock: int | None = None  # descriptor of the file that says whose folder this is
        self._changing = threading.RLock()

    def open(self) -> None:
        """Read what an earlier process left; jobs that it did not end have failed. Raises StorageError, OSError."""
        if not self.folder.is_dir():
            return
        self._take_folder()
        found = [job for path in self.folder.iterdir() if path.is_dir() and (job := self._read(path))]
        for job in sorted(found, key=lambda job: job.created):
            self._jobs[job.id] = job
            self._sizes[job.id] = _size_of(self.folder / job.id)
            if not job.is_over:
                message = "the gateway ended while the job was waiting or running: ask again"
                self.fail(job.id, INTERRUPTED, message)
        self.sweep()

    def close(self) -> None:
        """Let another process have the folder."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None
        if self._is_temporary:
            shutil.rmtree(self.folder, ignore_errors=True)

    # Reading --------------------------------------------------------------------------------------------------

    def get(self, job_id: str, owner: str) -> Job | None:
        """Return a job to whom it belongs."""
        job = self._jobs.get(job_id)
        return job if job is not None and job.owner == owner and not _is_expired(job) else None

    def peek(self, job_id: str) -> Job | None:
        """Return a job, whosever it is."""
        return self._jobs.get(job_id)

    def page(
        self, owner: str, *, limit: int, after: str | None = None, order: Literal["asc", "desc"] = "desc"
    ) -> tuple[list[Job], bool]:
        """Return up to `limit` jobs behind the job `after`, and whether there are more. KeyError: no such job."""
        mine = [job for job in self._jobs.values() if job.owner == owner and not _is_expired(job)]
        if order == "desc":
            mine.reverse()
        if after is not None:
            ids = [job.id for job in mine]
            if after not in ids:
                raise KeyError(after)
            mine = mine[ids.index(after) + 1 :]
        return mine[:limit], len(mine) > limit

    def file(self, job_id: str, name: str) -> Path | None:
        """Return the path of one of a job's files, if it is there."""
        path = self.folder / job_id / name
        return path if path.is_file() else None

    @property
    def size_bytes(self) -> int:
        return sum(self._sizes.values())

    @property
    def num_unfinished(self) -> int:
        return sum(not job.is_over for job in self._jobs.values())

    @property
    def is_empty(self) -> bool:
        return not self._jobs

    # Changing -------------------------------------------------------------------------------------------------

    def add(self, job: Job) -> None:
        """Keep a new job. Raises StorageError."""
        with self._changing:
            self.sweep()
            self._make_room(job, RECORD_BYTES)
            path = self.folder / job.id
            try:
                self.folder.mkdir(mode=OWNER_ONLY, parents=True, exist_ok=True)
                self._take_folder()
                path.mkdir(mode=OWNER_ONLY)
                self._jobs[job.id] = job
                self._write(job)
            except OSError as error:
                self.remove(job.id)
                raise _storage_error(error) from error

    def update(self, job: Job) -> None:
        """Keep a job's new state; on a full disk only until the process ends. A job that was removed stays so."""
        with self._changing:
            if job.id not in self._jobs:
                return
            self._jobs[job.id] = job
            try:
                self._write(job)
            except OSError as error:
                log.warning("job %s: its state could not be written: %s", job.id, error.strerror)

    def fail(self, job_id: str, code: str, message: str) -> None:
        """A job has failed, unless it is over already or was removed."""
        with self._changing:
            job = self._jobs.get(job_id)
            if job is not None and not job.is_over:
                self.update(job.failed(code, message, self.lifetime_s))

    def note(self, job: Job) -> None:
        """Keep a job's progress, which is not worth a write."""
        if job.id in self._jobs:
            self._jobs[job.id] = job

    def complete(self, job: Job, files: Mapping[str, bytes]) -> None:
        """Keep a job that is done, with its files: all of them or none. Raises StorageError, KeyError if removed.

        Where there is no room, the oldest finished jobs of the same owner are let go.
        """
        with self._changing:
            if job.id not in self._jobs:
                raise KeyError(job.id)
            self.sweep()
            self._make_room(job, sum(map(len, files.values())))
            path = self.folder / job.id
            try:
                for name, content in files.items():
                    write_whole(path / name, content)
                self._jobs[job.id] = job
                self._write(job)
            except OSError as error:
                for name in files:
                    with suppress(OSError):
                        (path / name).unlink(missing_ok=True)
                raise _storage_error(error) from error

    def remove(self, job_id: str) -> None:
        """Forget a job and its files."""
        with self._changing:
            self._jobs.pop(job_id, None)
            self._sizes.pop(job_id, None)
            shutil.rmtree(self.folder / job_id, ignore_errors=True)

    def sweep(self) -> None:
        """Forget the jobs whose time is over."""
        with self._changing:
            for job in [job for job in self._jobs.values() if _is_expired(job)]:
                self.remove(job.id)

    def _make_room(self, job: Job, size_bytes: int) -> None:
        while self.size_bytes + size_bytes > self._max_bytes or len(self._jobs) > MAX_JOBS:
            old = [one for one in self._jobs.values() if one.is_over and one.owner == job.owner]
            if not old:
                message = (
                    f"the videos kept here may take {self._max_bytes} bytes together, and this one needs "
                    f"{size_bytes} more: delete some, or make it shorter or smaller"
                )
                raise StorageError("storage_full", message)
            self.remove(old[0].id)

    def _write(self, job: Job) -> None:
        write_whole(self.folder / job.id / RECORD, json.dumps(job.to_json()).encode())
        self._sizes[job.id] = _size_of(self.folder / job.id)

    def _read(self, path: Path) -> Job | None:
        """Read one job's folder, without what a crash left half written; what is no job is removed."""
        try:
            for part in path.glob(f"*{UNFINISHED}"):
                part.unlink()
            record = path / RECORD
            if record.stat().st_size > MAX_RECORD_BYTES:
                raise ValueError("too large for a job")
            job = Job.from_json(json.loads(record.read_bytes()))
            if job.id != path.name:
                raise ValueError("a job under another's name")
        except (OSError, ValueError, TypeError, KeyError, AttributeError):
            if path.name.startswith("video_"):
                shutil.rmtree(path, ignore_errors=True)
            return None
        return job

    def _take_folder(self) -> None:
        if self._lock is not None:
            return
        try:
            import fcntl
        except ImportError:  # Windows: two gateways there must be given two folders
            return
        descriptor = os.open(self.folder / LOCK, os.O_CREAT | os.O_RDWR, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(descriptor)
            message = (
                "another gateway keeps its videos in this folder: give this one another DIFFUSE_VIDEOS_DIR"
            )
            raise StorageError("storage_in_use", message) from None
        self._lock = descriptor


def _is_expired(job: Job) -> bool:
    return job.expires is not None and job.expires <= time.time()


def _size_of(path: Path) -> int:
    sizes: Sequence[int] = [one.stat().st_size for one in path.iterdir()]
    return max(RECORD_BYTES, sum(sizes))


def _storage_error(error: OSError) -> StorageError:
    if is_disk_full(error):
        return StorageError("storage_full", "the gateway's disk is full")
    return StorageError("storage_failed", f"it cannot be kept: {error.strerror or type(error).__name__}")
