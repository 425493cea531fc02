"""Random pools, and two oracles for the best placement: subset dynamic programming, and enumeration."""

from __future__ import annotations

import itertools
import random
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from routing.placement import ModelDemand, Placed, PoolNode, Score
from routing.types import NodeId, SliceSpec


def models_of(*num_layers: int, demands: Sequence[float] = ()) -> list[ModelDemand]:
    demands = demands or [1.0] * len(num_layers)
    return [
        ModelDemand(bytes([n]) * 32, layers, demand)
        for n, (layers, demand) in enumerate(zip(num_layers, demands, strict=True))
    ]


def pool_node(
    number: int, models: Sequence[ModelDemand], layer_ms: float, max_layers: int, *held: tuple[int, int]
) -> PoolNode:
    """A node that runs every model alike; `held` are its slices of the first models, in order."""
    placed = tuple(Placed(m.digest, SliceSpec(*span)) for m, span in zip(models, held, strict=False))
    return PoolNode(
        NodeId(number.to_bytes(32, "big")),
        {model.digest: layer_ms for model in models},
        {model.digest: max_layers for model in models},
        placed,
    )


def random_pool(draws: random.Random, num_nodes: int, models: Sequence[ModelDemand]) -> list[PoolNode]:
    """Speeds spread tenfold, any capacities; each model runs a little faster here and slower there."""
    pool = []
    for number in range(num_nodes):
        layer_ms = 10 ** draws.uniform(0, 1)
        pool.append(
            PoolNode(
                NodeId(number.to_bytes(32, "big")),
                {m.digest: layer_ms * draws.uniform(0.8, 1.25) for m in models},
                {m.digest: draws.randint(1, m.num_layers + 1) for m in models},
            )
        )
    return pool


def placed(pool: Sequence[PoolNode], plan: Mapping[NodeId, tuple[Placed, ...]]) -> list[PoolNode]:
    return [replace(node, held=plan[node.node_id]) for node in pool]


def enumerated(pool: Sequence[PoolNode], models: Sequence[ModelDemand]) -> Score:
    """The best of all placements: every node, every slice of every model, several models on one node too."""
    totals = np.zeros((1, sum(model.num_layers for model in models)))
    for node in pool:
        choices = np.array(list(_choices(node, models)))
        totals = (totals[:, None, :] + choices[None, :, :]).reshape(-1, totals.shape[1])
    at = np.cumsum([0] + [model.num_layers for model in models])
    rates = [totals[:, a:b].min(axis=1) for a, b in itertools.pairwise(at)]
    covered = sum((rate > 0).astype(int) for rate in rates)
    value = sum(m.demand * rate for m, rate in zip(models, rates, strict=True))
    most = covered.max()
    return Score(int(most), float(value[covered == most].max()))


def _choices(node: PoolNode, models: Sequence[ModelDemand]):  # type: ignore[no-untyped-def]
    spans = [[(0, 0), *itertools.combinations(range(m.num_layers + 1), 2)] for m in models]
    for choice in itertools.product(*spans):
        sizes = [b - a for a, b in choice]
        used = sum(size / node.max_layers[m.digest] for size, m in zip(sizes, models, strict=True) if size)
        if used > 1 + 1e-9:
            continue
        ms = sum(size * node.layer_ms[m.digest] for size, m in zip(sizes, models, strict=True))
        row = [np.zeros(m.num_layers) for m in models]
        for part, (a, b) in zip(row, choice, strict=True):
            part[a:b] = 1000 / ms if ms else 0.0
        yield np.concatenate(row)


def best_without_replicas(pool: Sequence[PoolNode], models: Sequence[ModelDemand]) -> Score:
    """The best of all placements with each node in one model and each layer on one node: over all subsets."""
    subsets = range(1 << len(pool))
    best = [(0, 0.0)] * len(subsets)
    for model in models:
        chain = [_chain_rate([n for i, n in enumerate(pool) if s >> i & 1], model) for s in subsets]
        after = list(best)
        for subset in subsets:
            mine = subset
            while mine:
                covered, rate = best[subset ^ mine]
                if chain[mine] > 0:
                    found = (covered + 1, rate + model.demand * chain[mine])
                    after[subset] = max(after[subset], found)
                mine = (mine - 1) & subset
        best = after
    return Score(*best[-1])


def _chain_rate(nodes: Sequence[PoolNode], model: ModelDemand) -> float:
    """The fastest chain: the highest rate at which the nodes' slices together are long enough."""
    digest = model.digest
    rates = {1000 / (n.layer_ms[digest] * k) for n in nodes for k in range(1, n.max_layers[digest] + 1)}
    for rate in sorted(rates, reverse=True):
        room = sum(min(n.max_layers[digest], int(1000 / (rate * n.layer_ms[digest]) + 1e-9)) for n in nodes)
        if room >= model.num_layers:
            return rate
    return 0.0
