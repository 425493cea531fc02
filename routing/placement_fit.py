"""The best slice of one model for one node, among all of them, given what the others hold.

Pure; looks at one node and one model at a time. Knows nothing of who moves when.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from routing.placement_score import (
    LEAST_RATE,
    Board,
    ModelDemand,
    PoolNode,
    Profile,
    Slices,
    pass_ms,
    share_used,
)
from routing.types import SliceSpec

SAME = 1e-9  # relative: scores closer than this are the same


class Worth(NamedTuple):
    """How good a board is: the order in which placements are compared.

    `missing`: layers without a holder, of the model that lacks the fewest; `all_missing`: of all models. Both are 0
    where gaps do not come first.
    """

    models: int
    missing: int
    all_missing: int
    rate: float
    evenness: float

    def beats(self, other: Worth) -> bool:
        """Whether this is better, by more than rounding."""
        mine, theirs = self._coverage(), other._coverage()
        if mine != theirs:
            return mine > theirs
        if abs(self.rate - other.rate) > SAME * max(abs(self.rate), abs(other.rate)):
            return self.rate > other.rate
        return self.evenness > other.evenness + SAME * abs(other.evenness)

    def _coverage(self) -> tuple[int, int, int]:
        return self.models, -self.missing, -self.all_missing


def worth_with(board: Board, node: PoolNode, slices: Slices, *, gaps_first: bool) -> Worth:
    """How good the board would be with a node's slices on it, too."""
    standings = board.standings_with(node, slices)
    models, rate, evenness, fewest, missing = 0, 0.0, 0.0, 0, 0
    for model, standing in zip(board.models, standings, strict=True):
        models += standing.slowest > 0
        if standing.missing:  # how even its other layers are says nothing
            missing += standing.missing
            fewest = min(fewest or standing.missing, standing.missing)
        else:
            rate += model.demand * standing.slowest
            evenness += model.demand * standing.evenness
    return (
        Worth(models, fewest, missing, rate, evenness) if gaps_first else Worth(models, 0, 0, rate, evenness)
    )


def candidates(
    board: Board, node: PoolNode, held: Slices, *, gaps_first: bool, deep: bool = True
) -> Iterator[dict[bytes, SliceSpec]]:
    """What a node that is not on the board could hold, the best of each kind: one model; what it holds with
    one slice added, given up or chosen anew; if `deep`, two models chosen anew."""
    yield dict(held)
    for model in board.models:
        others = {digest: spec for digest, spec in held.items() if digest != model.digest}
        alone = best_slice(board, node, {}, model, gaps_first=gaps_first)
        if alone is not None:
            yield {model.digest: alone}
            for second in board.models if deep else ():
                if second.digest != model.digest:
                    beside = best_slice(board, node, {model.digest: alone}, second, gaps_first=gaps_first)
                    if beside is not None:
                        yield {model.digest: alone, second.digest: beside}
        if others:
            yield others
            beside = best_slice(board, node, others, model, gaps_first=gaps_first)
            if beside is not None:
                yield {**others, model.digest: beside}


def best_slice(
    board: Board, node: PoolNode, beside: Slices, model: ModelDemand, *, gaps_first: bool
) -> SliceSpec | None:
    """The slice of a model that is best for the board, `beside` what else the node will hold; None: no room."""
    left = (1 - share_used(beside, node.max_layers)) * node.max_layers.get(model.digest, 0)
    most = min(int(left + SAME), model.num_layers)
    if most < 1:
        return None
    fit = _Fit(board, node, beside, model, most)
    start, num_layers = fit.best(gaps_first=gaps_first)
    return SliceSpec(start, start + num_layers)


class _Shape(NamedTuple):
    """All slices of up to `most` layers: tables of start x (number of layers - 1)."""

    counts: npt.NDArray[np.int64]  # [most]
    starts: npt.NDArray[np.int64]  # [num_layers, 1]
    ends: npt.NDArray[np.int64]  # where a slice would reach beyond the model, its end
    windows: npt.NDArray[np.int64]  # the layer that lies so many after the start, or the one behind the last
    is_possible: npt.NDArray[np.bool_]


@functools.lru_cache(maxsize=256)
def _shape(num_layers: int, most: int) -> _Shape:
    counts, starts = np.arange(1, most + 1), np.arange(num_layers)[:, None]
    ends = starts + counts
    clipped = np.minimum(ends, num_layers)
    return _Shape(counts, starts, clipped, np.minimum(ends - 1, num_layers), ends <= num_layers)


class _Fit:
    """All slices of one model that a node could hold."""

    def __init__(self, board: Board, node: PoolNode, beside: Slices, model: ModelDemand, most: int) -> None:
        self._board, self._beside, self._model, self._most = board, beside, model, most
        self._profile = board.profiles[model.digest]
        self._shape = _shape(model.num_layers, most)
        fixed_ms = pass_ms(node, beside) + node.line_ms.get(model.digest, 0.0)
        self._rates = 1000 / (fixed_ms + self._shape.counts * node.layer_ms[model.digest])

    def best(self, *, gaps_first: bool) -> tuple[int, int]:
        """Start and number of layers; of equals the evenest. In a gap as much as fits, from its beginning on: what
        is left is one piece, which later nodes can fill."""
        slowest = np.where(self._shape.is_possible, self._slowest(), -1.0)
        is_whole = slowest > 0
        if gaps_first and not is_whole.any():
            is_empty = (self._profile == 0).astype(np.float64)
            filled = self._span_sums(np.broadcast_to(is_empty, (self._most, len(is_empty))))
            keep = self._shape.is_possible & (filled >= filled[self._shape.is_possible].max())
            return self._first(keep)
        keep = is_whole if is_whole.any() else self._shape.is_possible
        rate = self._model.demand * slowest + self._rate_beside()
        keep = keep & (rate >= rate[keep].max() * (1 - SAME))
        return self._first(keep, np.where(keep, self._evenness(), -np.inf))

    def _first(self, keep: npt.NDArray[np.bool_], by: Profile | None = None) -> tuple[int, int]:
        """Of the kept slices the best, the smallest, the first."""
        order = keep if by is None else by
        column, start = divmod(int(order.T.argmax()), len(self._profile))
        return start, column + 1

    def _slowest(self) -> Profile:
        """The slowest layer of the model, for each slice."""
        padded = np.concatenate([self._profile, [np.inf]])
        before = np.minimum.accumulate(np.concatenate([[np.inf], self._profile[:-1]]))
        after = np.minimum.accumulate(padded[::-1])[::-1]
        within = np.minimum.accumulate(padded[self._shape.windows], axis=1) + self._rates
        outside = np.minimum(before[:, None], after[self._shape.ends])
        return np.minimum(outside, within)

    def _rate_beside(self) -> Profile:
        """What the node's other slices bring their models, by the number of layers taken here."""
        total = np.zeros(self._most)
        for model in self._board.models if self._beside else ():
            if (spec := self._beside.get(model.digest)) is not None:
                profile = self._board.profiles[model.digest]
                outside = np.concatenate([[np.inf], profile[: spec.start], profile[spec.end :]]).min()
                total += model.demand * np.minimum(
                    outside, profile[spec.start : spec.end].min() + self._rates
                )
        return total

    def _evenness(self) -> Profile:
        now = self._profile + LEAST_RATE
        then = now + self._rates[:, None]
        return self._span_sums(1 / (now * now) - 1 / (then * then))

    def _span_sums(self, values: npt.NDArray[np.float64]) -> Profile:
        """Sums over each slice's layers; values [num_layers in the slice, layer]."""
        sums = np.zeros((self._most, len(self._profile) + 1))
        np.cumsum(values, axis=1, out=sums[:, 1:])
        columns = self._shape.counts - 1
        return sums[columns, self._shape.ends] - sums[columns, self._shape.starts]
