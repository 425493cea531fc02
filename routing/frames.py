"""How a step's rows lie in its payload: branches side by side, and rotary positions behind them.

A frame is what a session has at one position: a row of each branch. Rows are frame-major, branch-minor. Where
positions have axes, the rows are followed by [axes, rows] int32, little endian, whatever the rows' element type is.
Memory has places in the stead of positions, and no axes. Knows nothing of what rows are.
"""

from __future__ import annotations

from collections.abc import Iterator

from routing.types import Buffer, WireDtype

AXIS_BYTES = 4  # of one row's position on one axis
# Of one step of memory, as long as others of a session: each hop passes the first on while the next is on its way.
MEMORY_PIECE_ROWS = 512
MEMORY_PIECE_BYTES = 4 << 20


def axes_bytes(rows: int, axes: int) -> int:
    """Bytes behind so many rows."""
    return AXIS_BYTES * rows * axes


def split_payload(payload: Buffer, rows: int, axes: int) -> tuple[memoryview, memoryview]:
    """The rows of a payload, and what follows them: views."""
    content = memoryview(payload).cast("B")
    end = len(content) - axes_bytes(rows, axes)
    return content[:end], content[end:]


def join_payload(rows: Buffer, positions: Buffer) -> Buffer:
    """Rows and what follows them in one buffer; no copy where nothing does."""
    return b"".join((rows, positions)) if len(positions) else rows


def first_rows(payload: Buffer, rows: int, kept: int, axes: int) -> Buffer:
    """The first `kept` of so many rows, with their positions; a view where there are no axes."""
    body, positions = split_payload(payload, rows, axes)
    body = body[: len(body) // rows * kept]
    if not axes:
        return body
    size = axes_bytes(rows, 1)
    return b"".join((body, *(positions[axis * size :][: axes_bytes(kept, 1)] for axis in range(axes))))


def memory_wire(wire_in: WireDtype) -> WireDtype:
    """The element type of memory into a hop: one that takes token ids speaks float32, as every node does."""
    return WireDtype.FLOAT32 if wire_in is WireDtype.INT32 else wire_in


def memory_pieces(num_rows: int, row_bytes: int, branches: int = 1) -> Iterator[tuple[int, int]]:
    """Into which steps memory is cut: (first row, rows) of each, whole places of all branches."""
    rows = min(MEMORY_PIECE_ROWS, MEMORY_PIECE_BYTES // max(row_bytes, 1))
    rows = max(rows // branches, 1) * branches
    for first in range(0, num_rows, rows):
        yield first, min(rows, num_rows - first)
