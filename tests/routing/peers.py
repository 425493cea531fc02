"""Endpoints, receivers and raw connections for the tests of links: the real classes over loopback."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any

from routing.dialling import dial_websocket
from routing.dispatcher import Dispatcher
from routing.endpoint import Endpoint
from routing.errors import RemoteError
from routing.identity import Identity
from routing.link import Link
from routing.relay import RelayLimits, RelayServer
from routing.reservations import Reservations
from routing.transport import WebSocket
from routing.types import Answer, Capabilities, Describe, Message, NodeAddress, SessionId, Step

NETWORK_ID = b"n" * 32
SESSION_ID = SessionId(b"s" * 16)


@dataclass
class Inbox:
    """A `LinkReceiver` that keeps what arrives and lets a test wait for it."""

    messages: list[Message] = field(default_factory=list)
    ups: list[Link] = field(default_factory=list)
    ends: list[RemoteError | None] = field(default_factory=list)
    _news: asyncio.Event = field(default_factory=asyncio.Event)

    def on_message(self, link: Link, message: Message) -> None:
        self.messages.append(message)
        self._news.set()

    def on_link_up(self, link: Link) -> None:
        self.ups.append(link)
        self._news.set()

    def on_link_closed(self, link: Link, error: RemoteError | None) -> None:
        self.ends.append(error)
        self._news.set()

    async def until(self, condition: Callable[[], bool], timeout_s: float = 10.0) -> None:
        async with asyncio.timeout(timeout_s):
            while not condition():
                self._news.clear()
                await self._news.wait()

    async def receive(self, num_messages: int = 1) -> list[Message]:
        await self.until(lambda: len(self.messages) >= num_messages)
        return self.messages


@dataclass
class Peer:
    """An endpoint with its inbox."""

    endpoint: Endpoint
    inbox: Inbox
    address: NodeAddress


@dataclass
class Sentinel(Peer):
    """A peer that relays."""

    relay: RelayServer


@dataclass
class Hidden(Peer):
    """A peer that only its sentinels can be reached through; `address` is by the first of them."""

    reservations: Reservations
    keeping: asyncio.Task[None]

    def through(self, sentinel: Sentinel) -> NodeAddress:
        place = sentinel.address
        return NodeAddress(self.endpoint.node_id, place.host, place.port, place.node_id)


class Rig:
    """Makes peers and closes them."""

    def __init__(self, stack: contextlib.AsyncExitStack) -> None:
        self._stack = stack

    async def peer(self, *, network_id: bytes = NETWORK_ID, **options: Any) -> Peer:
        """A listening endpoint; `options` are those of `Endpoint`."""
        inbox = Inbox()
        endpoint = Endpoint(Identity.generate(), network_id, Capabilities, inbox, **options)
        self._stack.push_async_callback(endpoint.close)
        host, port = await endpoint.listen("127.0.0.1", 0)
        return Peer(endpoint, inbox, NodeAddress(endpoint.node_id, host, port))

    async def sentinel(
        self,
        limits: RelayLimits | None = None,
        *,
        identity: Identity | None = None,
        port: int = 0,
        **options: Any,
    ) -> Sentinel:
        """A listening endpoint that relays."""
        identity, inbox, dispatcher = identity or Identity.generate(), Inbox(), Dispatcher()
        endpoint = Endpoint(identity, NETWORK_ID, Capabilities, dispatcher, **options)
        relay = RelayServer(identity, NETWORK_ID, endpoint, limits=limits)
        dispatcher.add(relay, RelayServer.KINDS)
        dispatcher.add(inbox)
        self._stack.push_async_callback(endpoint.close)
        host, port = await endpoint.listen("127.0.0.1", port)
        return Sentinel(endpoint, inbox, NodeAddress(endpoint.node_id, host, port), relay)

    async def hidden(
        self,
        *sentinels: Sentinel,
        identity: Identity | None = None,
        count: int = 2,
        places: list[NodeAddress] | None = None,
        **options: Any,
    ) -> Hidden:
        """A peer that listens nowhere and has got a reservation at each sentinel; `places` are where they are."""
        inbox, dispatcher = Inbox(), Dispatcher()
        endpoint = Endpoint(identity or Identity.generate(), NETWORK_ID, Capabilities, dispatcher, **options)
        held = asyncio.Event()

        def look() -> None:
            if len(reservations.sentinels) >= len(sentinels[:count]):
                held.set()

        places = places or [sentinel.address for sentinel in sentinels]
        reservations = Reservations(endpoint, lambda: places, count=count, on_change=look)
        dispatcher.add(reservations, Reservations.KINDS)
        dispatcher.add(inbox, [Step, Answer, Describe])
        keeping = asyncio.create_task(reservations.run())
        self._stack.push_async_callback(endpoint.close)
        self._stack.push_async_callback(cancelled, keeping)
        async with asyncio.timeout(10.0):
            await held.wait()
        place = places[0]
        address = NodeAddress(endpoint.node_id, place.host, place.port, place.node_id)
        return Hidden(endpoint, inbox, address, reservations, keeping)

    async def pair(self, **options: Any) -> tuple[Peer, Peer, Link]:
        """Two peers and the first one's link to the second."""
        dialler, acceptor = await self.peer(**options), await self.peer(**options)
        link = await dialler.endpoint.dial(acceptor.address)
        return dialler, acceptor, link


async def cancelled(task: asyncio.Task[Any]) -> None:
    """Cancel a task and wait for its end."""
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


@contextlib.asynccontextmanager
async def open_rig() -> AsyncIterator[Rig]:
    """A rig whose peers leave no task and no connection behind."""
    before = asyncio.all_tasks()
    async with contextlib.AsyncExitStack() as stack:
        yield Rig(stack)
    left = asyncio.all_tasks() - before - {asyncio.current_task()}
    assert not left, left


@dataclass
class RawFrames:
    """A `FrameReceiver` for talking to a listener frame by frame."""

    websocket: WebSocket
    frames: list[bytes] = field(default_factory=list)
    lost: asyncio.Event = field(default_factory=asyncio.Event)

    def on_frame(self, frame: Any) -> None:
        self.frames.append(bytes(frame))

    def on_writable(self) -> None: ...

    def on_violation(self, error: Any) -> None: ...

    def on_lost(self, error: Any) -> None:
        self.lost.set()


async def dial_raw(address: NodeAddress) -> RawFrames:
    """A websocket to a listener, with no session on it."""
    websocket = await dial_websocket(address.host, address.port, 5.0)
    raw = RawFrames(websocket)
    websocket.receiver = raw
    return raw


def step(payload: Any = b"x" * 64, *, number: int = 1, session_id: SessionId = SESSION_ID) -> Step:
    """A one-row step."""
    return Step(session_id, 1, number, 0, 1, payload)
