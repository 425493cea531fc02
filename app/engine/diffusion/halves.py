"""Guidance in one call: a pass of two rows as two passes of one, which two groups of nodes can run side by side.

Kernels may give other last bits for another number of rows, so halves are used only where they were found equal. Knows
nothing of sessions.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from slicing.diffusion.calls import Pass


def halves_of(made: Pass) -> tuple[Pass, Pass] | None:
    """The first and the second half of a pass's rows; None where it has an odd number of them.

    What has as many rows as the streams is taken to go with them. That is a guess, for the check to refuse.
    """
    rows = {stream.shape[0] if stream.dim() else 0 for stream in made.streams}
    num_rows = rows.pop() if len(rows) == 1 else 0
    if num_rows < 2 or num_rows % 2:
        return None
    first, second = (
        Pass(
            made.plan,
            [_half(stream, half) for stream in made.streams],
            [_half(slot, half) if slot.dim() and slot.shape[0] == num_rows else slot for slot in made.slots],
        )
        for half in range(2)
    )
    return first, second


def joined_halves(first: Sequence[torch.Tensor], second: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The streams of the whole pass."""
    return [torch.cat(pair) for pair in zip(first, second, strict=True)]


def _half(tensor: torch.Tensor, half: int) -> torch.Tensor:
    size = tensor.shape[0] // 2
    return tensor[half * size : (half + 1) * size]
