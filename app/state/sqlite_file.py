"""The one file of a gateway's state: opened, locked, and used by one thread of its own.

Write-ahead logging keeps it whole when the process is killed. One gateway has a file at a time: several share a Redis.
"""

from __future__ import annotations

import asyncio
import os
import sqlite3
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import TypeVar

from app.state.state import StateError, StateFullError, StateInUseError
from app.state.trouble import Part

T = TypeVar("T")

VERSION = 1  # of the tables below, as `user_version`
OWNER_ONLY = 0o600
FOLDER_OWNER_ONLY = 0o700
TABLES = """
CREATE TABLE taken (key TEXT NOT NULL, at REAL NOT NULL, cost INTEGER NOT NULL);
CREATE INDEX taken_by_key ON taken (key, at);
CREATE INDEX taken_by_time ON taken (at);
CREATE TABLE kept (
    number INTEGER PRIMARY KEY AUTOINCREMENT, shelf TEXT NOT NULL, name TEXT NOT NULL,
    value BLOB NOT NULL, weight INTEGER NOT NULL, until REAL NOT NULL, UNIQUE (shelf, name)
);
CREATE TABLE jobs (
    id TEXT PRIMARY KEY, owner TEXT NOT NULL, created REAL NOT NULL, is_over INTEGER NOT NULL,
    told TEXT NOT NULL, gateway TEXT NOT NULL, size_bytes INTEGER NOT NULL
);
CREATE INDEX jobs_by_owner ON jobs (owner, created);
"""


class StateFile:
    """An open file. `run` is the only way to it."""

    def __init__(self, connection: sqlite3.Connection, thread: ThreadPoolExecutor) -> None:
        self.on_error: Callable[[Part, str], None] = lambda part, reason: None
        self._connection = connection
        self._thread = thread

    async def run(self, part: Part, work: Callable[[sqlite3.Connection], T]) -> T:
        """Do `work` in one transaction. Raises `StateError`."""
        try:
            return await asyncio.get_running_loop().run_in_executor(self._thread, self._transact, work)
        except sqlite3.Error as error:
            self.on_error(part, type(error).__name__)
            if error.sqlite_errorcode == sqlite3.SQLITE_FULL:
                raise StateFullError("the disk of the state file is full") from error
            raise StateError("the state file cannot be used") from error

    def _transact(self, work: Callable[[sqlite3.Connection], T]) -> T:
        with self._connection:
            self._connection.execute("BEGIN IMMEDIATE")
            return work(self._connection)


@asynccontextmanager
async def opened_file(path: Path) -> AsyncIterator[StateFile]:
    """Hold the file open, made if need be, for nobody else to read. Raises `StateError` and `StateInUseError`."""
    with _locked(path), ThreadPoolExecutor(1, thread_name_prefix="state") as thread:
        loop = asyncio.get_running_loop()
        connection = await loop.run_in_executor(thread, _connect, path)
        try:
            yield StateFile(connection, thread)
        finally:
            await loop.run_in_executor(thread, connection.close)


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Be the only gateway of this file; a process that is killed lets go. The lock is a file of its own, because
    closing a second descriptor of a SQLite file would drop SQLite's own locks."""
    try:
        path.parent.mkdir(mode=FOLDER_OWNER_ONLY, parents=True, exist_ok=True)
        descriptor = os.open(path.with_name(path.name + ".lock"), os.O_CREAT | os.O_RDWR, OWNER_ONLY)
    except OSError as error:
        raise StateError(f"the state file {path} cannot be made: {error.strerror}") from error
    try:
        _lock(descriptor, path)
        yield
    finally:
        os.close(descriptor)


def _lock(descriptor: int, path: Path) -> None:
    try:
        import fcntl
    except ImportError:  # Windows: two gateways there must be given two files
        return
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        message = (
            f"another gateway has the state file {path}: give this one another with --state sqlite:///FILE, "
            "or let both share --state redis://HOST"
        )
        raise StateInUseError(message) from None


def _connect(path: Path) -> sqlite3.Connection:
    """Open the file in the thread that will use it, and make its tables."""
    try:
        os.close(os.open(path, os.O_CREAT | os.O_RDWR, OWNER_ONLY))
        path.chmod(OWNER_ONLY)
        connection = sqlite3.connect(path, isolation_level=None)
    except (OSError, sqlite3.Error) as error:
        raise StateError(f"the state file {path} cannot be opened") from error
    try:
        connection.execute("PRAGMA journal_mode=WAL")
        connection.execute("PRAGMA synchronous=NORMAL")  # whole after a crash; the last moment may be missing
        connection.execute("PRAGMA secure_delete=ON")  # jobs hold prompts
        _make_tables(connection, path)
    except sqlite3.Error as error:
        connection.close()
        raise StateError(f"{path} is not a gateway's state file, or it is damaged: move it away") from error
    except StateError:
        connection.close()
        raise
    return connection


def _make_tables(connection: sqlite3.Connection, path: Path) -> None:
    (version,) = connection.execute("PRAGMA user_version").fetchone()
    (num_tables,) = connection.execute("SELECT COUNT(*) FROM sqlite_master").fetchone()
    if version == 0 and num_tables == 0:
        connection.executescript(f"BEGIN; {TABLES} PRAGMA user_version={VERSION}; COMMIT;")
    elif version != VERSION:
        raise StateError(f"{path} is not a state file of this version: move it away, or give another")
