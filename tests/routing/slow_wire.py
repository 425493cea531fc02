"""A TCP proxy for tests that limits the rate, adds delay, keeps what passes, and can go silent or cut.

Works on asyncio alone. Small socket buffers, so that what waits, waits at the sender.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time
from collections.abc import AsyncIterator

_CHUNK = 4 << 10
_BUFFER = 16 << 10
_SLACK_S = 0.003  # what a late timer may catch up on, so that the rate holds on a busy machine


class SlowWire:
    """Listens on a port of its own and passes on to another: `rate` in B/s each way (0: no limit)."""

    def __init__(self, host: str, port: int, rate: float = 0.0, *, delay_s: float = 0.0) -> None:
        self._target = host, port
        self.rate = rate
        self.delay_s = delay_s
        self.seen = bytearray()
        self.keeps = False
        self.host = ""
        self.port = 0
        self._tasks: set[asyncio.Task[None]] = set()
        self._sockets: list[socket.socket] = []

    async def open(self) -> None:
        listener = _socket()
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        self.host, self.port = listener.getsockname()
        self._sockets.append(listener)
        self._start(self._accept(listener))

    async def close(self) -> None:
        for task in tuple(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for each in self._sockets:
            each.close()

    async def _accept(self, listener: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while True:
            near, _ = await loop.sock_accept(listener)
            near.setblocking(False)
            far = _socket()
            self._sockets += [near, far]
            await loop.sock_connect(far, self._target)
            self._start(self._pass_on(near, far))
            self._start(self._pass_on(far, near))

    async def _pass_on(self, source: socket.socket, sink: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        flying: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue(maxsize=256 if self.delay_s else 1)
        self._start(self._deliver(flying, sink))
        free_at = time.monotonic()
        while chunk := await loop.sock_recv(source, _CHUNK):
            if self.keeps:
                self.seen += chunk
            if self.rate:
                free_at = max(free_at, time.monotonic() - _SLACK_S) + len(chunk) / self.rate
                if free_at > time.monotonic():
                    await asyncio.sleep(free_at - time.monotonic())
            await flying.put((time.monotonic() + self.delay_s, chunk))
        await flying.put((0.0, b""))

    async def _deliver(self, flying: asyncio.Queue[tuple[float, bytes]], sink: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        with contextlib.suppress(OSError):
            while True:
                due, chunk = await flying.get()
                await asyncio.sleep(max(0.0, due - time.monotonic()))
                if not chunk:
                    sink.shutdown(socket.SHUT_WR)
                    return
                await loop.sock_sendall(sink, chunk)

    def _start(self, work: object) -> None:
        async def quietly() -> None:
            with contextlib.suppress(OSError):
                await work  # type: ignore[misc]

        task = asyncio.ensure_future(quietly())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


@contextlib.asynccontextmanager
async def slow_wire(
    host: str, port: int, rate: float = 0.0, *, delay_s: float = 0.0
) -> AsyncIterator[SlowWire]:
    wire = SlowWire(host, port, rate, delay_s=delay_s)
    await wire.open()
    try:
        yield wire
    finally:
        await wire.close()


def _socket() -> socket.socket:
    made = socket.socket()
    made.setblocking(False)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _BUFFER)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _BUFFER)
    made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return made
