"""Placements without replicas: each node serves one model, each model is one chain. A start for better ones.

How many layers a node of a chain takes is exact: a chain passes R tokens/s if its nodes hold enough layers at
1000 / (k * s + r) >= R, so the best R is the L-th largest of all 1000 / (k * s + r). Which node serves which model is a
local search over single moves and swaps.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import combinations

import numpy as np
import numpy.typing as npt

from routing.placement_score import ModelDemand, PoolNode
from routing.types import SliceSpec

SEED = 1  # the search is the same every time
RESTARTS = 8  # of a small pool with several models: single moves and swaps get stuck
MAX_SWEEPS = 4
MAX_SWEEPING = 64  # nodes: one sweep assigns a larger pool well enough
MAX_CHOOSING = 4  # models: all choices of them are tried, where not all can be whole
MAX_SWAPPING = 16  # nodes: swaps are pairs

Rates = npt.NDArray[np.float64]


def chains(nodes: Sequence[PoolNode], models: Sequence[ModelDemand]) -> list[dict[bytes, SliceSpec]]:
    """What each node holds, one model at most."""
    best = _searched(nodes, models)
    if best.num_whole < len(models) <= MAX_CHOOSING:  # which of the models may be another choice
        some = [list(combinations(models, size)) for size in range(1, len(models))]
        tries = [_searched(nodes, subset) for subsets in some for subset in subsets]
        best = max([best, *tries], key=_Assignment.worth)
    return best.plan()


def _searched(nodes: Sequence[PoolNode], models: Sequence[ModelDemand]) -> _Assignment:
    draws = random.Random(SEED)  # noqa: S311 - a search, no secret
    tries = [_Assignment(nodes, models)]
    if len(models) > 1 and len(nodes) <= MAX_SWAPPING:
        tries += [_Assignment(nodes, models, draws) for _ in range(RESTARTS)]
    for assigned in tries:
        assigned.improve()
        assigned.counts_room = False  # a model that cannot be whole has had its chance
        assigned.improve()
    return max(tries, key=_Assignment.worth)


class _Assignment:
    """Which model each node serves; -1: none. `draws`: begin anywhere."""

    def __init__(
        self,
        nodes: Sequence[PoolNode],
        models: Sequence[ModelDemand],
        draws: random.Random | None = None,
    ) -> None:
        self._models = models
        self.counts_room = True
        self._rates = [[_rates(node, model) for model in models] for node in nodes]
        self._of = [-1] * len(nodes)
        self._members: list[set[int]] = [set() for _ in models]
        self._worths = [(0, 0.0) for _ in models]  # layers there is room for, demand x tokens/s
        if draws is not None:
            self._put({node: draws.randrange(len(models)) for node in range(len(nodes))})

    def improve(self) -> None:
        """Move and swap nodes until nothing is gained."""
        fastest_first = sorted(
            range(len(self._of)),
            key=lambda node: -max((float(r.max(initial=0)) for r in self._rates[node]), default=0.0),
        )
        for _ in range(MAX_SWEEPS if len(self._of) <= MAX_SWEEPING else 1):
            moved = [self._move(node) for node in fastest_first]
            if len(self._of) <= MAX_SWAPPING:
                pairs = [(a, b) for a in fastest_first for b in fastest_first if a < b]
                moved += [self._swap(a, b) for a, b in pairs]
            if not any(moved):
                return

    @property
    def num_whole(self) -> int:
        """Models that have every layer."""
        return sum(rate > 0 for _, rate in self._worths)

    def plan(self) -> list[dict[bytes, SliceSpec]]:
        """What each node holds: one slice after another in each model."""
        plan: list[dict[bytes, SliceSpec]] = [{} for _ in self._of]
        for number, model in enumerate(self._models):
            at = 0
            for node, num_layers in self._shares(number):
                if num_layers:
                    plan[node] = {model.digest: SliceSpec(at, at + num_layers)}
                    at += num_layers
        return plan

    def _shares(self, number: int) -> list[tuple[int, int]]:
        """How many layers of a model each of its nodes takes: all of them together, or as many as fit."""
        members = sorted(self._members[number])
        owners = np.concatenate([np.full(len(self._rates[n][number]), n) for n in members] or [np.zeros(0)])
        rates = np.concatenate([self._rates[n][number] for n in members] or [np.zeros(0)])
        chosen = owners[np.argsort(-rates, kind="stable")[: self._models[number].num_layers]]
        return [(node, int((chosen == node).sum())) for node in members]

    def _move(self, node: int) -> bool:
        others = [number for number in range(len(self._models)) if number != self._of[node]]
        return any(self._try({node: number}) for number in others if len(self._rates[node][number]))

    def _swap(self, one: int, other: int) -> bool:
        a, b = self._of[one], self._of[other]
        return a != b and self._try({one: b, other: a})

    def _try(self, moves: dict[int, int]) -> bool:
        """Whether the moves are a gain; they are undone if not."""
        before, was, worths = self.worth(), {node: self._of[node] for node in moves}, list(self._worths)
        self._put(moves)
        if self.worth() > before:
            return True
        self._put(was)
        self._worths = worths
        return False

    def _put(self, moves: dict[int, int]) -> None:
        touched = set()
        for node, number in moves.items():
            old = self._of[node]
            touched |= {old, number} - {-1}
            if old >= 0:
                self._members[old].discard(node)
            if number >= 0:
                self._members[number].add(node)
            self._of[node] = number
        for number in touched:
            self._worths[number] = self._chain(number)

    def worth(self) -> tuple[int, int, float]:
        """Models covered, layers there is room for (while that counts), the sum of demand x tokens/s."""
        covered = sum(rate > 0 for _, rate in self._worths)
        room = sum(layers for layers, _ in self._worths) if self.counts_room else 0
        return covered, room, sum(rate for _, rate in self._worths)

    def _chain(self, number: int) -> tuple[int, float]:
        model = self._models[number]
        rates = np.concatenate([self._rates[n][number] for n in self._members[number]] or [np.zeros(0)])
        if len(rates) < model.num_layers:
            return len(rates), 0.0
        at = len(rates) - model.num_layers
        return model.num_layers, model.demand * float(np.partition(rates, at)[at])


def _rates(node: PoolNode, model: ModelDemand) -> Rates:
    """Tokens/s of one node by the number of layers it takes, 1, 2, ... as many as fit."""
    most = min(node.max_layers.get(model.digest, 0), model.num_layers)
    line_ms = node.line_ms.get(model.digest, 0.0)
    return 1000 / (line_ms + node.layer_ms[model.digest] * np.arange(1, most + 1))
