"""How the final hidden states of a text become one vector: pooling, dense layers, length one, fewer dimensions.

Arithmetic alone, in float32; which of it a model wants is read in `sentence_files`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum

import torch
from torch.nn import functional

Step = Callable[[torch.Tensor], torch.Tensor]  # of a vector: [in] to [out]

ACTIVATIONS: Mapping[str, Step] = {"Identity": lambda vector: vector, "Tanh": torch.tanh}


class Pooling(StrEnum):
    """Which rows become the vector, and how."""

    MEAN = "mean"
    CLS = "cls"  # the first row
    LAST = "last"
    MAX = "max"

    def rows_of(self, rows: int) -> range:
        """The rows of a text that it looks at."""
        match self:
            case Pooling.CLS:
                return range(1)
            case Pooling.LAST:
                return range(rows - 1, rows)
        return range(rows)

    def pool(self, states: torch.Tensor) -> torch.Tensor:
        """Make one row of those that `rows_of` names: [n, hidden] to [hidden], float32."""
        states = states.float()
        return states.amax(dim=0) if self is Pooling.MAX else states.mean(dim=0)


@dataclass(frozen=True, eq=False)
class Dense:
    """A linear layer behind the pooling."""

    weight: torch.Tensor = field(repr=False)  # [out, in] float32
    bias: torch.Tensor | None = field(repr=False)  # [out]
    activation: Step = field(repr=False)

    def __call__(self, vector: torch.Tensor) -> torch.Tensor:
        return self.activation(functional.linear(vector, self.weight, self.bias))


def normalize(vector: torch.Tensor) -> torch.Tensor:
    """Give a vector the length one; zeros stay zeros. [size]"""
    return functional.normalize(vector, dim=0)


@dataclass(frozen=True, eq=False)
class VectorRecipe:
    """What becomes of the final hidden states of one text."""

    pooling: Pooling
    size: int  # of the vectors
    steps: tuple[Step, ...] = ()
    cuts: frozenset[int] = frozenset()  # numbers of dimensions that the model was trained to be cut to

    @property
    def normalizes(self) -> bool:
        """Whether the vectors have the length one."""
        return bool(self.steps) and self.steps[-1] is normalize

    def vector(self, states: torch.Tensor, dimensions: int | None = None) -> torch.Tensor:
        """Make the vector [size or `dimensions`] (float32) of the rows [n, hidden] that `Pooling.rows_of` names."""
        vector = self.pooling.pool(states)
        for step in self.steps:
            vector = step(vector)
        if dimensions is None or dimensions == self.size:
            return vector
        shorter = vector[:dimensions]
        return normalize(shorter) if self.normalizes else shorter
