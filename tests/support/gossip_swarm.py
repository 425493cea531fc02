"""Many `gossip_process`es over loopback, with what each of them sees; for tests of convergence."""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from routing.addresses import parse_address
from routing.identity import Identity
from routing.types import NodeAddress

START_TIMEOUT_S = 60.0  # of a process that shares two cores with a dozen others


@dataclass
class Member:
    """One process: its latest view, and everything it wrote to stderr."""

    process: asyncio.subprocess.Process
    address: NodeAddress
    view: dict[str, Any] = field(default_factory=dict)
    log: list[str] = field(default_factory=list)
    reading: list[asyncio.Task[None]] = field(default_factory=list)

    @property
    def id_hex(self) -> str:
        return self.address.node_id.hex()

    @property
    def alive(self) -> set[str]:
        """Whom it would route to, by id in hex."""
        return set(self.view.get("alive", ()))


class GossipSwarm:
    """Starts, kills and watches members."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._num_keys = 0
        self._news = asyncio.Event()
        self.members: list[Member] = []

    def new_key(self) -> Path:
        """A key file for a process."""
        self._num_keys += 1
        path = self._folder / f"key{self._num_keys}"
        Identity.generate().save(path)
        return path

    async def start(self, *flags: str, bootstraps: list[NodeAddress], key: Path | None = None) -> Member:
        """Start a process and wait until it listens."""
        command = [sys.executable, "-m", "tests.support.gossip_process", *flags]
        command += [word for address in bootstraps for word in ("--bootstrap", str(address))]
        command += ["--key", str(key or self.new_key()), "--state", str(self._folder / "state")]
        pipe = asyncio.subprocess.PIPE
        process = await asyncio.create_subprocess_exec(*command, stdin=pipe, stdout=pipe, stderr=pipe)
        assert process.stdout is not None
        async with asyncio.timeout(START_TIMEOUT_S):
            line = await process.stdout.readline()
        if not line:
            assert process.stderr is not None
            raise AssertionError((await process.stderr.read()).decode())
        member = Member(process, parse_address(json.loads(line)["address"]))
        member.reading = [asyncio.create_task(it) for it in (self._read(member), self._read_log(member))]
        self.members.append(member)
        return member

    async def kill(self, member: Member) -> None:
        """SIGKILL: it has no time to say goodbye."""
        self.members.remove(member)
        member.process.kill()
        await self._end(member)

    async def leave(self, member: Member) -> None:
        """Let it leave on purpose."""
        self.members.remove(member)
        assert member.process.stdin is not None
        member.process.stdin.write(b"leave\n")
        await self._end(member)

    async def until(self, condition: Callable[[], bool], timeout_s: float) -> float:
        """Wait until a condition on the views holds; return for how long."""
        began = time.monotonic()
        async with asyncio.timeout(timeout_s):
            while not condition():
                self._news.clear()
                await self._news.wait()
        return time.monotonic() - began

    def is_settled(self) -> bool:
        """Whether every member would route to every other one, and to nobody else."""
        everybody = {member.id_hex for member in self.members}
        return all(member.alive == everybody - {member.id_hex} for member in self.members)

    async def close(self) -> None:
        """End what is left."""
        for member in tuple(self.members):
            with contextlib.suppress(ProcessLookupError):
                await self.kill(member)

    async def _read(self, member: Member) -> None:
        assert member.process.stdout is not None
        while line := await member.process.stdout.readline():
            member.view = json.loads(line)
            self._news.set()

    async def _read_log(self, member: Member) -> None:
        assert member.process.stderr is not None
        while line := await member.process.stderr.readline():
            member.log.append(line.decode().rstrip())

    async def _end(self, member: Member) -> None:
        await member.process.wait()
        await asyncio.gather(*member.reading)
        self._news.set()


@contextlib.asynccontextmanager
async def open_swarm(folder: Path) -> AsyncIterator[GossipSwarm]:
    """A swarm whose processes end with the block."""
    swarm = GossipSwarm(folder)
    try:
        yield swarm
    finally:
        await swarm.close()
