"""Whether a model can answer now: its facts and what the directory holds in, a status out.

Pure but for the clock; knows no weights and no links.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, replace

from app.engine.request import ModelStatus, RouteHop
from routing.chain import RETURN_GRACE_S
from routing.errors import NoRouteError
from routing.planner import RouteRequest, missing_layers, plan_route
from routing.types import NodeId, NodeRecord, Route, SliceOffer, SliceSpec

SHORT_DIGITS = 8  # of an id or a digest, in texts for people


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """What the gateway knows of a model without its weights."""

    name: str
    digest: bytes
    num_layers: int
    hidden_size: int
    vocab_size: int
    max_positions: int


def route_request(
    facts: ModelFacts, middle: SliceSpec, *, is_thin: bool, excluded: frozenset[NodeId] = frozenset()
) -> RouteRequest:
    """What any route of this model must do."""
    return RouteRequest(
        facts.name,
        facts.digest,
        middle,
        needs_opening=is_thin,
        needs_closing=is_thin,
        excluded=excluded,
        num_layers=facts.num_layers,
        hidden_size=facts.hidden_size,
    )


class Coverage:
    """Whether one model has a whole route; planned again only when the directory's records are others."""

    def __init__(self, request: RouteRequest, *, now: Callable[[], float] = time.monotonic) -> None:
        self.request = request
        self._now = now
        self._seen: Collection[NodeRecord] | None = None
        self._status = ModelStatus("partial", request.num_layers)
        self._lost_at: float | None = None  # when the last whole route was found gone

    def status(self, records: tuple[NodeRecord, ...]) -> ModelStatus:
        """See `status_of`; for as long as an answer under way would wait for a lost node, it says so."""
        if records is not self._seen:
            was_ready, self._status = self._status.is_ready, status_of(records, self.request)
            self._seen = records
            if was_ready and not self._status.is_ready:
                self._lost_at = self._now()
        if self._status.is_ready or self._lost_at is None or self._now() - self._lost_at >= RETURN_GRACE_S:
            return self._status
        return replace(self._status, may_return=True)


def status_of(records: Collection[NodeRecord], request: RouteRequest) -> ModelStatus:
    """Say "ready", or "partial" with the layers and ends that no live node serves."""
    try:
        plan_route(records, request)
    except NoRouteError as error:
        missing = error.missing or tuple(missing_layers(records, request))
        reason = other_weights(records, request)
        return ModelStatus("partial", request.num_layers, missing, error.missing_ends, reason)
    return ModelStatus("ready", request.num_layers)


def other_weights(records: Iterable[NodeRecord], request: RouteRequest) -> str:
    """Name nodes that serve something else under the same name, or ""."""
    others = [
        offer
        for record in records
        for offer in record.offers
        if offer.model_name == request.model_name and offer.model_digest != request.model_digest
    ]
    return f"nodes serve another model under this name ({digests_of(others)})" if others else ""


def digests_of(offers: Iterable[SliceOffer]) -> str:
    """The digests of these offers, short, each once."""
    return ", ".join(sorted({offer.model_digest.hex()[:SHORT_DIGITS] for offer in offers}))


def hops_of(route: Route | None, relayed: Mapping[NodeId, bool]) -> tuple[RouteHop, ...]:
    """A route as clients are told of it; `relayed` knows better than its addresses where a link is up."""
    return tuple(
        RouteHop(
            hop.address.node_id.hex()[:SHORT_DIGITS],
            hop.spec.start,
            hop.spec.end,
            relayed.get(hop.address.node_id, hop.address.is_relayed),
        )
        for hop in (route.hops if route else ())
    )
