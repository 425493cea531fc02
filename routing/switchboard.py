"""The gateway's links and who on this side each arriving message concerns.

Answers and failures go to the chain of their session, descriptions to the directory, lost links to both. Knows
nothing of what a step holds.
"""

from __future__ import annotations

import contextlib
import logging
import secrets
from collections import deque
from dataclasses import dataclass, field, replace

from routing.chain import Chain
from routing.directory import Directory
from routing.endpoint import Endpoint
from routing.errors import RemoteError
from routing.link import Link
from routing.opening import ChainOptions
from routing.planner import RouteRequest, plan_route
from routing.types import Answer, Cancel, Description, Failure, Hop, Message, NodeId, Route, SessionId

logger = logging.getLogger(__name__)

# Cancels kept for a node that cannot be reached. It may be stopped, and come back with its sessions; those that it
# lost the gateway's link of expire there after two minutes anyway.
MAX_OWED = 256


@dataclass(slots=True)
class Switchboard:
    """Dispatches what arrives on the gateway's links; opens chains.

    Built before its endpoint (which delivers to it) and connected to it afterwards.
    """

    _chains: dict[SessionId, Chain] = field(default_factory=dict)
    _owed: dict[NodeId, deque[Cancel]] = field(default_factory=dict)
    _endpoint: Endpoint | None = None
    _directory: Directory | None = None

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

    async def open_chain(
        self, request: RouteRequest, options: ChainOptions, *, deadline_s: float | None = None
    ) -> Chain:
        """Plan, open and register one session's chain. Raises NoRouteError or RemoteError."""

        def replan(excluded: frozenset[NodeId], previous: Route | None) -> Route:
            return plan_route(self.directory.records(), _narrowed(request, excluded, previous))

        chain = Chain(self, replan, options, new_secret=secrets.token_bytes)
        try:
            await chain.open(deadline_s=deadline_s)
        except BaseException:  # a caller that left while the route was being opened, too
            await chain.close()
            raise
        return chain

    # What a chain needs (chain.Switch) ------------------------------------------------------------------------

    @property
    def gateway_id(self) -> NodeId:
        return self._live_endpoint.node_id

    def register(self, chain: Chain) -> None:
        self._chains[chain.session_id] = chain

    def forget(self, chain: Chain) -> None:
        self._chains.pop(chain.session_id, None)

    async def reach(self, hop: Hop) -> Link:
        return await self._live_endpoint.dial(hop.address)  # a live link, if it is not silent

    def live_link(self, node_id: NodeId) -> Link | None:
        return next((link for link in self._live_endpoint.links_to(node_id) if not link.is_closed), None)

    def deliver(self, node_id: NodeId, cancel: Cancel) -> None:
        link = self.live_link(node_id)
        if link is None:
            self._owed.setdefault(node_id, deque(maxlen=MAX_OWED)).append(cancel)
        else:
            with contextlib.suppress(RemoteError):
                link.post(cancel)

    def note_loss(self, node_id: NodeId) -> None:
        self.directory.note_loss(node_id)

    # What the links tell (link.LinkReceiver) ------------------------------------------------------------------

    def on_message(self, link: Link, message: Message) -> None:
        match message:
            case Answer():
                if chain := self._chains.get(message.session_id):
                    chain.take_answer(link.peer_id, message)
            case Failure():
                if chain := self._chains.get(message.session_id):
                    chain.take_failure(link.peer_id, message)
            case Description():
                self.directory.note_description(link, message)
            case _:
                logger.warning(
                    "node %s sent a %s to a gateway", link.peer_id.hex()[:8], type(message).__name__
                )

    def on_link_up(self, link: Link) -> None:
        """Say what could not be said while the node was away."""
        for cancel in self._owed.pop(link.peer_id, ()):
            with contextlib.suppress(RemoteError):
                link.post(cancel)

    def on_link_closed(self, link: Link, error: RemoteError | None) -> None:
        if self.live_link(link.peer_id) is None:
            self.directory.note_loss(link.peer_id)
        for chain in tuple(self._chains.values()):
            chain.take_link_loss(link, error)

    @property
    def _live_endpoint(self) -> Endpoint:
        assert self._endpoint is not None
        return self._endpoint


def _narrowed(request: RouteRequest, excluded: frozenset[NodeId], previous: Route | None) -> RouteRequest:
    """The request of a re-plan: the weights and forms that this answer began with."""
    hashes: dict[int, bytes] = dict(request.known_hashes or {})
    forms = set(request.forms)
    for hop in previous.hops if previous else ():
        offered = dict(
            zip(range(hop.offer.spec.start, hop.offer.spec.end), hop.offer.layer_hashes, strict=False)
        )
        hashes |= {n: offered[n] for n in range(hop.spec.start, hop.spec.end) if n in offered}
        forms.add(hop.offer.form)
    return replace(
        request, excluded=request.excluded | excluded, known_hashes=hashes or None, forms=frozenset(forms)
    )
