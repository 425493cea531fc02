"""What planning is told of nodes, made of what they described or announced, and which of many nodes to follow.

Pure. Knows nothing of links' lives or of how records come here.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping

from routing.announcement import Announcement
from routing.follower import name_of
from routing.link import Link
from routing.types import Description, NodeAddress, NodeId, NodeRecord, SliceOffer

logger = logging.getLogger(__name__)

SEAL_KEY_SIZE = 32
MAX_OFFERS = 16  # per node; one holds a slice of a few models. It bounds what a plan looks at
COPIES = 3  # of every layer are followed before the remaining places are filled


def described_record(
    address: NodeAddress,
    others: tuple[NodeAddress, ...],
    link: Link,
    description: Description,
    told: Announcement | None,
) -> NodeRecord | None:
    """What a node said on a link of ours; None for one that cannot be used: nothing can be sealed for it."""
    capabilities = link.capabilities
    if len(capabilities.seal_key) != SEAL_KEY_SIZE:
        return None
    offers = tuple(offer for offer in description.slices if _makes_sense(offer))[:MAX_OFFERS]
    if len(offers) < len(description.slices):
        num_left = len(description.slices) - len(offers)
        logger.warning("node %s: %d of its slices are not taken", name_of(address), num_left)
    return NodeRecord(
        address,
        capabilities.seal_key,
        capabilities.dtypes,
        offers,
        description.load,
        link.rtt_ms,
        owner=told.owner.key.hex() if told is not None and told.owner is not None else "",
        max_sessions=description.max_sessions,
        neighbour_ms=dict(told.neighbour_ms) if told is not None else {},
        neighbour_mbps=dict(told.neighbour_mbps) if told is not None else {},
        mbps=link.mbps,
        alternatives=others,
    )


def announced_record(told: Announcement, ways: tuple[NodeAddress, ...]) -> NodeRecord:
    """What a node that we have no link to claims of itself."""
    return NodeRecord(
        ways[0],
        told.seal_key,
        told.dtypes,
        tuple(offer for offer in told.offers if _makes_sense(offer))[:MAX_OFFERS],
        told.load,
        owner=told.owner.key.hex() if told.owner is not None else "",
        max_sessions=told.max_sessions,
        neighbour_ms=dict(told.neighbour_ms),
        neighbour_mbps=dict(told.neighbour_mbps),
        alternatives=ways[1:],
        is_verified=False,
    )


def chosen_to_follow(
    kept: Iterable[NodeId], fresh: Iterable[NodeId], told: Mapping[NodeId, Announcement], limit: int
) -> frozenset[NodeId]:
    """Return `kept` and as many `fresh` nodes as there are places for, first such as hold a layer with few copies."""
    copies: dict[tuple[bytes, int], int] = {}
    chosen: dict[NodeId, None] = {}

    def take(node_id: NodeId) -> None:
        chosen[node_id] = None
        for layer in _layers(told[node_id].offers):
            copies[layer] = copies.get(layer, 0) + 1

    for node_id in kept:
        take(node_id)
    for copies_wanted in (COPIES, len(told) + 1):
        for node_id in fresh:
            if len(chosen) >= limit:
                break
            layers = _layers(told[node_id].offers)
            if node_id not in chosen and any(copies.get(layer, 0) < copies_wanted for layer in layers):
                take(node_id)
    return frozenset(chosen)


def _layers(offers: Iterable[SliceOffer]) -> list[tuple[bytes, int]]:
    return [(it.model_digest, layer) for it in offers for layer in range(it.spec.start, it.spec.end)]


def slices_of(offers: Iterable[SliceOffer]) -> set[tuple[bytes, int, int]]:
    """Which layers of which models these are."""
    return {(it.model_digest, it.spec.start, it.spec.end) for it in offers}


def _makes_sense(offer: SliceOffer) -> bool:
    return 0 <= offer.spec.start < offer.spec.end <= offer.num_layers and offer.layer_ms >= 0
