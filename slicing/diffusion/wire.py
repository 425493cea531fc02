"""Calls as bytes: passes over blocks on their way to a node, between nodes, and streams on their way back.

u32 length of the header (big endian), header (see `wire_header`), the plan's JSON where it was not sent before,
streams, slots: raw little-endian tensors. A slot that equals one of this or the last pass goes by its digest. What was
sent is remembered at both ends by the same rules: containers of one direction arrive in the order in which they were
packed, so nothing needs to be confirmed. Knows nothing of links, nodes or models.
"""

from __future__ import annotations

import hashlib
import math
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from slicing.diffusion.calls import DIGEST_BYTES, Pass, Plan
from slicing.diffusion.wire_header import (
    MAX_HEADER_BYTES,
    CallHeader,
    Contents,
    HopVerdict,
    SlotEntry,
    decode_header,
    encode_header,
)
from slicing.diffusion.wire_tensors import (
    HELD_BYTES,
    MAX_ROWS,
    BaseKey,
    Bases,
    Buffer,
    Reader,
    TensorEntry,
    WireForm,
    decode,
    decode_stream,
    encode_slot,
    encode_stream,
    is_finite,
)
from slicing.errors import CallError, CallTooLarge, CallUnknown, ModelError

__all__ = ["CallHeader", "CallReceiver", "CallSender", "HopVerdict", "WireForm"]

MAX_PLANS = 8  # of one session: a stack has one or two, AceStep's every other block makes another
# A plan as it is held, for each byte of its JSON: small lists and dictionaries take far more than their letters.
PLAN_FACTOR = 32
# Constants of a session, at each end: for Wan at 720p and 81 frames they are 90 MB. What does not fit is sent again.
MAX_CONSTANT_BYTES = 512 << 20
_LENGTH = struct.Struct(">I")


@dataclass(slots=True)
class _Constant:
    """A tensor that both ends know; the sender needs its size only."""

    size_bytes: int  # with what remembering it takes
    last_pass: int
    tensor: torch.Tensor | None = field(default=None, repr=False)


class Constants:
    """Slots sent before, by digest: those of this pass and the one before. The same at both ends."""

    def __init__(self) -> None:
        self._held: dict[bytes, _Constant] = {}
        self._pass = self._before = -1
        self.size_bytes = 0

    def begin(self, pass_number: int) -> None:
        """A call of this pass comes: what neither it nor the last one used is let go."""
        if pass_number == self._pass:
            return
        self._before, self._pass = self._pass, pass_number
        for digest in [digest for digest, held in self._held.items() if held.last_pass != self._before]:
            self.size_bytes -= self._held.pop(digest).size_bytes

    def find(self, digest: bytes) -> _Constant | None:
        """One that is held; that counts as a use."""
        held = self._held.get(digest)
        if held is not None:
            held.last_pass = self._pass
        return held

    def fits(self, size_bytes: int) -> bool:
        """Whether there is room for one more."""
        return self.size_bytes + size_bytes + HELD_BYTES <= MAX_CONSTANT_BYTES

    def put(self, digest: bytes, size_bytes: int, tensor: torch.Tensor | None = None) -> None:
        """Hold one more."""
        if (before := self._held.pop(digest, None)) is not None:
            self.size_bytes -= before.size_bytes
        self._held[digest] = _Constant(size_bytes + HELD_BYTES, self._pass, tensor)
        self.size_bytes += size_bytes + HELD_BYTES

    def clear(self) -> None:
        """Forget everything."""
        self._held.clear()
        self._pass = self._before = -1
        self.size_bytes = 0


class CallSender:
    """Packs the calls, or the answers, of one direction of one session."""

    def __init__(self, form: WireForm = WireForm.RAW) -> None:
        self.form = form
        self._constants = Constants()
        self._plans: dict[bytes, None] = {}
        self._bases = Bases()
        self._is_fresh = True  # nothing was sent yet

    @property
    def size_bytes(self) -> int:
        """Memory held now: what the receiver has of the streams."""
        return self._bases.size_bytes

    def reset(self) -> None:
        """The receiver is another one, or has forgotten everything: the next call says so and needs nothing before."""
        self._constants.clear()
        self._plans.clear()
        self._bases.clear()
        self._is_fresh = True

    def pack(
        self,
        header: CallHeader,
        made: Pass,
        *,
        first_block: int = 0,
        fresh: bool = False,
        digests: Sequence[bytes | None] | None = None,
    ) -> bytes:
        """A call for whoever runs the blocks from `first_block` of the stack on: slots only used before are left out.

        With `fresh`, as after `reset`. `digests` of the slots, where they are known. Sets the header's form and plan
        digest. Raises `CallError` for what does not travel, and, where differences are sent, for what is no number.
        """
        if fresh:
            self.reset()
        plan = made.plan
        header.plan_digest, header.first_block = plan.digest, plan.first
        self._constants.begin(header.pass_number)
        encoded_plan = b"" if _note_plan(self._plans, plan.digest) else plan.to_json()
        buffers: list[Buffer] = [encoded_plan]
        streams = self._pack_streams(header, made.streams, buffers)
        needed = made.slots_between(first_block, plan.end)
        slots = tuple(
            self._pack_slot(slot, None if digests is None else digests[number], digests is None, buffers)
            if number in needed
            else None
            for number, slot in enumerate(made.slots)
        )
        contents = Contents(self._is_fresh, len(encoded_plan), streams, slots)
        self._is_fresh = False
        return _joined(header, contents, buffers)

    def pack_streams(self, header: CallHeader, streams: Sequence[torch.Tensor]) -> bytes:
        """An answer: the streams after the last block. The header is that of the call, with what was found since."""
        buffers: list[Buffer] = []
        packed = self._pack_streams(header, streams, buffers)
        return _joined(header, Contents(is_fresh=False, plan_bytes=0, streams=packed, slots=()), buffers)

    def _pack_streams(
        self, header: CallHeader, streams: Sequence[torch.Tensor], buffers: list[Buffer]
    ) -> tuple[TensorEntry, ...]:
        header.form = self.form
        self._bases.begin(header.cut)
        entries = []
        for number, stream in enumerate(streams):
            key = BaseKey(number, header.first_block, header.cut)
            entry, pieces = encode_stream(stream, self.form, self._bases, key)
            entries.append(entry)
            buffers += pieces
        return tuple(entries)

    def _pack_slot(
        self, slot: torch.Tensor, digest: bytes | None, is_unknown: bool, buffers: list[Buffer]
    ) -> SlotEntry:
        if digest is not None and self._constants.find(digest) is not None:
            return SlotEntry(None, digest)
        entry, pieces = encode_slot(slot)
        if digest is None and is_unknown and slot.nbytes <= MAX_CONSTANT_BYTES:
            digest = _digest_of(entry, pieces)
            if self._constants.find(digest) is not None:
                return SlotEntry(None, digest)
        buffers += pieces
        if digest is None or not self._constants.fits(slot.nbytes):
            return SlotEntry(entry)
        self._constants.put(digest, slot.nbytes)
        return SlotEntry(entry, digest)


class CallReceiver:
    """Reads what one `CallSender` packs, in order. Tensors come on `device`; nobody may change a slot."""

    def __init__(self, device: torch.device | str = "cpu") -> None:
        self._device = torch.device(device)
        self._constants = Constants()
        self._plans: dict[bytes, Plan] = {}
        self._bases = Bases()
        self.digests: list[bytes | None] = []  # of the slots of the last call

    @property
    def size_bytes(self) -> int:
        """Memory held now: constants, plans, and the streams that differences are to."""
        plans = PLAN_FACTOR * sum(len(plan.to_json()) for plan in self._plans.values())
        return self._constants.size_bytes + plans + self._bases.size_bytes

    def reset(self) -> None:
        """Forget everything: another sender comes."""
        self._constants.clear()
        self._plans.clear()
        self._bases.clear()

    def unpack(
        self,
        payload: Buffer | Sequence[Buffer],
        *,
        blocks_of: Callable[[Plan], tuple[int, int]] | None = None,
        spare_bytes: int | None = None,
    ) -> tuple[CallHeader, Pass]:
        """A call. `blocks_of` says which blocks of its stack are to be run: slots that only earlier ones use may lack.

        It may take `spare_bytes` more memory than its own size (None: any). Raises `CallError` for bytes that hold no
        call, `CallTooLarge` for want of memory, and `CallUnknown` for what is not here. After any of them, nothing
        more of this sender can be read.
        """
        header, contents, reader = _opened(payload)
        expanded_bytes = contents.expanded_bytes(header.form)
        if spare_bytes is not None and expanded_bytes > spare_bytes:
            raise CallTooLarge(
                f"a call takes {expanded_bytes} bytes more than it has, {spare_bytes} are free"
            )
        if contents.is_fresh:
            self.reset()
        self._constants.begin(header.pass_number)
        plan = self._read_plan(header, reader.take(contents.plan_bytes))
        if len(contents.streams) != plan.num_streams or len(contents.slots) < plan.num_slots:
            raise CallError("a call does not bring the streams and slots that its plan names")
        streams = self._read_streams(header, contents, reader)
        slots = [self._read_slot(slot, reader) for slot in contents.slots]
        made = Pass(plan, streams, [_NOTHING if slot is None else slot for slot in slots])
        first = 0 if blocks_of is None else blocks_of(plan)[0]
        if any(slots[number] is None for number in made.slots_between(first, plan.end)):
            raise CallError("a call lacks a slot that its blocks use")
        self.digests = [None if slot is None else slot.digest for slot in contents.slots]
        return header, made

    def unpack_streams(
        self, payload: Buffer | Sequence[Buffer], like: Sequence[torch.Tensor] | None = None
    ) -> tuple[CallHeader, list[torch.Tensor]]:
        """An answer: streams, of the shapes and types of `like`. Raises `CallError` for anything else, NaN included."""
        header, contents, reader = _opened(payload)
        if contents.plan_bytes or contents.slots:
            raise CallError("an answer holds more than streams")
        if like is not None:
            asked = [(tuple(stream.shape), stream.dtype) for stream in like]
            if [(stream.shape, stream.dtype) for stream in contents.streams] != asked:
                raise CallError("an answer holds streams of other shapes or types than were sent")
        return header, self._read_streams(header, contents, reader)

    def _read_plan(self, header: CallHeader, encoded: bytes) -> Plan:
        digest = header.plan_digest
        if encoded:
            plan = _plan_of(encoded)
            if (plan.digest, plan.first) != (digest, header.first_block):
                raise CallError("a call's plan is another than its header names")
        elif (known := self._plans.get(digest)) is not None:
            plan = known
        else:
            raise CallUnknown("a call names a plan that is not here")
        _note_plan(self._plans, digest, plan)
        return plan

    def _read_streams(self, header: CallHeader, contents: Contents, reader: Reader) -> list[torch.Tensor]:
        self._bases.begin(header.cut)
        bases = self._bases if header.form is WireForm.INT8_DELTA else None
        streams = [
            decode_stream(entry, reader, self._device, bases, BaseKey(number, header.first_block, header.cut))
            for number, entry in enumerate(contents.streams)
        ]
        if not all(map(is_finite, streams)):
            raise CallError("a stream holds what is infinite or no number")
        return streams

    def _read_slot(self, slot: SlotEntry | None, reader: Reader) -> torch.Tensor | None:
        if slot is None:
            return None
        if slot.entry is None:
            held = None if slot.digest is None else self._constants.find(slot.digest)
            if held is None or held.tensor is None:
                raise CallUnknown("a call names a constant that is not here")
            return held.tensor
        if slot.digest is not None and not self._constants.fits(slot.entry.full_bytes):
            raise CallError("a session's constants are more than a node keeps")
        tensor = decode(slot.entry, reader, self._device)
        if slot.digest is not None:
            self._constants.put(slot.digest, slot.entry.full_bytes, tensor)
        return tensor


_NOTHING = torch.empty(0)  # stands for a slot that only blocks before use


def _digest_of(entry: TensorEntry, pieces: Sequence[Buffer]) -> bytes:
    """16 bytes that stand for a tensor's type, shape, order in memory and content."""
    digest = hashlib.blake2b(repr(entry.to_json()).encode(), digest_size=DIGEST_BYTES)
    for piece in pieces:
        digest.update(piece)
    return digest.digest()


def _note_plan(plans: dict[bytes, Plan] | dict[bytes, None], digest: bytes, plan: Plan | None = None) -> bool:
    """Make a plan the newest of at most so many; whether it was there."""
    was_there = digest in plans
    plans.pop(digest, None)
    plans[digest] = plan  # type: ignore[assignment]  # the sender needs digests only
    if len(plans) > MAX_PLANS:
        del plans[next(iter(plans))]
    return was_there


def _plan_of(encoded: bytes) -> Plan:
    try:
        return Plan.from_json(encoded)
    except ModelError as error:
        raise CallError(str(error)) from None


def _joined(header: CallHeader, contents: Contents, buffers: list[Buffer]) -> bytes:
    encoded = encode_header(header, contents)
    return b"".join([_LENGTH.pack(len(encoded)), encoded, *buffers])


def _opened(payload: Buffer | Sequence[Buffer]) -> tuple[CallHeader, Contents, Reader]:
    """The header, with every length checked against what came, before any memory is taken."""
    reader = Reader(payload)
    (length,) = _LENGTH.unpack(reader.take(_LENGTH.size))
    if length > MAX_HEADER_BYTES:
        raise CallError("a call's header is too long")
    header, contents = decode_header(reader.take(length))
    if any(math.prod(stream.shape[:-1]) > MAX_ROWS for stream in contents.streams):
        raise CallError(f"a call's stream has more than {MAX_ROWS} rows")
    if contents.size_bytes != reader.left:
        raise CallError(f"a call holds {reader.left} bytes where {contents.size_bytes} are due")
    return header, contents, reader
