"""CTranslate2 files: where each variable lies, and its values.

The format, little endian: u32 version, the model's specification (a string), u32 revision, u32 count; for each variable
its name, u8 rank, u32 dimensions, u8 type, u32 size in bytes and the bytes; then u32 count of aliases, two names each.
A string is its u16 length and as many bytes, the last one NUL. Knows nothing of what a variable is for.
"""

from __future__ import annotations

import math
import os
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Final

import numpy as np
import torch

from slicing.errors import ModelError

VERSION: Final = 6
MAX_VARIABLES: Final = 100_000
MAX_RANK: Final = 8
DTYPES: Final = {
    0: "<f4",
    1: "<i1",
    2: "<i2",
    3: "<i4",
    4: "<f2",
}  # by their code; 5 (bfloat16) is no numpy type


@dataclass(frozen=True, slots=True)
class Variable:
    """One variable: its type, and the `size_bytes` from `begin` on that hold it."""

    dtype: np.dtype
    shape: tuple[int, ...]
    begin: int
    size_bytes: int


class CT2File:
    """One open file, its variables read by name. Raises `ModelError` when it is damaged or of another version."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with path.open("rb") as stream:
                self.specification, self.variables, self.aliases = _read_index(stream, path)
        except OSError as error:
            raise ModelError(f"cannot read {path}: {error.strerror}") from error

    def shape(self, name: str) -> tuple[int, ...]:
        """The dimensions of a variable. Raises `ModelError` when there is none of this name."""
        return self._variable(name).shape

    def read(self, name: str) -> torch.Tensor:
        """Return a variable's values, as float32 where they are floating. Raises `ModelError`."""
        variable = self._variable(name)
        try:
            with self.path.open("rb") as stream:
                stream.seek(variable.begin)
                raw = stream.read(variable.size_bytes)
        except OSError as error:
            raise ModelError(f"cannot read {self.path}: {error.strerror}") from error
        if len(raw) < variable.size_bytes:
            raise _damaged(self.path, f"it ends within {name}")
        values = torch.from_numpy(np.frombuffer(raw, dtype=variable.dtype).reshape(variable.shape).copy())
        return values.float() if values.is_floating_point() else values

    def _variable(self, name: str) -> Variable:
        variable = self.variables.get(self.aliases.get(name, name))
        if variable is None:
            raise ModelError(f"{self.path} holds no variable {name}")
        return variable


def _read_index(stream: BinaryIO, path: Path) -> tuple[str, dict[str, Variable], dict[str, str]]:
    size = os.fstat(stream.fileno()).st_size
    (version,) = _unpack(stream, "<I", path)
    if version != VERSION:
        raise ModelError(f"{path} is no CTranslate2 file of version {VERSION}")
    specification = _string(stream, path)
    _, count = _unpack(stream, "<II", path)
    if count > MAX_VARIABLES:
        raise _damaged(path, f"it claims {count} variables")
    variables: dict[str, Variable] = {}
    for _ in range(count):
        name = _string(stream, path)
        variables[name] = variable = _variable(stream, name, path)
        if variable.begin + variable.size_bytes > size:
            raise _damaged(path, f"it ends within {name}")
        stream.seek(variable.size_bytes, os.SEEK_CUR)
    (count,) = _unpack(stream, "<I", path)
    if count > MAX_VARIABLES:
        raise _damaged(path, f"it claims {count} aliases")
    aliases = {_string(stream, path): _string(stream, path) for _ in range(count)}
    return specification, variables, aliases


def _variable(stream: BinaryIO, name: str, path: Path) -> Variable:
    (rank,) = _unpack(stream, "<B", path)
    if rank > MAX_RANK:
        raise _damaged(path, f"{name} has {rank} dimensions")
    shape = _unpack(stream, f"<{rank}I", path)
    code, size_bytes = _unpack(stream, "<BI", path)
    if code not in DTYPES:
        raise ModelError(f"{path}: {name} has a type that is not known here ({code})")
    dtype = np.dtype(DTYPES[code])
    if math.prod(shape) * dtype.itemsize != size_bytes:
        raise _damaged(path, f"{name} has {size_bytes} bytes, which is not what its shape needs")
    return Variable(dtype, shape, stream.tell(), size_bytes)


def _string(stream: BinaryIO, path: Path) -> str:
    (length,) = _unpack(stream, "<H", path)
    raw = stream.read(length)
    if length < 1 or len(raw) < length or raw[-1] != 0:
        raise _damaged(path, "a name is not whole")
    try:
        return raw[:-1].decode()
    except UnicodeError:
        raise _damaged(path, "a name is no text") from None


def _unpack(stream: BinaryIO, form: str, path: Path) -> tuple[int, ...]:
    size = struct.calcsize(form)
    raw = stream.read(size)
    if len(raw) < size:
        raise _damaged(path, "it is cut short")
    return struct.unpack(form, raw)


def _damaged(path: Path, reason: str) -> ModelError:
    return ModelError(f"{path} is damaged: {reason}; fetch it again")
