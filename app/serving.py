"""The gateway as a running server: HTTP from the first second, models when they are loaded, a drain at the end.

Knows the order of things; what is served is `main`'s, how tokens are made the engine's.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import uvicorn

from app.engine.library import LibrarySettings, NetworkLibrary, opened_library
from app.engine.network import FIRST_LOOK_S, MemberSettings, open_network
from app.engine.openable import Openable
from app.gateway import Gateway
from app.main import create_app, serve_config
from app.metrics import GatewayMetrics
from app.settings import GatewaySettings
from app.state.opening import open_state
from app.state.state import StateError
from routing.errors import SettingsError
from routing.tls import Tls, https_tls
from routing.tls_files import TlsFiles
from routing.trace_export import open_traces
from routing.types import NodeId
from slicing.progress import Progress

if TYPE_CHECKING:
    from opentelemetry.trace import Tracer

OnEvent = Callable[[dict[str, Any]], None]

FIRST_FIND_S = 15.0  # a packaged model is converted in that time; a download may go on behind "ready"


async def run_gateway(
    settings: GatewaySettings,
    member: MemberSettings,
    library_settings: LibrarySettings,
    *,
    on_event: OnEvent = lambda event: None,
    sockets: Sequence[socket.socket] | None = None,
    tls: Tls | None = None,
) -> None:
    """Serve until cancelled. While the first models load, requests for an unknown one get 503 `model_loading`.

    `sockets` are bound and listening already; otherwise `settings` says where. `tls` was read already; likewise.
    Raises OSError when the address is taken, ModelError and SettingsError for a named model that cannot be opened,
    SettingsError for files of TLS, and StateError where the state cannot be used.
    """
    tls = tls or https_tls(TlsFiles(settings.tls_cert, settings.tls_key))
    listening = list(sockets) if sockets is not None else [_bind(settings)]
    excluded = frozenset(NodeId(bytes.fromhex(node_id)) for node_id in settings.avoid)
    wanted = replace(library_settings, excluded=excluded, queue_s=settings.queue_timeout_s)
    async with contextlib.AsyncExitStack() as stack:
        for sock in listening:
            stack.callback(sock.close)
        state = await stack.enter_async_context(open_state(settings.state.get_secret_value()))
        joined = await stack.enter_async_context(open_network(member))
        library = await stack.enter_async_context(
            opened_library(wanted, joined, progress=_progress(on_event), on_event=on_event)
        )
        metrics = GatewayMetrics()
        metrics.watch_network(joined.network.status, joined.directory.records)
        joined.switchboard.on_pause = metrics.failover.observe
        tracer = await stack.enter_async_context(_traced(settings))
        app = create_app(settings, library, metrics, state, tracer=tracer)
        gateway: Gateway = app.state.gateway
        stack.push_async_callback(gateway.close)
        gateway.is_loading = True
        with contextlib.suppress(StateError):  # a store that is away is looked at again by the first request
            await app.state.jobs.open()
        if tls is not None:
            await stack.enter_async_context(_running(tls.watch()))
        serving = await stack.enter_async_context(_served(serve_config(app, settings, tls), listening))
        stack.push_async_callback(app.state.jobs.close)
        stack.push_async_callback(gateway.drain)
        named = await library.open_named()
        _check_aliases(settings, wanted, library)
        await joined.network.first_look(FIRST_LOOK_S)
        finding = await stack.enter_async_context(_running(library.run()))
        await _first_find(library, finding)
        gateway.is_loading = False
        on_event(_ready(_url_of(listening[0], is_secured=tls is not None), library, named))
        await asyncio.wait({serving, finding}, return_when=asyncio.FIRST_COMPLETED)  # until cancelled
        if finding.done():
            finding.result()
        serving.result()
        raise RuntimeError("the HTTP server ended by itself")


def _ready(url: str, library: NetworkLibrary, named: Sequence[Openable[Any]]) -> dict[str, Any]:
    """What is told once requests can be answered; what is missing is said of the first model that was named."""
    known = {model.name: model for model in library.models() if model.is_listed}
    first = known[named[0].facts.name].status if named else None
    return {
        "event": "ready",
        "url": url,
        "models": list(known),
        "missing_layers": [list(span) for span in first.missing] if first else [],
        "missing_ends": list(first.missing_ends) if first else [],
        "load_s": round(sum(model.load_s for model in named), 2),
    }


def _progress(on_event: OnEvent) -> Progress:
    """Tell of loads from whatever thread they run in."""
    loop = asyncio.get_running_loop()

    def tell(stage: str, done_bytes: int, total_bytes: int) -> None:
        event = {"event": "progress", "stage": stage, "done_bytes": done_bytes, "total_bytes": total_bytes}
        loop.call_soon_threadsafe(on_event, event)

    return tell


async def _first_find(library: NetworkLibrary, finding: asyncio.Task[None]) -> None:
    """Wait until what the swarm announced by now was looked at, but not for long."""
    looked = asyncio.create_task(library.has_looked.wait())
    try:
        await asyncio.wait({looked, finding}, timeout=FIRST_FIND_S, return_when=asyncio.FIRST_COMPLETED)
    finally:
        looked.cancel()


def _check_aliases(settings: GatewaySettings, wanted: LibrarySettings, library: NetworkLibrary) -> None:
    """Raise SettingsError for an alias of a model that will never be here."""
    names = [model.name for model in library.models()]
    for alias, model in settings.model_aliases.items():
        if model not in names and not wanted.finds:
            raise SettingsError(
                f"--model-aliases {alias}={model}: there is no such model here, only {', '.join(names)}"
            )


@contextlib.asynccontextmanager
async def _traced(settings: GatewaySettings) -> AsyncIterator[Tracer | None]:
    """Export traces while inside, where that was asked for. Raises SettingsError."""
    export = open_traces(settings.traces, "diffuse-gateway", f"{socket.gethostname()}:{settings.port}")
    if export is None:
        yield None
        return
    try:
        yield export.tracer
    finally:
        await export.close()


@contextlib.asynccontextmanager
async def _running(work: Coroutine[Any, Any, None]) -> AsyncIterator[asyncio.Task[None]]:
    """Run something beside what is inside."""
    task = asyncio.create_task(work)
    try:
        yield task
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


@contextlib.asynccontextmanager
async def _served(config: uvicorn.Config, sockets: list[socket.socket]) -> AsyncIterator[asyncio.Task[None]]:
    """Run uvicorn inside; stop it on the way out. Signals stay with whoever started us."""
    server = uvicorn.Server(config)
    serving = asyncio.create_task(server._serve(sockets))  # `serve` would take the signals
    try:
        yield serving
    finally:
        server.should_exit = True
        try:
            await serving
        finally:
            for sock in sockets:
                sock.close()


def _bind(settings: GatewaySettings) -> socket.socket:
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        sock.bind((settings.host.strip("[]"), settings.port))
    except OSError:
        sock.close()
        raise
    return sock


def _url_of(sock: socket.socket, *, is_secured: bool) -> str:
    host, port = sock.getsockname()[:2]
    scheme = "https" if is_secured else "http"
    return f"{scheme}://[{host}]:{port}/v1" if ":" in host else f"{scheme}://{host}:{port}/v1"
