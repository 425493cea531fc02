"""The gateway's connections under TLS: the certificate of now, a limit on the handshake, words for plain HTTP.

What is on the connection is `connection.py`'s, as without TLS.
"""

from __future__ import annotations

import asyncio
import json
from typing import Any, Final, cast

from app.api.connection import Connection
from app.api.errors import ApiError
from routing.tls import Tls
from routing.tls_transport import TlsTransport

HANDSHAKE_TIMEOUT_S: Final = 10.0  # three round trips of the longest line, and a slow phone


def secured_connection(tls: Tls) -> type[asyncio.Protocol]:
    """What uvicorn makes for each connection, in the place of `Connection`."""

    def make(**options: Any) -> TlsTransport:
        context = tls.contexts.accept
        assert context is not None, "an HTTP server's TLS accepts"
        return TlsTransport(
            Connection(**options),
            context,
            is_server=True,
            timeout_s=HANDSHAKE_TIMEOUT_S,
            plain_reply=_PLAIN_REPLY,
        )

    return cast("type[asyncio.Protocol]", make)


def _plain_reply() -> bytes:
    refusal = ApiError(400, "https_only", "this port speaks HTTPS only: write https:// before its address")
    body = json.dumps(refusal.envelope()).encode()
    head = f"HTTP/1.1 400 Bad Request\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n"
    return head.encode() + b"connection: close\r\n\r\n" + body


_PLAIN_REPLY: Final = _plain_reply()
