"""The cheapest way through a snapshot's legs, each node at most once: exact, within a bounded amount of work.

A relaxed problem, in which a node may come twice, is solved over borders between layers; where its answer breaks a
rule, the ways that keep it are split into parts that are searched again, the cheapest first. Knows costs and limits;
nothing of records, offers or why there is no way.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import count
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from routing.route_costs import Column, RouteCosts
from routing.types import SliceSpec

# One unit is a pair of nodes looked at, about 1 ns; a look costs as much as 50,000 pairs. Half a second in all.
MAX_WORK = 400_000_000
LOOK_WORK = 50_000
MAX_DIVE = 8  # more tries when the work is used up, always on with the cheaper half: not exact any more

Mask = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True, eq=False)
class Rules:
    """What a way must keep, by node numbers. `owners` [num_nodes]: entry and exit must differ, if given."""

    spec: SliceSpec
    may_open: Mask  # [num_legs]
    may_close: Mask
    pinned: tuple[int, ...] = ()
    max_hops: int | None = None
    owners: tuple[int, ...] | None = None


class Taken(NamedTuple):
    """Layers [start, end) by the leg of this number."""

    leg: int
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class Way:
    """The cheapest way, or why there is none: `twice` is a leg that a node would have to run beside another."""

    taken: tuple[Taken, ...] = ()
    cost_ms: float = math.inf
    twice: Taken | None = None
    gave_up: bool = False


def cheapest_way(costs: RouteCosts, rules: Rules) -> Way:
    """The cheapest way that keeps the rules. An empty one: there is none, or none was found."""
    for counts_hops in (False, True):
        way = _Branches(costs, rules, _Layers(costs, rules, counts_hops)).best()
        num_hops = len(way.taken)
        if num_hops <= (rules.max_hops or num_hops) and not (num_hops == 1 and rules.owners):
            return way
    raise AssertionError("a counted way breaks the limit of hops")


class _Window(NamedTuple):
    """A node may be entered at layers [low, high) only."""

    node: int
    low: int
    high: int


@dataclass(frozen=True, slots=True)
class _Part:
    """A part of all ways: where nodes may be entered, and who may own the first and the last."""

    windows: tuple[_Window, ...] = ()
    first: int | None = None
    not_first: frozenset[int] = frozenset()
    not_last: frozenset[int] = frozenset()


class _Branches:
    """Branch and bound: parts of all ways by what they cost when a node may come twice."""

    def __init__(self, costs: RouteCosts, rules: Rules, layers: _Layers) -> None:
        self._costs, self._rules, self._layers = costs, rules, layers
        self._queue: list[tuple[float, int, tuple[Taken, ...], _Part]] = []
        self._tries: Iterator[int] = count()

    def best(self) -> Way:
        twice: Taken | None = None
        dives = 0
        self._try(_Part())
        while self._queue:
            cost_ms, _, taken, part = heapq.heappop(self._queue)
            twice = self._second_entry(taken) or twice
            parts = self._split(taken, part)
            if not parts:
                return Way(taken, cost_ms)
            if self._layers.work > MAX_WORK:
                if dives == MAX_DIVE:
                    return Way(twice=twice, gave_up=True)
                dives += 1
                self._queue.clear()
            for smaller in parts:
                self._try(smaller)
        return Way(twice=twice, gave_up=dives > 0)

    def _try(self, part: _Part) -> None:
        if (found := self._layers.cheapest(part)) is not None:
            heapq.heappush(self._queue, (found[0], next(self._tries), found[1], part))

    def _split(self, taken: tuple[Taken, ...], part: _Part) -> tuple[_Part, ...]:
        """Parts that hold all allowed ways but not this one; none if it is allowed."""
        again = self._second_entry(taken)
        if again is not None:  # whatever way there is enters the node either before or after the second entry
            node, at = self._costs.legs[again.leg].node, again.start
            halves = ((0, at), (at, self._rules.spec.end))
            return tuple(replace(part, windows=(*part.windows, _Window(node, *half))) for half in halves)
        owners = self._rules.owners
        if owners is None or len(taken) < 2:
            return ()
        first, last = (owners[self._costs.legs[leg.leg].node] for leg in (taken[0], taken[-1]))
        if first != last:
            return ()
        return (  # the first is another's, or the first is this one's and the last another's
            replace(part, not_first=part.not_first | {first}),
            replace(part, first=first, not_last=part.not_last | {first}),
        )

    def _second_entry(self, taken: tuple[Taken, ...]) -> Taken | None:
        seen: set[int] = set()
        for leg in taken:
            node = self._costs.legs[leg.leg].node
            if node in seen:
                return leg
            seen.add(node)
        return None


class _Limits(NamedTuple):
    """A part's limits for each leg: entered at layers [low, high) only; whether it may be the first, the last."""

    low: npt.NDArray[np.int64]
    high: npt.NDArray[np.int64]
    may_open: Mask
    may_close: Mask


class _Row(NamedTuple):
    """What a way so far counts: its hops (0 where nobody counts) and the pinned nodes it has, as bits."""

    num_hops: int
    pins: int


@dataclass(slots=True, eq=False)
class _Border:
    """What is cheapest at one border between layers, per row [num_legs]."""

    leaving: dict[_Row, Column] = field(default_factory=dict)  # to have come to here by this leg
    entered: dict[_Row, Mask] = field(default_factory=dict)  # whether a way in this leg begins it here


class _Layers:
    """The relaxed problem: dynamic programming over borders and legs; hops only go forward."""

    def __init__(self, costs: RouteCosts, rules: Rules, counts_hops: bool) -> None:
        self.work = 0
        self._costs, self._rules = costs, rules
        legs = costs.legs
        self._node = np.array([leg.node for leg in legs], np.int64)
        self._start = np.array([leg.start for leg in legs], np.int64)
        self._end = np.array([leg.end for leg in legs], np.int64)
        self._layer_ms = np.array([leg.layer_ms for leg in legs], np.float64)
        self._hop_ms = np.array([leg.hop_ms for leg in legs], np.float64)
        self._is_whole = np.array([leg.is_whole for leg in legs], bool)
        self._first_leg = np.searchsorted(self._node, np.arange(len(costs.records)))
        self._has_leg = np.bincount(self._node, minlength=len(costs.records)) > 0
        self._least_way = costs.between_ms.min(axis=0, initial=np.inf)
        self._pin_bit = {node: 1 << number for number, node in enumerate(rules.pinned)}
        self._all_pins = (1 << len(rules.pinned)) - 1
        self._most_hops = 0 if not counts_hops else rules.max_hops or 2
        self._is_strict = counts_hops and rules.max_hops is not None
        self._least_hops = 2 if counts_hops and rules.owners else 0

    def cheapest(self, part: _Part) -> tuple[float, tuple[Taken, ...]] | None:
        """The cheapest way of one part, a node twice allowed, and what it costs."""
        if not self._costs.legs:
            return None
        spec = self._rules.spec
        limits = self._limits(part)
        borders: dict[int, _Border] = {}
        here: dict[_Row, Column] = {}
        for at in range(spec.start, spec.end):
            border = borders[at] = _Border()
            can_enter = self._enterable(at, limits)
            if at == spec.start:
                arriving = self._spread(_Row(0, 0), self._costs.into_ms)
            else:
                can_leave = (self._start < at) & (at <= self._end) & (~self._is_whole | (self._end == at))
                border.leaving = {row: np.where(can_leave, cost, np.inf) for row, cost in here.items()}
                arriving = self._arriving(border.leaving, can_enter)
            here = self._entered(border, here, arriving, can_enter)
            here = self._a_layer_on(here, at)
            if not here:
                return None
        return self._finished(borders, here, limits.may_close)

    def _limits(self, part: _Part) -> _Limits:
        num_legs = len(self._node)
        low, high = np.zeros(num_legs, np.int64), np.full(num_legs, self._rules.spec.end)
        for window in part.windows:
            of_node = self._node == window.node
            low[of_node] = np.maximum(low[of_node], window.low)
            high[of_node] = np.minimum(high[of_node], window.high)
        may_open, may_close = self._rules.may_open, self._rules.may_close
        if self._rules.owners is not None:
            owner = np.array(self._rules.owners)[self._node]
            may_open = may_open & ~np.isin(owner, list(part.not_first))
            may_open &= (owner == part.first) | (part.first is None)
            may_close = may_close & ~np.isin(owner, list(part.not_last))
        return _Limits(low, high, may_open, may_close)

    def _enterable(self, at: int, limits: _Limits) -> Mask:
        can_enter: Mask = (self._start <= at) & (at < self._end) & (~self._is_whole | (self._start == at))
        can_enter &= (limits.low <= at) & (at < limits.high)
        if at == self._rules.spec.start:
            can_enter &= limits.may_open
        return can_enter

    def _a_layer_on(self, here: dict[_Row, Column], at: int) -> dict[_Row, Column]:
        """The costs one border further: each leg computes layer `at`, or ends here."""
        covers = (self._start <= at) & (at < self._end)
        further = {row: np.where(covers, cost + self._layer_ms, np.inf) for row, cost in here.items()}
        return {row: cost for row, cost in further.items() if np.isfinite(cost).any()}

    def _arriving(self, leaving: dict[_Row, Column], can_enter: Mask) -> dict[_Row, Column]:
        """The least cost to stand before each node, over all nodes that a hop may come from."""
        targets = np.unique(self._node[can_enter])
        arriving: dict[_Row, Column] = {}
        for row, cost in leaving.items():
            from_node = np.full(len(self._costs.records), np.inf)
            from_node[self._has_leg] = np.minimum.reduceat(cost, self._first_leg[self._has_leg])
            if not len(targets) or not np.isfinite(from_node).any():
                continue
            to_node = np.full(len(from_node), np.inf)
            to_node[targets] = self._least_sums(from_node, targets)
            for next_row, costs in self._spread(row, to_node).items():
                arriving[next_row] = np.minimum(arriving.get(next_row, np.inf), costs)
        return arriving

    def _least_sums(self, from_node: Column, targets: npt.NDArray[np.int64]) -> Column:
        """min over sources of from_node + between, for each target; sources that cannot win are left out."""
        between = self._costs.between_ms
        two = np.argpartition(from_node, 1)[:2] if len(from_node) > 2 else np.arange(len(from_node))
        bound: Column = (from_node[two] + between[np.ix_(targets, two)]).min(
            axis=1
        )  # by the two cheapest sources
        most = float(bound.max())
        sources = np.flatnonzero(from_node + self._least_way < most if most < np.inf else from_node < np.inf)
        if not len(sources):
            return bound
        self.work += LOOK_WORK + len(sources) * len(targets)
        if len(sources) == len(targets) == len(from_node):
            sums = between + from_node
        else:
            sums = between[np.ix_(targets, sources)] + from_node[sources]
        least: Column = np.minimum(sums.min(axis=1), bound)
        return least

    def _spread(self, row: _Row, to_node: Column) -> dict[_Row, Column]:
        """The rows that a hop to each node leads to, each with the costs of the nodes that lead there."""
        num_hops = min(row.num_hops + 1, self._most_hops)
        if self._is_strict and row.num_hops == self._most_hops:
            return {}
        rest = to_node.copy()
        spread = {}
        for node, bit in self._pin_bit.items():
            if not row.pins & bit and math.isfinite(to_node[node]):
                alone = np.full(len(to_node), np.inf)
                alone[node] = to_node[node]
                spread[_Row(num_hops, row.pins | bit)] = alone
            rest[node] = np.inf
        spread[_Row(num_hops, row.pins)] = rest
        return spread

    def _entered(
        self, border: _Border, here: dict[_Row, Column], arriving: dict[_Row, Column], can_enter: Mask
    ) -> dict[_Row, Column]:
        after = dict(here)
        for row, to_node in arriving.items():
            cost = np.where(can_enter, to_node[self._node] + self._hop_ms, np.inf)
            staying = after.get(row)
            is_better = cost < (np.inf if staying is None else staying)
            if is_better.any():
                border.entered[row] = is_better
                after[row] = cost if staying is None else np.where(is_better, cost, staying)
        return after

    def _finished(
        self, borders: dict[int, _Border], here: dict[_Row, Column], may_close: Mask
    ) -> tuple[float, tuple[Taken, ...]] | None:
        back_ms = np.where(may_close, self._costs.back_ms[self._node], np.inf)
        ends = {
            row: cost + back_ms
            for row, cost in here.items()
            if row.pins == self._all_pins and row.num_hops >= self._least_hops
        }
        best = min(ends, key=lambda row: float(ends[row].min()), default=None)
        if best is None or not math.isfinite(cost := float(ends[best].min())):
            return None
        return cost, self._walked_back(borders, best, int(ends[best].argmin()))

    def _walked_back(self, borders: dict[int, _Border], row: _Row, leg: int) -> tuple[Taken, ...]:
        taken: list[Taken] = []
        spec = self._rules.spec
        end = spec.end
        while True:
            start = next(
                at for at in range(end - 1, spec.start - 1, -1) if self._begins(borders[at], row, leg)
            )
            taken.append(Taken(leg, start, end))
            if start == spec.start:
                return tuple(taken[::-1])
            row, leg = self._before(borders[start].leaving, row, leg)
            end = start

    def _begins(self, border: _Border, row: _Row, leg: int) -> bool:
        entered = border.entered.get(row)
        return entered is not None and bool(entered[leg])

    def _before(self, leaving: dict[_Row, Column], row: _Row, leg: int) -> tuple[_Row, int]:
        """The cheapest row and leg that a hop into this leg, which leads to this row, can come from."""
        node = int(self._node[leg])
        way_ms = self._costs.between_ms[node][self._node]
        sums = {before: cost + way_ms for before, cost in leaving.items() if self._leads(before, node) == row}
        before = min(sums, key=lambda candidate: float(sums[candidate].min()))
        return before, int(sums[before].argmin())

    def _leads(self, row: _Row, node: int) -> _Row | None:
        bit = self._pin_bit.get(node, 0)
        if row.pins & bit or (self._is_strict and row.num_hops == self._most_hops):
            return None
        return _Row(min(row.num_hops + 1, self._most_hops), row.pins | bit)
