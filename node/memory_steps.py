"""Which rows of memory a session has taken in: before its first step, and no more than it said there would be.

Steps that are undone or fail come again, and count once. Knows nothing of tensors.
"""

from __future__ import annotations

from routing.errors import ErrorCode, ProtocolError, WorkError
from routing.types import HopEntry, Step


class MemorySteps:
    """The accepted steps of memory of one session, by number, and the first step behind them."""

    def __init__(self) -> None:
        self.rows = 0
        self._steps: list[tuple[int, int]] = []  # (number, rows)
        self._first_other = 0  # number of the session's first step of positions; 0: there is none

    def check(self, step: Step, entry: HopEntry) -> None:
        """Judge the next step. Raises ProtocolError, or WorkError STEP for one that comes too late."""
        if not step.is_memory:
            if entry.memory_rows and not self.rows:
                raise ProtocolError(ErrorCode.MALFORMED, "a step before the memory that it needs")
            return
        if self._first_other:
            raise WorkError(ErrorCode.STEP, "memory after the session's first step")
        check_rows(self.rows + step.rows, entry)

    def accept(self, step: Step) -> None:
        """Count a step that was judged."""
        if step.is_memory:
            self._steps.append((step.step, step.rows))
            self.rows += step.rows
        elif not self._first_other:
            self._first_other = step.step

    def undo_from(self, number: int) -> None:
        """The steps from this number on come again."""
        while self._steps and self._steps[-1][0] >= number:
            self.rows -= self._steps.pop()[1]
        if self._first_other >= number:
            self._first_other = 0


def check_rows(num_rows: int, entry: HopEntry) -> None:
    """Refuse more memory than a session asked for. Raises ProtocolError."""
    if num_rows > entry.memory_rows:
        text = f"{num_rows} rows of memory where {entry.memory_rows} were to come"
        raise ProtocolError(ErrorCode.TOO_BIG, text)
