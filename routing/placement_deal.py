"""Which model each node of a large pool should serve: all for what brings the most, but for what covers the rest.

With many nodes a model's rate is nearly the time of its nodes over its layers, so a node is worth
demand / num_layers * 1000 / layer_ms to a model, whatever the others do. Pure.
"""

from __future__ import annotations

from collections.abc import Sequence

from routing.placement_score import ModelDemand, PoolNode


def dealt(nodes: Sequence[PoolNode], models: Sequence[ModelDemand]) -> list[int | None]:
    """The number of each node's model; None: it can serve none.

    Each model first gets room for its layers from the nodes that lose the least by it, per layer they hold.
    """
    values = [[_value(node, model) for model in models] for node in nodes]
    best = [max(range(len(models)), key=row.__getitem__, default=None) for row in values]
    dealt_to: list[int | None] = [
        None if number is None or not values[node][number] else number for node, number in enumerate(best)
    ]
    fixed: set[int] = set()
    for number in sorted(range(len(models)), key=lambda number: -models[number].num_layers):
        model, room = models[number], 0
        for node in sorted(
            range(len(nodes)), key=lambda node: _loss(values[node], number, nodes[node], model)
        ):
            if room >= model.num_layers:
                break
            if node not in fixed and values[node][number]:
                fixed.add(node)
                dealt_to[node] = number
                room += nodes[node].max_layers[model.digest]
    return dealt_to


def _value(node: PoolNode, model: ModelDemand) -> float:
    if node.max_layers.get(model.digest, 0) < 1:
        return 0.0
    return model.demand / model.num_layers * 1000 / node.layer_ms[model.digest]


def _loss(values: Sequence[float], number: int, node: PoolNode, model: ModelDemand) -> float:
    """What a node that serves this model brings less than at its best, per layer; its speed where it loses none."""
    num_layers = max(1, min(node.max_layers.get(model.digest, 0), model.num_layers))
    return (max(values) - values[number] + 1e-6 * values[number]) / num_layers
