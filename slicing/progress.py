"""How long work (a download, a conversion, a load) tells its caller how far it is.

Knows nothing of terminals: the CLI draws what it is told.
"""

from __future__ import annotations

from typing import Protocol


class Progress(Protocol):
    """Called now and then with what is being done and how many of its bytes are done."""

    def __call__(self, stage: str, done_bytes: int, total_bytes: int) -> None:
        """Note that `done_bytes` of `total_bytes` of a stage ("load", "download", "convert") are done."""


def no_progress(stage: str, done_bytes: int, total_bytes: int) -> None:
    """Tell nobody."""
