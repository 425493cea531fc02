"""How long work (a download, a conversion, a load) tells its caller how far it is.

Knows nothing of terminals: the CLI draws what it is told.
"""

from __future__ import annotations

import threading
from typing import Protocol


class Progress(Protocol):
    """Called now and then with what is being done and how many of its bytes are done."""

    def __call__(self, stage: str, done_bytes: int, total_bytes: int) -> None:
        """Note that `done_bytes` of `total_bytes` of a stage ("load", "download", "convert") are done."""


class LoadStopped(Exception):
    """Raised inside a load to end it early: whoever waited for it has left."""


class StoppableProgress:
    """Passes progress on until it is told to stop; the load that reports to it then ends with `LoadStopped`.

    A thread cannot be cancelled: without this, a Ctrl+C during a download would wait for all of it.
    """

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._stop = threading.Event()

    def stop(self) -> None:
        """End the load at its next sign of progress."""
        self._stop.set()

    def __call__(self, stage: str, done_bytes: int, total_bytes: int) -> None:
        if self._stop.is_set():
            raise LoadStopped
        self._progress(stage, done_bytes, total_bytes)


def no_progress(stage: str, done_bytes: int, total_bytes: int) -> None:
    """Tell nobody."""
