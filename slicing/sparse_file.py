"""A local file of which only some byte ranges have arrived, and the note beside it that says which.

The file has its full size from the start, with holes; the note is replaced in one step after the bytes are
on disk, so a process that dies loses at most what it was writing. Knows nothing of where the bytes come
from.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from itertools import pairwise
from pathlib import Path

Range = tuple[int, int]  # [begin, end)


class SparseFile:
    """One file, its size and the ranges it holds. Whoever writes holds the lock of `path` (`cache.locked`)."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._note = path.with_name(path.name + ".ranges.json")

    def size(self) -> int | None:
        """Return the full size in bytes, or None when nothing has arrived."""
        return self._read()[0]

    def missing(self, wanted: Iterable[Range]) -> list[Range]:
        """Return the parts of `wanted` that have not arrived, merged and in order."""
        return subtract(merged(wanted), self._read()[1])

    def read(self, begin: int, end: int) -> bytes:
        """Return the bytes of a range that has arrived."""
        with self.path.open("rb") as stream:
            stream.seek(begin)
            return stream.read(end - begin)

    def create(self, size: int) -> None:
        """Make the file with `size` bytes of holes, unless it is there."""
        if self.size() != size:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with self.path.open("wb") as stream:
                stream.truncate(size)
            self._write(size, [])

    def add(self, begin: int, end: int) -> None:
        """Note that [begin, end), which was written to the file, is there to stay."""
        with self.path.open("rb") as stream:
            os.fsync(stream.fileno())
        size, held = self._read()
        self._write(size or 0, merged([*held, (begin, end)]))

    def _read(self) -> tuple[int | None, list[Range]]:
        """Return the size and the ranges held; nothing at all when the note and the file do not agree."""
        try:
            note = json.loads(self._note.read_text(encoding="utf-8"))
            size, held = int(note["size"]), [(int(begin), int(end)) for begin, end in note["ranges"]]
            is_whole = self.path.stat().st_size == size
        except (OSError, ValueError, KeyError, TypeError):
            return None, []
        return (size, held) if is_whole else (None, [])

    def _write(self, size: int, held: list[Range]) -> None:
        draft = self._note.with_name(f"{self._note.name}.{os.getpid()}")
        draft.write_text(json.dumps({"size": size, "ranges": held}), encoding="utf-8")
        draft.replace(self._note)


def merged(ranges: Iterable[Range]) -> list[Range]:
    """Sort ranges and join those that touch or overlap; empty ones vanish."""
    joined: list[Range] = []
    for begin, end in sorted(item for item in ranges if item[0] < item[1]):
        if joined and begin <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(end, joined[-1][1]))
        else:
            joined.append((begin, end))
    return joined


def subtract(ranges: list[Range], held: list[Range]) -> list[Range]:
    """Return what of `ranges` lies outside `held` (both merged)."""
    left: list[Range] = []
    for begin, end in ranges:
        inside = [(first, last) for first, last in held if first < end and last > begin]
        edges = [(begin, begin), *inside, (end, end)]
        gaps = [(last, first) for (_, last), (first, _) in pairwise(edges)]
        left += [(first, last) for first, last in gaps if first < last]
    return left


def pieces(ranges: Iterable[Range], size: int) -> list[Range]:
    """Cut ranges into parts of at most `size` bytes."""
    return [(first, min(first + size, end)) for begin, end in ranges for first in range(begin, end, size)]
