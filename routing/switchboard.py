"""The gateway's links and who on this side each arriving message concerns.

Answers, failures and the like go to the chain of their session, descriptions to the directory, lost links to both.
What one session learns of nodes, the next plan knows: who failed, and how fast they are. Knows nothing of what a
step holds.
"""

from __future__ import annotations

import contextlib
import logging
import math
import secrets
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from itertools import pairwise

from routing.background import Background
from routing.chain import Chain
from routing.directory import Directory
from routing.endpoint import STALE_AFTER_S, Endpoint
from routing.errors import NoRouteError, RemoteError
from routing.link import Link
from routing.measurements import Measured, Measurements
from routing.opening import ChainOptions
from routing.planner import RouteRequest, plan_route, route_ms
from routing.prefix import Beginning, prefers_holders
from routing.route_costs import lines_ms
from routing.types import (
    Answer,
    Cancel,
    Description,
    Failure,
    Hop,
    Keep,
    Message,
    NodeId,
    Opened,
    Resumed,
    Route,
    SessionId,
    Standing,
)

logger = logging.getLogger(__name__)

# Cancels kept for a node that cannot be reached. It may be stopped, and come back with its sessions; those that it
# lost the gateway's link of expire there after two minutes anyway.
MAX_OWED = 256
# A node that failed one session is left out by the others for so long, where they can do without it. A directory
# that found it gone does not offer it any longer anyway; this is for what only its work shows.
DOUBT_S = 10.0
# What was posted so shortly before its link was lost may be lost too: a silent link is given up after ten seconds.
LOST_WITH_LINK_S = 15.0
REACH_SOON_S = 10.0  # for a link that is a gain, not a need
LINES_S = 10.0  # how long what is known of the lines between a route's nodes is taken for the present
RTT_S = 0.5  # how long round trips are: they are measured about as often while steps are under way
MAX_LINES = 256  # routes of which that is remembered


@dataclass(slots=True)
class Switchboard:
    """Dispatches what arrives on the gateway's links; opens chains.

    Built before its endpoint (which delivers to it) and connected to it afterwards. `on_pause` hears for how long, in
    seconds, an answer stood still while another route took over.
    """

    on_pause: Callable[[float], None] | None = None
    measurements: Measurements = field(default_factory=Measurements)
    _chains: dict[SessionId, Chain] = field(default_factory=dict)
    _owed: dict[NodeId, deque[Cancel]] = field(default_factory=dict)
    _posted: dict[NodeId, deque[tuple[float, Cancel]]] = field(default_factory=dict)  # when, time.monotonic()
    _endpoint: Endpoint | None = None
    _directory: Directory | None = None
    _doubted_at: dict[NodeId, float] = field(default_factory=dict)  # time.monotonic()
    _lines: dict[tuple[NodeId, ...], tuple[float, float]] = field(default_factory=dict)  # when, ms of a row
    _known_between: dict[tuple[NodeId, ...], tuple[float, float, float]] = field(default_factory=dict)
    _background: Background = field(default_factory=Background)
    last_loss_at: float = -math.inf  # in time.monotonic(): who was found gone then may be back soon

    def connect(self, endpoint: Endpoint, directory: Directory) -> None:
        """Give the switchboard the links it dispatches for."""
        self._endpoint = endpoint
        self._directory = directory

    @property
    def directory(self) -> Directory:
        """Who serves what."""
        assert self._directory is not None
        return self._directory

    @property
    def num_chains(self) -> int:
        """Chains that are open now."""
        return len(self._chains)

    @property
    def routes(self) -> tuple[Route, ...]:
        """The routes of those chains, in the order in which they were opened."""
        return tuple(chain.route for chain in self._chains.values() if chain.route is not None)

    async def open_chain(
        self,
        request: RouteRequest,
        options: ChainOptions,
        *,
        deadline_s: float | None = None,
        beginning: Beginning | None = None,
    ) -> Chain:
        """Plan, open and register one session's chain. Raises NoRouteError or RemoteError."""

        def replan(excluded: frozenset[NodeId], previous: Route | None) -> Route:
            narrowed = _narrowed(request, excluded, previous)
            if previous is None and beginning is not None and beginning.holders:
                return self._plan_with(narrowed, beginning)
            return self._plan(narrowed)

        chain = Chain(self, replan, options, new_secret=secrets.token_bytes, beginning=beginning)
        try:
            await chain.open(deadline_s=deadline_s)
        except BaseException:  # a caller that left while the route was being opened, too
            await chain.close()
            raise
        return chain

    def plan(self, request: RouteRequest) -> Route:
        """The route of a session that would be opened now, wherever its beginning is held. Raises NoRouteError."""
        return self._plan(request)

    def expected_ms(self, route: Route, request: RouteRequest) -> float:
        """What one token is expected to take on a route, in ms; infinite where a hop's node is gone."""
        return self._route_ms(route, request)

    def is_in_use(self, link: Link) -> bool:
        """Whether a session runs over this link."""
        return any(chain.uses(link) for chain in self._chains.values())

    async def close(self) -> None:
        """Give up dialling in the background."""
        await self._background.close()

    def _plan(self, request: RouteRequest) -> Route:
        """A route without the nodes that failed somebody a moment ago, if there is one. Raises NoRouteError."""
        records = self.directory.records()
        measured = self.measurements.of(request.model_digest)
        sessions = self._sessions()
        if doubted := self._doubted() - request.excluded:
            with contextlib.suppress(NoRouteError):
                spared = replace(request, excluded=request.excluded | doubted)
                return plan_route(records, spared, measured=measured, sessions=sessions)
        return plan_route(records, request, measured=measured, sessions=sessions)

    def _plan_with(self, request: RouteRequest, beginning: Beginning) -> Route:
        """A route over the nodes that hold the session's beginning, unless another is so much faster."""
        holders, free = beginning.holders, self._plan(request)
        try:
            near = self._plan(replace(request, held=holders))
        except NoRouteError:
            return free
        if {hop.address.node_id: hop.spec for hop in near.hops} != holders or near == free:
            return free
        free_ms, near_ms = self._route_ms(free, request), self._route_ms(near, request)
        gains = prefers_holders(
            free_ms,
            near_ms,
            num_rows=beginning.num_rows,
            num_held=beginning.num_held,
            free_lines_ms=self._lines_ms(free),
            holders_lines_ms=self._lines_ms(near),
        )
        return near if gains else free

    def _route_ms(self, route: Route, request: RouteRequest) -> float:
        measured = self.measurements.of(request.model_digest)
        records = self.directory.records()
        return route_ms(records, route, request, measured=measured, sessions=self._sessions())

    def _between(self, route: Route) -> tuple[float, float]:
        """What a step, and a row of it, spends between a route's machines, in ms; looked up now and then."""
        path, now = route.path, time.monotonic()
        known = self._known_between.get(path)
        if known is None or now - known[0] > RTT_S:
            known = now, self._network_ms(route), self._lines_ms(route)
            if len(self._known_between) >= MAX_LINES:
                self._known_between.clear()
            self._known_between[path] = known
        return known[1:]

    def _network_ms(self, route: Route) -> float:
        """What any step spends between machines: half our round trips to both ends, and what its hops are apart.

        That is guessed from our own round trips to them: no nearer to each other than the nearer of two is to us.
        """
        links = [self.live_link(hop.address.node_id) for hop in route.hops]
        rtts = [link.rtt_ms or 0.0 if link is not None else 0.0 for link in links]
        return (rtts[0] + rtts[-1] + sum(min(pair) for pair in pairwise(rtts))) / 2

    def _lines_ms(self, route: Route) -> float:
        """What one row takes on the lines between a route's hops, where that is known; looked up now and then."""
        path, now = route.path, time.monotonic()
        known = self._lines.get(path)
        if known is None or now - known[0] > LINES_S:
            records = {record.address.node_id: record for record in self.directory.records()}
            there = [
                (records[hop.address.node_id], [hop.offer])
                for hop in route.hops
                if hop.address.node_id in records
            ]
            known = now, lines_ms(there) if len(there) == len(path) else 0.0
            if len(self._lines) >= MAX_LINES:
                self._lines.clear()
            self._lines[path] = known
        return known[1]

    def _sessions(self) -> Mapping[NodeId, int]:
        """How many of our sessions are on each node."""
        return Counter(hop.address.node_id for route in self.routes for hop in route.hops)

    def _doubted(self) -> frozenset[NodeId]:
        since = time.monotonic() - DOUBT_S
        self._doubted_at = {node_id: at for node_id, at in self._doubted_at.items() if at > since}
        return frozenset(self._doubted_at)

    # What a chain needs (chain.Switch) ------------------------------------------------------------------------

    @property
    def gateway_id(self) -> NodeId:
        return self._live_endpoint.node_id

    def register(self, chain: Chain) -> None:
        self._chains[chain.session_id] = chain

    def forget(self, chain: Chain) -> None:
        self._chains.pop(chain.session_id, None)

    async def reach(self, hop: Hop, timeout_s: float) -> Link:
        ways = (hop.address, *hop.alternatives)
        return await self._live_endpoint.reach(ways, timeout_s=timeout_s)  # a live link, if it is not silent

    def reach_soon(self, hop: Hop) -> None:
        name = f"link to {hop.address.node_id.hex()[:8]}"
        self._background.spawn(self.reach(hop, REACH_SOON_S), name)  # `on_link_up` tells the chains

    def live_link(self, node_id: NodeId) -> Link | None:
        links = self._live_endpoint.links_to(node_id)
        if len(links) == 1 and not links[0].is_closed:
            return links[0]
        links = [link for link in links if not link.is_closed]
        spoken = (link for link in links if link.silent_for_s < STALE_AFTER_S)
        return next(spoken, links[0] if links else None)

    def deliver(self, node_id: NodeId, cancel: Cancel) -> None:
        link = self.live_link(node_id)
        if link is None:
            self._owed.setdefault(node_id, deque(maxlen=MAX_OWED)).append(cancel)
        else:
            self._posted.setdefault(node_id, deque(maxlen=MAX_OWED)).append((time.monotonic(), cancel))
            with contextlib.suppress(RemoteError):
                link.post(cancel)

    def keep(self, node_id: NodeId, keep: Keep, otherwise: Cancel) -> None:
        link = self.live_link(node_id)
        if link is None:
            self.deliver(node_id, otherwise)
            return
        # Were the link lost now, the cancel would follow: it ends a session that the Keep did not reach.
        self._posted.setdefault(node_id, deque(maxlen=MAX_OWED)).append((time.monotonic(), otherwise))
        with contextlib.suppress(RemoteError):
            link.post(keep)

    def note_loss(self, node_id: NodeId) -> None:
        self.last_loss_at = time.monotonic()
        self.directory.note_loss(node_id)

    def note_doubt(self, node_id: NodeId) -> None:
        self._doubted_at[node_id] = time.monotonic()

    def note_pause(self, pause_s: float) -> None:
        if self.on_pause is not None:
            self.on_pause(pause_s)

    def note_answer(self, route: Route, rows: int, answer: Answer, waited_s: float) -> None:
        between_ms, row_ms = self._between(route)
        self.measurements.note_step(
            route.hops,
            rows,
            answer.traces,
            waited_ms=waited_s * 1000,
            network_ms=between_ms + rows * row_ms,
        )

    def measured(self, model_digest: bytes) -> Mapping[NodeId, Measured]:
        return self.measurements.of(model_digest)

    # What the links tell (link.LinkReceiver) ------------------------------------------------------------------

    def on_message(self, link: Link, message: Message) -> None:
        match message:
            case Answer():
                if chain := self._chains.get(message.session_id):
                    chain.take_answer(link.peer_id, message)
            case Failure():
                if chain := self._chains.get(message.session_id):
                    chain.take_failure(link.peer_id, message)
            case Resumed():
                if chain := self._chains.get(message.session_id):
                    chain.take_resumed(link.peer_id, message)
            case Opened():
                if chain := self._chains.get(message.session_id):
                    chain.take_opened(link.peer_id, message)
            case Standing():
                if chain := self._chains.get(message.session_id):
                    chain.take_standing(link.peer_id, message)
            case Description():
                self.directory.note_description(link, message)
            case _:
                logger.warning(
                    "node %s sent a %s to a gateway", link.peer_id.hex()[:8], type(message).__name__
                )

    def on_link_up(self, link: Link) -> None:
        """Say what could not be said while the node was away; tell the chains that go through it."""
        self._doubted_at.pop(link.peer_id, None)
        for cancel in self._owed.pop(link.peer_id, ()):
            self.deliver(link.peer_id, cancel)
        for chain in tuple(self._chains.values()):
            chain.take_link_up(link)

    def on_link_closed(self, link: Link, error: RemoteError | None) -> None:
        if self.live_link(link.peer_id) is None:
            self.note_loss(link.peer_id)
        since = time.monotonic() - LOST_WITH_LINK_S
        for at, cancel in self._posted.pop(link.peer_id, ()):
            if at > since:
                self.deliver(link.peer_id, cancel)
        for chain in tuple(self._chains.values()):
            chain.take_link_loss(link, error)

    @property
    def _live_endpoint(self) -> Endpoint:
        assert self._endpoint is not None
        return self._endpoint


def _narrowed(request: RouteRequest, excluded: frozenset[NodeId], previous: Route | None) -> RouteRequest:
    """The request of a re-plan: the weights and forms that this answer began with, and who holds what of it."""
    hashes: dict[int, bytes] = dict(request.known_hashes or {})
    forms = set(request.forms)
    for hop in previous.hops if previous else ():
        offered = dict(
            zip(range(hop.offer.spec.start, hop.offer.spec.end), hop.offer.layer_hashes, strict=False)
        )
        hashes |= {n: offered[n] for n in range(hop.spec.start, hop.spec.end) if n in offered}
        forms.add(hop.offer.form)
    excluded = request.excluded | excluded
    held = {hop.address.node_id: hop.spec for hop in previous.hops} if previous else {}
    return replace(
        request,
        excluded=excluded,
        known_hashes=hashes or None,
        forms=frozenset(forms),
        held={node_id: spec for node_id, spec in held.items() if node_id not in excluded},
    )
