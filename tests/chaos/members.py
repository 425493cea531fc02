"""The members of a swarm under fire: real processes behind proxies, each of which can be hurt and brought back.

Knows how to start and to hurt; not when.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.support.delay_proxy import DelayProxy

START_TIMEOUT_S = 120.0
STOP_TIMEOUT_S = 20.0
THREADS = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}


@dataclass
class Member:
    """One process, and the proxy that stands for the network in front of it."""

    name: str
    arguments: list[str]
    log: Path
    proxy: DelayProxy | None = None
    skew_s: float = 0.0
    process: asyncio.subprocess.Process | None = None
    ready: dict[str, Any] = field(default_factory=dict)
    is_hurt: bool = False
    num_starts: int = 0
    _reading: asyncio.Task[None] | None = None
    _is_ready: asyncio.Event = field(default_factory=asyncio.Event)

    async def start(self) -> None:
        """Start it, and wait until it says that it is ready."""
        module = ["tests.chaos.skewed", str(self.skew_s)] if self.skew_s else ["cli"]
        self._is_ready.clear()
        self.num_starts += 1
        with self.log.open("ab") as log:
            self.process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                *module,
                *self.arguments,
                "--events",
                "json",
                "--until-eof",
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=log,
                env=os.environ | THREADS,
            )
        self._reading = asyncio.create_task(self._read(self.process))
        waiting = asyncio.create_task(self._is_ready.wait())
        ended = asyncio.create_task(self.process.wait())
        done, _ = await asyncio.wait(
            {waiting, ended}, timeout=START_TIMEOUT_S, return_when=asyncio.FIRST_COMPLETED
        )
        waiting.cancel()
        ended.cancel()
        if waiting not in done:
            raise RuntimeError(f"{self.name} did not start: see {self.log}")

    async def kill(self) -> None:
        """End it without a word."""
        assert self.process is not None
        with contextlib.suppress(ProcessLookupError):
            self.process.kill()
        await self.process.wait()

    def freeze(self) -> None:
        assert self.process is not None
        with contextlib.suppress(ProcessLookupError):
            self.process.send_signal(signal.SIGSTOP)

    def thaw(self) -> None:
        assert self.process is not None
        with contextlib.suppress(ProcessLookupError):
            self.process.send_signal(signal.SIGCONT)

    async def stop(self) -> None:
        """Ask it to leave; kill it if it does not."""
        if self.process is None or self.process.returncode is not None:
            return
        self.thaw()
        with contextlib.suppress(ProcessLookupError):
            self.process.terminate()
        try:
            await asyncio.wait_for(self.process.wait(), STOP_TIMEOUT_S)
        except TimeoutError:
            await self.kill()

    async def _read(self, process: asyncio.subprocess.Process) -> None:
        assert process.stdout is not None
        async for line in process.stdout:
            with contextlib.suppress(ValueError):
                event = json.loads(line)
                if event.get("event") == "ready":
                    self.ready = event
                    self._is_ready.set()
