"""Tensors to bytes and back, for what travels between slices.

Knows dtypes and shapes; knows nothing of sessions, links or what the numbers mean.
"""

from __future__ import annotations

import numpy as np
import torch

DTYPES: dict[str, torch.dtype] = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "int32": torch.int32,
}


def to_buffer(tensor: torch.Tensor, dtype: torch.dtype) -> memoryview:
    """Bytes of `tensor` in `dtype`, row by row; no copy where dtype and device already fit."""
    flat = tensor.detach().to(device="cpu", dtype=dtype).contiguous()
    return flat.view(torch.uint8).numpy().reshape(-1).data


def all_finite(numbers: torch.Tensor) -> bool:
    """Whether none is infinite or no number. A few rows are asked often: numpy does it in one pass."""
    if numbers.dtype is torch.float32 and numbers.device.type == "cpu":
        return bool(np.isfinite(numbers.detach().numpy()).all())
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
