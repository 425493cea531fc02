"""State in one SQLite file: for one gateway, kept over restarts.

Requests of the last minute, records and jobs are in the file. Places held, notes of running jobs and pictures go with
the process, as what they are about does.
"""

from __future__ import annotations

import sqlite3
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

from app.state.memory import WINDOW_S, MemoryState, allowance
from app.state.sqlite_file import StateFile, opened_file
from app.state.sqlite_jobs import SqliteJobs
from app.state.sqlite_shelf import SqliteShelf
from app.state.state import Allowance, Bound, Shelf, ShelfName
from app.state.trouble import Part


class SqliteState(MemoryState):
    """What must outlive the process is in the file, the rest as in memory."""

    def __init__(self, file: StateFile) -> None:
        self._file = file
        super().__init__()
        self.jobs = SqliteJobs(file)

    @property
    def on_error(self) -> Callable[[Part, str], None]:
        return self._file.on_error

    @on_error.setter
    def on_error(self, tell: Callable[[Part, str], None]) -> None:
        self._file.on_error = tell

    def shelf(self, name: ShelfName, bound: Bound) -> Shelf:
        return SqliteShelf(self._file, name, bound) if name == "records" else super().shelf(name, bound)

    async def take(self, key: str, per_minute: int, cost: int = 1) -> Allowance:
        return await self._file.run("limits", lambda tables: _take(tables, key, per_minute, cost))


@asynccontextmanager
async def sqlite_state(path: Path) -> AsyncIterator[SqliteState]:
    """Hold the file open. Raises `StateError`."""
    async with opened_file(path) as file:
        yield SqliteState(file)


def _take(tables: sqlite3.Connection, key: str, per_minute: int, cost: int) -> Allowance:
    now = (
        time.time()
    )  # what was taken before a restart counts; what lies ahead was taken before the clock was set back
    tables.execute("DELETE FROM taken WHERE at <= ? OR at > ?", (now - WINDOW_S, now))
    found = "SELECT COALESCE(SUM(cost), 0), MIN(at) FROM taken WHERE key = ?"
    num_taken, oldest = tables.execute(found, (key,)).fetchone()
    is_granted = num_taken + cost <= per_minute
    if is_granted:
        tables.execute("INSERT INTO taken VALUES (?, ?, ?)", (key, now, cost))
        num_taken, oldest = num_taken + cost, now if oldest is None else oldest
    return allowance(is_granted, num_taken, oldest, now, per_minute)
