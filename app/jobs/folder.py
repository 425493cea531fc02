"""Files of jobs in a folder of one gateway, one below it for each job; only its owner reads.

Blocking work is done in threads.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import threading
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

from app.jobs.errors import StorageError
from app.whole_file import UNFINISHED, is_disk_full, write_whole

LOCK = "lock"
OWNER_ONLY = 0o700
PIECE_BYTES = 256 << 10


class JobFolder:
    """The folder; it is made when the first job comes, and goes with the process where it is temporary."""

    def __init__(self, path: Path, *, is_temporary: bool = False) -> None:
        self.path = path
        self._is_temporary = is_temporary
        self._taking = threading.Lock()
        self._lock: int | None = None  # descriptor of the file that says whose folder this is

    async def prepare(self) -> None:
        """Make the folder and be its only gateway. Raises StorageError."""
        try:
            await asyncio.to_thread(self._take_once)
        except OSError as error:
            raise _storage_error(error) from error

    async def clean(self, known: Collection[str]) -> None:
        """Remove what a crash left and what belongs to no job, if there is a folder. Raises StorageError."""
        if self.path.is_dir():
            await self.prepare()
            await asyncio.to_thread(self._clean, known)

    async def close(self) -> None:
        """Let another process have the folder."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None
        if self._is_temporary:
            await asyncio.to_thread(shutil.rmtree, self.path, ignore_errors=True)

    async def put(self, job_id: str, files: dict[str, bytes], lifetime_s: float) -> None:
        """Keep a job's files until it is removed: all of them or none. Raises StorageError."""
        try:
            await asyncio.to_thread(self._put, job_id, files)
        except OSError as error:
            await self.remove(job_id)
            raise _storage_error(error) from error

    async def open(self, job_id: str, name: str) -> OpenFile | None:
        with suppress(OSError):
            return OpenFile(await asyncio.to_thread((self.path / job_id / name).open, "rb"))
        return None

    async def remove(self, job_id: str) -> None:
        await asyncio.to_thread(shutil.rmtree, self.path / job_id, ignore_errors=True)

    def _put(self, job_id: str, files: dict[str, bytes]) -> None:
        folder = self.path / job_id
        folder.mkdir(mode=OWNER_ONLY, exist_ok=True)
        for name, content in files.items():
            write_whole(folder / name, content)

    def _clean(self, known: Collection[str]) -> None:
        for part in self.path.glob(f"video_*/*{UNFINISHED}"):
            part.unlink()
        for path in self.path.glob("video_*"):
            if path.name not in known:
                shutil.rmtree(path, ignore_errors=True)

    def _take_once(self) -> None:
        """A second lock of ours would be refused as another gateway's is."""
        with self._taking:
            self._take()

    def _take(self) -> None:
        self.path.mkdir(mode=OWNER_ONLY, parents=True, exist_ok=True)
        if self._lock is not None:
            return
        try:
            import fcntl
        except ImportError:  # Windows: two gateways there must be given two folders
            return
        descriptor = os.open(self.path / LOCK, os.O_CREAT | os.O_RDWR, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(descriptor)
            message = (
                "another gateway keeps its videos in this folder: give this one another DIFFUSE_VIDEOS_DIR"
            )
            raise StorageError("storage_in_use", message) from None
        self._lock = descriptor


class OpenFile:
    """A file that can be read to its end, whatever becomes of its name."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self.size = os.fstat(file.fileno()).st_size

    async def read(self, start: int, end: int) -> bytes:
        return await asyncio.to_thread(self._read, start, min(PIECE_BYTES, end - start))

    async def close(self) -> None:
        self._file.close()

    def _read(self, start: int, num: int) -> bytes:
        self._file.seek(start)
        return self._file.read(num)


def _storage_error(error: OSError) -> StorageError:
    if is_disk_full(error):
        return StorageError("storage_full", "the gateway's disk is full")
    return StorageError("storage_failed", f"it cannot be kept: {error.strerror or type(error).__name__}")
