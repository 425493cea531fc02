"""Which nodes run which layers: a pure function from what the directory holds to a route.

Knows offers, options and exclusions. What ways cost is in `route_costs.py`, how the cheapest is found in
`route_search.py`; knows nothing of links, sessions or time.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise

import numpy as np

from routing.errors import NoRouteError
from routing.measurements import Measured
from routing.route_costs import Knowledge, Leg, RouteCosts, legs_of, round_trips, route_costs, site
from routing.route_search import Rules, Way, cheapest_way
from routing.types import Hop, NodeId, NodeRecord, Route, SliceOffer, SliceSpec

MAX_PINNED = 8  # which of them a way has is counted in bits
MAX_NODES = 512  # looked at for one route; of a larger crowd, the best for each layer
MAX_OFFERS = 16  # of one node for one model (directory.py): it bounds what a plan looks at

Usable = list[tuple[NodeRecord, list[SliceOffer]]]


@dataclass(frozen=True, slots=True)
class RouteRequest:
    """What a route must do.

    `known_hashes` are the content hashes of layers that already computed for this answer, `forms` the forms they
    computed in: a replica whose weights differ is never taken, one of another form only when nothing else is left.
    `held` are the survivors of a broken route and the layers that they computed: as many layers as possible stay
    with them, in exactly these ranges, before anything else is weighed.
    """

    model_name: str
    model_digest: bytes
    spec: SliceSpec
    needs_opening: bool = False
    needs_closing: bool = False
    excluded: frozenset[NodeId] = frozenset()
    known_hashes: Mapping[int, bytes] | None = None
    forms: frozenset[str] = frozenset()
    num_layers: int = 0  # of the model; 0: not known. An offer that says otherwise is not taken
    hidden_size: int = 0
    pinned: frozenset[NodeId] = frozenset()  # each of them is a hop
    max_hops: int | None = None
    distinct_owners: bool = False  # the first hop's owner is not the last one's: two hops at least
    held: Mapping[NodeId, SliceSpec] = field(default_factory=dict)


def plan_route(
    records: Iterable[NodeRecord],
    request: RouteRequest,
    *,
    measured: Mapping[NodeId, Measured] | None = None,
    sessions: Mapping[NodeId, int] | None = None,
) -> Route:
    """The route of least expected ms per token that covers `request.spec`, each node at most once.

    `measured`: what this gateway saw of nodes; `sessions`: how many of its own are on them now. Among equals the
    choice is by node id, whatever the order of the records. Raises NoRouteError, which names the layers that
    nobody serves, or the option that left no route.
    """
    spec = request.spec
    if spec.start == spec.end:
        return Route(spec)
    records = sorted(records, key=lambda record: record.address.node_id)
    usable = _usable(records, request)
    _check(records, usable, request)
    known = _knowledge(request, measured, sessions)
    costs = route_costs(_most_promising(usable, known, request), spec, known)
    way = cheapest_way(costs, _rules(costs, request))
    if not way.taken:
        raise _no_way(costs, request, way)
    return Route(spec, tuple(_hop(costs, leg.leg, SliceSpec(leg.start, leg.end)) for leg in way.taken))


def route_ms(
    records: Iterable[NodeRecord],
    route: Route,
    request: RouteRequest,
    *,
    measured: Mapping[NodeId, Measured] | None = None,
    sessions: Mapping[NodeId, int] | None = None,
) -> float:
    """What one token is expected to take on a route, in ms, survivors and forms left aside.

    Infinite where a hop's node or its offer is not among the records any more.
    """
    nodes = {hop.address.node_id: number for number, hop in enumerate(route.hops)}
    plain = replace(request, held={}, forms=frozenset())
    costs = route_costs(_usable(records, plain), request.spec, _knowledge(plain, measured, sessions))
    numbers = {record.address.node_id: number for number, record in enumerate(costs.records)}
    if not nodes or not nodes.keys() <= numbers.keys():
        return math.inf if nodes else 0.0
    path = [numbers[hop.address.node_id] for hop in route.hops]
    total = float(costs.into_ms[path[0]] + costs.back_ms[path[-1]])
    total += sum(float(costs.between_ms[there, here]) for here, there in pairwise(path))
    return total + sum(_leg_ms(costs, node, hop.spec) for node, hop in zip(path, route.hops, strict=True))


def missing_layers(records: Iterable[NodeRecord], request: RouteRequest) -> list[tuple[int, int]]:
    """Half-open ranges of `request.spec` that no usable node serves."""
    return _gaps(_usable(records, request), request.spec)


def _usable(records: Iterable[NodeRecord], request: RouteRequest) -> Usable:
    """Each node that may be asked, with the offers that fit: every node once."""
    usable: dict[NodeId, tuple[NodeRecord, list[SliceOffer]]] = {}
    for record in records:
        node_id = record.address.node_id
        if node_id in request.excluded or node_id in usable:
            continue
        offers = [offer for offer in record.offers if _fits(offer, request)]
        if offers:
            usable[node_id] = record, offers[:MAX_OFFERS]
    return list(usable.values())


def _fits(offer: SliceOffer, request: RouteRequest) -> bool:
    return (
        offer.model_digest == request.model_digest
        and offer.spec.start < request.spec.end
        and offer.spec.end > request.spec.start
        and request.num_layers in (0, offer.num_layers)
        and request.hidden_size in (0, offer.hidden_size)
        and 0 <= offer.layer_ms < math.inf
        and _same_weights(offer, request.known_hashes)
    )


def _same_weights(offer: SliceOffer, known: Mapping[int, bytes] | None) -> bool:
    if not known or not offer.layer_hashes:
        return True
    layers = range(offer.spec.start, offer.spec.end)
    return all(known.get(n, h) == h for n, h in zip(layers, offer.layer_hashes, strict=False))


def _gaps(usable: Usable, spec: SliceSpec) -> list[tuple[int, int]]:
    gaps: list[tuple[int, int]] = []
    at = spec.start
    for start, end in sorted((offer.spec.start, offer.spec.end) for _, offers in usable for offer in offers):
        if start >= spec.end:
            break
        if start > at:
            gaps.append((at, start))
        at = max(at, end)
    if at < spec.end:
        gaps.append((at, spec.end))
    return gaps


def _check(records: Sequence[NodeRecord], usable: Usable, request: RouteRequest) -> None:
    """Raise NoRouteError for what can be seen before a search."""
    gaps, ends = _gaps(usable, request.spec), _missing_ends(usable, request)
    if gaps or ends:
        others = _usable(records, replace(request, excluded=frozenset()))
        helps = (_gaps(others, request.spec), _missing_ends(others, request)) != (gaps, ends)
        reason = "nodes that do are excluded" if helps else ""
        raise NoRouteError(gaps, request.model_name, ends, reason)
    if request.max_hops is not None and request.max_hops < 1:
        raise NoRouteError((), request.model_name, reason=f"max_hops is {request.max_hops}")
    if len(request.pinned) > MAX_PINNED:
        raise NoRouteError((), request.model_name, reason=f"more than {MAX_PINNED} nodes are pinned")
    live = {record.address.node_id for record in records}
    able = {record.address.node_id for record, _ in usable}
    for node_id in sorted(request.pinned - able):
        if node_id in request.excluded:
            why = "excluded, too"
        else:
            why = "without layers for it" if node_id in live else "not live"
        raise NoRouteError((), request.model_name, reason=f"pinned node {node_id.hex()[:8]} is {why}")


def _missing_ends(usable: Usable, request: RouteRequest) -> list[str]:
    spec = request.spec
    offers = [offer for _, offers in usable for offer in offers]
    ends = []
    if request.needs_opening and not any(o.has_opening and o.spec.start <= spec.start for o in offers):
        ends.append("opening")
    if request.needs_closing and not any(o.has_closing and o.spec.end >= spec.end for o in offers):
        ends.append("closing")
    return ends


def _knowledge(
    request: RouteRequest,
    measured: Mapping[NodeId, Measured] | None,
    sessions: Mapping[NodeId, int] | None,
) -> Knowledge:
    return Knowledge(
        measured or {},
        sessions or {},
        request.forms,
        request.held,
        rows_come_back=not request.needs_closing,
    )


def _most_promising(usable: Usable, known: Knowledge, request: RouteRequest) -> Usable:
    """The best MAX_NODES: whoever must be there, then each layer's first choice, its second, and so on.

    A leg is as good as its share of a layer costs little. Both ends count as layers of their own.
    """
    if len(usable) <= MAX_NODES:
        return usable
    spec, legs = request.spec, legs_of(usable, request.spec, known)
    rtts = round_trips([record for record, _ in usable])
    price = [leg.layer_ms + (leg.hop_ms + rtts[leg.node]) / (leg.end - leg.start) for leg in legs]
    rank = np.full(len(usable), np.inf)
    taken = np.zeros(spec.end + 2)
    for number in sorted(range(len(legs)), key=price.__getitem__):
        leg = legs[number]
        if rank[leg.node] == np.inf:  # its other legs are dearer
            layers = _layers_of(leg, request)
            rank[leg.node] = taken[layers].min()
            taken[layers] += 1
    wanted = request.pinned | request.held.keys()
    rank[[record.address.node_id in wanted for record, _ in usable]] = -1
    return [usable[number] for number in sorted(np.argsort(rank, kind="stable")[:MAX_NODES].tolist())]


def _layers_of(leg: Leg, request: RouteRequest) -> list[int]:
    spec, offer = request.spec, leg.offer
    layers = list(range(leg.start, leg.end))
    if leg.start == spec.start and (offer.has_opening or not request.needs_opening):
        layers.append(spec.end)
    if leg.end == spec.end and (offer.has_closing or not request.needs_closing):
        layers.append(spec.end + 1)
    return layers


def _rules(costs: RouteCosts, request: RouteRequest) -> Rules:
    numbers = {record.address.node_id: number for number, record in enumerate(costs.records)}
    may_open = [leg.offer.has_opening or not request.needs_opening for leg in costs.legs]
    may_close = [leg.offer.has_closing or not request.needs_closing for leg in costs.legs]
    return Rules(
        request.spec,
        np.array(may_open, bool),
        np.array(may_close, bool),
        pinned=tuple(numbers[node_id] for node_id in sorted(request.pinned)),
        max_hops=request.max_hops,
        owners=_owners(costs.records) if request.distinct_owners else None,
    )


def _owners(records: Sequence[NodeRecord]) -> tuple[int, ...]:
    numbers: dict[tuple[bool, str], int] = {}
    names = [(bool(record.owner), record.owner or site(record.address)) for record in records]
    return tuple(numbers.setdefault(name, len(numbers)) for name in names)


def _hop(costs: RouteCosts, leg: int, spec: SliceSpec) -> Hop:
    record = costs.records[costs.legs[leg].node]
    offer = costs.legs[leg].offer
    return Hop(record.address, offer, spec, record.seal_key, record.dtypes, record.alternatives)


def _leg_ms(costs: RouteCosts, node: int, spec: SliceSpec) -> float:
    """The cheapest that a node runs these layers for."""
    num_layers = spec.end - spec.start
    return min(
        (
            leg.hop_ms + leg.layer_ms * num_layers
            for leg in costs.legs
            if leg.node == node and leg.start <= spec.start and spec.end <= leg.end
        ),
        default=math.inf,
    )


def _no_way(costs: RouteCosts, request: RouteRequest, way: Way) -> NoRouteError:
    """Which option left no route: the first without which there is one."""
    plain = replace(request, pinned=frozenset(), max_hops=None, distinct_owners=False)
    if plain != request:
        options = {
            "max_hops": f"at most {request.max_hops} hops are too few",
            "distinct_owners": "the first and the last hop would have one owner",
            "pinned": "the pinned nodes do not fit into one",
        }
        for option, reason in options.items():
            without = replace(request, **{option: getattr(plain, option)})
            if without != request and cheapest_way(costs, _rules(costs, without)).taken:
                return NoRouteError((), request.model_name, reason=reason)
        if cheapest_way(costs, _rules(costs, plain)).taken:
            return NoRouteError((), request.model_name, reason="its options together leave none")
    # Each layer and each end has a node, but no chain of them fits together.
    gap = (way.twice.start, way.twice.end) if way.twice else (request.spec.start, request.spec.end)
    reason = "the search for one was given up" if way.gave_up else ""
    return NoRouteError([gap], request.model_name, reason=reason)
