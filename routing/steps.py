"""Bytes of steps and answers: a fixed 32-byte header, the payload inline, a trailer only when asked for.

Layout: sid 16 | epoch u16 | flags u8 | want or answer kind u8 | step u32 | position u32 | rows u16 |
deadline u16 (units of 100 ms), big endian; payload; with Want.LIST or TRACE: rows u16 each, traces 44 B each,
counts 4 B. A call of blocks comes in parts, and `rows` counts those still to come, see `parts`. What a row holds is
the session's affair (`frames`); here it is bytes. Payloads are never copied here.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from itertools import pairwise

from routing.maps import U16, U32, malformed
from routing.types import (
    MAX_AXES,
    MAX_STREAMS,
    Answer,
    AnswerKind,
    Buffer,
    HopTrace,
    SessionId,
    Step,
    StepFlag,
    Want,
)

HEADER_SIZE = 32
TOKEN_WIDTH = 4  # B: u32 id; u16 where several streams are drawn from a small vocabulary
CANDIDATE_WIDTH = 8  # B: u32 id, f32 logit
TAG_SIZE = 16  # ChaCha20-Poly1305, on a sealed answer
MAX_TRACES = 128

_HEADER = struct.Struct(">16sHBBIIHH")
_TRACE = struct.Struct(">III32x")  # compute, queue, crypto microseconds; 32 B reserved for receipts
_COUNTS = struct.Struct(">HH")
_DEADLINE_UNIT_MS = 100
_WANTS = {int(want): want for want in Want}
_KINDS = {int(kind): kind for kind in AnswerKind}
_KNOWN_FLAGS = sum(int(flag) for flag in StepFlag)
_CALL = int(StepFlag.CALL)
_FLAGS = tuple(
    StepFlag(bits) for bits in range(_KNOWN_FLAGS + 1)
)  # a table, since calling an IntFlag is slow
_TRACE_BIT, _TOKEN_IDS_BIT, _SEALED_BIT, _MEMORY_BIT = (  # plain numbers: to ask an IntFlag is slow, too
    int(flag) for flag in (StepFlag.TRACE, StepFlag.TOKEN_IDS, StepFlag.SEALED, StepFlag.MEMORY)
)
_BESIDES_MEMORY = int(StepFlag.TOKEN_IDS | StepFlag.CALL)
_Trailer = tuple[memoryview, tuple[int, ...], tuple[HopTrace, ...]]


def encode_step(step: Step) -> list[Buffer]:
    """Return the buffers of a step; a plain one is header and payload, nothing more."""
    deadline = min(U16, -(-step.deadline_ms // _DEADLINE_UNIT_MS))
    header = _HEADER.pack(
        step.session_id, step.epoch, step.flags, step.want, step.step, step.position, step.rows, deadline
    )
    if step.want is not Want.LIST and not int(step.flags) & _TRACE_BIT:
        return [header, step.payload]
    return [header, step.payload, _trailer(step.want_rows, step.traces)]


def encode_answer(answer: Answer) -> list[Buffer]:
    """Return the buffers of an answer."""
    header = answer_header(answer)
    if not int(answer.flags) & _TRACE_BIT:
        return [header, answer.payload]
    return [header, answer.payload, _trailer((), answer.traces)]


def answer_header(answer: Answer) -> bytes:
    """Return an answer's 32-byte header; a sealed payload is bound to it."""
    return _HEADER.pack(
        answer.session_id,
        answer.epoch,
        answer.flags,
        answer.kind,
        answer.step,
        answer.position,
        answer.rows,
        0,
    )


def decode_step(content: memoryview) -> Step:
    """Return a step whose payload is a view into `content`; raise `ProtocolError` MALFORMED."""
    session_id, epoch, bits, want_number, number, position, rows, deadline = _unpack(content)
    want = _WANTS.get(want_number)
    flags = _FLAGS[bits]
    if want is None or bits & _SEALED_BIT or rows == 0:
        raise malformed("a step header has an unknown want or flag, or no rows")
    trailer: _Trailer = content[HEADER_SIZE:], (), ()
    if want is Want.LIST or bits & _TRACE_BIT:
        trailer = _split_trailer(trailer[0])
    payload, want_rows, traces = trailer
    if want_rows:
        _check_want_rows(want, want_rows, rows)
    is_call = bool(bits & _CALL)
    if is_call and (want is not Want.LAST or StepFlag.TOKEN_IDS in flags):
        raise malformed("a call of blocks has one answer, and no token ids")
    if not payload or (not is_call and len(payload) % rows):
        raise malformed("a step's payload is not a whole number of rows")
    if bits & _TOKEN_IDS_BIT and not _holds_ids(len(payload), rows):
        raise malformed("a step's payload is not a few token ids per row")
    if bits & _MEMORY_BIT:
        _check_memory(bits, want, want_rows, position)
    deadline_ms = deadline * _DEADLINE_UNIT_MS
    return Step(
        session_id, epoch, number, position, rows, payload, want, want_rows, flags, deadline_ms, traces
    )


def decode_answer(content: memoryview) -> Answer:
    """Return an answer whose payload is a view into `content`; raise `ProtocolError` MALFORMED."""
    session_id, epoch, bits, kind_number, number, position, rows, deadline = _unpack(content)
    kind = _KINDS.get(kind_number)
    flags = _FLAGS[bits]
    if kind is None or deadline:
        raise malformed("an answer header has an unknown kind or a deadline")
    trailer: _Trailer = content[HEADER_SIZE:], (), ()
    if bits & _TRACE_BIT:
        trailer = _split_trailer(trailer[0])
    payload, want_rows, traces = trailer
    answer = Answer(session_id, epoch, number, position, rows, payload, kind, flags, traces)
    if want_rows or not _fits(answer):
        raise malformed("an answer's payload does not fit its kind and row count")
    return answer


def _holds_ids(size: int, rows: int) -> bool:
    """Whether so many bytes can be the ids of all streams for each row, and its positions."""
    numbers, rest = divmod(size, rows * TOKEN_WIDTH)
    return not rest and numbers <= MAX_STREAMS + MAX_AXES


def _check_memory(bits: int, want: Want, want_rows: Sequence[int], position: int) -> None:
    """Memory takes no positions, and nothing comes back but an acknowledgement."""
    if bits & _BESIDES_MEMORY or position:
        raise malformed("memory is confused with tokens or a call")
    if want_rows or want not in (Want.NONE, Want.LIST):
        raise malformed("memory has no rows to give back")


def _unpack(content: memoryview) -> tuple[SessionId, int, int, int, int, int, int, int]:
    if len(content) < HEADER_SIZE:
        raise malformed("a step or answer is cut short")
    session_id: SessionId
    session_id, epoch, bits, choice, number, position, rows, deadline = _HEADER.unpack_from(content)
    if bits > _KNOWN_FLAGS or position + rows > U32:
        raise malformed("a header has unknown flags or a position out of range")
    return session_id, epoch, bits, choice, number, position, rows, deadline


def _fits(answer: Answer) -> bool:
    size = len(answer.payload) - (TAG_SIZE if int(answer.flags) & _SEALED_BIT else 0)
    if answer.rows == 0:  # an acknowledgement
        return size == 0 and answer.kind is AnswerKind.HIDDEN_STATES
    if answer.kind is AnswerKind.CALL:
        return size > 0
    per_row, rest = divmod(size, answer.rows)
    if rest or per_row <= 0:
        return False
    match answer.kind:
        case AnswerKind.CANDIDATES:
            return per_row % CANDIDATE_WIDTH == 0
        case AnswerKind.TOKEN_IDS:
            return per_row % 2 == 0 and TOKEN_WIDTH <= per_row <= MAX_STREAMS * TOKEN_WIDTH
    return True


def _trailer(want_rows: Sequence[int], traces: Sequence[HopTrace]) -> bytes:
    rows = struct.pack(f">{len(want_rows)}H", *want_rows) if want_rows else b""
    packed = [
        _TRACE.pack(min(t.compute_us, U32), min(t.queue_us, U32), min(t.crypto_us, U32)) for t in traces
    ]
    return b"".join((rows, *packed, _COUNTS.pack(len(want_rows), len(traces))))


def _split_trailer(content: memoryview) -> _Trailer:
    if len(content) < _COUNTS.size:
        raise malformed("a trailer is cut short")
    traces_end = len(content) - _COUNTS.size
    num_rows, num_traces = _COUNTS.unpack_from(content, traces_end)
    traces_start = traces_end - num_traces * _TRACE.size
    start = traces_start - 2 * num_rows
    if start < 0 or num_traces > MAX_TRACES:
        raise malformed("a trailer claims more than the message holds")
    rows = struct.unpack_from(f">{num_rows}H", content, start) if num_rows else ()
    traces = tuple([HopTrace(*times) for times in _TRACE.iter_unpack(content[traces_start:traces_end])])
    return content[:start], rows, traces


def _check_want_rows(want: Want, want_rows: Sequence[int], rows: int) -> None:
    if want is not Want.LIST:
        raise malformed("a list of wanted rows is uncalled for")
    if want_rows[-1] >= rows or any(a >= b for a, b in pairwise(want_rows)):
        raise malformed("wanted rows are out of range or out of order")
