"""Where each tensor lies in a safetensors file: the header, read and checked by hand.

The format: eight bytes with the header's length (little endian), the header (JSON), then the tensors'
bytes. Reads and writes headers; it does not know what a tensor is for, and never maps a file into memory
(mapped pages count as the process's own).
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from slicing.errors import ModelError

DTYPES: dict[str, torch.dtype] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
LENGTH_BYTES = 8
DATA_ALIGNMENT_BYTES = 64
MAX_HEADER_BYTES = 100_000_000  # the limit of the safetensors library itself


@dataclass(frozen=True)
class TensorRange:
    """One tensor of a checkpoint: its type, and the bytes `[begin, end)` of `file` that hold it."""

    file: Path
    dtype: torch.dtype
    shape: tuple[int, ...]
    begin: int
    end: int

    @property
    def size_bytes(self) -> int:
        """How many bytes it takes in its file."""
        return self.end - self.begin


def read_tensor_ranges(file: Path) -> dict[str, TensorRange]:
    """Read the header of one local safetensors file. Raises `ModelError` naming it when it is damaged."""
    try:
        with file.open("rb") as stream:
            size = os.fstat(stream.fileno()).st_size
            length = header_length(stream.read(LENGTH_BYTES), size, file)
            return parse_header(stream.read(length), size, file)
    except OSError as error:
        raise ModelError(f"cannot read {file}: {error.strerror}") from error


def header_length(prefix: bytes, file_size: int, file: Path) -> int:
    """Check the first eight bytes of a file of `file_size` bytes and return the length of its header."""
    length = int.from_bytes(prefix, "little")
    if len(prefix) < LENGTH_BYTES or length < 2:
        raise _damaged(file, "it is too short to be a safetensors file")
    if length > MAX_HEADER_BYTES:
        raise _damaged(file, f"its header claims {length} bytes, more than {MAX_HEADER_BYTES}")
    if LENGTH_BYTES + length > file_size:
        raise _damaged(file, f"its header claims {length} bytes but the file has {file_size}")
    return length


def parse_header(header: bytes, file_size: int, file: Path) -> dict[str, TensorRange]:
    """Turn a header into ranges, counted from the start of the file, none outside it and none overlapping."""
    try:
        entries = json.loads(header.decode(), object_pairs_hook=_unique_keys)
    except (ValueError, RecursionError) as error:
        raise _damaged(file, "its header is not valid JSON") from error
    if not isinstance(entries, dict):
        raise _damaged(file, "its header is not a table of tensors")
    data_start = LENGTH_BYTES + len(header)
    ranges = {
        name: _tensor_range(name, entry, data_start, file_size, file)
        for name, entry in entries.items()
        if name != "__metadata__"
    }
    _check_no_overlap(ranges, file)
    return ranges


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    table = dict(pairs)
    if len(table) != len(pairs):
        raise ValueError("a key stands twice")
    return table


def _tensor_range(name: str, entry: object, data_start: int, file_size: int, file: Path) -> TensorRange:
    if not isinstance(entry, dict):
        raise _damaged(file, f"its entry for {name} is not a table")
    dtype = DTYPES.get(str(entry.get("dtype")))
    if dtype is None:
        raise _damaged(file, f"tensor {name} has a type this version cannot read: {entry.get('dtype')!r}")
    shape, offsets = _counts(entry.get("shape")), _counts(entry.get("data_offsets"))
    if shape is None or offsets is None or len(offsets) != 2:
        raise _damaged(file, f"tensor {name} has no valid shape and offsets")
    begin, end = data_start + offsets[0], data_start + offsets[1]
    if end - begin != math.prod(shape) * dtype.itemsize:
        raise _damaged(file, f"tensor {name} has {end - begin} bytes, which is not what its shape needs")
    if end > file_size:
        raise _damaged(
            file, f"tensor {name} ends at byte {end} but the file has {file_size}: it is cut short"
        )
    return TensorRange(file, dtype, shape, begin, end)


def _counts(value: object) -> tuple[int, ...] | None:
    if not isinstance(value, list) or not all(type(item) is int and item >= 0 for item in value):
        return None
    return tuple(value)


def _check_no_overlap(ranges: dict[str, TensorRange], file: Path) -> None:
    end = 0
    for name, tensor in sorted(ranges.items(), key=lambda item: (item[1].begin, item[1].end)):
        if tensor.begin < end:
            raise _damaged(file, f"tensor {name} overlaps another one")
        end = tensor.end


def write_tensors(
    file: Path, shapes: Mapping[str, tuple[int, ...]], tensors: Iterable[tuple[str, torch.Tensor]]
) -> Iterator[int]:
    """Write a float32 safetensors file one tensor at a time, in any order; yields the bytes of each.

    `shapes` has to name every tensor that will come. The tensors' bytes start at a multiple of 64.
    """
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offsets, end = {}, 0
    for name, shape in shapes.items():
        offsets[name], begin, end = end, end, end + math.prod(shape) * torch.float32.itemsize
        header[name] = {"dtype": "F32", "shape": list(shape), "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text += b" " * (-(LENGTH_BYTES + len(text)) % DATA_ALIGNMENT_BYTES)
    with file.open("wb") as stream:
        stream.write(len(text).to_bytes(LENGTH_BYTES, "little") + text)
        for name, tensor in tensors:
            if tuple(tensor.shape) != tuple(shapes[name]):
                raise ModelError(f"{name} has shape {tuple(tensor.shape)}, not {tuple(shapes[name])}")
            stream.seek(LENGTH_BYTES + len(text) + offsets[name])
            values = tensor.detach().to(torch.float32).contiguous().reshape(-1)
            stream.write(values.view(torch.uint8).numpy())  # type: ignore[arg-type]  # numpy's own stub gap
            yield tensor.numel() * torch.float32.itemsize
        stream.truncate(LENGTH_BYTES + len(text) + end)
        stream.flush()
        os.fsync(stream.fileno())


def _damaged(file: Path, reason: str) -> ModelError:
    return ModelError(f"{file} is damaged: {reason}; fetch it again")
