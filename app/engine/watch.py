"""When an answer is late: its first sign, or the next one. Pure: it is told the time and what came.

What a slow network does slowly all the time is not taken for a stall: four times the longest wait that ended well is
always allowed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum, auto
from math import inf
from typing import Any, Final, Literal

PATIENCE: Final = 4.0

LateCode = Literal["first_token_timeout", "stalled"]


class LateError(Exception):
    """An answer did not go on in time."""

    def __init__(self, code: LateCode) -> None:
        super().__init__(code)
        self.code = code


class Sign(Enum):
    """What an event says of an answer."""

    NONE = auto()  # it was taken; it may wait for its turn
    LIFE = auto()  # it is being prepared
    OUTPUT = auto()  # a part of it is there
    LAST_WORK = auto()  # the last part is worked on, which takes as long as the first
    END = auto()  # it is whole; what follows is another answer


@dataclass(frozen=True, slots=True)
class Deadlines:
    """How long to wait, in seconds; `sign_of` tells what an event says."""

    sign_of: Callable[[Any], Sign]
    first_s: float = inf  # for the first output
    stall_s: float = inf  # for a sign after another


NO_DEADLINES: Final = Deadlines(lambda _: Sign.NONE)


class Watch:
    """One answer after the other."""

    due_at: float
    _first_at: float
    _next_at: float
    _last_at: float
    _longest_s: float
    _has_output: bool

    def __init__(self, deadlines: Deadlines, now: float) -> None:
        self._deadlines = deadlines
        self._begin(now)

    def note(self, event: object, now: float) -> None:
        """Take in an event."""
        match self._deadlines.sign_of(event):
            case Sign.NONE:
                return
            case Sign.END:
                self._begin(now)
                return
            case Sign.OUTPUT:
                self._has_output = True
                self._first_at = inf
            case Sign.LAST_WORK:
                self._last_at, self._next_at = now, inf
                self._first_at = now + self._deadlines.first_s
                self.due_at = self._first_at
                return
            case Sign.LIFE:
                pass
        self._longest_s = max(self._longest_s, now - self._last_at)
        self._last_at = now
        self._next_at = now + max(self._deadlines.stall_s, PATIENCE * self._longest_s)
        self.due_at = min(self._first_at, self._next_at)

    def error(self) -> LateError:
        """What it is, now that it is late."""
        is_first = not self._has_output and self._first_at <= self._next_at
        return LateError("first_token_timeout" if is_first else "stalled")

    def _begin(self, now: float) -> None:
        self._has_output = False
        self._longest_s = 0.0
        self._last_at = now
        self._first_at = now + self._deadlines.first_s
        self._next_at = inf
        self.due_at = self._first_at
