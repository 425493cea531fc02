"""The routes of one model over one switchboard: what an answer may ask of them, and what is said of them afterwards.

Plans nothing itself; knows neither tokens nor tensors.
"""

from __future__ import annotations

from dataclasses import replace

from app.engine.coverage import Coverage, hops_of
from app.engine.hop_uses import hop_uses
from app.engine.request import HopUse, ModelStatus, ModelUnavailableError, RequestError, RouteHop
from app.engine.route_options import ANY_ROUTE, NodeNameError, RouteOptions, avoided_nodes, pinned_nodes
from routing.chain import Chain
from routing.directory import LiveDirectory
from routing.errors import NoRouteError
from routing.planner import RouteRequest
from routing.switchboard import Switchboard
from routing.types import NodeId, Route

RETRY_S = 5  # a node that was restarted is back within that time


class Routes:
    """Routes that do what `request` says, and what an answer's own options add to it."""

    def __init__(self, switchboard: Switchboard, request: RouteRequest) -> None:
        self._switchboard = switchboard
        self._request = request
        self._coverage = Coverage(request)

    def coverage(self) -> ModelStatus:
        """Whether there is any route now, whatever an answer may ask for."""
        return self._coverage.status(self._switchboard.directory.records())

    def asked(self, options: RouteOptions) -> RouteRequest:
        """What an answer's routes must do. Raises RequestError or ModelUnavailableError, which name the option."""
        if options == ANY_ROUTE:
            return self._request
        known = self._known_nodes()
        try:
            pinned, avoided = pinned_nodes(options, known), avoided_nodes(options, known)
        except NodeNameError as error:
            raise _refusal(error) from None
        excluded = self._request.excluded | avoided
        if both := pinned & excluded:
            message = f"node {min(both).hex()[:8]} is to be avoided, it cannot be pinned"
            raise RequestError("diffuse.pin", "invalid_value", message)
        return replace(
            self._request,
            pinned=pinned,
            excluded=excluded,
            max_hops=options.max_hops,
            distinct_owners=options.distinct_owners,
        )

    def blamed(self, error: NoRouteError, options: RouteOptions) -> Exception:
        """Name the options that leave no route, where there would be one without them."""
        asked = options.names
        if not asked or not self.coverage().is_ready:
            return error
        param = f"diffuse.{asked[0]}" if len(asked) == 1 else "diffuse"
        message = f"{error}; it was asked for with {', '.join(asked)}"
        return ModelUnavailableError("no_route", message, RETRY_S, param=param)

    def taken(self, route: Route | None) -> tuple[RouteHop, ...]:
        """A route as clients are told of it, with how those nodes are reached that we have a link to."""
        links = {
            hop.address.node_id: self._switchboard.live_link(hop.address.node_id)
            for hop in (route.hops if route else ())
        }
        return hops_of(
            route, {node_id: link.is_relayed for node_id, link in links.items() if link is not None}
        )

    def used(self, chain: Chain) -> tuple[HopUse, ...]:
        """What each node did for a session, over all its routes."""
        links = {node_id: self._switchboard.live_link(node_id) for node_id in chain.hop_times.by_node}
        return hop_uses(chain.hop_times, chain.times.network_s, links)

    def _known_nodes(self) -> frozenset[NodeId]:
        directory = self._switchboard.directory
        known = {record.address.node_id for record in directory.records()}
        if isinstance(directory, LiveDirectory):
            known |= {announcement.node_id for announcement in directory.announced()}
        return frozenset(known)


def _refusal(error: NodeNameError) -> Exception:
    """A pinned node that is away may come back; any other name that fits no node is a mistake."""
    param = f"diffuse.{error.option}"
    if error.option == "pin" and error.is_unknown:
        return ModelUnavailableError("no_route", error.message, RETRY_S, param=param)
    return RequestError(param, "invalid_value", f"invalid '{param}': {error.message}")
