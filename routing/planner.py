"""Which nodes run which layers: a pure function from what the directory holds to a route.

Knows offers, costs and exclusions; knows nothing of links, sessions or time.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import count
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from routing.errors import NoRouteError
from routing.types import Hop, NodeId, NodeRecord, Route, SliceOffer, SliceSpec

HOP_MS = 1.0  # what one more hop costs where no round trip was measured (loopback bar of the hop cost)
LOAD_MS = 0.5  # per live session on a node: spreads sessions over replicas of equal speed
MAX_TRIES = 32  # paths looked at for one route: more means offers that somebody made up
FORM_PENALTY_MS = 1e6  # a replica of another form is the last resort (it changes bits)

Column = npt.NDArray[np.int64]


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
    num_layers: int = 0  # of the model; 0: not known. An offer that says otherwise is not taken
    hidden_size: int = 0


def plan_route(records: Iterable[NodeRecord], request: RouteRequest) -> Route:
    """The cheapest chain of hops that covers `request.spec`, each node at most once.

    Cost of a hop: its round trip, its measured ms per layer and its load. Raises NoRouteError, which names the
    layers that nobody serves.
    """
    spec = request.spec
    if spec.start == spec.end:
        return Route(spec)
    usable = _usable_offers(records, request)
    table = _OfferTable(usable, request)
    tries = count()
    queue: list[tuple[float, int, tuple[Window, ...], list[Leg]]] = []
    _try(queue, table, (), tries)
    if not queue:
        raise _missing(usable, request)
    # A session is held once per node, so a node cannot have two hops. Where the cheapest path wants it, whatever
    # route there is enters that node either before or after the second entry: try both, the cheapest first.
    again: Hop | None = None
    while queue:
        _, _, windows, legs = heapq.heappop(queue)
        hops = tuple(_hop(*usable[leg.offer], SliceSpec(leg.start, leg.end)) for leg in legs)
        again = _second_entry(hops)
        if again is None:
            return Route(spec, hops)
        if next(tries) < MAX_TRIES:
            node_id, at = again.address.node_id, again.spec.start
            _try(queue, table, (*windows, Window(node_id, 0, at)), tries)
            _try(queue, table, (*windows, Window(node_id, at, spec.end)), tries)
    assert again is not None
    raise NoRouteError([(again.spec.start, again.spec.end)], request.model_name)


class Leg(NamedTuple):
    """Layers [start, end) by the usable offer of this number."""

    offer: int
    start: int
    end: int


class Window(NamedTuple):
    """A node may be entered at layers [low, high) only."""

    node_id: NodeId
    low: int
    high: int


class _OfferTable:
    """The usable offers as columns: a snapshot may hold thousands, and a plan is made for every request."""

    def __init__(self, usable: list[tuple[NodeRecord, SliceOffer]], request: RouteRequest) -> None:
        self.spec = request.spec
        self.node_ids = [record.address.node_id for record, _ in usable]
        self.start = np.array([offer.spec.start for _, offer in usable], dtype=np.int64)
        self.end = np.array([offer.spec.end for _, offer in usable], dtype=np.int64)
        self.layer_ms = np.array([offer.layer_ms for _, offer in usable], dtype=np.float64)
        self.hop_ms = np.array([_hop_ms(record, offer, request) for record, offer in usable])
        self.may_open = np.array(
            [offer.has_opening or not request.needs_opening for _, offer in usable], bool
        )
        self.may_close = np.array(
            [offer.has_closing or not request.needs_closing for _, offer in usable], bool
        )

    def cheapest(self, windows: tuple[Window, ...]) -> tuple[float, list[Leg]] | None:
        """The cheapest path over borders in ascending order (hops only go forward); O(offers x borders)."""
        if not self.node_ids:
            return None
        low, high = self._entries(windows)
        spec = self.spec
        entered_at = np.full(len(low), -1)
        # What an offer costs up to border b is hop_ms + layer_ms * b + entry_ms, wherever it was entered.
        entry_ms = np.full(len(low), np.inf)
        best, came_from = {spec.start: 0.0}, {spec.start: Leg(0, 0, 0)}
        borders = np.unique(np.concatenate([self.start, self.end, [spec.start, spec.end]]))
        for border in borders[(borders >= spec.start) & (borders <= spec.end)].tolist():
            if border > spec.start:
                cost = entry_ms + self.hop_ms + self.layer_ms * border
                cost[(self.end < border) | ((border == spec.end) & ~self.may_close)] = np.inf
                offer = int(cost.argmin())
                if not math.isfinite(cost[offer]):
                    continue
                best[border] = float(cost[offer])
                came_from[border] = Leg(offer, int(entered_at[offer]), border)
            entry = best[border] - self.layer_ms * border
            may = (self.start <= border) & (border < self.end) & (low <= border) & (border < high)
            may &= (border != spec.start) | self.may_open
            may &= entry < entry_ms
            entry_ms[may], entered_at[may] = entry[may], border
        if spec.end not in best:
            return None
        return best[spec.end], _walk_back(came_from, spec)

    def _entries(self, windows: tuple[Window, ...]) -> tuple[Column, Column]:
        """The layers [low, high) at which each offer may be entered."""
        low, high = np.zeros(len(self.node_ids), np.int64), np.full(len(self.node_ids), self.spec.end)
        for window in windows:
            of_node = np.array([node_id == window.node_id for node_id in self.node_ids])
            low[of_node] = np.maximum(low[of_node], window.low)
            high[of_node] = np.minimum(high[of_node], window.high)
        return low, high


def _try(
    queue: list[tuple[float, int, tuple[Window, ...], list[Leg]]],
    table: _OfferTable,
    windows: tuple[Window, ...],
    tries: Iterator[int],
) -> None:
    if (found := table.cheapest(windows)) is not None:
        heapq.heappush(queue, (found[0], next(tries), windows, found[1]))


def _second_entry(hops: tuple[Hop, ...]) -> Hop | None:
    """The first hop whose node has an earlier hop."""
    seen: set[NodeId] = set()
    for hop in hops:
        if hop.address.node_id in seen:
            return hop
        seen.add(hop.address.node_id)
    return None


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
        if offer.model_digest == request.model_digest
        and request.num_layers in (0, offer.num_layers)
        and request.hidden_size in (0, offer.hidden_size)
        and _same_weights(offer, request.known_hashes)
    ]


def _same_weights(offer: SliceOffer, known: Mapping[int, bytes] | None) -> bool:
    if not known or not offer.layer_hashes:
        return True
    layers = range(offer.spec.start, offer.spec.end)
    return all(known.get(n, h) == h for n, h in zip(layers, offer.layer_hashes, strict=False))


def _hop_ms(record: NodeRecord, offer: SliceOffer, request: RouteRequest) -> float:
    """What a hop costs beside its layers."""
    cost = (HOP_MS if record.rtt_ms is None else record.rtt_ms) + LOAD_MS * record.load
    if request.forms and offer.form not in request.forms:
        cost += FORM_PENALTY_MS
    return cost


def _hop(record: NodeRecord, offer: SliceOffer, spec: SliceSpec) -> Hop:
    return Hop(record.address, offer, spec, record.seal_key, record.dtypes)


def _walk_back(came_from: Mapping[int, Leg], spec: SliceSpec) -> list[Leg]:
    legs: list[Leg] = []
    at = spec.end
    while at != spec.start:
        legs.append(came_from[at])
        at = came_from[at].start
    return legs[::-1]


def _missing(usable: list[tuple[NodeRecord, SliceOffer]], request: RouteRequest) -> NoRouteError:
    gaps = missing_layers([record for record, _ in usable], request)
    ends = []
    spec = request.spec
    if request.needs_opening and not any(o.has_opening and o.spec.start <= spec.start for _, o in usable):
        ends.append("opening")
    if request.needs_closing and not any(o.has_closing and o.spec.end >= spec.end for _, o in usable):
        ends.append("closing")
    if not gaps and not ends:  # each layer and each end has a node, but no chain of them fits together
        gaps = [(spec.start, spec.end)]
    return NoRouteError(gaps, request.model_name, ends)
