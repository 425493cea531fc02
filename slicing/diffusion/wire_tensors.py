"""Tensors as bytes: as they are, as bfloat16, or as int8 differences to what the receiver has.

Both ends rebuild a difference with the same arithmetic, and the sender subtracts what the receiver rebuilt: errors do
not add up (measured on the small picture model: 0.18 of 255 levels, at half of bfloat16's bytes). The order of a
tensor's dimensions in memory travels too, for kernels give other bits in another order. Knows nothing of calls or of
how bytes travel.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from itertools import pairwise
from typing import TypeAlias

import numpy as np
import torch

from slicing.diffusion.calls import DTYPES, memory_order, restore_order
from slicing.diffusion.patches import Cut
from slicing.errors import CallError, CallUnknown

Buffer: TypeAlias = bytes | bytearray | memoryview

DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}
SHORTENED = (torch.float32, torch.float16, torch.bfloat16)  # what other forms than the raw one are made of
MAX_DIMENSIONS = 8
MAX_SIZE = 1 << 20  # of one dimension: the largest known models have 2^17 tokens
MAX_ROWS = 1 << 19  # of a stream in all, guidance in one call: attention takes their square, undisturbed
MAX_ELEMENTS = 1 << 40  # so that no product of sizes is a number to be afraid of; bytes are counted besides
MAX_EMPTY_ELEMENTS = (
    1 << 24
)  # as many as an empty tensor would have with ones for zeros: blocks may reduce it to those
SCALE = torch.bfloat16  # of an int8 row: the range of float32 in two bytes, and the loop mends what it rounds
STEPS = 127.0
PIECE_ELEMENTS = 1 << 18  # of a difference at a time: what is made on the way stays in the processor's cache
# Wan 2.2 TI2V has an embedding of the step for each token, six times as large as the stream and all but the same: of
# tensors from this size on, runs of equal rows are sent once.
RUNS_FROM_BYTES = 1 << 20
MAX_RUNS = 64
HELD_BYTES = 1 << 10  # what remembering a tensor takes beside its elements: many may be tiny, or empty


class WireForm(StrEnum):
    """How the streams of a pass travel. Other tensors are always sent as they are."""

    RAW = "raw"
    BF16 = "bf16"
    INT8_DELTA = "int8-delta"


@dataclass(frozen=True)
class TensorEntry:
    """One tensor as a header names it."""

    form: WireForm
    dtype: torch.dtype
    shape: tuple[int, ...]
    order: tuple[int, ...] | None = None  # dimensions from slowest to fastest in memory; None: as they are
    runs: tuple[int, ...] | None = (
        None  # lengths of runs of equal rows along dimension 1; one row of each is sent
    )
    begins: bool = False  # a difference to zero, the first of its stream

    @property
    def sent_shape(self) -> tuple[int, ...]:
        """The sizes of what is sent, in the order of memory."""
        if self.runs is not None:
            return (self.shape[0], len(self.runs), *self.shape[2:])
        return self.shape if self.order is None else tuple(self.shape[dim] for dim in self.order)

    @property
    def num_rows(self) -> int:
        """Rows of the last dimension in memory: each has its own scale."""
        *rows, width = self.sent_shape or (0,)
        return math.prod(rows) if width else 0

    @property
    def full_bytes(self) -> int:
        """What the tensor itself takes."""
        return self.dtype.itemsize * math.prod(self.shape)

    @property
    def size_bytes(self) -> int:
        """What it takes in the container."""
        num_elements = math.prod(self.sent_shape)
        if self.form is WireForm.BF16:
            return 2 * num_elements
        if self.form is WireForm.INT8_DELTA:
            return num_elements + SCALE.itemsize * self.num_rows
        return self.dtype.itemsize * num_elements

    def to_json(self) -> list[object]:
        """As it stands in a header; what is as usual is left out at the end."""
        order = None if self.order is None else list(self.order)
        runs = None if self.runs is None else list(self.runs)
        shape, begins = list(self.shape), self.begins or None
        values: list[object] = [self.form.value, DTYPE_NAMES[self.dtype], shape, order, runs, begins]
        while values[-1] is None:
            values.pop()
        return values

    @classmethod
    def from_json(cls, value: object) -> TensorEntry:
        """Read one that came from elsewhere. Raises `CallError`."""
        match value:
            case [str(form), str(dtype), list(shape), *rest] if (
                dtype in DTYPES and len(shape) <= MAX_DIMENSIONS and len(rest) <= 3
            ):
                order, runs, begins = (*rest, None, None, None)[:3]
                if begins not in (None, True):
                    raise _unknown()
                entry = cls(
                    _form_named(form),
                    DTYPES[dtype],
                    _sizes(shape),
                    _order(order, len(shape)),
                    _lengths(runs),
                    bool(begins),
                )
                _check(entry)
                return entry
        raise _unknown()


def _unknown() -> CallError:
    return CallError("a call's header names a tensor of no known form, type or shape")


def _form_named(name: str) -> WireForm:
    if name in tuple(WireForm):
        return WireForm(name)
    raise _unknown()


def _sizes(shape: list[object]) -> tuple[int, ...]:
    sizes = tuple(size for size in shape if type(size) is int and 0 <= size <= MAX_SIZE)
    most = MAX_ELEMENTS if all(sizes) else MAX_EMPTY_ELEMENTS
    if len(sizes) < len(shape) or math.prod(max(size, 1) for size in sizes) > most:
        raise _unknown()
    return sizes


def _order(value: object, num_dimensions: int) -> tuple[int, ...] | None:
    if value is None:
        return None
    is_list = isinstance(value, list) and all(type(dim) is int for dim in value)
    if isinstance(value, list) and is_list and sorted(value) == list(range(num_dimensions)):
        return tuple(value)
    raise CallError("a call's header names an order that is none of a tensor's dimensions")


def _lengths(value: object) -> tuple[int, ...] | None:
    if value is None:
        return None
    is_list = isinstance(value, list) and 0 < len(value) <= MAX_RUNS
    if isinstance(value, list) and is_list and all(type(it) is int and 0 < it <= MAX_SIZE for it in value):
        return tuple(value)
    raise CallError("a call's header names runs that are none")


def _check(entry: TensorEntry) -> None:
    if entry.form is not WireForm.RAW and entry.dtype not in SHORTENED:
        raise CallError("a call's header shortens a tensor that is not of floating point")
    if entry.begins and entry.form is not WireForm.INT8_DELTA:
        raise CallError("a call's header begins differences with what is none")
    if entry.form is WireForm.INT8_DELTA and not entry.shape:
        raise CallError("a call's header sends differences of a tensor without rows")
    if entry.runs is not None:
        is_plain = entry.form is WireForm.RAW and entry.order is None and len(entry.shape) >= 2
        if not is_plain or sum(entry.runs) != entry.shape[1]:
            raise CallError("a call's header names runs that are none")


@dataclass(frozen=True)
class BaseKey:
    """Which stream of a pass, before which block, and of which patch: differences are to the last step's."""

    stream: int
    first_block: int
    cut: Cut | None


class Bases:
    """What the receiver of one direction has of each stream, in the order of memory. The same at both ends."""

    def __init__(self) -> None:
        self._held: dict[BaseKey, torch.Tensor] = {}

    @property
    def size_bytes(self) -> int:
        """Memory held now."""
        return sum(base.nbytes + HELD_BYTES for base in self._held.values())

    def begin(self, cut: Cut | None) -> None:
        """A pass of this cut comes: what was kept of other cuts is not needed any more."""
        kind = None if cut is None else (cut.grid, cut.of)
        for key in [key for key in self._held if (key.cut and (key.cut.grid, key.cut.of)) != kind]:
            del self._held[key]

    def find(self, key: BaseKey, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor | None:
        """The base of a stream, where there is one of this shape and type."""
        held = self._held.get(key)
        return held if held is not None and (held.shape, held.dtype) == (torch.Size(shape), dtype) else None

    def put(self, key: BaseKey, rebuilt: torch.Tensor) -> None:
        """The receiver has this now. It must not be changed by anybody."""
        self._held[key] = rebuilt

    def clear(self) -> None:
        """Forget everything."""
        self._held.clear()


def encode_raw(tensor: torch.Tensor) -> tuple[TensorEntry, list[memoryview]]:
    """A tensor as it is. Raises `CallError` for a type that does not travel."""
    entry, dense = _dense(tensor)
    return entry, [bytes_of(dense)]


def encode_slot(tensor: torch.Tensor) -> tuple[TensorEntry, list[memoryview]]:
    """A tensor as it is, runs of equal rows once. Raises `CallError` for a type that does not travel."""
    starts = _starts_of_runs(tensor)
    if starts is None:
        return encode_raw(tensor)
    runs = tuple(end - start for start, end in pairwise([*starts, tensor.shape[1]]))
    rows = tensor.detach()[:, starts].contiguous()
    return TensorEntry(WireForm.RAW, tensor.dtype, tuple(tensor.shape), runs=runs), [bytes_of(rows)]


def encode_stream(
    tensor: torch.Tensor, form: WireForm, bases: Bases, key: BaseKey
) -> tuple[TensorEntry, list[memoryview]]:
    """A stream in `form`; the first difference is to zero. Raises `CallError` for what is no number."""
    if form is WireForm.RAW or tensor.dtype not in SHORTENED or not tensor.dim():
        return encode_raw(tensor)
    entry, dense = _dense(tensor)
    if form is WireForm.BF16:
        return replace(entry, form=form), [bytes_of(dense.to(torch.bfloat16))]
    base = bases.find(key, dense.shape, dense.dtype)
    scale, steps, rebuilt = _difference(dense, torch.zeros_like(dense) if base is None else base)
    bases.put(key, rebuilt)
    return replace(entry, form=form, begins=base is None), [bytes_of(scale), bytes_of(steps)]


def decode(entry: TensorEntry, reader: Reader, device: torch.device) -> torch.Tensor:
    """A tensor that is not a difference, in fresh aligned storage."""
    dtype = torch.bfloat16 if entry.form is WireForm.BF16 else entry.dtype
    sent = reader.tensor(entry.sent_shape, dtype).to(device=device, dtype=entry.dtype)
    if entry.runs is not None:
        return sent.repeat_interleave(torch.tensor(entry.runs, device=device), 1)
    return _in_order(sent, entry)


def decode_stream(
    entry: TensorEntry, reader: Reader, device: torch.device, bases: Bases | None, key: BaseKey
) -> torch.Tensor:
    """A stream of any form; `bases` is None where the sender never sends differences.

    Raises `CallUnknown` for a difference to what is not here.
    """
    if entry.runs is not None:
        raise CallError("a call sends a stream in runs")
    if entry.form is not WireForm.INT8_DELTA:
        dtype = torch.bfloat16 if entry.form is WireForm.BF16 else entry.dtype
        sent = reader.tensor(entry.sent_shape, dtype).to(device=device, dtype=entry.dtype)
        if bases is not None:
            bases.put(key, sent.clone())
        return _in_order(sent, entry)
    base = None if bases is None else bases.find(key, entry.sent_shape, entry.dtype)
    if entry.begins:
        base = torch.zeros(entry.sent_shape, dtype=entry.dtype, device=device)
    if base is None:
        raise CallUnknown("a call sends a difference to a stream that is not here")
    scale = reader.tensor((*entry.sent_shape[:-1], 1), SCALE).to(device)
    steps = reader.tensor(entry.sent_shape, torch.int8).to(device)
    assert bases is not None
    rebuilt = _rebuilt(base, scale, steps)
    bases.put(key, rebuilt)
    return _in_order(rebuilt.clone(), entry)


def is_finite(tensor: torch.Tensor) -> bool:
    """Whether all elements are numbers. Types without infinities always are."""
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.resolve_conj())
    if not tensor.is_floating_point() or not tensor.numel():
        return True
    low, high = torch.aminmax(tensor)  # a NaN anywhere is in both; nothing of the tensor's size is made
    return math.isfinite(float(low)) and math.isfinite(float(high))


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """The bytes of a tensor, row by row; no copy where it lies so in this machine's memory."""
    return tensor.detach().to("cpu").contiguous().reshape(-1).view(torch.uint8).numpy().data


class Reader:
    """Reads what came in one or several buffers, from front to back. The caller has counted the bytes."""

    def __init__(self, payload: Buffer | Sequence[Buffer]) -> None:
        buffers = [payload] if isinstance(payload, bytes | bytearray | memoryview) else payload
        self._buffers = [memoryview(buffer).cast("B") for buffer in buffers if len(buffer)][::-1]
        self.left = sum(len(buffer) for buffer in self._buffers)

    def take(self, size: int) -> bytes:
        """The next bytes. Raises `CallError` where there are fewer."""
        out = bytearray(min(size, self.left))
        self.read_into(memoryview(out), size)
        return bytes(out)

    def tensor(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """The next elements in fresh storage: what arrives may lie at any address, which costs speed and other bits."""
        if dtype.itemsize * math.prod(shape) > self.left:
            raise CallError("a call is cut short")
        out = torch.empty(tuple(shape), dtype=dtype)
        self.read_into(out.reshape(-1).view(torch.uint8).numpy().data, out.nbytes)
        if dtype is torch.bool and out.numel() and int(out.view(torch.uint8).max()) > 1:
            raise CallError("a call holds a truth value that is neither true nor false")
        return out

    def read_into(self, out: memoryview, size: int) -> None:
        """Fill `out` with the next `size` bytes."""
        if size > self.left:
            raise CallError("a call is cut short")
        self.left -= size
        target, at = np.frombuffer(out, dtype=np.uint8), 0
        while at < size:
            head = self._buffers.pop()
            piece = head[: size - at]
            target[at : at + len(piece)] = np.frombuffer(piece, dtype=np.uint8)
            at += len(piece)
            if len(piece) < len(head):
                self._buffers.append(head[len(piece) :])


def _dense(tensor: torch.Tensor) -> tuple[TensorEntry, torch.Tensor]:
    """A tensor as it lies in memory, and how to name it."""
    if tensor.dtype not in DTYPE_NAMES:
        raise CallError(f"a tensor of {tensor.dtype} does not travel")
    tensor = tensor.detach().resolve_conj().resolve_neg()
    order = memory_order(tensor)
    is_plain = order == tuple(range(tensor.dim()))
    entry = TensorEntry(WireForm.RAW, tensor.dtype, tuple(tensor.shape), None if is_plain else order)
    return entry, tensor.permute(order).contiguous()


def _in_order(sent: torch.Tensor, entry: TensorEntry) -> torch.Tensor:
    return sent if entry.order is None else restore_order(sent, entry.order)


def _starts_of_runs(tensor: torch.Tensor) -> list[int] | None:
    """Where rows along dimension 1 differ from the one before; None where that is too often, or the tensor small."""
    is_large = tensor.dim() >= 2 and tensor.nbytes >= RUNS_FROM_BYTES and tensor.shape[1] > MAX_RUNS
    if not is_large or tensor.dtype not in SHORTENED or not tensor.is_contiguous():
        return None
    bits = tensor.detach().view(torch.int32 if tensor.dtype is torch.float32 else torch.int16)
    starts, num_rows = [0], max(1, PIECE_ELEMENTS * tensor.shape[1] // tensor.numel())
    for first in range(0, tensor.shape[1] - 1, num_rows):
        rows = bits[:, first : first + num_rows + 1]
        differs = (rows[:, 1:] != rows[:, :-1]).transpose(0, 1).flatten(1).any(1)
        starts += [first + 1 + int(place) for place in differs.nonzero().view(-1)]
        if len(starts) > MAX_RUNS:
            return None
    return starts


def _difference(new: torch.Tensor, base: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """A scale [..., 1] for each row, its steps [..., d] in int8, and what the receiver makes of them."""
    scale = torch.empty((*new.shape[:-1], 1), dtype=SCALE, device=new.device)
    steps, rebuilt = torch.empty_like(new, dtype=torch.int8), torch.empty_like(base)
    for piece in _pieces(new.shape):
        before = _rows(base)[piece].float()
        difference = _rows(new)[piece].float() - before
        of_rows = difference.abs().amax(-1, keepdim=True).div_(STEPS).to(SCALE)
        factor = of_rows.float()
        difference.div_(torch.where(factor == 0, torch.ones_like(factor), factor))
        difference.round_().clamp_(-STEPS, STEPS)
        _rows(steps)[piece] = difference.to(torch.int8)
        _rows(scale)[piece] = of_rows
        _rows(rebuilt)[piece] = _moved(before, difference, factor)
    if not is_finite(scale):
        raise CallError("a stream holds what is infinite or no number")
    return scale, steps, rebuilt


def _rebuilt(base: torch.Tensor, scale: torch.Tensor, steps: torch.Tensor) -> torch.Tensor:
    """What both ends have after a difference."""
    rebuilt = torch.empty_like(base)
    for piece in _pieces(base.shape):
        _rows(rebuilt)[piece] = _moved(
            _rows(base)[piece].float(), _rows(steps)[piece].float(), _rows(scale)[piece].float()
        )
    return rebuilt


def _moved(before: torch.Tensor, steps: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Product and sum apart, so that no machine fuses them. Changes `steps`."""
    return steps.mul_(scale).add_(before)


def _rows(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(-1, tensor.shape[-1])


def _pieces(shape: Sequence[int]) -> list[slice]:
    """Slices of rows that are worked on at a time."""
    num_elements, width = math.prod(shape), shape[-1]
    if not num_elements:
        return []
    num_rows = max(1, PIECE_ELEMENTS // width)
    return [slice(first, first + num_rows) for first in range(0, num_elements // width, num_rows)]
