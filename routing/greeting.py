"""One handshake over one websocket, until it is a session or has failed.

Says nothing to a peer that fails: before it is authenticated it learns no detail. Knows nothing of other links.
"""

from __future__ import annotations

import asyncio
from typing import Protocol

from routing.carrier import Carrier
from routing.errors import ErrorCode, LinkError, ProtocolError, RemoteError, SecurityError
from routing.handshake import Handshake
from routing.mux import Channel, HandshakeFrame, Mux
from routing.transport import FrameSocket
from routing.types import Buffer

_CLOSED_ON_US = (
    "the node closed the connection during the handshake: its id, the swarm id or the swarm secret may differ"
)


class Host(Protocol):
    """Whoever began a greeting and hears how it ends. One of the two is called, once."""

    def on_secured(self, greeting: Greeting, channel: Channel) -> None: ...

    def on_failed(self, greeting: Greeting, error: RemoteError) -> None: ...


class Greeting:
    """A handshake in progress; a `transport.FrameReceiver` until a link takes its place."""

    def __init__(self, websocket: FrameSocket, handshake: Handshake, host: Host, *, timeout_s: float) -> None:
        loop = asyncio.get_running_loop()
        self.handshake = handshake
        self.carrier = Carrier(websocket, Mux(is_dialler=handshake.is_dialler, max_channels=1))
        self._host = host
        self._is_over = False
        self._timer = loop.call_later(timeout_s, self._time_out)
        websocket.receiver = self
        if handshake.is_dialler:
            channel = self.carrier.mux.open_channel()
            channel.handshakes.append(handshake.start())
            self.carrier.write_burst()

    def give_up(self, error: RemoteError) -> None:
        """End the handshake and cut the connection."""
        if self._is_over:
            return
        self._settle()
        self.carrier.websocket.abort()
        self._host.on_failed(self, error)

    def on_frame(self, frame: Buffer) -> None:
        if self._is_over:
            return
        try:
            event = self.carrier.receive(frame)
            if not isinstance(event, HandshakeFrame):
                raise ProtocolError(ErrorCode.STATE, "a frame came before the handshake was done")
            self._advance(event)
        except RemoteError as error:
            self.give_up(error)

    def on_writable(self) -> None:
        self.carrier.write_burst()

    def on_violation(self, error: ProtocolError) -> None:
        self.give_up(error)

    def on_lost(self, error: RemoteError) -> None:
        if self.handshake.is_dialler and isinstance(error, LinkError):
            self.give_up(SecurityError(ErrorCode.HANDSHAKE, _CLOSED_ON_US))
        else:
            self.give_up(error)

    def _advance(self, event: HandshakeFrame) -> None:
        reply = self.handshake.receive(bytes(event.body))
        if reply is not None:
            event.channel.handshakes.append(reply)
            self.carrier.write_burst()
        if self.handshake.secured is not None:
            self._settle()
            self._host.on_secured(self, event.channel)

    def _settle(self) -> None:
        self._is_over = True
        self._timer.cancel()

    def _time_out(self) -> None:
        self.give_up(LinkError(ErrorCode.TIMEOUT, "the peer did not finish the handshake in time"))
