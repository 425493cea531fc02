"""The dialling side of a websocket: connect, under TLS where there is a context for it, upgrade, and say why not."""

from __future__ import annotations

import asyncio
import ssl

from websockets.client import ClientProtocol
from websockets.exceptions import InvalidStatus, WebSocketException
from websockets.http11 import Response
from websockets.protocol import State
from websockets.uri import parse_uri

from routing.errors import ErrorCode, LinkError, RemoteError, SecurityError
from routing.mux import MAX_FRAME
from routing.tls_transport import ALERT, TlsTransport
from routing.tls_words import wants_tls
from routing.transport import WebSocket, said

UPGRADE_REQUIRED = 426  # RFC 2817: how a port that wants TLS answers a plain request


async def dial_websocket(
    host: str, port: int, timeout_s: float, context: ssl.SSLContext | None = None
) -> WebSocket:
    """Connect and upgrade, by wss with a context; raise `LinkError` TIMEOUT or LINK_LOST with what the system said.

    Raises `SecurityError` TLS where a certificate is refused, or where one side speaks TLS and the other does not.
    Environment proxies are not used and redirects are not followed: an address means that address.
    """
    place = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    websocket: _Dialled | None = None
    try:
        scheme = "ws" if context is None else "wss"
        protocol = ClientProtocol(parse_uri(f"{scheme}://{place}/"), max_size=MAX_FRAME)
        websocket = _Dialled(protocol, place)
        below: asyncio.Protocol = websocket
        if context is not None:
            below = TlsTransport(websocket, context, is_server=False, timeout_s=timeout_s)
        async with asyncio.timeout(timeout_s):
            await asyncio.get_running_loop().create_connection(lambda: below, host, port)
            await asyncio.shield(websocket.ready)
    except BaseException as error:
        if websocket is not None:
            websocket.abort()
        if isinstance(error, TimeoutError):
            text = f"{place} did not answer within {timeout_s:g} s"
            raise LinkError(ErrorCode.TIMEOUT, text) from error
        if isinstance(error, OSError | ValueError | WebSocketException):
            raise LinkError(ErrorCode.LINK_LOST, f"cannot reach {place}: {said(error)}") from error
        raise
    return websocket


class _Dialled(WebSocket):
    """The dialling side: upgrades, then is `ready`."""

    def __init__(self, protocol: ClientProtocol, place: str) -> None:
        super().__init__(protocol)
        self._client = protocol
        self._place = place
        self.ready: asyncio.Future[None] = self._loop.create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self._client.send_request(self._client.connect())
        self._flush()

    def _take(self, event: object) -> None:
        if not isinstance(event, Response):
            super()._take(event)
        elif not self.ready.done():
            self._settle()

    def data_received(self, chunk: bytes) -> None:
        if not self.ready.done() and chunk[0] == ALERT:  # no HTTP begins like that
            self._fail(wants_tls())
            return
        super().data_received(chunk)
        if self._client.handshake_exc is not None:
            self._settle()

    def connection_lost(self, error: Exception | None) -> None:
        super().connection_lost(error)
        if isinstance(error, SecurityError):
            self._fail(error)
        self._settle()

    def _settle(self) -> None:
        if self.ready.done():
            return
        error = self._client.handshake_exc
        if error is None and self._client.state is State.OPEN:
            self.ready.set_result(None)
        elif isinstance(error, InvalidStatus) and error.response.status_code == UPGRADE_REQUIRED:
            self._fail(wants_tls())
        else:
            told = said(error) if error is not None else "the connection was closed"
            self._fail(LinkError(ErrorCode.LINK_LOST, f"no node answers at {self._place}: {told}"))

    def _fail(self, error: RemoteError) -> None:
        if self.ready.done():
            return
        if isinstance(error, SecurityError):
            error = SecurityError(error.code, f"no link to {self._place}: {error.text}")
        self.ready.set_exception(error)
        self.ready.exception()  # a dial that was given up does not look
