"""The steps of a session as they were sent, kept so that another route can repeat them.

Knows positions, row counts and bytes; nothing of routes or links, and of tensors only how to widen an element.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import numpy as np

from routing.frames import first_rows, join_payload, split_payload
from routing.types import Answer, Buffer, Want, WireDtype


class CannotRemake(Exception):
    """A call of blocks builds on what nodes held, and the next route has none of it. Raised by whoever makes calls."""


# Makes the payload of a call; told whether the route has nothing of the session, so that all must be in it.
MakeCall = Callable[[bool], Buffer]
# What is wrong with a call's answer, without its content; None: nothing. Runs in a thread where the answer is large.
CheckAnswer = Callable[[Answer], str | None]


@dataclass(slots=True, eq=False)
class RecordedStep:
    """A step as it was sent. `wire` is the element type of its payload, `wire_back` that of its answer's rows."""

    position: int
    rows: int
    payload: Buffer = field(repr=False)
    wire: WireDtype
    want: Want
    want_rows: tuple[int, ...] = ()
    number: int = 0  # given once, when it is recorded, and the same on every route
    until: float | None = None  # time.monotonic() at which its deadline runs out
    answer: asyncio.Future[Answer] | None = None  # None: none is wanted, or it was handed out already
    wire_back: WireDtype = WireDtype.FLOAT32
    is_held: bool = False  # never sent: every node held its positions; there is no payload yet
    leaves_out: bool = False  # numbers before it were not sent
    make: MakeCall | None = None  # of a call of blocks: it is made for each route anew
    check: CheckAnswer | None = None
    call_rows: int = 0  # of a call of blocks: what it is taken to cost, in rows (`parts.call_rows`)
    answered_epoch: int = 0  # of a call of blocks: the route that its answer came over
    branches: int = 1  # rows of each position
    axes: int = 0  # positions of each row, behind the rows of the payload
    is_memory: bool = False  # it takes no positions, and nothing undoes it

    @property
    def is_call(self) -> bool:
        """Whether it is a call of blocks."""
        return self.make is not None

    @property
    def work_rows(self) -> int:
        """Rows that are computed for it, about."""
        return self.call_rows or self.rows

    @property
    def num_frames(self) -> int:
        """Positions that its rows take."""
        return 0 if self.is_memory else self.rows // self.branches

    @property
    def end(self) -> int:
        """The position after its last row."""
        return self.position + self.num_frames

    @property
    def is_answered(self) -> bool:
        """Whether nobody needs another answer to it."""
        return self.answer is None or self.answer.done()

    @property
    def wanted(self) -> tuple[int, ...]:
        """The positions that the answer is for, counted from the step's own."""
        match self.want:
            case Want.NONE:
                return ()
            case Want.LAST:
                return (self.num_frames - 1,)
            case Want.ALL:
                return tuple(range(self.num_frames))
            case Want.LIST:
                return self.want_rows

    def left_ms(self, now: float) -> int:
        """What is left of its deadline at `now`, at least 1; 0 where nobody waits for it or there is none."""
        if self.until is None or self.is_answered:
            return 0
        return max(1, int((self.until - now) * 1000))

    def widen_to(self, wire: WireDtype) -> None:
        """Turn 16-bit floats into float32, which loses nothing, for a first hop that takes nothing else."""
        if self.wire is not wire:
            assert wire is WireDtype.FLOAT32
            rows, positions = split_payload(self.payload, self.rows, self.axes)
            self.payload, self.wire = join_payload(widened(rows, self.wire), positions), wire


class Recording:
    """A session's steps in order, without those that a roll back has undone. Numbers only grow."""

    def __init__(self) -> None:
        self._steps: list[RecordedStep] = []
        self._has_forgotten = False
        self.last_number = 0

    def __len__(self) -> int:
        return len(self._steps)

    def __iter__(self) -> Iterator[RecordedStep]:
        """Over the steps that there are now; adding meanwhile is safe."""
        return iter(tuple(self._steps))

    @property
    def answered(self) -> int:
        """Nobody needs another answer to the steps up to this number."""
        return next((step.number - 1 for step in self._steps if not step.is_answered), self.last_number)

    @property
    def unanswered(self) -> list[RecordedStep]:
        """The steps whose answers are due."""
        return [step for step in self._steps if not step.is_answered]

    @property
    def end(self) -> int:
        """The position after its last row; 0 where there is none."""
        return self._steps[-1].end if self._steps else 0

    @property
    def has_sent(self) -> bool:
        """Whether any step was sent."""
        return self._has_forgotten or (bool(self._steps) and not self._steps[-1].is_held)

    def leave_out(self, num_positions: int, rows: int, wire: WireDtype, *, axes: int = 0) -> None:
        """Begin with steps of so many rows that need not be sent, since every node holds their positions."""
        assert not self._steps
        for start in range(0, num_positions, rows):
            count = min(rows, num_positions - start)
            self.add(RecordedStep(start, count, b"", wire, Want.NONE, is_held=True, axes=axes))

    def forget(self, step: RecordedStep) -> None:
        """No route needs this step any more: a call of blocks that was answered, or that cannot be made again."""
        self._steps = [other for other in self._steps if other is not step]
        self._has_forgotten = True

    def add(self, step: RecordedStep) -> None:
        """Number and keep a step; rows recorded at or after its position are forgotten: it overwrites them.

        Memory comes before all others and stays, whatever position the session goes back to.
        """
        assert not step.is_memory or all(other.is_memory for other in self._steps), "memory comes first"
        self.last_number += 1
        step.number = self.last_number
        step.leaves_out = not step.is_held and bool(self._steps) and self._steps[-1].is_held
        while self._steps and not self._steps[-1].is_memory and self._steps[-1].position >= step.position:
            self._steps.pop()
        if self._steps and self._steps[-1].end > step.position:
            _cut(self._steps[-1], step.position)
        self._steps.append(step)


def wants_before(want: Want, want_rows: tuple[int, ...], frames: int) -> tuple[Want, tuple[int, ...]]:
    """What is still wanted of a step of which only the first positions are kept; its last one is not among them.

    Matters where the last hop draws: a row that was drawn for and kept is drawn for again in a replay.
    """
    match want:
        case Want.ALL:
            return Want.LIST, tuple(range(frames))
        case Want.LIST if kept := tuple(row for row in want_rows if row < frames):
            return Want.LIST, kept
    return Want.NONE, ()


def _cut(step: RecordedStep, position: int) -> None:
    """Keep the rows before `position`. Nobody waits for their answer: the last row is undone."""
    frames = position - step.position
    step.payload = first_rows(step.payload, step.rows, frames * step.branches, step.axes)
    step.rows = frames * step.branches
    step.want, step.want_rows = wants_before(step.want, step.want_rows, frames)
    step.answer = None


def widened(payload: Buffer, wire: WireDtype) -> Buffer:
    """The same numbers as float32."""
    if wire is WireDtype.BFLOAT16:  # the upper half of a float32
        halves = np.frombuffer(payload, dtype="<u2").astype("<u4")
        return (halves << 16).tobytes()
    if wire is WireDtype.FLOAT16:
        return np.frombuffer(payload, dtype="<f2").astype("<f4").tobytes()
    return payload
