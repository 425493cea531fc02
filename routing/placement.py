"""Which node should hold which layers: for a whole pool, or for one node that joins or looks again.

Pure functions over a snapshot: whole pools here, one node's moves in `placement_moves.py`, what they are worth in
`placement_score.py`. Knows nothing of records, loading or time.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterable, Sequence

from routing.placement_chains import chains
from routing.placement_deal import dealt
from routing.placement_fit import SAME, Worth, best_slice, candidates, worth_with
from routing.placement_joint import Choices, best_together, group_size
from routing.placement_moves import choose_slices, fits_beside, may_leave
from routing.placement_score import Board, ModelDemand, Placed, PoolNode, Score, Slices, believed, score
from routing.types import NodeId, SliceSpec

__all__ = [
    "ModelDemand",
    "Placed",
    "PoolNode",
    "Score",
    "choose_slices",
    "fits_beside",
    "may_leave",
    "place",
    "score",
]

MAX_SWEEPS = 6  # over all nodes, each to its best answer; the last ones gain little
MAX_DEALS = 2  # times that each node of a dealt pool chooses: to cover, then to level
MAX_DEEP = 40  # nodes: up to here placements with several models on one node are tried throughout
MAX_EXCHANGED = 8  # nodes: the groups of a larger pool are too many
REBUILDS = 8  # of a small pool, a few nodes each time; larger pools gain less by it and get fewer
REBUILT = 80  # nodes times rebuilds, at most
NEAR = 0.7  # of the best score: a rebuilt placement that starts below is not worth settling
ENOUGH = 0.98  # of a bound that no placement reaches: no more search
SEED = 1  # the search is the same every time


def place(pool: Iterable[PoolNode], models: Sequence[ModelDemand]) -> dict[NodeId, tuple[Placed, ...]]:
    """What every node of a pool should hold, from scratch: near the best score, not proved to be it."""
    nodes = believed(sorted(pool, key=lambda node: node.node_id), models)
    if not nodes:
        return {}
    bound = _bound(nodes, models)
    best = _deal(nodes, models)
    if len(nodes) <= MAX_DEEP and not best.is_enough(bound):
        plan = _Plan(nodes, models, chains(nodes, models))
        plan.settle()
        best = plan if plan.worth().beats(best.worth()) else best
    for order in _orders(nodes, models):
        if not best.is_enough(bound):
            plan = _Plan(nodes, models)
            for number in order:
                plan.rejoin(number, gaps_first=True)
            plan.settle()
            best = plan if plan.worth().beats(best.worth()) else best
    best = _rebuilt(_exchanged(best, bound), bound)
    return {
        node.node_id: tuple(Placed(digest, spec) for digest, spec in held.items())
        for node, held in zip(nodes, best.held, strict=True)
    }


class _Plan:
    """A placement of a whole pool, with its board."""

    def __init__(
        self, nodes: Sequence[PoolNode], models: Sequence[ModelDemand], held: Sequence[Slices] = ()
    ) -> None:
        self.nodes, self.models = nodes, models
        self.held: list[dict[bytes, SliceSpec]] = [dict(slices) for slices in held] or [{} for _ in nodes]
        self.board = Board(models)
        for node, slices in zip(nodes, self.held, strict=True):
            self.board.put(node, slices)

    def copy(self) -> _Plan:
        return _Plan(self.nodes, self.models, self.held)

    def worth(self) -> Worth:
        return worth_with(self.board, self.nodes[0], {}, gaps_first=False)

    def is_enough(self, bound: float) -> bool:
        """Whether no search could gain much."""
        now = self.board.score()
        return now.models == len(self.models) and now.rate >= ENOUGH * bound

    def settle(self) -> None:
        """Let each node take its best answer to the others until none moves."""
        for _ in range(MAX_SWEEPS):
            before = self.worth()
            moved = [self.rejoin(number, gaps_first=False) for number in range(len(self.nodes))]
            if not any(moved) or (len(moved) > MAX_DEEP and self.worth().rate < before.rate * 1.01):
                return

    def take(self, number: int) -> None:
        """Take a node's slices off the board."""
        self.board.put(self.nodes[number], self.held[number], -1)
        self.held[number] = {}

    def give(self, number: int, slices: Slices) -> None:
        """Put slices on a node that holds none."""
        self.held[number] = dict(slices)
        self.board.put(self.nodes[number], slices)

    def join_anywhere(self, number: int, draws: random.Random) -> None:
        """Give a node any slice of any model."""
        node, model = self.nodes[number], draws.choice(self.models)
        most = min(node.max_layers.get(model.digest, 0), model.num_layers)
        if most > 0:
            num_layers = draws.randint(1, most)
            start = draws.randint(0, model.num_layers - num_layers)
            self.give(number, {model.digest: SliceSpec(start, start + num_layers)})

    def place_together(self, group: Sequence[int], choices: Sequence[Choices]) -> bool:
        """Give a few nodes their best combination; whether that is a gain."""
        before, held = self.board.score(), [self.held[number] for number in group]
        for number in group:
            self.take(number)
        covered, rate, best = best_together(self.board, choices)
        is_gain = covered > before.models or (covered == before.models and rate > before.rate * (1 + SAME))
        for number, slices in zip(group, best if is_gain else held, strict=True):
            self.give(number, slices)
        return is_gain

    def rejoin(self, number: int, *, gaps_first: bool) -> bool:
        """Give a node what is best beside the others; whether that is something else than before."""
        node, before = self.nodes[number], self.held[number]
        self.take(number)
        best, best_worth = before, worth_with(self.board, node, before, gaps_first=gaps_first)
        deep = len(self.nodes) <= MAX_DEEP
        for slices in candidates(self.board, node, before, gaps_first=gaps_first, deep=deep):
            if (new := worth_with(self.board, node, slices, gaps_first=gaps_first)).beats(best_worth):
                best, best_worth = slices, new
        self.give(number, best)
        return best != before


def _deal(nodes: Sequence[PoolNode], models: Sequence[ModelDemand]) -> _Plan:
    """Each node at its best in the model that it is dealt to; the fastest choose first."""
    plan = _Plan(nodes, models)
    numbers = [(number, models[of]) for number, of in enumerate(dealt(nodes, models)) if of is not None]
    numbers.sort(key=lambda pair: nodes[pair[0]].layer_ms[pair[1].digest])
    for sweep in range(MAX_DEALS):
        for number, model in numbers:
            plan.take(number)
            spec = best_slice(plan.board, nodes[number], {}, model, gaps_first=sweep == 0)
            plan.give(number, {model.digest: spec} if spec else {})
    plan.settle()
    return plan


def _exchanged(plan: _Plan, bound: float) -> _Plan:
    """Place as many nodes together as can be gone through, group after group, until no group gains."""
    choices = [Choices(node, plan.models) for node in plan.nodes] if len(plan.nodes) <= MAX_EXCHANGED else []
    size = group_size(choices)
    groups = list(itertools.combinations(range(len(plan.nodes)), size)) if size else []
    for _ in range(MAX_SWEEPS):
        if not groups or plan.is_enough(bound):
            break
        gained = [plan.place_together(group, [choices[number] for number in group]) for group in groups]
        if not any(gained):
            break
    return plan


def _rebuilt(plan: _Plan, bound: float) -> _Plan:
    """Take a few nodes out, put one back anywhere and the others to their best, as often as the pool's size allows."""
    draws = random.Random(SEED)  # noqa: S311 - a search, no secret
    num_nodes = len(plan.nodes)
    for _ in range(min(REBUILDS, REBUILT // max(1, num_nodes)) if num_nodes > 1 else 0):
        if plan.is_enough(bound):
            break
        other = plan.copy()
        for number in (out := draws.sample(range(num_nodes), min(num_nodes, draws.choice([2, 3, 4])))):
            other.take(number)
        gaps_first = draws.random() < 0.5
        if draws.random() < 0.7:
            other.join_anywhere(out.pop(), draws)
        for number in out:
            other.rejoin(number, gaps_first=gaps_first)
        if other.worth().models < plan.worth().models or other.worth().rate < NEAR * plan.worth().rate:
            continue
        other.settle()
        plan = other if other.worth().beats(plan.worth()) else plan
    return plan


def _bound(nodes: Sequence[PoolNode], models: Sequence[ModelDemand]) -> float:
    """A score that no placement passes: all of each node's time for the model where it brings the most."""
    return sum(
        max(
            (
                model.demand / model.num_layers * 1000 / node.layer_ms[model.digest]
                for model in models
                if node.max_layers.get(model.digest, 0) > 0
            ),
            default=0.0,
        )
        for node in nodes
    )


def _orders(nodes: Sequence[PoolNode], models: Sequence[ModelDemand]) -> list[list[int]]:
    """Orders of joining that lead to different placements; none for large pools, which are dealt well."""
    if len(nodes) > MAX_DEEP:
        return []
    numbers = list(range(len(nodes)))
    speed = [min((node.layer_ms[model.digest] for model in models), default=0.0) for node in nodes]
    size = [sum(node.max_layers.get(model.digest, 0) for model in models) for node in nodes]
    by_speed = sorted(numbers, key=lambda number: speed[number])
    return [by_speed, by_speed[::-1], sorted(numbers, key=lambda number: -size[number])]
