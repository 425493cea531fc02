"""Which nodes run which layers: a pure function from what the directory holds to a route.

Knows offers, costs and exclusions; knows nothing of links, sessions or time.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from routing.errors import NoRouteError
from routing.types import Hop, NodeId, NodeRecord, Route, SliceOffer, SliceSpec

HOP_MS = 1.0  # what one more hop costs where no round trip was measured (loopback bar of the hop cost)
LOAD_MS = 0.5  # per live session on a node: spreads sessions over replicas of equal speed
FORM_PENALTY_MS = 1e6  # a replica of another form is the last resort (it changes bits)


@dataclass(frozen=True, slots=True)
class RouteRequest:
    """What a route must do.

    `known_hashes` are the content hashes of layers that already computed for this answer, `forms` the forms they
    computed in: a replica whose weights differ is never taken, one of another form only when nothing else is left.
    """

    model_name: str
    model_digest: bytes
    spec: SliceSpec
    needs_opening: bool = False
    needs_closing: bool = False
    excluded: frozenset[NodeId] = frozenset()
    known_hashes: Mapping[int, bytes] | None = None
    forms: frozenset[str] = frozenset()


def plan_route(records: Iterable[NodeRecord], request: RouteRequest) -> Route:
    """The cheapest chain of hops that covers `request.spec`.

    Cost of a hop: its round trip, its measured ms per layer and its load. Raises NoRouteError, which names the
    layers that nobody serves.
    """
    usable = _usable_offers(records, request)
    spec = request.spec
    if spec.start == spec.end:
        return Route(spec)
    borders = sorted({spec.start, spec.end} | {b for _, o in usable for b in (o.spec.start, o.spec.end)})
    borders = [b for b in borders if spec.start <= b <= spec.end]
    best: dict[int, float] = {spec.start: 0.0}
    came_from: dict[int, tuple[int, Hop]] = {}
    queue = [(0.0, spec.start)]
    while queue:
        cost, at = heapq.heappop(queue)
        if cost > best[at]:
            continue
        for record, offer in usable:
            for border in borders:
                if not (offer.spec.start <= at < border <= offer.spec.end):
                    continue
                if not _holds_ends(offer, at, border, request):
                    continue
                total = cost + _hop_cost(record, offer, border - at, request)
                if total < best.get(border, float("inf")):
                    best[border] = total
                    came_from[border] = (at, _hop(record, offer, SliceSpec(at, border)))
                    heapq.heappush(queue, (total, border))
    if spec.end not in came_from:
        raise _missing(usable, request)
    return Route(spec, _walk_back(came_from, spec))


def missing_layers(records: Iterable[NodeRecord], request: RouteRequest) -> list[tuple[int, int]]:
    """Half-open ranges of `request.spec` that no usable node serves."""
    gaps: list[tuple[int, int]] = []
    at = request.spec.start
    for _, offer in sorted(_usable_offers(records, request), key=lambda pair: pair[1].spec.start):
        if offer.spec.start >= request.spec.end:
            break
        if offer.spec.start > at:
            gaps.append((at, offer.spec.start))
        at = max(at, offer.spec.end)
    if at < request.spec.end:
        gaps.append((at, request.spec.end))
    return gaps


def _usable_offers(
    records: Iterable[NodeRecord], request: RouteRequest
) -> list[tuple[NodeRecord, SliceOffer]]:
    return [
        (record, offer)
        for record in records
        if record.address.node_id not in request.excluded
        for offer in record.offers
        if offer.model_digest == request.model_digest and _same_weights(offer, request.known_hashes)
    ]


def _same_weights(offer: SliceOffer, known: Mapping[int, bytes] | None) -> bool:
    if not known or not offer.layer_hashes:
        return True
    layers = range(offer.spec.start, offer.spec.end)
    return all(known.get(n, h) == h for n, h in zip(layers, offer.layer_hashes, strict=False))


def _holds_ends(offer: SliceOffer, start: int, end: int, request: RouteRequest) -> bool:
    if request.needs_opening and start == request.spec.start and not offer.has_opening:
        return False
    return not (request.needs_closing and end == request.spec.end and not offer.has_closing)


def _hop_cost(record: NodeRecord, offer: SliceOffer, layers: int, request: RouteRequest) -> float:
    cost = (HOP_MS if record.rtt_ms is None else record.rtt_ms) + LOAD_MS * record.load
    cost += offer.layer_ms * layers
    if request.forms and offer.form not in request.forms:
        cost += FORM_PENALTY_MS
    return cost


def _hop(record: NodeRecord, offer: SliceOffer, spec: SliceSpec) -> Hop:
    return Hop(record.address, offer, spec, record.seal_key, record.dtypes)


def _walk_back(came_from: Mapping[int, tuple[int, Hop]], spec: SliceSpec) -> tuple[Hop, ...]:
    hops: list[Hop] = []
    at = spec.end
    while at != spec.start:
        at, hop = came_from[at]
        hops.append(hop)
    return tuple(reversed(hops))


def _missing(usable: list[tuple[NodeRecord, SliceOffer]], request: RouteRequest) -> NoRouteError:
    gaps = missing_layers([record for record, _ in usable], request)
    ends = []
    spec = request.spec
    if request.needs_opening and not any(o.has_opening and o.spec.start <= spec.start for _, o in usable):
        ends.append("opening")
    if request.needs_closing and not any(o.has_closing and o.spec.end >= spec.end for _, o in usable):
        ends.append("closing")
    return NoRouteError(gaps, request.model_name, ends)
