"""An endpoint: one identity's links, dialled and accepted.

Each peer is dialled once at a time, live links are used again, and nobody is kicked for a newer link. Knows
nothing of what messages mean.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable

from routing.admission import Admission, Limits
from routing.counters import EndpointCounters
from routing.errors import ErrorCode, LinkError, RemoteError, SecurityError, SettingsError, remote_error
from routing.greeting import Greeting
from routing.handshake import Handshake, Membership
from routing.heartbeat import HeartbeatTiming
from routing.identity import Identity, StaticKeyring
from routing.link import Link, LinkReceiver, LinkTerms, log_receiver_failure
from routing.mux import Channel
from routing.records import Quota
from routing.transport import Listener, WebSocket, dial_websocket
from routing.types import Capabilities, NodeAddress, NodeId

logger = logging.getLogger(__name__)

STALE_AFTER_S = 2.0  # a link that is silent for so long is not used again: a new one is dialled beside it
_SECRET_SIZE = 32


class Endpoint:
    """All links of one identity in one swarm.

    `capabilities` is asked at every handshake. `psk` (32 B) makes the swarm private; `allow` decides whether an
    authenticated peer may stay. Raises `SettingsError` for a network id or secret of another size.
    """

    def __init__(
        self,
        identity: Identity,
        network_id: bytes,
        capabilities: Callable[[], Capabilities],
        receiver: LinkReceiver,
        *,
        psk: bytes | None = None,
        pad: bool = False,
        allow: Callable[[NodeId], bool] | None = None,
        timing: HeartbeatTiming | None = None,
        limits: Limits | None = None,
    ) -> None:
        if len(network_id) != _SECRET_SIZE or (psk is not None and len(psk) != _SECRET_SIZE):
            raise SettingsError("a network id and a swarm secret are 32 bytes each")
        self.node_id: NodeId = identity.node_id
        self.membership = Membership(identity, network_id, StaticKeyring(identity, network_id), psk)
        self._capabilities = capabilities
        self._receiver = receiver
        self._is_padded = pad
        self._allow = allow
        self._timing = timing or HeartbeatTiming()
        self._limits = limits or Limits()
        self._admission = Admission(self._limits, time.monotonic)
        self._in_flight = Quota(self._limits.max_in_flight)
        self._quotas: dict[NodeId, Quota] = {}
        self._links: dict[NodeId, list[Link]] = {}
        self._dials: dict[NodeAddress, asyncio.Task[Link]] = {}
        self._greetings: dict[Greeting, asyncio.Future[Link] | None] = {}
        self._listeners: list[Listener] = []
        self._websockets: set[WebSocket] = set()
        self._past = EndpointCounters()
        self._is_closed = False

    async def dial(self, address: NodeAddress) -> Link:
        """Return a live link to the node at `address`: one that is there, or a new one.

        Concurrent dials of one address share one handshake. Raises `LinkError` (cannot be reached, timed out),
        `SecurityError` (ID_MISMATCH, NETWORK, HANDSHAKE, CERTIFICATE_EXPIRED, NOT_ALLOWED) or `WorkError` BUSY.
        """
        if self._is_closed:
            raise LinkError(ErrorCode.LINK_LOST, "this endpoint is closed")
        for link in self.links_to(address.node_id):
            if link.silent_for_s < STALE_AFTER_S:
                return link
        task = self._dials.get(address)
        if task is None:
            task = self._dials[address] = asyncio.create_task(self._dial(address))
            task.add_done_callback(lambda done: self._dialled(address, done))
        try:
            return await asyncio.shield(task)
        except RemoteError as error:  # a copy for each who waits: the chain marks its own with a hop
            raise remote_error(error.code, error.text) from error
        except asyncio.CancelledError:
            if task.cancelled():  # by `close`, not by our caller
                raise LinkError(ErrorCode.LINK_LOST, "this endpoint was closed while it dialled") from None
            raise

    async def listen(self, host: str, port: int) -> tuple[str, int]:
        """Accept links at `host`:`port` (0 = any free port); return what was bound. Raises `LinkError`."""
        if self._is_closed:
            raise LinkError(ErrorCode.LINK_LOST, "this endpoint is closed")
        listener = Listener(self._may_begin, self._accept, self._limits.handshake_timeout_s)
        self._listeners.append(listener)
        return await listener.bind(host, port)

    def links_to(self, node_id: NodeId) -> list[Link]:
        """Return the live links to a node, newest first."""
        return list(reversed(self._links.get(node_id, ())))

    @property
    def links(self) -> list[Link]:
        """All live links."""
        return [link for links in self._links.values() for link in links]

    @property
    def counters(self) -> EndpointCounters:
        """A fresh sum over all links, past and live."""
        total = EndpointCounters(connections_refused=self._admission.num_refused)
        total.add(self._past)
        total.handshakes_done = self._past.handshakes_done
        total.handshakes_failed.update(self._past.handshakes_failed)
        for link in self.links:
            total.add(link.counters)
        return total

    async def close(self) -> None:
        """Stop listening, give up what is half open, and close every link with a sealed end."""
        self._is_closed = True
        dials = tuple(self._dials.values())
        for task in dials:
            task.cancel()
        for greeting in tuple(self._greetings):
            greeting.give_up(LinkError(ErrorCode.LINK_LOST, "this endpoint was closed"))
        await asyncio.gather(*(listener.close() for listener in self._listeners))
        await asyncio.gather(*dials, return_exceptions=True)
        await asyncio.gather(*(link.close() for link in self.links))
        await asyncio.gather(*(websocket.wait_closed() for websocket in tuple(self._websockets)))

    # --- dialling and accepting

    def _dialled(self, address: NodeAddress, task: asyncio.Task[Link]) -> None:
        self._dials.pop(address, None)
        if not task.cancelled():
            task.exception()  # whoever waited has it; perhaps nobody waits any more

    async def _dial(self, address: NodeAddress) -> Link:
        limit_s = self._limits.handshake_timeout_s
        try:
            websocket = await dial_websocket(address.host, address.port, limit_s)
        except RemoteError as error:
            self._past.handshakes_failed[error.code.name] += 1
            raise
        secured: asyncio.Future[Link] = asyncio.get_running_loop().create_future()
        handshake = Handshake(self.membership, self._capabilities(), address.node_id)
        greeting = Greeting(websocket, handshake, self, timeout_s=limit_s)
        self._keep(websocket)
        self._greetings[greeting] = secured
        try:
            link = await secured
        except asyncio.CancelledError:
            greeting.give_up(LinkError(ErrorCode.LINK_LOST, "the dial was given up"))
            if secured.done() and not secured.cancelled() and secured.exception() is None:
                await secured.result().close()
            raise
        return await self._confirmed(link, limit_s)

    async def _confirmed(self, link: Link, limit_s: float) -> Link:
        """Wait for the peer's word that it accepts us: a wrong swarm secret shows only there."""
        try:
            async with asyncio.timeout(limit_s):
                await link.wait_ready()
        except TimeoutError as error:
            await link.close()
            raise LinkError(ErrorCode.TIMEOUT, f"the node did not confirm within {limit_s:g} s") from error
        except LinkError as error:
            text = "the node closed the connection instead of confirming: the swarm secret may differ"
            raise SecurityError(ErrorCode.HANDSHAKE, text) from error
        except asyncio.CancelledError:
            await link.close()
            raise
        return link

    def _accept(self, websocket: WebSocket) -> None:
        handshake = Handshake(self.membership, self._capabilities())
        left_s = self._limits.handshake_timeout_s - websocket.age_s
        greeting = Greeting(websocket, handshake, self, timeout_s=left_s)
        self._keep(websocket)
        self._greetings[greeting] = None

    def _keep(self, websocket: WebSocket) -> None:
        """Remember a connection until it is gone, so that `close` leaves none behind."""
        self._websockets.add(websocket)
        websocket.closed.add_done_callback(lambda _: self._websockets.discard(websocket))

    def _may_begin(self, peer_host: str) -> bool:
        num_half_open = sum(waiting is None for waiting in self._greetings.values())
        num_half_open += sum(len(listener.pending) for listener in self._listeners)
        return not self._is_closed and self._admission.admit(peer_host, num_half_open)

    # --- what greetings tell (greeting.Host)

    def on_secured(self, greeting: Greeting, channel: Channel) -> None:
        waiting = self._greetings.pop(greeting)
        secured = greeting.handshake.secured
        assert secured is not None
        quota = self._quotas.setdefault(
            secured.peer_id, Quota(self._limits.max_in_flight_per_peer, self._in_flight)
        )
        max_message = greeting.handshake.capabilities.max_message
        terms = LinkTerms(max_message, quota, self._timing, self._is_padded)
        link = Link(
            greeting.carrier, channel, secured, self._receiver, self, terms, is_dialler=waiting is not None
        )
        self._past.handshakes_done += 1
        if waiting is None:
            self._admit(link)
        elif not waiting.done():
            waiting.set_result(link)

    def on_failed(self, greeting: Greeting, error: RemoteError) -> None:
        waiting = self._greetings.pop(greeting)
        self._past.add(greeting.carrier.counters)
        self._past.handshakes_failed[error.code.name] += 1
        if waiting is None:
            logger.info("handshake with %s failed: %s", greeting.carrier.websocket.peer_host, error)
        elif not waiting.done():
            waiting.set_exception(error)

    def _admit(self, link: Link) -> None:
        """Keep an accepted link, or say why not: the peer is authenticated now and may know."""
        if self._allow is not None and not self._allow(link.peer_id):
            link.refuse(ErrorCode.NOT_ALLOWED)
        elif self._has_no_room(link) or not self._admission.link_up(link.peer_host):
            link.refuse(ErrorCode.BUSY)
        else:
            link.confirm()
            self.on_ready(link)

    def _has_no_room(self, link: Link) -> bool:
        num_links = len(self._links.get(link.peer_id, ()))
        return num_links >= self._limits.max_links_per_identity or len(self.links) >= self._limits.max_links

    # --- what links tell (link.LinkHost)

    def on_ready(self, link: Link) -> None:
        self._links.setdefault(link.peer_id, []).append(link)
        self._tell("on_link_up", lambda: self._receiver.on_link_up(link))

    def on_over(self, link: Link, error: RemoteError | None) -> None:
        self._past.add(link.counters)
        siblings = self._links.get(link.peer_id, [])
        was_ready = link in siblings  # not refused, and confirmed
        if was_ready:
            siblings.remove(link)
        if not siblings:
            self._links.pop(link.peer_id, None)
            self._quotas.pop(link.peer_id, None)
        if not was_ready:
            return
        if not link.is_dialler:
            self._admission.link_down(link.peer_host)
        self._tell("on_link_closed", lambda: self._receiver.on_link_closed(link, error))

    def _tell(self, name: str, call: Callable[[], None]) -> None:
        try:
            call()
        except Exception as error:  # a receiver's bug must not break the endpoint
            log_receiver_failure(name, error)
