"""The accepting side of a websocket: who may begin, under TLS where there is a context for it, and the upgrade."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from websockets.http11 import Request
from websockets.protocol import State
from websockets.server import ServerProtocol

from routing.errors import ErrorCode, LinkError
from routing.mux import MAX_FRAME
from routing.tls import Tls
from routing.tls_transport import HANDSHAKE, OnFault, TlsTransport
from routing.tls_words import dialled_with_tls
from routing.transport import WebSocket, said

_BACKLOG = 128
_TLS_ONLY = (
    b"HTTP/1.1 426 Upgrade Required\r\nUpgrade: TLS/1.3\r\nConnection: Upgrade, close\r\n"
    b"Content-Length: 0\r\n\r\n"
)
_NO_TLS = b"HTTP/1.1 400 Bad Request\r\nConnection: close\r\nContent-Length: 0\r\n\r\n"


class Listener:
    """A bound socket that accepts connections and sees each through its upgrade.

    `admit` is asked with the peer's address before a byte is read; connections that are not upgraded within
    `timeout_s` are cut; the others go to `on_accept`. `on_fault` hears of whoever spoke TLS wrongly, or should have.
    """

    def __init__(
        self,
        admit: Callable[[str], bool],
        on_accept: Callable[[WebSocket], None],
        timeout_s: float,
        *,
        tls: Tls | None = None,
        on_fault: OnFault = lambda host, fault: None,
    ) -> None:
        self.admit = admit
        self.on_accept = on_accept
        self.on_fault = on_fault
        self.timeout_s = timeout_s
        self._tls = tls
        self.pending: set[WebSocket] = set()  # accepted, not upgraded yet
        self._server: asyncio.Server | None = None

    async def bind(self, host: str, port: int) -> tuple[str, int]:
        """Start to accept; return what was bound. Raises `LinkError` LINK_LOST when it cannot be."""
        try:
            self._server = await asyncio.get_running_loop().create_server(
                self._accepted, host, port, backlog=_BACKLOG
            )
        except (OSError, OverflowError) as error:
            text = f"cannot listen on {host}:{port}: {said(error)}"
            raise LinkError(ErrorCode.LINK_LOST, text) from error
        name = self._server.sockets[0].getsockname()
        return name[0], name[1]

    def _accepted(self) -> asyncio.Protocol:
        accepted = _Accepted(self, is_secured=self._tls is not None)
        context = None if self._tls is None else self._tls.contexts.accept
        if context is None:
            return accepted
        return TlsTransport(
            accepted,
            context,
            is_server=True,
            timeout_s=self.timeout_s,
            plain_reply=_TLS_ONLY,
            on_fault=self.on_fault,
        )

    async def close(self) -> None:
        """Stop accepting, and cut connections that are not upgraded yet."""
        if self._server is not None:
            self._server.close()
        pending = tuple(self.pending)
        for websocket in pending:
            websocket.abort()
        await asyncio.gather(*(websocket.wait_closed() for websocket in pending))


class _Accepted(WebSocket):
    """The accepting side: refused before its first byte, cut when it dawdles, or handed over."""

    def __init__(self, listener: Listener, *, is_secured: bool) -> None:
        # browsers send an Origin; a link is not for them
        self._server = ServerProtocol(origins=[None], max_size=MAX_FRAME)
        super().__init__(self._server)
        self._listener = listener
        self._may_be_tls = not is_secured
        self._timer = self._loop.call_later(listener.timeout_s, self.abort)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        if not self._listener.admit(self.peer_host):
            self.abort()
        self._listener.pending.add(self)

    def data_received(self, chunk: bytes) -> None:
        if self._may_be_tls and chunk[0] == HANDSHAKE:
            self._refuse_tls()
            return
        self._may_be_tls = False
        super().data_received(chunk)

    def _refuse_tls(self) -> None:
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(_NO_TLS)  # which one that speaks TLS takes for what it is: no TLS
            self._transport.close()
            self._listener.on_fault(self.peer_host, dialled_with_tls())

    def connection_lost(self, error: Exception | None) -> None:
        self._leave()
        super().connection_lost(error)

    def _take(self, event: object) -> None:
        if not isinstance(event, Request):
            super()._take(event)
            return
        self._server.send_response(self._server.accept(event))
        self._flush()
        if self._server.state is State.OPEN:
            self._leave()
            self._listener.on_accept(self)

    def _leave(self) -> None:
        self._timer.cancel()
        self._listener.pending.discard(self)
