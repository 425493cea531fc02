"""Calls of blocks in parts: a pass over a video's blocks is larger than any message.

A part is a step or an answer like any other; `rows` counts those still to come, itself included, so 1 is the last.
Each stays within what every link takes, and lets others' messages pass in between. Knows nothing of what a call holds.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import TypeVar

from routing.errors import ErrorCode, ProtocolError
from routing.maps import malformed
from routing.types import Answer, Buffer, Step, StepFlag

PART_BYTES = (
    16 << 20
)  # four sessions' parts may be open on a link at once (outbox), each well below a message's limit
MIN_PART_BYTES = 1 << 20  # of all but the last: a peer must not make us keep thousands of small ones
MAX_CALL_BYTES = 1 << 30  # the streams of Wan 14B at 720p and 81 frames are 774 MB in bfloat16
VERDICTS_BYTES = 256 << 10  # of 128 hops, with a header
# What a call costs is told in rows, like a prefill's, from its size: enough for the scheduler's turns, and to know
# whether a node takes too long for it. More than any decode step has.
MIN_CALL_ROWS = 17
MAX_CALL_ROWS = (1 << 16) - 1
Message = TypeVar("Message", Step, Answer)


def parts_of(message: Message) -> Iterator[Message]:
    """The parts of a whole call or answer, in order. Payloads are views; traces come with the last one."""
    payload = memoryview(message.payload).cast("B")
    num_parts = max(1, -(-len(payload) // PART_BYTES))
    for number in range(num_parts - 1):
        piece = payload[number * PART_BYTES : (number + 1) * PART_BYTES]
        flags = message.flags & ~StepFlag.TRACE
        yield replace(message, rows=num_parts - number, payload=piece, flags=flags, traces=())
    yield replace(message, rows=1, payload=payload[(num_parts - 1) * PART_BYTES :])


class Assembly:
    """The parts of one call so far, which may be `limit_bytes` in all."""

    def __init__(self, limit_bytes: int = MAX_CALL_BYTES) -> None:
        self._limit_bytes = limit_bytes
        self._payloads: list[Buffer] = []
        self._due = 0  # parts still to come; 0: it has not begun
        self.size_bytes = 0

    def add(self, message: Step | Answer) -> list[Buffer] | None:
        """Take the next part; returns all payloads with the last one. Raises ProtocolError MALFORMED or TOO_BIG."""
        if self._due and message.rows != self._due:
            raise malformed("a call's parts are out of order")
        if message.rows > 1 and len(message.payload) < MIN_PART_BYTES:
            raise malformed("a call's part is too small")
        if (
            self.size_bytes + len(message.payload) + (message.rows - 1) * MIN_PART_BYTES
            > self._limit_bytes + PART_BYTES
        ):
            raise ProtocolError(ErrorCode.TOO_BIG, f"a call of more than {self._limit_bytes} B")
        self.size_bytes += len(message.payload)
        self._payloads.append(message.payload)
        self._due = message.rows - 1
        return None if self._due else self._payloads


def most_of_answer(size_bytes: int) -> int:
    """The most that an answer to a call of so many bytes can be: it holds streams as they were sent, and verdicts.

    Differences are sent there and whole numbers back where only one end has begun anew.
    """
    return min(2 * size_bytes + VERDICTS_BYTES, MAX_CALL_BYTES)


def call_rows(size_bytes: int, row_bytes: int) -> int:
    """What a call of so many bytes is taken to cost, in rows."""
    return max(MIN_CALL_ROWS, min(size_bytes // max(row_bytes, 1), MAX_CALL_ROWS))
