"""What a session's cross-attention looks at: the states of an encoder, and the keys and values made of them.

The rows come once and never change; each held layer's keys and values are computed at its first use. Stands in for
transformers' `EncoderDecoderCache`, beside the session's own keys and values.
"""

from __future__ import annotations

import torch
from transformers.cache_utils import Cache, DynamicLayer, EncoderDecoderCache


class Memory:
    """The encoder states of one session, and what its layers made of them."""

    def __init__(self, own: Cache, num_layers: int) -> None:
        """`own` holds the keys and values of the session's positions."""
        self._pieces: list[torch.Tensor] = []
        self._states: torch.Tensor | None = None
        self._crossed = [DynamicLayer() for _ in range(num_layers)]
        self.pair = EncoderDecoderCache(
            own, Cache(layers=[*self._crossed])
        )  # what a stock model takes for its cache

    @property
    def rows(self) -> int:
        """Rows that came."""
        return sum(len(piece) for piece in self._pieces)

    def states(self, device: torch.device) -> torch.Tensor | None:
        """All rows [1, rows, width], on `device` from then on; None while there are none.

        From the first look on no more are taken.
        """
        if self._states is None and self._pieces:
            self._states = torch.cat(self._pieces).to(device).unsqueeze(0)
            self._pieces = [self._states[0]]
        return self._states

    @property
    def size_bytes(self) -> int:
        """Memory of the rows, and of the keys and values made of them."""
        made = [tensor for layer in self._crossed for tensor in (layer.keys, layer.values)]
        return sum(tensor.nbytes for tensor in [*self._pieces, *made] if isinstance(tensor, torch.Tensor))

    def add(self, states: torch.Tensor) -> None:
        """Take [rows, width] more. Raises ValueError once they were used."""
        if self._states is not None:
            raise ValueError("encoder states that come after they were used")
        self._pieces.append(states.clone())  # what came may be a view of something larger

    def has_crossed(self, layer: int) -> bool:
        """Whether a layer has made its keys and values."""
        return bool(self.pair.is_updated.get(layer))

    def cross(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Keep a layer's keys and values [1, heads, rows, dim], where a call for several sessions made them."""
        self._crossed[layer].update(keys, values)
        self.pair.is_updated[layer] = True

    def close(self) -> None:
        """Free the storage, whoever still looks at it."""
        self._pieces, self._states = [], None
        for layer in self._crossed:
            layer.keys = layer.values = None

    def crossed(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """A layer's keys and values [1, heads, rows, dim], once it has made them."""
        held = self._crossed[layer]
        assert held.keys is not None
        assert held.values is not None
        return held.keys, held.values
