"""`/metrics`, `/health` and `/live` of a node or sentinel, for Prometheus and for whoever watches processes.

A server of its own, beside the links: it answers who may connect to the address it is given, and knows neither keys
nor models. What is told is `metrics`' business.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, MutableMapping
from typing import Any, Final, Protocol

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from node.settings import HostPort
from routing.admission import is_this_machine
from routing.errors import SettingsError

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]

MAX_CONNECTIONS: Final = 32  # a few scrapers, and probes; more get 503 and cost nothing
MAX_HEAD_BYTES: Final = 8 << 10
HEAD_TIMEOUT_S: Final = 5.0  # from the connection to the end of its one request's headers
SHUTDOWN_S: Final = 1
SERVING: Final = "serving"
TEXT: Final = "text/plain; charset=utf-8"


class Exported(Protocol):
    """What is told."""

    @property
    def content_type(self) -> str:
        """Of `render`."""

    def render(self) -> bytes:
        """All metrics, as Prometheus reads them."""

    def state(self) -> str:
        """One word: "serving", or why not."""


@contextlib.asynccontextmanager
async def exporting(place: HostPort, exported: Exported) -> AsyncIterator[tuple[str, int]]:
    """Answer HTTP at a place while inside; yields what was bound.

    Raises SettingsError where it cannot be bound.
    """
    listener = _listen(place)
    is_local = is_this_machine(listener.getsockname()[0])
    config = uvicorn.Config(
        _Pages(exported, is_local=is_local),
        log_config=None,
        access_log=False,
        server_header=False,
        lifespan="off",
        http=_Connection,
        ws="none",
        h11_max_incomplete_event_size=MAX_HEAD_BYTES,
        limit_concurrency=MAX_CONNECTIONS,
        timeout_graceful_shutdown=SHUTDOWN_S,
    )
    server = uvicorn.Server(config)
    serving = asyncio.create_task(server._serve([listener]))  # `serve` would take the signals
    try:
        yield listener.getsockname()[:2]
    finally:
        server.should_exit = True
        try:
            await serving
        finally:
            listener.close()


class _Connection(H11Protocol):
    """uvicorn's connection, for one request that must come soon: who only holds on keeps scrapers out."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.loop.call_later(HEAD_TIMEOUT_S, self._check)

    def _check(self) -> None:
        if self.cycle is None:
            self.transport.close()


class _Pages:
    """The three pages, as an ASGI application. `/health` says whether it serves, `/live` only that it turns."""

    def __init__(self, exported: Exported, *, is_local: bool) -> None:
        self._exported = exported
        self._is_local = is_local

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        status, content_type, body = self._answer(scope)
        headers = [
            (b"content-type", content_type.encode()),
            (b"content-length", str(len(body)).encode()),
            (b"connection", b"close"),
        ]
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": b"" if scope["method"] == "HEAD" else body})

    def _answer(self, scope: Scope) -> tuple[int, str, bytes]:
        if scope["method"] not in ("GET", "HEAD"):
            return 405, TEXT, b"GET or HEAD\n"
        if self._is_local and not _names_this_machine(scope):
            return 403, TEXT, b"this Host is not allowed here\n"
        match scope["path"]:
            case "/metrics":
                return 200, self._exported.content_type, self._exported.render()
            case "/health":
                state = self._exported.state()
                return 200 if state == SERVING else 503, TEXT, f"{state}\n".encode()
            case "/live":
                return 200, TEXT, b"alive\n"
            case _:
                return 404, TEXT, b"there are /metrics, /health and /live\n"


def _names_this_machine(scope: Scope) -> bool:
    """Whether a request was meant for loopback: a page that rebound its own name sends that name."""
    hosts = [value.decode("latin-1").lower() for name, value in scope["headers"] if name == b"host"]
    if not hosts:
        return bool(scope["http_version"] == "1.0")  # no browser sends such a request
    host = hosts[0]
    bare = host[1:].partition("]")[0] if host.startswith("[") else host.partition(":")[0]
    return len(hosts) == 1 and (bare == "localhost" or is_this_machine(bare))


def _listen(place: HostPort) -> socket.socket:
    """Bind and listen; with port 0 on a free one."""
    listener = socket.socket(socket.AF_INET6 if ":" in place.host else socket.AF_INET, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((place.host, place.port))
        listener.listen(MAX_CONNECTIONS)
        listener.setblocking(False)
    except OSError as error:
        listener.close()
        raise SettingsError(f"cannot serve metrics at {place}: {error.strerror}") from error
    return listener
