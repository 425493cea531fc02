"""The gateway as a running server: HTTP from the first second, the engine when it is loaded, a drain at the end.

Knows the order of things; what is served is `main`'s, how tokens are made the engine's.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import Any

import uvicorn

from app.engine.request import TextEngine
from app.engine.swarm import SwarmSettings, open_swarm
from app.gateway import Gateway
from app.main import create_app, serve_config
from app.metrics import GatewayMetrics
from app.settings import GatewaySettings
from routing.errors import SettingsError

OnEvent = Callable[[dict[str, Any]], None]


async def run_gateway(
    settings: GatewaySettings,
    swarm_settings: SwarmSettings,
    *,
    on_event: OnEvent = lambda event: None,
    sockets: Sequence[socket.socket] | None = None,
) -> None:
    """Serve until cancelled. While the ends load, requests for a model get 503 `model_loading`.

    `sockets` are bound and listening already; otherwise `settings` says where. Raises OSError when the address is
    taken, ModelError and SettingsError as `open_swarm` does.
    """
    engines: dict[str, TextEngine] = {}
    metrics = GatewayMetrics()
    app = create_app(settings, engines, metrics)
    gateway: Gateway = app.state.gateway
    gateway.is_loading = True
    listening = list(sockets) if sockets is not None else [_bind(settings)]
    host, port = listening[0].getsockname()[:2]
    async with _served(serve_config(app, settings), listening) as serving:
        loop = asyncio.get_running_loop()

        def tell_progress(stage: str, done_bytes: int, total_bytes: int) -> None:
            event = {
                "event": "progress",
                "stage": stage,
                "done_bytes": done_bytes,
                "total_bytes": total_bytes,
            }
            loop.call_soon_threadsafe(on_event, event)

        async with open_swarm(swarm_settings, progress=tell_progress) as swarm:
            engines[swarm.engine.model_name] = swarm.engine
            _check_aliases(settings, engines)
            gateway.is_loading = False
            status = swarm.engine.coverage()
            on_event(
                {
                    "event": "ready",
                    "url": f"http://{_bracketed(host)}:{port}/v1",
                    "models": list(engines),
                    "missing_layers": [list(span) for span in status.missing],
                    "missing_ends": list(status.missing_ends),
                    "load_s": round(swarm.load_s, 2),
                }
            )
            try:
                await asyncio.wait({serving})  # until cancelled
                serving.result()
                raise RuntimeError("the HTTP server ended by itself")
            finally:
                await gateway.drain()
    on_event({"event": "stopped"})


def _check_aliases(settings: GatewaySettings, engines: Mapping[str, TextEngine]) -> None:
    for alias, model in settings.model_aliases.items():
        if model not in engines:
            raise SettingsError(
                f"--alias {alias}={model}: there is no such model here, only {', '.join(engines)}"
            )


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


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host
