"""Tensors to bytes and back, for what travels between slices.

Knows dtypes and shapes; knows nothing of sessions, links or what the numbers mean.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

DTYPES: dict[str, torch.dtype] = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "int32": torch.int32,
}
FLOAT_BYTES = 4


def to_buffer(tensor: torch.Tensor, dtype: torch.dtype) -> memoryview:
    """Bytes of `tensor` in `dtype`, row by row; no copy where dtype and device already fit."""
    if dtype is torch.float32:
        return float_array(tensor).reshape(-1).view(np.uint8).data
    flat = tensor.detach().to(device="cpu", dtype=dtype).contiguous()
    return flat.view(torch.uint8).numpy().reshape(-1).data


def float_array(tensor: torch.Tensor) -> NDArray[np.float32]:
    """The numbers in float32 as an array: a view where they lie so in this machine's memory already."""
    if tensor.dtype is torch.float32 and tensor.is_cpu and not tensor.requires_grad:
        return tensor.numpy()
    return tensor.detach().to(device="cpu", dtype=torch.float32).numpy()


def all_finite(numbers: torch.Tensor) -> bool:
    """Whether none is infinite or no number. A few rows are asked often: numpy does it in one pass."""
    if numbers.dtype is torch.float32 and numbers.is_cpu:
        return bool(np.isfinite(float_array(numbers)).all())
    return bool(numbers.isfinite().all())


def from_buffer(
    buffer: bytes | bytearray | memoryview,
    wire: torch.dtype,
    width: int,
    *,
    dtype: torch.dtype,
    device: str = "cpu",
) -> torch.Tensor:
    """[rows, width] in `dtype` from the bytes of [rows, width] in `wire`.

    The values are copied into fresh torch storage: what arrives may lie at any address, and MKL takes another
    path (other bits) for unaligned rows. Raises ValueError when the bytes are no whole number of rows.
    """
    row_bytes = width * wire.itemsize
    if len(buffer) % row_bytes:
        raise ValueError(f"{len(buffer)} bytes are no whole number of rows of {row_bytes}")
    out = torch.empty((len(buffer) // row_bytes, width), dtype=wire)
    out.view(torch.uint8).numpy().reshape(-1)[:] = np.frombuffer(buffer, dtype=np.uint8)
    return out.to(device=device, dtype=dtype)


def float_rows(payloads: Sequence[bytes | bytearray | memoryview], width: int) -> list[torch.Tensor] | None:
    """[rows, width] of each payload of float32, all of them looked at in one go; None where one is not all finite.

    Copies lie one behind the other, a row's address being a multiple of four bytes only: for runners, which align
    what they must. Raises ValueError when the bytes are no whole number of rows.
    """
    rows = np.frombuffer(bytearray().join(payloads), np.float32).reshape(-1, width)
    if not np.isfinite(rows).all():
        return None
    found, first = [], 0
    for payload in payloads:
        last = first + len(payload) // (width * FLOAT_BYTES)
        found.append(torch.from_numpy(rows[first:last]))
        first = last
    return found
