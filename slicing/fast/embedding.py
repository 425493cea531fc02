"""Looks tokens up in a packed table: the same memory as a tied head's, the same values as the kernels see."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from slicing.fast.packing import PackedWeight
from slicing.fast.records import GROUP, LANES


def look_up(table: PackedWeight, token_ids: NDArray[np.int64], factor: float) -> NDArray[np.float32]:
    """Return the rows [n, columns] of `table` times `factor`. Raises IndexError for a token outside of it."""
    if token_ids.size and not (int(token_ids.min()) >= 0 and int(token_ids.max()) < table.rows):
        raise IndexError(f"a token id outside the vocabulary of {table.rows}")
    panels, lanes = token_ids // LANES, token_ids % LANES
    stored: NDArray[Any] = table.data[panels, :, lanes]
    if table.form == "bf16":
        rows = (stored.astype(np.uint32) << 16).view(np.float32)
    elif table.scales is not None:
        rows = stored * table.scales[panels, :, lanes].repeat(GROUP, axis=1)[:, : table.columns]
    else:
        rows = stored.astype(np.float32)
    return rows if factor == 1.0 else rows * np.float32(factor)
