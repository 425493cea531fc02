"""A TCP proxy that delays, jitters, slows, stalls, cuts and listens in: a network path for tests without root.

Bytes keep their order. `python -m tests.support.delay_proxy '{"target": ["127.0.0.1", 9000], …}'` runs one alone and
prints its port.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import sys
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

_CHUNK = 16 << 10
_MAX_WAITING = 8 << 20  # bytes on their way in one direction; then the sender waits, as before a full pipe


@dataclass
class Path:
    """What the proxy does to bytes, the same both ways; may be changed at any time."""

    delay_s: float = 0.0  # one way
    jitter_s: float = 0.0  # up to so much more
    rate_bps: float = 0.0  # bytes per second each way; 0: as fast as it goes
    stall_chance: float = 0.0  # per chunk: a lost packet costs a retransmission
    stall_s: float = 0.2
    seed: int = 0


@dataclass
class DelayProxy:
    """Listens on a loopback port for one target."""

    target: tuple[str, int]
    path: Path = field(default_factory=Path)
    tap: Callable[[bytes], None] | None = None  # sees every byte of both directions
    num_connections: int = 0
    bytes_passed: int = 0
    _server: asyncio.Server | None = None
    _pipes: set[_Pipe] = field(default_factory=set)
    _tasks: set[asyncio.Task[None]] = field(default_factory=set)
    _open: asyncio.Event = field(default_factory=asyncio.Event)

    async def start(self, port: int = 0) -> tuple[str, int]:
        """Begin to listen; returns host and port."""
        self._open.set()
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", port)
        host, bound = self._server.sockets[0].getsockname()[:2]
        return host, bound

    def stall(self) -> None:
        """Let nothing through, and close nothing: a path that went silent. New connections hang too."""
        self._open.clear()

    def resume(self) -> None:
        """Undo `stall`; what waited goes on."""
        self._open.set()

    def cut(self) -> None:
        """Reset every connection; new ones are welcome."""
        for pipe in tuple(self._pipes):
            pipe.abort()

    async def close(self) -> None:
        """Reset everything and stop listening."""
        if self._server is not None:
            self._server.close()
        self.cut()
        for task in tuple(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.num_connections += 1
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        with contextlib.suppress(OSError, asyncio.CancelledError):
            try:
                await self._open.wait()
                far_reader, far_writer = await asyncio.open_connection(*self.target)
                rng = random.Random(self.path.seed * 7919 + self.num_connections)
                pipes = [_Pipe(self, reader, far_writer, rng), _Pipe(self, far_reader, writer, rng)]
                self._pipes.update(pipes)
                try:
                    await asyncio.gather(*(pipe.run() for pipe in pipes))
                finally:
                    self._pipes.difference_update(pipes)
                    for pipe in pipes:
                        pipe.abort()
            finally:
                writer.transport.abort()


class _Pipe:
    """One direction of one connection."""

    def __init__(
        self,
        proxy: DelayProxy,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        rng: random.Random,
    ) -> None:
        self._proxy, self._reader, self._writer, self._rng = proxy, reader, writer, rng
        self._waiting: deque[tuple[float, bytes]] = deque()
        self._waiting_bytes = 0
        self._changed = asyncio.Event()
        self._is_over = False
        self._free_at = self._last_due = 0.0

    def abort(self) -> None:
        self._is_over = True
        self._changed.set()
        self._writer.transport.abort()

    async def run(self) -> None:
        await asyncio.gather(self._read(), self._write())

    async def _read(self) -> None:
        loop, path = asyncio.get_running_loop(), self._proxy.path
        while not self._is_over and (chunk := await self._reader.read(_CHUNK)):
            if self._proxy.tap is not None:
                self._proxy.tap(chunk)
            now = loop.time()
            if path.rate_bps:
                self._free_at = max(self._free_at, now) + len(chunk) / path.rate_bps
            due = max(now, self._free_at) + path.delay_s + self._rng.uniform(0, path.jitter_s)
            if self._rng.random() < path.stall_chance:
                due += path.stall_s
            self._last_due = max(self._last_due, due)
            self._waiting.append((self._last_due, chunk))
            self._waiting_bytes += len(chunk)
            self._changed.set()
            while self._waiting_bytes > _MAX_WAITING and not self._is_over:
                await asyncio.sleep(0.005)
        self._waiting.append((self._last_due, b""))
        self._changed.set()

    async def _write(self) -> None:
        loop = asyncio.get_running_loop()
        while not self._is_over:
            if not self._waiting:
                self._changed.clear()
                await self._changed.wait()
                continue
            due, chunk = self._waiting.popleft()
            if (wait_s := due - loop.time()) > 0:
                await asyncio.sleep(wait_s)
            await self._proxy._open.wait()
            if not chunk:
                self._writer.close()
                return
            self._waiting_bytes -= len(chunk)
            self._proxy.bytes_passed += len(chunk)
            self._writer.write(chunk)
            await self._writer.drain()


async def _run(wanted: dict[str, object]) -> None:
    target = wanted.pop("target")
    assert isinstance(target, list)
    proxy = DelayProxy((str(target[0]), int(target[1])), Path(**wanted))  # type: ignore[arg-type]
    _, port = await proxy.start()
    print(port, flush=True)
    await asyncio.Event().wait()


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(_run(json.loads(sys.argv[1])))
