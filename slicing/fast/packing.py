"""Weights laid out for the kernels: panels of 16 outputs, [N/16][K][16], in one of three forms.

Knows nothing of what they are multiplied with.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray

from slicing.fast import records as r

Form = Literal["fp32", "bf16", "int8"]
FORMS: dict[str, int] = {"fp32": r.FP32, "bf16": r.BF16, "int8": r.INT8}
ALIGNMENT = 64  # bytes; a cache line
VALUES_AT_ONCE = 1 << 18  # values converted at a time: what that needs of its own stays in the caches


@dataclass(frozen=True, slots=True, eq=False)
class PackedWeight:
    """A weight [rows, columns] in panels."""

    form: Form
    rows: int
    columns: int
    data: NDArray[Any] = field(repr=False)  # [panels, columns, 16]: float32, uint16 (bfloat16 bits) or int8
    scales: NDArray[np.float32] | None = field(default=None, repr=False)  # int8: [panels, groups, 16]

    @property
    def nbytes(self) -> int:
        """Memory it takes."""
        return self.data.nbytes + (self.scales.nbytes if self.scales is not None else 0)

    def record(self) -> NDArray[np.int64]:
        """Return the weight record that operations point to; it holds addresses, so keep this weight alive."""
        record = np.zeros(r.WEIGHT_WORDS, np.int64)
        record[r.WEIGHT_FORM] = FORMS[self.form]
        record[r.WEIGHT_ROWS] = self.rows
        record[r.WEIGHT_COLUMNS] = self.columns
        record[r.WEIGHT_DATA] = self.data.ctypes.data
        record[r.WEIGHT_SCALES] = self.scales.ctypes.data if self.scales is not None else 0
        return record


def pack(weight: torch.Tensor, form: Form) -> PackedWeight:
    """Pack a weight [N, K] of any floating type. bf16 is exact for a bfloat16 weight, else rounded to nearest even."""
    rows, columns = weight.shape
    panels = -(-rows // r.LANES)
    types: dict[str, Any] = {"fp32": np.float32, "bf16": np.uint16, "int8": np.int8}
    data = aligned_zeros((panels, columns, r.LANES), types[form])
    groups = -(-columns // r.GROUP)
    scales = aligned_zeros((panels, groups, r.LANES), np.float32) if form == "int8" else None
    at_once = max(1, VALUES_AT_ONCE // max(1, columns * r.LANES)) * r.LANES
    for first in range(0, rows, at_once):
        part = weight[first : first + at_once].detach().cpu()
        if scales is not None:
            values, part_scales = _quantised(part.float())
            _fill(scales, first, part_scales)
        else:
            values = _bits(part, form)
        _fill(data, first, values)
    return PackedWeight(form, rows, columns, data, scales)


def unpack(packed: PackedWeight) -> torch.Tensor:
    """Return the weight [N, K] in float32 as the kernels see it."""
    values = packed.data
    if packed.form == "bf16":
        values = (values.astype(np.uint32) << 16).view(np.float32)
    elif packed.scales is not None:
        scales = np.repeat(packed.scales, r.GROUP, axis=1)[:, : packed.columns]
        values = values.astype(np.float32) * scales
    flat = values.transpose(0, 2, 1).reshape(-1, packed.columns)[: packed.rows]
    return torch.from_numpy(np.array(flat, np.float32))


def aligned_zeros(shape: tuple[int, ...], kind: Any) -> NDArray[Any]:
    """Return zeros whose first byte lies at a multiple of 64."""
    size = int(np.prod(shape)) * np.dtype(kind).itemsize
    raw = np.zeros(size + ALIGNMENT, np.uint8)
    start = -raw.ctypes.data % ALIGNMENT
    return raw[start : start + size].view(kind).reshape(shape)


def _bits(part: torch.Tensor, form: Form) -> NDArray[Any]:
    if form == "fp32":
        return part.float().numpy()
    return part.to(torch.bfloat16).contiguous().view(torch.int16).numpy().view(np.uint16)


def _quantised(part: torch.Tensor) -> tuple[NDArray[np.int8], NDArray[np.float32]]:
    """Return int8 [n, K] and scales [n, groups]: the largest of a group becomes 127."""
    rows, columns = part.shape
    padded = torch.nn.functional.pad(part, (0, -columns % r.GROUP)).reshape(rows, -1, r.GROUP)
    scales = torch.maximum(padded.amax(-1), -padded.amin(-1)) / 127
    safe = torch.where(scales > 0, scales, torch.ones(()))
    values = (padded / safe[..., None]).round_().clamp_(-127, 127).to(torch.int8)
    return values.reshape(rows, -1)[:, :columns].numpy(), scales.numpy()


def _fill(panels: NDArray[Any], first: int, values: NDArray[Any]) -> None:
    """Write rows [first, first + n) of a weight, `first` a multiple of 16, into their panels."""
    rows, columns = values.shape
    whole = rows // r.LANES
    at = first // r.LANES
    shaped = values[: whole * r.LANES].reshape(whole, r.LANES, columns)
    panels[at : at + whole] = shaped.transpose(0, 2, 1)
    rest = values[whole * r.LANES :]
    if len(rest):
        panels[at + whole, :, : len(rest)] = rest.T
