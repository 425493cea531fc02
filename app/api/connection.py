"""How requests are read off a connection: by h11, within bounds, with our own words for what is not HTTP.

uvicorn prefers httptools where it is installed. That one collects request headers without end, and loses the body
of a request that offers `Upgrade: h2c`, which Java's HTTP client does by default.
"""

from __future__ import annotations

import asyncio
import json
import secrets
import socket

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from app.api.errors import ApiError

LINGER_S = 1.0  # for a client that sends on when it is refused, and reads only then
MAX_HEAD_BYTES = 64 << 10  # request line and headers: browsers stay below 16 KiB, tokens in headers below 48
HEAD_TIMEOUT_S = 30.0  # from the connection, or the first byte of a later request, to the end of its headers


class Connection(H11Protocol):
    """uvicorn's connection, which also gives up on headers that never end."""

    _deadline: asyncio.TimerHandle | None = None
    _is_refused = False  # what still comes is no HTTP that we know

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        _send_at_once(transport)
        self._start_waiting()

    def data_received(self, data: bytes) -> None:
        if self._is_refused:
            return
        super().data_received(data)
        if self.conn.their_state is not h11.IDLE:
            self._stop_waiting()
        elif self._deadline is None:
            self._start_waiting()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_waiting()
        super().connection_lost(exc)

    def send_400_response(self, msg: str) -> None:
        """Answer what is not HTTP, unless an answer has begun: then all that is left is to hang up."""
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            refusal = ApiError(400, "invalid_http", "this is not a valid HTTP/1.1 request")
            body = json.dumps(refusal.envelope()).encode()
            headers = {
                "content-type": "application/json",
                "content-length": str(len(body)),
                "x-request-id": f"req_{secrets.token_hex(12)}",
                "connection": "close",
            }
            response = h11.Response(status_code=400, headers=list(headers.items()), reason=b"Bad Request")
            for event in (response, h11.Data(data=body), h11.EndOfMessage()):
                self.transport.write(self.conn.send(event) or b"")
        if self.cycle is not None and not self.cycle.response_complete:
            self.cycle.disconnected = True  # whoever still reads the body has nobody to answer
            self.cycle.message_event.set()
        self._hang_up()

    def _hang_up(self) -> None:
        """Close, but not before what is on its way was read: the refusal would be lost to a reset connection."""
        self._is_refused = True
        if self.transport.can_write_eof():
            self.transport.write_eof()
            self.loop.call_later(LINGER_S, self.transport.close)
        else:  # TLS says good-bye by itself
            self.transport.close()

    def _should_upgrade(self) -> bool:
        """No upgrade is taken up, and a client that offers one is not worth a warning."""
        return False

    def _start_waiting(self) -> None:
        self._deadline = self.loop.call_later(HEAD_TIMEOUT_S, self.timeout_keep_alive_handler)

    def _stop_waiting(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None


def _send_at_once(transport: asyncio.BaseTransport) -> None:
    """Let a body not wait for the acknowledgement of its headers, 40 ms on most systems.

    uvloop does so by itself; asyncio only for sockets that were made for TCP by name.
    """
    sock = transport.get_extra_info("socket")
    if sock is not None and sock.family in (socket.AF_INET, socket.AF_INET6):
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, True)
