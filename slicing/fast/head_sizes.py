"""How many heads a layer's attention has, and which columns of a joined product are theirs."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from slicing.fast.recipe import Part
from slicing.fast.tracing import AttentionCall


@dataclass(frozen=True)
class HeadSizes:
    """A layer's attention: how many heads, how wide."""

    heads: int
    kv_heads: int
    k_dim: int
    v_dim: int

    @classmethod
    def of(cls, call: AttentionCall) -> HeadSizes:
        """Read them off a call."""
        return cls(call.query.shape[1], call.key.shape[1], call.query.shape[-1], call.value.shape[-1])

    def columns(self, part: Part) -> np.ndarray:
        """Return the columns of a joined product that are the part's."""
        group = self.heads // self.kv_heads
        widths = (group * self.k_dim, self.k_dim, self.v_dim)  # of one key/value head
        place = ("query", "key", "value").index(part.name)
        if part.is_grouped:
            first = np.arange(self.kv_heads) * sum(widths) + sum(widths[:place])
            return (first[:, None] + np.arange(widths[place])).ravel()
        whole = [width * self.kv_heads for width in widths]
        return sum(whole[:place]) + np.arange(whole[place])

    @property
    def joined_width(self) -> int:
        """Columns of queries, keys and values joined."""
        return self.heads * self.k_dim + self.kv_heads * (self.k_dim + self.v_dim)


def columns_of(part: Part, width: int, sizes: HeadSizes | None) -> np.ndarray:
    """Return which of `width` columns are the part's."""
    if part.name in ("query", "key", "value"):
        assert sizes is not None
        return sizes.columns(part)
    start, step = {"first": (0, 1), "second": (width // 2, 1), "even": (0, 2), "odd": (1, 2)}[part.name]
    return (start + np.arange(width // 2) * step)[: width // 2]
