"""An in-memory `Endpoint` and `Link` with the production interface, able to delay, drop, stall and cut.

Every message goes through the real message codec, so what a test sees is what a peer would decode.
Knows no sockets, no handshake and no encryption: who a peer is comes from the `Identity` given.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Protocol

from routing import wire
from routing.counters import LinkCounters
from routing.endpoint import PROBE_TIMEOUT_S, STALE_AFTER_S, Allow
from routing.errors import ErrorCode, LinkError, RelayError, RemoteError, SecurityError, remote_error
from routing.race import race
from routing.types import Capabilities, Message, NodeAddress, NodeId

Drop = Callable[["FakeLink", Message], bool]


class HasNodeId(Protocol):
    """What the fake needs of `routing.identity.Identity`."""

    @property
    def node_id(self) -> NodeId: ...


class Receiver(Protocol):
    """The same calls as `routing.link.LinkReceiver`."""

    def on_link_up(self, link: FakeLink) -> None: ...

    def on_message(self, link: FakeLink, message: Message) -> None: ...

    def on_link_closed(self, link: FakeLink, error: RemoteError | None) -> None: ...


class FakeNetwork:
    """The air between fake endpoints: all of them in one test share one.

    `delay_s` is one way and may be changed at any time (order is kept). `drop(link, message)` is asked on
    the sending side for every message; true loses it silently.
    """

    def __init__(self, *, delay_s: float = 0.0, drop: Drop | None = None) -> None:
        self.delay_s = delay_s
        self.drop = drop
        self.links: list[FakeLink] = []  # dialling sides, in the order they were made
        self.endpoints: list[FakeEndpoint] = []
        self._ports = itertools.count(40001)
        self._listening: dict[tuple[str, int], FakeEndpoint] = {}
        self._away: dict[tuple[str, int], FakeEndpoint] = {}  # cut off

    def links_between(self, one: NodeId, other: NodeId) -> list[FakeLink]:
        """Both sides of every live link between two nodes."""
        return [
            side
            for link in self.links
            for side in (link, link.other_side)
            if not side.is_closed and {link.peer_id, link.own_id} == {one, other}
        ]

    def cut(self, one: NodeId, other: NodeId) -> None:
        """Break every link between two nodes, as a lost connection does: no CLOSE is seen."""
        for link in self.links_between(one, other):
            link.cut()

    def cut_off(self, node_id: NodeId) -> None:
        """A node dies: its links break and nobody listens at its addresses any more."""
        gone = {at: end for at, end in self._listening.items() if end.node_id == node_id}
        self._listening = {at: end for at, end in self._listening.items() if at not in gone}
        self._away |= gone
        for link in list(self.links):
            if node_id in (link.peer_id, link.own_id):
                link.cut()

    def bring_back(self, node_id: NodeId) -> None:
        """A node that was cut off listens again."""
        self._listening |= {at: end for at, end in self._away.items() if end.node_id == node_id}

    def _listen(self, endpoint: FakeEndpoint, host: str, port: int) -> tuple[str, int]:
        bound = (host, port or next(self._ports))
        self._listening[bound] = endpoint
        return bound

    def _find(self, address: NodeAddress) -> FakeEndpoint:
        endpoint = self._listening.get((address.host, address.port))
        if endpoint is None:
            raise LinkError(ErrorCode.LINK_LOST, f"nobody listens at {address.host}:{address.port}")
        return endpoint if address.relay_id is None else self._behind(endpoint, address)

    def _behind(self, sentinel: FakeEndpoint, address: NodeAddress) -> FakeEndpoint:
        """A relayed address works while the node has a link to that sentinel; no reservation is asked for here."""
        if sentinel.node_id != address.relay_id:
            raise SecurityError(ErrorCode.ID_MISMATCH, "another node answers there")
        for endpoint in self.endpoints:
            if endpoint.node_id == address.node_id and endpoint.links_to(sentinel.node_id):
                return endpoint
        raise RelayError(ErrorCode.NO_RESERVATION, "the node has no link to that sentinel")

    def _forget(self, endpoint: FakeEndpoint) -> None:
        self._listening = {at: end for at, end in self._listening.items() if end is not endpoint}


class FakeLink:
    """One side of a link. `stall()` holds what it sends until `resume()`, like a stopped process."""

    other_side: FakeLink

    def __init__(
        self,
        network: FakeNetwork,
        owner: FakeEndpoint,
        peer: FakeEndpoint,
        *,
        is_dialler: bool,
        relay_id: NodeId | None = None,
    ) -> None:
        self.own_id = owner.node_id
        self.peer_id = peer.node_id
        self.capabilities: Capabilities = peer.capabilities()
        self.is_dialler = is_dialler
        self.relay_id = relay_id
        self.peer_key: bytes = getattr(peer.identity, "public_key", b"")
        self.peer_host = "" if relay_id is not None else "127.0.0.1"
        self.peer_port = 0 if relay_id is not None else 40000
        self.accepts_circuits = False
        self.rtt_ms: float | None = None
        self.mbps: float | None = None
        self.is_relayed = relay_id is not None  # tests may set it
        self.is_closed = False
        self.counters = LinkCounters()
        self.last_open_us = 0.0
        self.last_seal_us = 0.0
        self.sent: list[Message] = []  # every message handed to `send`, dropped ones included
        self._network = network
        self._owner = owner
        self.num_watches = 0
        self._stalled_at: float | None = None
        self.waiting_bytes = 0
        self._in_flight: deque[tuple[Message, int, Callable[[], None]]] = deque()
        self._closed: asyncio.Future[RemoteError | None] = asyncio.get_running_loop().create_future()
        self._resumed = asyncio.Event()
        self._resumed.set()

    async def send(self, message: Message) -> None:
        self.post(message)

    def post(self, message: Message, gone: Callable[[], None] | None = None) -> None:
        """Send without waiting; `gone` is called when the message arrived, was dropped, or never will arrive."""
        if self.is_closed:
            raise LinkError(ErrorCode.LINK_LOST, "the link is closed")
        message, size = _through_codec(message)
        self.sent.append(message)
        self.counters.frames_sent["DATA"] += 1
        self.counters.messages_sent[type(message).__name__] += 1
        self.counters.payload_bytes_sent += size
        gone = gone or _nothing
        if self._network.drop is not None and self._network.drop(self, message):
            gone()
            return
        self.waiting_bytes += size
        self._in_flight.append((message, size, gone))
        self._later(self._deliver_one)

    @property
    def num_waiting(self) -> int:
        return len(self._in_flight)

    async def ping(self) -> float:
        if self.is_closed:
            raise LinkError(ErrorCode.LINK_LOST, "the link is closed")
        await self._answered_or_closed()
        self.rtt_ms = 2000 * self._network.delay_s
        return self.rtt_ms

    @property
    def silent_for_s(self) -> float:
        """Seconds without a sign of life: heartbeats are answered unless a side is stalled."""
        stalls = [at for at in (self._stalled_at, self.other_side._stalled_at) if at is not None]
        return time.monotonic() - min(stalls) if stalls else 0.0

    @contextlib.contextmanager
    def watch(self) -> Iterator[None]:
        """Ask for the fast heartbeat while inside."""
        self.num_watches += 1
        try:
            yield
        finally:
            self.num_watches -= 1

    async def wait_closed(self) -> RemoteError | None:
        return await asyncio.shield(self._closed)

    async def close(self, code: int = 0) -> None:
        """A clean CLOSE, or one with a code for the peer: what was sent before still arrives."""
        self.refuse(code)

    def refuse(self, code: int) -> None:
        """The same without waiting."""
        if self.is_closed:
            return
        self._mark_closed(None)
        heard = remote_error(code, "the peer ended the link with this code") if code else None
        self._later(lambda: self.other_side._mark_closed(heard))

    def cut(self) -> None:
        """Break the link now, on both sides; what is in flight is lost."""
        for side in (self, self.other_side):
            lost = tuple(side._in_flight)
            side._in_flight.clear()
            for _, _, gone in lost:
                gone()
            side._mark_closed(LinkError(ErrorCode.LINK_LOST, "cut by the test"))

    def stall(self) -> None:
        """Nothing sent from this side arrives until `resume`; neither side notices by itself."""
        self._stalled_at = time.monotonic()
        self._resumed.clear()

    def resume(self) -> None:
        self._stalled_at = None
        self._resumed.set()
        for _ in range(len(self._in_flight)):
            self._later(self._deliver_one)

    def _later(self, call: Callable[[], None]) -> None:
        loop = asyncio.get_running_loop()
        if self._network.delay_s > 0:
            loop.call_later(self._network.delay_s, call)
        else:
            loop.call_soon(call)

    def _deliver_one(self) -> None:
        other = self.other_side
        if self._stalled_at is not None or not self._in_flight or other.is_closed:
            return
        message, size, gone = self._in_flight.popleft()
        self.waiting_bytes -= size
        gone()
        other.counters.frames_received["DATA"] += 1
        other.counters.messages_received[type(message).__name__] += 1
        try:
            other._owner.receiver.on_message(other, message)
        except Exception as error:  # as the real link does; kept so that tests can look
            other._owner.receiver_errors.append(error)

    async def _answered_or_closed(self) -> None:
        await asyncio.sleep(2 * self._network.delay_s)
        waits = [asyncio.ensure_future(side._resumed.wait()) for side in (self, self.other_side)]
        done = asyncio.gather(*waits)
        try:
            await asyncio.wait({done, self._closed}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            done.cancel()
        if self.is_closed:
            raise LinkError(ErrorCode.LINK_LOST, "the link closed while waiting for a pong")

    def _mark_closed(self, error: RemoteError | None) -> None:
        if self.is_closed:
            return
        self.is_closed = True
        self._closed.set_result(error)
        self._owner._links = [link for link in self._owner._links if link is not self]
        self._owner.receiver.on_link_closed(self, error)


class FakeEndpoint:
    """Same constructor as `routing.link.Endpoint`, plus the `network` it stands in."""

    def __init__(
        self,
        identity: HasNodeId,
        network_id: bytes,
        capabilities: Callable[[], Capabilities],
        receiver: Receiver,
        *,
        network: FakeNetwork,
        psk: bytes | None = None,
        accepted_psks: Sequence[bytes] = (),
        pad: bool = False,
        allow: Allow | None = None,
        timing: object = None,
        limits: object = None,
    ) -> None:
        self.identity = identity
        self.node_id = identity.node_id
        self.network_id = network_id
        self.capabilities = capabilities
        self.receiver = receiver
        self.receiver_errors: list[Exception] = []
        self.num_dials = 0  # new links made, reuse apart
        self._network = network
        self.set_secrets(psk, accepted_psks)
        self.trusted: set[NodeId] = set()
        self._allow = allow
        network.endpoints.append(self)
        self._links: list[FakeLink] = []
        self._dialling: dict[NodeAddress, asyncio.Task[FakeLink]] = {}

    async def dial(self, address: NodeAddress) -> FakeLink:
        """Reuse a live link to that node, whoever dialled it, join a dial in progress, or make a link."""
        live = self._live_link(address.node_id)
        if live is not None and (address.is_relayed or not live.is_relayed):
            return live
        task = self._dialling.get(address)
        if task is None:
            task = asyncio.ensure_future(self._dial_new(address))
            self._dialling[address] = task
            task.add_done_callback(lambda _: self._dialling.pop(address, None))
        return await asyncio.shield(task)

    async def reach(self, addresses: Sequence[NodeAddress], *, timeout_s: float | None = None) -> FakeLink:
        """A live link, or the first of the addresses that works, direct ones first."""
        for address in addresses:
            if (live := self._live_link(address.node_id)) is not None:
                return live
        ordered = sorted(addresses, key=lambda address: address.is_relayed)
        if not ordered:
            raise LinkError(ErrorCode.LINK_LOST, "no address of the node is known")
        try:
            async with asyncio.timeout(timeout_s):
                return await race([partial(self.dial, address) for address in ordered])
        except TimeoutError as error:
            raise LinkError(ErrorCode.TIMEOUT, "the node could not be reached in time") from error

    async def probe(self, address: NodeAddress, timeout_s: float = PROBE_TIMEOUT_S) -> None:
        """Whether the node answers there; leaves no link on either side."""
        await asyncio.sleep(4 * self._network.delay_s)
        self._check(self._network._find(address), address)

    def set_secrets(self, psk: bytes | None, accepted_psks: Sequence[bytes] = ()) -> None:
        self._psk = psk
        self._accepted_psks = tuple(accepted_psks)

    def recheck_allowed(self) -> None:
        for link in self.links:
            if not self._may_stay(link.peer_id, link.capabilities):
                link.refuse(ErrorCode.NOT_ALLOWED)

    @property
    def links(self) -> list[FakeLink]:
        return [link for link in self._links if not link.is_closed]

    async def listen(self, host: str, port: int) -> tuple[str, int]:
        return self._network._listen(self, host, port)

    def links_to(self, node_id: NodeId) -> list[FakeLink]:
        newest_first = [link for link in reversed(self.links) if link.peer_id == node_id]
        return sorted(newest_first, key=lambda link: link.is_relayed)

    async def close(self) -> None:
        self._network._forget(self)
        for link in list(self._links):
            await link.close()

    async def _dial_new(self, address: NodeAddress) -> FakeLink:
        peer = self._network._find(address)
        await asyncio.sleep(4 * self._network.delay_s)  # websocket upgrade and Noise XX: two round trips
        self._check(peer, address)
        self.num_dials += 1
        relay_id = address.relay_id
        mine = FakeLink(self._network, self, peer, is_dialler=True, relay_id=relay_id)
        theirs = FakeLink(self._network, peer, self, is_dialler=False, relay_id=relay_id)
        mine.other_side, theirs.other_side = theirs, mine
        self._network.links.append(mine)
        for side in (theirs, mine):
            side._owner._links.append(side)
            side._owner.receiver.on_link_up(side)
        return mine

    def _check(self, peer: FakeEndpoint, address: NodeAddress) -> None:
        """What a handshake finds out."""
        if peer.node_id != address.node_id:
            raise SecurityError(ErrorCode.ID_MISMATCH, "another node answers there")
        if peer.network_id != self.network_id or self._psk not in (peer._psk, *peer._accepted_psks):
            raise SecurityError(ErrorCode.NETWORK, "another network")
        mine, theirs = self.capabilities(), peer.capabilities()
        if not (self._may_stay(peer.node_id, theirs) and peer._may_stay(self.node_id, mine)):
            raise SecurityError(ErrorCode.NOT_ALLOWED, "not on the allow list")

    def _may_stay(self, node_id: NodeId, capabilities: Capabilities) -> bool:
        return self._allow is None or node_id in self.trusted or self._allow(node_id, capabilities)

    def _live_link(self, node_id: NodeId) -> FakeLink | None:
        links = (link for link in self.links_to(node_id) if link.silent_for_s < STALE_AFTER_S)
        return next(links, None)


def _nothing() -> None:
    pass


def _through_codec(message: Message) -> tuple[Message, int]:
    kind, buffers = wire.encode(message)
    content = b"".join(buffers)
    decoded = wire.decode(kind, memoryview(content))
    assert decoded is not None
    return decoded, len(content)
