"""The rows of a step as tensors, and back: checked on the way in and on the way out.

The only place of the node where bytes and tensors meet. Knows nothing of sessions or of what is computed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from routing.errors import ErrorCode, ProtocolError, RemoteError, WorkError
from routing.frames import join_payload, memory_wire, split_payload
from routing.types import WIDTHS, Buffer, HopEntry, Step, Want, WireDtype
from slicing.batch import Runner
from slicing.buffers import DTYPES, all_finite, float_rows, from_buffer, to_buffer

TORCH_DTYPES = {dtype: DTYPES[dtype.name.lower()] for dtype in WIDTHS}


def wanted_frames(step: Step, branches: int) -> Sequence[int]:
    """The positions that the gateway wants something back for, counted from the step's own."""
    match step.want:
        case Want.NONE:
            return ()
        case Want.LAST:
            return (step.rows // branches - 1,)
        case Want.ALL:
            return range(step.rows // branches)
        case Want.LIST:
            return step.want_rows


def rows_of_frames(frames: Sequence[int], branches: int) -> Sequence[int]:
    """Their rows, of all branches."""
    if branches == 1:
        return frames
    return [frame * branches + branch for frame in frames for branch in range(branches)]


class RowsOfStep(NamedTuple):
    """`rows` rows of a step from `first` on."""

    step: Step
    entry: HopEntry
    first: int
    rows: int


def decode_together(pieces: Sequence[RowsOfStep], runner: Runner) -> list[torch.Tensor] | None:
    """Rows of several steps [rows, hidden], as `decode_rows` makes them one by one.

    None where those have to be looked at one by one: they travel as something other than what is computed with, or
    some are no numbers.
    """
    if runner.dtype is not torch.float32:
        return None
    row_bytes = runner.hidden_size * WIDTHS[WireDtype.FLOAT32]
    payloads = []
    for step, entry, first, rows in pieces:
        if entry.wire_in is not WireDtype.FLOAT32:
            return None
        payloads.append(memoryview(step.payload).cast("B")[first * row_bytes : (first + rows) * row_bytes])
    return float_rows(payloads, runner.hidden_size)


def decode_rows(step: Step, entry: HopEntry, runner: Runner, first: int, rows: int) -> torch.Tensor:
    """Rows of a step from `first` on: [rows, hidden] in the compute dtype, or ids [rows] or [rows, streams] (int64).

    Raises ProtocolError for ids that no embedding has, and what `checked` raises.
    """
    wire = TORCH_DTYPES[entry.wire_in]
    width = entry.streams if entry.wire_in is WireDtype.INT32 else runner.hidden_size
    row_bytes = width * wire.itemsize
    payload = memoryview(step.payload).cast("B")[first * row_bytes : (first + rows) * row_bytes]
    if entry.wire_in is not WireDtype.INT32:
        return checked(from_buffer(payload, wire, width, dtype=runner.dtype), entry.hop)
    ids = from_buffer(payload, wire, width, dtype=torch.int64)
    # A stream that has not begun is fed the id after the vocabulary's last.
    num_ids = runner.vocab_size + (entry.streams > 1)
    if int(ids.min()) < 0 or int(ids.max()) >= num_ids:
        # Checked here since an embedding on a GPU would take the whole process down.
        raise ProtocolError(ErrorCode.MALFORMED, f"a token id outside the vocabulary of {runner.vocab_size}")
    return ids if entry.streams > 1 else ids.reshape(-1)


def decode_places(step: Step, entry: HopEntry, runner: Runner, first: int, rows: int) -> torch.Tensor | None:
    """Rotary positions [axes, rows] (int64) of rows from `first` on; None where they follow from the step's.

    Raises ProtocolError or WorkError for positions that the model does not have.
    """
    if not entry.axes:
        return None
    _, positions = split_payload(step.payload, step.rows, entry.axes)
    all_rows = np.frombuffer(positions, dtype="<i4").reshape(entry.axes, step.rows)
    places = torch.from_numpy(all_rows[:, first : first + rows].astype(np.int64))
    if int(places.min()) < 0 or int(places.max()) >= runner.max_positions:
        # A table of positions on a GPU would take the process down, and some scale what others see to the furthest.
        raise _at_fault(entry.hop, f"rotary positions outside 0 to {runner.max_positions - 1}")
    return places


def decode_memory(step: Step, entry: HopEntry, runner: Runner) -> torch.Tensor:
    """Rows of memory [rows, hidden] in the compute dtype. Raises what `checked` raises."""
    wire = TORCH_DTYPES[memory_wire(entry.wire_in)]
    return checked(from_buffer(step.payload, wire, runner.hidden_size, dtype=runner.dtype), entry.hop)


def checked(hidden_states: torch.Tensor, hop: int) -> torch.Tensor:
    """Hidden states for this hop, if all of them are numbers. Raises ProtocolError or WorkError."""
    if all_finite(hidden_states):
        return hidden_states
    raise _at_fault(hop, "hidden states that are infinite or no numbers")


def encode_rows(hidden_states: torch.Tensor, wire: WireDtype) -> Buffer:
    """Bytes of rows in an element type."""
    return to_buffer(hidden_states, TORCH_DTYPES[wire])


def in_wire(payload: Buffer, rows: int, axes: int, wire: WireDtype, wanted: WireDtype) -> Buffer:
    """The same rows in another element type, rounded where that is narrower; their positions stay as they are."""
    if wire is wanted:
        return payload
    body, positions = split_payload(payload, rows, axes)
    numbers = from_buffer(body, TORCH_DTYPES[wire], 1, dtype=TORCH_DTYPES[wanted])
    return join_payload(encode_rows(numbers, wanted), positions)


def _at_fault(hop: int, text: str) -> RemoteError:
    """What a gateway sends is its own fault; what a node sent may be better on another route."""
    return WorkError(ErrorCode.COMPUTE, text) if hop else ProtocolError(ErrorCode.MALFORMED, text)
