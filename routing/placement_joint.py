"""A few nodes placed together: all combinations of their slices, where these are few enough to go through.

Finds what single moves cannot: two nodes that must change at once. Pure; knows nothing of the rest of the search.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt

from routing.placement_fit import SAME
from routing.placement_score import Board, ModelDemand, PoolNode, pass_ms, share_used
from routing.types import SliceSpec

MAX_CHOICES = 400  # of one node
MAX_TOGETHER = 12_000  # combinations of several nodes' choices: about a millisecond

Table = npt.NDArray[np.float64]  # [choices, layers of all models]: tokens/s


class Choices:
    """All that one node can hold, and what each choice brings every layer; empty where they are too many."""

    def __init__(self, node: PoolNode, models: Sequence[ModelDemand]) -> None:
        num_spans = math.prod(1 + m.num_layers * (m.num_layers + 1) // 2 for m in models)
        self.slices = list(_slices(node, models)) if num_spans <= 4 * MAX_CHOICES else []
        if len(self.slices) > MAX_CHOICES:
            self.slices = []
        starts = dict(zip((m.digest for m in models), _offsets(models), strict=False))
        self.table: Table = np.zeros((len(self.slices), sum(m.num_layers for m in models)))
        for row, slices in zip(self.table, self.slices, strict=True):
            for digest, spec in slices.items():
                row[starts[digest] + spec.start : starts[digest] + spec.end] = 1000 / pass_ms(node, slices)


def group_size(choices: Sequence[Choices]) -> int:
    """How many of a pool's nodes can be placed together; 0: not even two."""
    counts = sorted((len(each.slices) for each in choices), reverse=True)
    if not counts or not counts[-1]:
        return 0
    return next((n for n in range(len(counts), 1, -1) if math.prod(counts[:n]) <= MAX_TOGETHER), 0)


def best_together(
    board: Board, choices: Sequence[Choices]
) -> tuple[int, float, list[dict[bytes, SliceSpec]]]:
    """Models covered, rate and slices of the best combination on a board without these nodes."""
    models = board.models
    totals = np.concatenate([board.profiles[model.digest] for model in models])[None, :]
    for each in choices:
        totals = (totals[:, None, :] + each.table[None, :, :]).reshape(-1, totals.shape[1])
    slowest = np.minimum.reduceat(totals, _offsets(models)[:-1], axis=1)
    covered = (slowest > 0).sum(axis=1)
    rate = slowest @ np.array([model.demand for model in models])
    rate[covered < covered.max()] = -1.0
    best = int((rate >= rate.max() * (1 - SAME)).argmax())
    numbers = np.unravel_index(best, [len(each.slices) for each in choices])
    slices = [each.slices[int(number)] for each, number in zip(choices, numbers, strict=True)]
    return int(covered[best]), float(rate[best]), slices


def _slices(node: PoolNode, models: Sequence[ModelDemand]) -> Iterator[dict[bytes, SliceSpec]]:
    spans = [[None, *itertools.combinations(range(model.num_layers + 1), 2)] for model in models]
    for choice in itertools.product(*spans):
        slices = {m.digest: SliceSpec(*span) for m, span in zip(models, choice, strict=True) if span}
        if share_used(slices, node.max_layers) <= 1 + SAME:
            yield slices


def _offsets(models: Sequence[ModelDemand]) -> list[int]:
    return [0, *itertools.accumulate(model.num_layers for model in models)]
