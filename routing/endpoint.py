"""An endpoint: one identity's links, dialled and accepted, directly or through a sentinel.

Each peer is dialled once at a time, live links are used again, and nobody is kicked for a newer link. Knows
nothing of what messages mean, but for the two by which a sentinel speaks of circuits.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from contextvars import Context
from dataclasses import dataclass, replace
from functools import partial

from routing.admission import Admission, Limits, party_of
from routing.circuit import Circuit
from routing.counters import EndpointCounters
from routing.dialling import dial_websocket
from routing.errors import (
    ErrorCode,
    LinkError,
    RelayError,
    RemoteError,
    SecurityError,
    SettingsError,
    remote_error,
)
from routing.greeting import Greeting
from routing.guest_token import is_for_anybody
from routing.handshake import Handshake, Membership
from routing.heartbeat import HeartbeatTiming
from routing.identity import Identity, StaticKeyring
from routing.link import Link, LinkReceiver, LinkTerms, log_receiver_failure
from routing.listening import Listener
from routing.mux import Channel
from routing.race import race
from routing.records import Quota
from routing.tls import Tls
from routing.transport import FrameSocket
from routing.types import Capabilities, Incoming, Message, NodeAddress, NodeId, Refused, RelayOpen

logger = logging.getLogger(__name__)

STALE_AFTER_S = 2.0  # a link that is silent for so long is not used again: a new one is dialled beside it
PROBE_TIMEOUT_S = 3.0  # transport.md 5.6
_SECRET_SIZE = 32
GRUMBLE_EVERY_S = 60.0
MAX_GRUMBLES = 256  # parties that are warned of; whoever scans us from many addresses fills no log

Allow = Callable[[NodeId, Capabilities], bool]


class Endpoint:
    """All links of one identity in one swarm.

    `capabilities` is asked at every handshake. `psk` (32 B) makes the swarm private; diallers may also use one of
    `accepted_psks`, while the secret is rotated. `allow` decides whether an authenticated peer may stay, whoever
    dialled; ids in `trusted` need not ask. With `tls` links are dialled and accepted by wss, where it has a context
    for that. Raises `SettingsError` for a network id or secret of another size.
    """

    def __init__(
        self,
        identity: Identity,
        network_id: bytes,
        capabilities: Callable[[], Capabilities],
        receiver: LinkReceiver,
        *,
        psk: bytes | None = None,
        accepted_psks: Sequence[bytes] = (),
        pad: bool = False,
        allow: Allow | None = None,
        timing: HeartbeatTiming | None = None,
        limits: Limits | None = None,
        tls: Tls | None = None,
    ) -> None:
        if len(network_id) != _SECRET_SIZE:
            raise SettingsError("a network id is 32 bytes")
        self.node_id: NodeId = identity.node_id
        self.membership = Membership(identity, network_id, StaticKeyring(identity, network_id))
        self.set_secrets(psk, accepted_psks)
        self.trusted: set[NodeId] = set()  # ids that our own operator has named
        self._capabilities = capabilities
        self._receiver = receiver
        self._is_padded = pad
        self._allow = allow
        self._timing = timing or HeartbeatTiming()
        self._limits = limits or Limits()
        self._tls = tls
        self._grumbled: dict[str, float] = {}  # parties whose TLS was found wrong, and when we said so
        self._admission = Admission(self._limits, time.monotonic)
        of_circuits = replace(self._limits, max_half_open=self._limits.max_half_open // 2)
        self._circuit_admission = Admission(
            of_circuits, time.monotonic
        )  # a sentinel that floods bars no others
        self._in_flight = Quota(self._limits.max_in_flight)
        self._quotas: dict[NodeId, Quota] = {}
        self._links: dict[NodeId, list[Link]] = {}
        self._dials: dict[NodeAddress, asyncio.Task[Link]] = {}
        self._greetings: dict[Greeting, _Dial | None] = {}  # None: accepted
        self._probes: set[Link] = set()
        self._listeners: list[Listener] = []
        self._websockets: set[FrameSocket] = set()
        self._past = EndpointCounters()
        self._is_closed = False

    async def dial(self, address: NodeAddress) -> Link:
        """Return a live link to the node at `address`: one that is there, or a new one.

        A relayed link does for a relayed address only: a direct address is dialled beside it. Concurrent dials of
        one address share one handshake. Raises `LinkError` (cannot be reached, timed out), `SecurityError`
        (ID_MISMATCH, NETWORK, HANDSHAKE, CERTIFICATE_EXPIRED, NOT_ALLOWED), `WorkError` BUSY, or `RelayError`
        (NO_RESERVATION, PEER_GONE, RELAY_FULL, QUOTA, GOING_AWAY) for a relayed address.
        """
        if self._is_closed:
            raise LinkError(ErrorCode.LINK_LOST, "this endpoint is closed")
        live = self._live_link(address.node_id)
        if live is not None and (address.is_relayed or not live.is_relayed):
            return live
        task = self._dials.get(address)
        if task is None:
            task = asyncio.create_task(self._dial(address), context=Context())  # links outlive who asked
            self._dials[address] = task
            task.add_done_callback(lambda done: self._dialled(address, done))
        try:
            return await asyncio.shield(task)
        except RemoteError as error:  # a copy for each who waits: the chain marks its own with a hop
            raise remote_error(error.code, error.text, retry_ms=error.retry_ms) from error
        except asyncio.CancelledError:
            if task.cancelled():  # by `close`, not by our caller
                raise LinkError(ErrorCode.LINK_LOST, "this endpoint was closed while it dialled") from None
            raise

    async def reach(self, addresses: Sequence[NodeAddress], *, timeout_s: float | None = None) -> Link:
        """Return a live link to one node by any of its addresses, direct ones first; see `race`.

        Raises what `dial` raises, of the last address that failed, and `LinkError` TIMEOUT after `timeout_s`.
        """
        for address in addresses:
            if (live := self._live_link(address.node_id)) is not None:
                return live
        ordered = sorted(dict.fromkeys(addresses), key=lambda address: address.is_relayed)
        if not ordered:
            raise LinkError(ErrorCode.LINK_LOST, "no address of the node is known")
        try:
            async with asyncio.timeout(timeout_s):
                return await race([partial(self.dial, address) for address in ordered])
        except TimeoutError as error:
            text = f"the node could not be reached within {timeout_s:g} s"
            raise LinkError(ErrorCode.TIMEOUT, text) from error

    async def probe(self, address: NodeAddress, timeout_s: float = PROBE_TIMEOUT_S) -> None:
        """Prove that the node answers at `address`, by a connection of its own that nobody here is told of.

        Raises what `dial` raises.
        """
        try:
            async with asyncio.timeout(timeout_s):
                link = await self._dial(address, is_probe=True)
        except TimeoutError as error:
            raise LinkError(ErrorCode.TIMEOUT, f"the node did not answer within {timeout_s:g} s") from error
        await link.close()

    async def listen(self, host: str, port: int) -> tuple[str, int]:
        """Accept links at `host`:`port` (0 = any free port); return what was bound. Raises `LinkError`."""
        if self._is_closed:
            raise LinkError(ErrorCode.LINK_LOST, "this endpoint is closed")
        limit_s = self._limits.handshake_timeout_s
        listener = Listener(self._may_begin, self._accept, limit_s, tls=self._tls, on_fault=self._note_fault)
        self._listeners.append(listener)
        return await listener.bind(host, port)

    def links_to(self, node_id: NodeId) -> list[Link]:
        """Return the live links to a node: direct ones first, then newest first."""
        newest_first = self._links.get(node_id, [])[::-1]
        if len(newest_first) <= 1:
            return newest_first
        return [
            link for is_relayed in (False, True) for link in newest_first if link.is_relayed == is_relayed
        ]

    @property
    def links(self) -> list[Link]:
        """All live links."""
        return [link for links in self._links.values() for link in links]

    def set_secrets(self, psk: bytes | None, accepted_psks: Sequence[bytes] = ()) -> None:
        """Use these swarm secrets from the next handshake on. Raises `SettingsError`."""
        secrets = [*accepted_psks, *([] if psk is None else [psk])]
        if any(len(secret) != _SECRET_SIZE for secret in secrets):
            raise SettingsError("a swarm secret is 32 bytes")
        if psk is None and accepted_psks:
            raise SettingsError("a swarm without a secret of its own cannot accept others")
        self.membership = replace(self.membership, psk=psk, accepted_psks=tuple(accepted_psks))

    def recheck_allowed(self) -> None:
        """Ask `allow` again about every live link and end those of peers that may not stay (NOT_ALLOWED)."""
        for link in self.links:
            if not self._may_stay(link):
                link.refuse(ErrorCode.NOT_ALLOWED)

    @property
    def counters(self) -> EndpointCounters:
        """A fresh sum over all links, past and live."""
        num_refused = self._admission.num_refused + self._circuit_admission.num_refused
        total = EndpointCounters(connections_refused=num_refused)
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
        await asyncio.gather(*(link.close() for link in self.links if link.is_relayed))
        await asyncio.gather(*(link.close() for link in self.links))
        await asyncio.gather(*(websocket.wait_closed() for websocket in tuple(self._websockets)))

    # --- dialling

    def _live_link(self, node_id: NodeId) -> Link | None:
        """The best link to a node that has not fallen silent."""
        links = (link for link in self.links_to(node_id) if link.silent_for_s < STALE_AFTER_S)
        return next(links, None)

    def _dialled(self, address: NodeAddress, task: asyncio.Task[Link]) -> None:
        self._dials.pop(address, None)
        if not task.cancelled():
            task.exception()  # whoever waited has it; perhaps nobody waits any more

    async def _dial(self, address: NodeAddress, *, is_probe: bool = False) -> Link:
        limit_s = self._limits.handshake_timeout_s
        try:
            websocket = await self._connect(address, limit_s)
        except RemoteError as error:
            self._past.handshakes_failed[error.code.name] += 1
            raise
        handshake = Handshake(
            self.membership, self._capabilities(), address.node_id, is_relayed=address.is_relayed
        )
        greeting = Greeting(websocket, handshake, self, timeout_s=limit_s)
        self._keep(websocket)
        secured: asyncio.Future[Link] = asyncio.get_running_loop().create_future()
        self._greetings[greeting] = _Dial(secured, is_probe)
        try:
            link = await secured
        except asyncio.CancelledError:
            greeting.give_up(LinkError(ErrorCode.LINK_LOST, "the dial was given up"))
            if secured.done() and not secured.cancelled() and secured.exception() is None:
                await secured.result().close()
            raise
        return await self._confirmed(link, limit_s, websocket)

    async def _connect(self, address: NodeAddress, limit_s: float) -> FrameSocket:
        """Connect to a node, or, for a relayed address, to its sentinel and prepare a circuit there."""
        if not address.is_relayed:
            context = None if self._tls is None else self._tls.contexts.dial
            return await dial_websocket(address.host, address.port, limit_s, context)
        if address.relay_id == self.node_id:
            raise RelayError(ErrorCode.NO_RESERVATION, "the node has no link to this sentinel")
        outer = await self.dial(address.relay)
        if not outer.side.has_room:
            raise RelayError(ErrorCode.RELAY_FULL, "the link to the sentinel carries no more circuits")
        if outer.is_closed:
            raise RelayError(ErrorCode.PEER_GONE, "the link to the sentinel is gone")
        return Circuit(outer, partial(_open_circuit, address.node_id))

    async def _confirmed(self, link: Link, limit_s: float, websocket: FrameSocket) -> Link:
        """Wait for the peer's word that it accepts us: a wrong swarm secret shows only there."""
        try:
            async with asyncio.timeout(limit_s):
                await link.wait_ready()
        except TimeoutError as error:
            await link.close()
            raise LinkError(ErrorCode.TIMEOUT, f"the node did not confirm within {limit_s:g} s") from error
        except LinkError as error:
            loss = websocket.loss if isinstance(websocket, Circuit) else None
            if isinstance(loss, RelayError):
                raise remote_error(loss.code, loss.text) from error
            text = "the node closed the connection instead of confirming: the swarm secret may differ"
            raise SecurityError(ErrorCode.HANDSHAKE, text) from error
        except asyncio.CancelledError:
            await link.close()
            raise
        return link

    # --- accepting

    def _accept(self, websocket: FrameSocket) -> None:
        is_relayed = websocket.relay_id is not None
        told = self._capabilities()
        if is_for_anybody(told.token):  # the dialler is told before it says who it is, and could use it
            told = replace(told, token=b"")
        handshake = Handshake(self.membership, told, is_relayed=is_relayed)
        left_s = self._limits.handshake_timeout_s - websocket.age_s
        greeting = Greeting(websocket, handshake, self, timeout_s=left_s)
        self._keep(websocket)
        self._greetings[greeting] = None

    def _keep(self, websocket: FrameSocket) -> None:
        """Remember a connection until it is gone, so that `close` leaves none behind."""
        self._websockets.add(websocket)
        websocket.closed.add_done_callback(lambda _: self._websockets.discard(websocket))

    def _may_begin(self, peer_host: str) -> bool:
        half_open = self._half_open
        num_of_party = 0
        if len(half_open) >= self._limits.max_half_open_per_ip:
            num_of_party = sum(party_of(host) == party_of(peer_host) for host in half_open)
        return not self._is_closed and self._admission.admit(peer_host, len(half_open), num_of_party)

    def _note_fault(self, peer_host: str, fault: SecurityError) -> None:
        """Say, of each party now and then, what is wrong with its TLS: nobody else can tell our operator."""
        self._past.handshakes_failed[fault.code.name] += 1
        party, now = party_of(peer_host), time.monotonic()
        is_new = now - self._grumbled.get(party, -GRUMBLE_EVERY_S) >= GRUMBLE_EVERY_S
        is_new = is_new and (party in self._grumbled or len(self._grumbled) < MAX_GRUMBLES)
        if is_new:
            self._grumbled[party] = now
        logger.log(logging.WARNING if is_new else logging.INFO, "no link with %s: %s", peer_host, fault.text)

    @property
    def _half_open(self) -> list[str]:
        """Where connections come from that are not links yet."""
        greeted = [it.carrier.websocket for it, dial in self._greetings.items() if dial is None]
        pending = [websocket for listener in self._listeners for websocket in listener.pending]
        return [websocket.peer_host for websocket in (*greeted, *pending)]

    def on_circuit(self, link: Link, message: Incoming | Refused) -> None:
        """Take what a sentinel says: somebody wants to reach us, or a circuit of ours is refused."""
        if isinstance(message, Refused):
            circuit = link.side.refused(message.channel)
            if isinstance(circuit, Circuit):
                circuit.refused(message.code, message.retry_ms)
        elif self._may_begin_circuit(link, message.source):
            circuit = Circuit(link)
            circuit.join(message.channel)
            self._accept(circuit)
            circuit.begin(message.first)

    def _may_begin_circuit(self, link: Link, source: NodeId) -> bool:
        """Limits of circuits are per source: the sentinel's address stands for everybody behind it."""
        if not link.accepts_circuits or link.is_relayed or not link.side.has_room:
            return False
        num_circuits = sum(
            dial is None and greeting.carrier.websocket.relay_id is not None
            for greeting, dial in self._greetings.items()
        )
        return not self._is_closed and self._circuit_admission.admit(source.hex(), num_circuits)

    # --- what greetings tell (greeting.Host)

    def on_secured(self, greeting: Greeting, channel: Channel) -> None:
        dial = self._greetings.pop(greeting)
        secured = greeting.handshake.secured
        assert secured is not None
        quota = self._quotas.setdefault(
            secured.peer_id, Quota(self._limits.max_in_flight_per_peer, self._in_flight)
        )
        max_message = greeting.handshake.capabilities.max_message
        terms = LinkTerms(max_message, quota, self._timing, self._is_padded)
        receiver = _Deaf() if dial is not None and dial.is_probe else self._receiver
        link = Link(greeting.carrier, channel, secured, receiver, self, terms, is_dialler=dial is not None)
        self._past.handshakes_done += 1
        if dial is None:
            self._admit(link)
        elif not dial.secured.done():
            self._take_dialled(link, dial)

    def on_failed(self, greeting: Greeting, error: RemoteError) -> None:
        dial = self._greetings.pop(greeting)
        self._past.add(greeting.carrier.counters)
        self._past.handshakes_failed[error.code.name] += 1
        if dial is None:
            place = greeting.carrier.websocket.peer_host or "a circuit"
            logger.info("handshake with %s failed: %s", place, error)
        elif not dial.secured.done():
            dial.secured.set_exception(error)

    def _take_dialled(self, link: Link, dial: _Dial) -> None:
        if not self._may_stay(link):
            link.refuse(ErrorCode.NOT_ALLOWED)
            error = SecurityError(ErrorCode.NOT_ALLOWED, "the node dialled is not on our own allow list")
            dial.secured.set_exception(error)
            return
        if dial.is_probe:
            self._probes.add(link)
        dial.secured.set_result(link)

    def _admit(self, link: Link) -> None:
        """Keep an accepted link, or say why not: the peer is authenticated now and may know."""
        if not self._may_stay(link):
            link.refuse(ErrorCode.NOT_ALLOWED)
        elif self._has_no_room(link) or not (link.is_relayed or self._admission.link_up(link.peer_host)):
            link.refuse(ErrorCode.BUSY)
        else:
            link.confirm()
            self.on_ready(link)

    def _may_stay(self, link: Link) -> bool:
        is_known = self._allow is None or link.peer_id in self.trusted
        return is_known or (self._allow is not None and self._allow(link.peer_id, link.capabilities))

    def _has_no_room(self, link: Link) -> bool:
        num_links = len(self._links.get(link.peer_id, ()))
        return num_links >= self._limits.max_links_per_identity or len(self.links) >= self._limits.max_links

    # --- what links tell (link.LinkHost)

    def on_ready(self, link: Link) -> None:
        if link in self._probes:
            return
        self._links.setdefault(link.peer_id, []).append(link)
        self._tell("on_link_up", lambda: self._receiver.on_link_up(link))

    def on_over(self, link: Link, error: RemoteError | None) -> None:
        self._past.add(link.counters)
        self._probes.discard(link)
        siblings = self._links.get(link.peer_id, [])
        was_ready = link in siblings  # not refused, and confirmed
        if was_ready:
            siblings.remove(link)
        if not siblings:
            self._links.pop(link.peer_id, None)
            self._quotas.pop(link.peer_id, None)
        if not was_ready:
            return
        if not link.is_dialler and not link.is_relayed:
            self._admission.link_down(link.peer_host)
        self._tell("on_link_closed", lambda: self._receiver.on_link_closed(link, error))

    def _tell(self, name: str, call: Callable[[], None]) -> None:
        try:
            call()
        except Exception as error:  # a receiver's bug must not break the endpoint
            log_receiver_failure(name, error)


@dataclass(frozen=True, slots=True)
class _Dial:
    """Who waits for a handshake of ours."""

    secured: asyncio.Future[Link]
    is_probe: bool


class _Deaf:
    """The receiver of a probe's link: nothing that comes there is anybody's."""

    def on_message(self, link: Link, message: Message) -> None:
        pass

    def on_link_up(self, link: Link) -> None:
        pass

    def on_link_closed(self, link: Link, error: RemoteError | None) -> None:
        pass


def _open_circuit(target: NodeId, number: int, first: bytes) -> RelayOpen:
    return RelayOpen(number, target, first)
