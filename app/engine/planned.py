"""The route that a request for a model would take now, and how many nodes could take each of its layers.

Reads what the directory and the links know at this moment; opens nothing.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from app.engine.coverage import SHORT_DIGITS
from app.engine.request import RouteHop
from app.engine.route_options import RouteOptions
from app.engine.routes import Routes
from routing.measurements import Measured
from routing.planner import RouteRequest
from routing.switchboard import Switchboard
from routing.types import Hop, NodeRecord

Spans = tuple[tuple[int, int], ...]  # of layers, half-open


@dataclass(frozen=True, slots=True)
class PlannedHop:
    """One hop. `layer_ms` is one token (of a pipeline: one pass) through one layer, `queue_ms` its wait at the node.

    Without measurements of ours, `layer_ms` is what the node says of itself. `rtt_ms` is ours to it; None: not known.
    """

    hop: RouteHop
    rtt_ms: float | None
    layer_ms: float | None
    queue_ms: float
    is_measured: bool
    dtype: str
    form: str
    stack: str = ""  # of a pipeline: which of its lists of blocks
    opens: bool = False  # it embeds token ids
    closes: bool = False  # it has the head, and draws


@dataclass(frozen=True, slots=True)
class RoutePlan:
    """A whole route: what nodes run, in order, and what stays here. `replicas` are live nodes by layer, 0 at home."""

    num_layers: int
    hops: tuple[PlannedHop, ...] = ()
    home: Spans = ()
    has_ends: bool = True  # embedding and head are here
    replicas: tuple[int, ...] = ()
    expected_ms: float | None = None  # of one token on the network and the nodes; of a pipeline: of one pass

    @staticmethod
    def at_home(num_layers: int) -> RoutePlan:
        """The plan of a model that is whole in this process."""
        return RoutePlan(num_layers, home=((0, num_layers),), replicas=(0,) * num_layers)


def planned(
    switchboard: Switchboard, stacks: Sequence[tuple[str, RouteRequest]], options: RouteOptions
) -> RoutePlan:
    """Plan every stack of a model. Raises NoRouteError, RequestError, ModelUnavailableError."""
    num_layers = stacks[0][1].num_layers
    hops: list[PlannedHop] = []
    expected_ms = 0.0
    for name, request in stacks:
        route = switchboard.plan(Routes(switchboard, request).asked(options))
        expected_ms += switchboard.expected_ms(route, request)
        measured = switchboard.measurements.of(request.model_digest)
        last = len(route.hops) - 1
        hops += [
            _hop(
                switchboard,
                hop,
                measured.get(hop.address.node_id),
                stack=name,
                opens=request.needs_opening and number == 0,
                closes=request.needs_closing and number == last,
            )
            for number, hop in enumerate(route.hops)
        ]
    requests = [request for _, request in stacks]
    return RoutePlan(
        num_layers,
        tuple(hops),
        home=_outside([(request.spec.start, request.spec.end) for request in requests], num_layers),
        has_ends=not any(request.needs_opening for request in requests),
        replicas=_replicas(switchboard.directory.records(), requests, num_layers),
        expected_ms=round(expected_ms, 3) if math.isfinite(expected_ms) else None,
    )


def _hop(
    switchboard: Switchboard, hop: Hop, measured: Measured | None, *, stack: str, opens: bool, closes: bool
) -> PlannedHop:
    link = switchboard.live_link(hop.address.node_id)
    seen_ms = None if measured is None else measured.layer_ms
    return PlannedHop(
        RouteHop(
            hop.address.node_id.hex()[:SHORT_DIGITS],
            hop.spec.start,
            hop.spec.end,
            hop.address.is_relayed if link is None else link.is_relayed,
        ),
        rtt_ms=None if link is None else link.rtt_ms,
        layer_ms=seen_ms if seen_ms is not None else hop.offer.layer_ms or None,
        queue_ms=0.0 if measured is None else measured.queue_ms,
        is_measured=seen_ms is not None,
        dtype=hop.offer.dtype.name.lower(),
        form=hop.offer.form,
        stack=stack,
        opens=opens,
        closes=closes,
    )


def _outside(spans: Iterable[tuple[int, int]], num_layers: int) -> Spans:
    """What of [0, num_layers) lies in none of the spans."""
    at, found = 0, []
    for start, end in [*sorted(spans), (num_layers, num_layers)]:
        if start > at:
            found.append((at, start))
        at = max(at, end)
    return tuple(found)


def _replicas(
    records: Iterable[NodeRecord], requests: Sequence[RouteRequest], num_layers: int
) -> tuple[int, ...]:
    """How many nodes that may be asked hold each layer that nodes run."""
    wanted = {layer for request in requests for layer in range(request.spec.start, request.spec.end)}
    digests = {request.model_digest for request in requests}
    excluded = frozenset().union(*(request.excluded for request in requests))
    counts = [0] * num_layers
    for record in records:
        if record.address.node_id in excluded:
            continue
        held: set[int] = set()
        for offer in record.offers:
            if offer.model_digest in digests and offer.num_layers == num_layers:
                held.update(range(offer.spec.start, offer.spec.end))
        for layer in held & wanted:
            counts[layer] += 1
    return tuple(counts)
