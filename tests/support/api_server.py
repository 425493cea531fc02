"""The application under a real uvicorn on a loopback port, with any engines, and a client for it."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import httpx
import uvicorn

from app.engine.diffusion.request import DiffusionEngine
from app.engine.request import AnyEngine, Library
from app.engine.shelf import Shelf
from app.gateway import Gateway
from app.jobs.runner import JobRunner
from app.main import create_app, serve_config
from app.metrics import GatewayMetrics
from app.settings import GatewaySettings
from app.state.opening import open_state
from routing.tls import Tls, https_tls
from routing.tls_files import TlsFiles

if TYPE_CHECKING:
    from openai import AsyncOpenAI
    from opentelemetry.trace import Tracer

QUESTION: dict[str, Any] = {"model": "scripted", "messages": [{"role": "user", "content": "hello"}]}
PATH = "/v1/chat/completions"


@dataclass
class Served:
    """A gateway that listens, and a client for it."""

    url: str
    port: int
    http: httpx.AsyncClient
    gateway: Gateway
    metrics: GatewayMetrics
    jobs: JobRunner
    tls: Tls | None = None

    async def ask(self, **changes: Any) -> httpx.Response:
        """Send `QUESTION` with changes; a change to None leaves the field out."""
        body = {name: value for name, value in {**QUESTION, **changes}.items() if value is not None}
        return await self.http.post(PATH, json=body)

    async def stream(self, **changes: Any) -> list[dict[str, Any] | str]:
        """Send `QUESTION` as a stream; return its chunks, `"[DONE]"`, and comments as they are."""
        response = await self.ask(stream=True, **changes)
        assert response.status_code == 200, response.text
        return events_of(response.text)

    def openai(self) -> AsyncOpenAI:
        """The official client, which is closed by whoever asks for it."""
        from openai import AsyncOpenAI

        return AsyncOpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0)

    async def begin(self, path: str, asked: Mapping[str, Any]) -> asyncio.StreamWriter:
        """Send a request on a connection of its own, which is left by closing it."""
        _, writer = await asyncio.open_connection("127.0.0.1", self.port)
        body = json.dumps(asked).encode()
        head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n"
        writer.write(head.encode() + body)
        await writer.drain()
        return writer

    async def talk(self, sent: bytes) -> bytes:
        """Send bytes as they are and read until the gateway hangs up."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        writer.write(sent)
        try:
            async with asyncio.timeout(5):
                return await reader.read()
        finally:
            writer.close()

    def metric(self, name: str, **labels: str) -> float:
        return self.metrics.registry.get_sample_value(name, labels) or 0.0


def events_of(text: str) -> list[dict[str, Any] | str]:
    """Split a stream as the standard says; anything but `data:` and comments fails."""
    events: list[dict[str, Any] | str] = []
    for block in text.removesuffix("\n\n").split("\n\n"):
        if block.startswith(":"):
            events.append(block)
            continue
        field, _, value = block.partition(": ")
        assert field == "data"
        assert "\n" not in value
        events.append(value if value == "[DONE]" else json.loads(value))
    return events


def chunks_of(events: list[dict[str, Any] | str]) -> list[dict[str, Any]]:
    """Return the parsed chunks alone."""
    return [event for event in events if isinstance(event, dict)]


def text_of(events: list[dict[str, Any] | str], index: int = 0) -> str:
    """Join the text of one choice."""
    choices = [
        choice for chunk in chunks_of(events) for choice in chunk["choices"] if choice["index"] == index
    ]
    return "".join(choice["delta"].get("content") or "" for choice in choices)


class QuickServer(uvicorn.Server):
    """uvicorn's server, which leaves at once instead of looking every 100 ms."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.leaving = asyncio.Event()

    async def main_loop(self) -> None:
        await self.leaving.wait()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        for server in self.servers:
            server.close()
        for connection in list(self.server_state.connections):
            connection.shutdown()
        await settles(lambda: not self.server_state.connections and not self.server_state.tasks)


def serve_engines(
    *engines: AnyEngine | DiffusionEngine, tracer: Tracer | None = None, **settings: Any
) -> AbstractAsyncContextManager[Served]:
    """Run the application over engines that are there."""
    return serve_library(Shelf({engine.model_name: engine for engine in engines}), tracer=tracer, **settings)


@asynccontextmanager
async def serve_library(
    library: Library, *, tracer: Tracer | None = None, **settings: Any
) -> AsyncIterator[Served]:
    """Run the application until the block is left."""
    chosen = GatewaySettings(port=0, **settings)
    async with open_state(chosen.state.get_secret_value()) as state:
        metrics = GatewayMetrics()
        app = create_app(chosen, library, metrics, state, tracer=tracer)
        listener = socket.create_server(("127.0.0.1", 0))
        tls = https_tls(TlsFiles(chosen.tls_cert, chosen.tls_key))
        server = QuickServer(serve_config(app, chosen, tls))
        serving = asyncio.create_task(server.serve(sockets=[listener]))
        port = listener.getsockname()[1]
        url = f"{'http' if tls is None else 'https'}://127.0.0.1:{port}"
        try:
            await settles(lambda: server.started)
            async with httpx.AsyncClient(base_url=url, timeout=10, trust_env=False, verify=False) as http:
                yield Served(url, port, http, app.state.gateway, metrics, app.state.jobs, tls)
        finally:
            await app.state.jobs.close()
            server.leaving.set()
            await serving
            await app.state.gateway.close()
            listener.close()


async def settles(condition: Callable[[], bool], *, within_s: float = 3.0) -> None:
    """Wait until `condition` holds."""
    async with asyncio.timeout(within_s):
        while not condition():
            await asyncio.sleep(0.002)
