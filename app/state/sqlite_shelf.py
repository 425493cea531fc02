"""A shelf in the state file: its values outlive the process."""

from __future__ import annotations

import sqlite3
import time

from app.state.sqlite_file import StateFile
from app.state.state import Bound, Kept, ShelfName


class SqliteShelf:
    """Values by name, the oldest first."""

    def __init__(self, file: StateFile, name: ShelfName, bound: Bound) -> None:
        self._file = file
        self._name = name
        self._bound = bound

    async def put(self, name: str, value: bytes) -> None:
        weight = len(value) if self._bound.counts_bytes else 1
        if weight > self._bound.total:
            return
        row = (self._name, name, value, weight, time.time() + self._bound.lifetime_s)
        await self._file.run(self._name, lambda tables: self._put(tables, row))

    async def get(self, name: str) -> Kept | None:
        found = await self._file.run(self._name, lambda tables: self._get(tables, name))
        left = found[1] - time.time() if found else 0.0
        return Kept(found[0], left) if found and left > 0 else None

    async def remove(self, name: str) -> None:
        told = "DELETE FROM kept WHERE shelf = ? AND name = ?"
        await self._file.run(self._name, lambda tables: tables.execute(told, (self._name, name)))

    def _put(self, tables: sqlite3.Connection, row: tuple[object, ...]) -> None:
        tables.execute(
            "INSERT OR REPLACE INTO kept (shelf, name, value, weight, until) VALUES (?, ?, ?, ?, ?)", row
        )
        tables.execute("DELETE FROM kept WHERE shelf = ? AND until <= ?", (self._name, time.time()))
        weighed = "SELECT COALESCE(SUM(weight), 0) FROM kept WHERE shelf = ?"
        (total,) = tables.execute(weighed, (self._name,)).fetchone()
        while total > self._bound.total:
            oldest = "SELECT number, weight FROM kept WHERE shelf = ? ORDER BY number LIMIT 1"
            number, weight = tables.execute(oldest, (self._name,)).fetchone()
            tables.execute("DELETE FROM kept WHERE number = ?", (number,))
            total -= weight

    def _get(self, tables: sqlite3.Connection, name: str) -> tuple[bytes, float] | None:
        asked = "SELECT value, until FROM kept WHERE shelf = ? AND name = ?"
        found: tuple[bytes, float] | None = tables.execute(asked, (self._name, name)).fetchone()
        return found
