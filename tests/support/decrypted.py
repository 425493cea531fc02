"""Searches what nodes decrypted for what they must not learn, and for what they do."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import torch

PIECE_BYTES = (
    24  # of what is searched for, aligned to its elements: six float32 that are equal by chance are not seen
)


def pieces(
    tensors: Iterable[torch.Tensor | np.ndarray[Any, Any]], *, in_both_orders: bool = True
) -> set[bytes]:
    """Short runs of a tensor's memory, with channels first or last, without constant ones."""
    found: set[bytes] = set()
    for tensor in tensors:
        array = np.asarray(tensor.detach() if isinstance(tensor, torch.Tensor) else tensor)
        turns = [np.moveaxis(array, 1, -1)] if in_both_orders and array.ndim > 2 else []
        for laid_out in (array, *turns):
            memory = np.ascontiguousarray(laid_out).tobytes()
            step = max(PIECE_BYTES, len(memory) // 64 // PIECE_BYTES * PIECE_BYTES)
            runs = (memory[at : at + PIECE_BYTES] for at in range(0, len(memory) - PIECE_BYTES, step))
            found |= {run for run in runs if len(set(run)) > 4}
    return found


def num_found(wanted: set[bytes], decrypted: bytes) -> int:
    return sum(run in decrypted for run in wanted)
