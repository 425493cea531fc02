"""What a job's end may fail with, beside what its engine raises."""

from __future__ import annotations


class StorageError(Exception):
    """A job or its video cannot be kept; the text says whose bound it is, and names no path."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


class RemovedError(Exception):
    """The job was removed, or failed by another gateway, while it was made."""
