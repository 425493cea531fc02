"""The pool as placement sees it, made of announcements: who holds what, who is about to, and who waits for a place.

Announcements are strangers' claims: they decide what this node loads among the models that its owner listed, and
nothing else. Knows no clock, no loads and no links.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from node.slice_loader import ModelFacts
from routing.announcement import Announcement
from routing.placement import ModelDemand, Placed, PoolNode, Score, choose_slices, score
from routing.types import NodeId, SliceSpec

PREFIX_SIZE = 8  # of a model's digest where an intention names it
ROOM_POSITIONS = 4096  # for keys and values beside the weights: a few sessions of a thousand tokens
GAIN = (
    1.2  # a move costs a load and a drain: less is not worth it, and noise in the measured speeds is below it
)


@dataclass(frozen=True, slots=True)
class Pool:
    """Everybody but us, as far as it concerns our models."""

    others: tuple[PoolNode, ...]  # what they hold or, where they are about to change, what they will hold
    waiting: tuple[PoolNode, ...]  # nodes without a slice that have not said yet what they take
    movers: frozenset[NodeId]  # those of `others` that hold slices and are about to change them

    @property
    def signature(self) -> tuple[object, ...]:
        """What a decision depends on, speeds roughly: as long as it stays, nothing has to be thought over."""
        speeds = [
            sorted((digest, round(ms, 1)) for digest, ms in (*node.layer_ms.items(), *node.line_ms.items()))
            for node in self.others
        ]
        held = [(node.node_id, node.held) for node in self.others]
        return tuple(map(str, (held, speeds, [node.node_id for node in self.waiting])))


def pool_of(
    announcements: Iterable[Announcement],
    facts: Sequence[ModelFacts],
    *,
    ignored: Collection[NodeId] = (),
    lines: Mapping[NodeId, float] | None = None,
) -> Pool:
    """Read what others announce of the models in `facts`; what `ignored` nodes plan is left out.

    `lines`: see `lines_of`.
    """
    of_prefix = {model.digest[:PREFIX_SIZE]: model for model in facts}
    others, waiting, movers = [], [], set()
    for announcement in sorted(announcements, key=lambda told: told.node_id):
        if "node" not in announcement.roles:
            continue
        is_ignored = announcement.node_id in ignored
        told = replace(announcement, intends=()) if is_ignored else announcement
        node = _pool_node(told, of_prefix, (lines or {}).get(told.node_id))
        if told.intends and told.offers:
            movers.add(node.node_id)
        if told.offers or told.intends:
            others.append(node)
        elif not is_ignored:
            waiting.append(node)
    return Pool(tuple(others), tuple(waiting), frozenset(movers))


def lines_of(told: Mapping[NodeId, Mapping[bytes, float]]) -> dict[NodeId, float]:
    """Mbit/s of each node's own line, where anybody knows: the best between it and any other.

    `told` is what each node tells of lines from others, by id prefix. Where both ends tell, the lower counts; so a
    node can be made slow by nobody but itself, and its own praise reaches no further than its neighbours' word.
    """
    whole = {node_id[:PREFIX_SIZE]: node_id for node_id in told}
    best: dict[NodeId, float] = {}
    for node_id, of_others in told.items():
        for prefix, mbps in of_others.items():
            other = whole.get(prefix)
            if other is None or other == node_id or not mbps > 0:
                continue
            slower = min(mbps, told[other].get(node_id[:PREFIX_SIZE], mbps))
            for end in (node_id, other):
                best[end] = max(best.get(end, 0.0), slower)
    return best


def line_ms(mbps: float | None, facts: Iterable[ModelFacts]) -> dict[bytes, float]:
    """What one row of each model takes on a line; nothing where that is not known."""
    if mbps is None:
        return {}
    return {model.digest: model.row_bytes / (125 * mbps) for model in facts if model.row_bytes}


def max_layers(allowed_bytes: int, model: ModelFacts) -> int:
    """How many layers of a model fit, with room for sessions."""
    each = model.layer_bytes + ROOM_POSITIONS * model.cache_bytes
    return min(model.num_layers, max(0, allowed_bytes) // max(1, each))


def demands(facts: Iterable[ModelFacts]) -> tuple[ModelDemand, ...]:
    """Every listed model counts the same: nobody measures yet what is asked for and not served."""
    return tuple(ModelDemand(model.digest, model.num_layers) for model in facts)


def choose(
    me: PoolNode, pool: Pool, models: Sequence[ModelDemand], *, gain: float = GAIN
) -> tuple[Placed, ...] | None:
    """What this node should hold; None: what it holds. Nodes that wait are taken to choose first, by their ids."""
    others = pool.others
    for node in pool.waiting:
        if not me.held and node.node_id > me.node_id:
            break
        chosen = choose_slices(node, others, models, gain=gain)
        others = (*others, replace(node, held=chosen or ()))
    return choose_slices(me, others, models, gain=gain)


def improvement(
    me: PoolNode, chosen: tuple[Placed, ...], pool: Pool, models: Sequence[ModelDemand]
) -> tuple[Score, Score]:
    """The pool's score now and after the change."""
    return score((*pool.others, me), models), score((*pool.others, replace(me, held=chosen)), models)


def _pool_node(
    announcement: Announcement, of_prefix: Mapping[bytes, ModelFacts], mbps: float | None
) -> PoolNode:
    held = {
        offer.model_digest: offer.spec
        for offer in announcement.offers
        if offer.model_digest[:PREFIX_SIZE] in of_prefix
    }
    speeds = {offer.model_digest: offer.layer_ms for offer in announcement.offers}
    intended = {
        of_prefix[prefix].digest: SliceSpec(start, end)
        for prefix, start, end in announcement.intends
        if prefix in of_prefix and end <= of_prefix[prefix].num_layers
    }
    if announcement.intends:
        held = intended
    return PoolNode(
        announcement.node_id,
        {model.digest: speeds.get(model.digest, model.layer_ms) for model in of_prefix.values()},
        {model.digest: _capacity(announcement, model, held) for model in of_prefix.values()},
        tuple(Placed(digest, spec) for digest, spec in held.items()),
        line_ms=line_ms(mbps, of_prefix.values()),
    )


def _capacity(announcement: Announcement, model: ModelFacts, held: Mapping[bytes, SliceSpec]) -> int:
    """A node without slices tells what it may take in bytes; of another one we know what it holds."""
    if not announcement.offers:
        return max_layers(announcement.free_bytes, model)
    spec = held.get(model.digest)
    return 0 if spec is None else spec.end - spec.start
