"""What one node should hold, beside what the others hold now: whether it moves, and what a move must not do.

Pure. A move is returned only if it fills a gap, raises the score by the asked factor, or takes layers over from a
neighbour that then can; so nodes that look again one after another come to rest.

A move never opens a gap. The new slice is loaded beside the old one where memory allows both; else the node may let
go first, but only of layers that others hold, too.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import numpy as np

from routing.placement_fit import SAME, Worth, best_slice, candidates, worth_with
from routing.placement_score import (
    Board,
    ModelDemand,
    Placed,
    PoolNode,
    Slices,
    believed,
    held_by,
    share_used,
)
from routing.types import SliceSpec

GAIN = 1.2  # a move costs a load and a drain: it must be worth that much more
MAX_LENT = 8  # neighbours looked at, whose layers a node could take over


def choose_slices(
    me: PoolNode, others: Sequence[PoolNode], models: Sequence[ModelDemand], *, gain: float = GAIN
) -> tuple[Placed, ...] | None:
    """All that a node should hold from now on, or None: as it is.

    Gaps first, those of the model that lacks the fewest layers before others; then what raises the score by `gain`.
    A node that holds nothing takes whatever helps at all.
    """
    foreign, me = _without_foreign(me, models)
    me, *others = believed([me, *others], models)
    choice = _Choice(me, others, models, gain)
    best = choice.best() or choice.taken_over()
    if best is None or best == held_by(me):
        return None
    return (*foreign, *(Placed(digest, spec) for digest, spec in sorted(best.items())))


def fits_beside(me: PoolNode, slices: Sequence[Placed]) -> bool:
    """Whether what is new of `slices` can be loaded while the node still holds what it holds."""
    new = {placed.digest: placed.spec for placed in slices if placed not in me.held}
    return share_used(new, me.max_layers if me.room is None else me.room) <= 1 + SAME


def may_leave(me: PoolNode, slices: Sequence[Placed], others: Sequence[PoolNode]) -> bool:
    """Whether a move opens no gap, not even on the way: what it leaves is held by others or in its new slices."""
    new = {placed.digest: placed.spec for placed in slices} if fits_beside(me, slices) else {}
    for placed in me.held:
        if placed in slices:
            continue
        layers = set(range(placed.spec.start, placed.spec.end))
        if (spec := new.get(placed.digest)) is not None:
            layers -= set(range(spec.start, spec.end))
        for other in others:
            for theirs in other.held if layers else ():
                if theirs.digest == placed.digest:
                    layers -= set(range(theirs.spec.start, theirs.spec.end))
        if layers:
            return False
    return True


class _Choice:
    """One node's choice, on a board that holds the others."""

    def __init__(
        self, me: PoolNode, others: Sequence[PoolNode], models: Sequence[ModelDemand], gain: float
    ) -> None:
        self._me, self._others, self._models, self._gain = me, others, models, gain
        self._held = held_by(me)
        self._board = Board(models)
        for other in others:
            self._board.put(other, held_by(other))
        self._now = self._worth(self._held)

    def best(self) -> dict[bytes, SliceSpec] | None:
        """The best move that is worth it by itself."""
        best, best_worth = None, self._now
        for slices in self._moves():
            new = self._worth(slices)
            if self._is_worth_it(new) and (best is None or new.beats(best_worth)) and self._is_safe(slices):
                best, best_worth = slices, new
        return best

    def taken_over(self) -> dict[bytes, SliceSpec] | None:
        """The widening that hurts nobody now and lets a slow neighbour give layers up, for the asked gain.

        Only ever more than it holds: a node that waits in vain for its neighbour does not turn back.
        """
        best, best_rate = None, self._now.rate * self._gain
        for neighbour in self._slowest_neighbours():
            for slices in self._widened(neighbour):
                if self._worth(slices).rate < self._now.rate * (1 - SAME) or not self._is_safe(slices):
                    continue
                if (rate := self._rate_after(neighbour, slices)) > best_rate * (1 + SAME):
                    best, best_rate = slices, rate
        return best

    def _worth(self, slices: Slices) -> Worth:
        return worth_with(self._board, self._me, slices, gaps_first=True)

    def _moves(self) -> Iterator[dict[bytes, SliceSpec]]:
        yield from candidates(self._board, self._me, self._held, gaps_first=True)
        if self._now.all_missing:
            yield from self._gap_fillers()
            yield from candidates(self._board, self._me, self._held, gaps_first=False)

    def _gap_fillers(self) -> Iterator[dict[bytes, SliceSpec]]:
        """With no more of each slice than nobody else holds, what there is room for in the gaps."""
        least = {}
        for digest, spec in self._held.items():
            alone = np.flatnonzero(self._board.holders[digest][spec.start : spec.end] == 0) + spec.start
            if len(alone):
                least[digest] = SliceSpec(int(alone[0]), int(alone[-1]) + 1)
        for model in self._models:
            others = {digest: spec for digest, spec in least.items() if digest != model.digest}
            kept = least.get(model.digest)
            if kept is None:
                new = best_slice(self._board, self._me, others, model, gaps_first=True)
                if new is not None:
                    yield {**others, model.digest: new}
                continue
            left = (1 - share_used(others, self._me.max_layers)) * self._me.max_layers[model.digest]
            more = int(left + SAME) - (kept.end - kept.start)
            if more > 0:
                yield {**others, model.digest: SliceSpec(max(0, kept.start - more), kept.end)}
                yield {**others, model.digest: SliceSpec(kept.start, min(model.num_layers, kept.end + more))}

    def _is_worth_it(self, new: Worth) -> bool:
        now = self._now
        if new.models != now.models:
            return new.models > now.models
        if new.all_missing != now.all_missing:
            return new.all_missing < now.all_missing
        if not self._held:
            return new.beats(now)
        return new.rate > 0 and new.rate >= now.rate * self._gain * (1 - SAME)

    def _is_safe(self, slices: Slices) -> bool:
        """Whether the move opens no gap; `may_leave`, by what the board counts."""
        placed = tuple(Placed(digest, spec) for digest, spec in slices.items())
        new: Mapping[bytes, SliceSpec] = slices if fits_beside(self._me, placed) else {}
        for digest, spec in self._held.items():
            if slices.get(digest) == spec:
                continue
            is_alone = self._board.holders[digest] == 0
            if (kept := new.get(digest)) is not None:
                is_alone = is_alone.copy()
                is_alone[kept.start : kept.end] = False
            if is_alone[spec.start : spec.end].any():
                return False
        return True

    def _slowest_neighbours(self) -> list[PoolNode]:
        """Nodes whose slice, of a model that this one serves, meets this one's and is the slowest."""
        neighbours: list[tuple[float, bytes, PoolNode]] = []
        for other in self._others:
            for digest, spec in held_by(other).items():
                mine = self._held.get(digest)
                if mine is not None and spec.start <= mine.end and mine.start <= spec.end:
                    rate = float(self._board.profiles[digest][spec.start : spec.end].min())
                    neighbours.append((rate, other.node_id, other))
        return [other for _, _, other in sorted(neighbours, key=lambda found: found[:2])[:MAX_LENT]]

    def _widened(self, neighbour: PoolNode) -> Iterator[dict[bytes, SliceSpec]]:
        """What this node holds, with one slice reaching further into the neighbour's."""
        theirs = held_by(neighbour)
        for digest, mine in self._held.items():
            if (spec := theirs.get(digest)) is None:
                continue
            wider = [SliceSpec(start, mine.end) for start in range(spec.start, mine.start)]
            wider += [SliceSpec(mine.start, end) for end in range(mine.end + 1, spec.end + 1)]
            for one in wider:
                slices = {**self._held, digest: one}
                if share_used(slices, self._me.max_layers) <= 1 + SAME:
                    yield slices

    def _rate_after(self, neighbour: PoolNode, slices: Slices) -> float:
        """The score's rate once the neighbour has given up what this node took over."""
        theirs = held_by(neighbour)
        rest = {}
        for digest, spec in theirs.items():
            rest[digest] = spec
            mine = slices.get(digest)
            if mine is not None and mine != self._held.get(digest):
                rest[digest] = _rest(spec, mine)
        if any(spec.start >= spec.end for spec in rest.values()):
            return 0.0
        self._board.put(neighbour, theirs, -1)
        self._board.put(neighbour, rest)
        try:
            after = self._worth(slices)
            is_whole = after.models == self._now.models and after.all_missing == self._now.all_missing
            return after.rate if is_whole else 0.0
        finally:
            self._board.put(neighbour, rest, -1)
            self._board.put(neighbour, theirs)


def _rest(spec: SliceSpec, taken: SliceSpec) -> SliceSpec:
    """What is left of a slice beside one that reaches into it from one side."""
    if taken.start <= spec.start:
        return SliceSpec(max(spec.start, min(taken.end, spec.end)), spec.end)
    return SliceSpec(spec.start, min(spec.end, taken.start))


def _without_foreign(me: PoolNode, models: Sequence[ModelDemand]) -> tuple[tuple[Placed, ...], PoolNode]:
    """What a node holds of models that are not planned here stays, and takes its part of the room."""
    known = {model.digest for model in models}
    foreign = tuple(placed for placed in me.held if placed.digest not in known)
    if not foreign:
        return (), me
    used = share_used({placed.digest: placed.spec for placed in foreign}, me.max_layers)
    left = max(0.0, 1 - used)
    held = tuple(placed for placed in me.held if placed.digest in known)
    smaller = {digest: int(most * left + SAME) for digest, most in me.max_layers.items()}
    return foreign, replace(me, held=held, max_layers=smaller)
