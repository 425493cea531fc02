"""Cross-attention in a packed call: every session's rows attend to that session's own encoder states.

The keys and values of states that were not used yet are made by the stock projections, for all such sessions at once:
products of rows do not depend on their neighbours (`row_linear`). Stands in for transformers' cross-attention cache.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.nn import functional
from transformers.cache_utils import Cache, DummyLayer

from slicing.memory import Memory
from slicing.row_linear import unwatched

ROWS = 32  # keys and values are filled up to a multiple of it, like the blocks of positions


class _MarkedLayer(DummyLayer):
    """Shows a tensor that says which layer it is; what is attended to lies in the sessions."""

    def __init__(self, mark: torch.Tensor) -> None:
        super().__init__()
        self.keys = self.values = mark


class Crossing(Cache):
    """What stock layers take for the cache of their cross-attention."""

    is_compileable = False

    def __init__(self, num_layers: int) -> None:
        self._marks = [torch.zeros(1, 1, 1, 1) for _ in range(num_layers)]
        super().__init__(layers=[_MarkedLayer(mark) for mark in self._marks])
        self._new: list[Memory] = []
        self._made: tuple[int, torch.Tensor] | None = None

    def take(self, memories: Sequence[Memory], start: int, end: int) -> dict[int, bool]:
        """Begin a call over layers [start, end); tells of each whether its keys and values are there for all."""
        self._made = None
        self._new = [
            memory for memory in memories if not all(memory.has_crossed(n) for n in range(start, end))
        ]
        return {
            number: all(memory.has_crossed(number) for memory in self._new)
            for number in range(len(self._marks))
        }

    def states(self, device: torch.device) -> torch.Tensor | None:
        """Return the states that keys and values are still made of, joined [1, rows, width]; None: there are none."""
        joined = [states for memory in self._new if (states := memory.states(device)) is not None]
        return torch.cat(joined, dim=1) if joined else None

    def update(
        self,
        key_states: torch.Tensor,
        value_states: torch.Tensor,
        layer_idx: int,
        *_args: Any,
        **_kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Store what a layer made of all new states [1, heads, rows, dim] in the sessions."""
        row = 0
        with unwatched():
            for memory in self._new:
                if not memory.has_crossed(layer_idx):
                    made = [part.narrow(2, row, memory.rows) for part in (key_states, value_states)]
                    memory.cross(layer_idx, *[_filled(part) for part in made])
                row += memory.rows
        self._made = layer_idx, key_states
        return key_states, value_states

    def layer_of(self, keys: torch.Tensor) -> int | None:
        """Tell which layer's cross-attention asks with these keys; None: they are no keys of states."""
        if self._made is not None and self._made[1] is keys:
            return self._made[0]
        return next((number for number, mark in enumerate(self._marks) if mark is keys), None)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Return 0: positions are given to the layers, not counted by them."""
        return 0


def filled_rows(num_rows: int) -> int:
    """Return how many keys are kept for so many rows of states."""
    return num_rows + -num_rows % ROWS


def unseen(num_rows: int, device: torch.device) -> torch.Tensor:
    """Return what is added to the logits of a session's states: 0, or -inf for what only fills up [filled rows]."""
    mask = torch.zeros(filled_rows(num_rows), device=device)
    mask[num_rows:] = float("-inf")
    return mask


def _filled(made: torch.Tensor) -> torch.Tensor:
    return functional.pad(made, (0, 0, 0, -made.shape[2] % ROWS))
