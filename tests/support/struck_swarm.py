"""Stages of replicas in real processes, eight streams through a gateway, and a node that is struck at some token.

Whoever was struck comes back with its key and its port while the next one is struck. Judges nothing: see `Round`.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import statistics
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field

import httpx
from openai import APIError

from tests.support.crowd import client_for, streamed
from tests.support.processes import Process, Processes

KNOWN_TIMEOUT_S = 90.0
LOOK_S = 0.05


@dataclass
class Replica:
    """One node that keeps its key and its port over restarts."""

    processes: Processes
    model: str
    layers: str
    flags: tuple[str, ...]
    process: Process = field(init=False)
    listen: str = "127.0.0.1:0"
    struck_by: signal.Signals | None = None

    def start(self) -> None:
        """Start it anew."""
        flags = (*self.flags, "--listen", self.listen)
        self.process = self.processes.start_host(self.model, self.layers, *flags)
        self.listen = str(self.process.ready["bound"])

    def strike(self, number: signal.Signals) -> None:
        """Send a signal, and wait for nothing."""
        self.struck_by = number
        self.process.popen.send_signal(number)

    def recover(self) -> None:
        """Undo it. A round may be over before the process that was killed in it is."""
        if self.struck_by is signal.SIGSTOP:
            self.process.thaw()
        else:
            self.process.popen.wait()
            self.start()


@dataclass
class Round:
    """What came of eight streams in which a node was struck."""

    stage: int
    token: int
    wrong: list[str] = field(default_factory=list)  # texts that are not what is due
    failed: list[str] = field(default_factory=list)
    replays: int = 0
    pauses_s: list[float] = field(default_factory=list)  # of streams that took another route

    def __str__(self) -> str:
        told = f"stage {self.stage}, token {self.token}: {self.replays} replays"
        return f"{told}, wrong {self.wrong}, failed {self.failed}"


class StruckSwarm:
    """Stages of two replicas each, and a gateway over all of them."""

    def __init__(
        self, processes: Processes, model: str, stages: Sequence[str], *, num_replicas: int = 2
    ) -> None:
        self._processes = processes
        self._model = model
        self.stages = [
            [self._replica(layers, 10 * stage + number) for number in range(num_replicas)]
            for stage, layers in enumerate(stages)
        ]
        self._turns = [0] * len(stages)
        self._recoveries: list[asyncio.Task[None] | None] = [None] * len(stages)

    def _replica(self, layers: str, number: int) -> Replica:
        key = self._processes.state_dir / f"replica-{number}.key"
        return Replica(self._processes, self._model, layers, ("--dtype", "float32", "--key", str(key)))

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[StruckSwarm]:
        """Every node, then the gateway; in the end everything comes back before it is ended."""
        await self._start()
        try:
            yield self
        finally:
            await asyncio.gather(*(it for it in self._recoveries if it is not None))
            await self.client.close()

    async def _start(self) -> None:
        replicas = self._replicas
        await asyncio.gather(*(asyncio.to_thread(replica.start) for replica in replicas))
        nodes = [replica.process for replica in replicas]
        self.gateway = await asyncio.to_thread(self._processes.serve, self._model, nodes)
        self.client = client_for(self.gateway)
        self.name = (await self.client.models.list()).data[0].id

    @property
    def _replicas(self) -> list[Replica]:
        return [replica for stage in self.stages for replica in stage]

    async def round(
        self, stage: int, token: int, number: signal.Signals, due: Mapping[str, str], num_tokens: int
    ) -> Round:
        """Ask for the texts in `due` all at once; strike a replica of a stage when the first is at a token.

        Again with the other replica where nobody was on this one.
        """
        while True:
            told = await self._round(stage, token, number, due, num_tokens)
            if told.replays or told.failed:
                return told

    async def _round(
        self, stage: int, token: int, number: signal.Signals, due: Mapping[str, str], num_tokens: int
    ) -> Round:
        await self._all_there(stage)
        replica = self.stages[stage][self._turns[stage] % len(self.stages[stage])]
        self._turns[stage] += 1
        told = Round(stage, token)
        is_struck = False

        def on_token(count: int) -> None:
            nonlocal is_struck
            if count == token and not is_struck:
                is_struck = True
                replica.strike(number)

        asked = (self._ask(prompt, text, num_tokens, told, on_token) for prompt, text in due.items())
        await asyncio.gather(*asked)
        assert is_struck, "no stream came that far"
        self._recoveries[stage] = asyncio.create_task(asyncio.to_thread(replica.recover))
        return told

    async def _ask(
        self, prompt: str, due: str, num_tokens: int, told: Round, on_token: Callable[[int], None]
    ) -> None:
        text, num_replays, gaps, last, count = "", 0, [], time.monotonic(), 0
        try:
            async for piece, replays in streamed(self.client, self.name, prompt, num_tokens):
                num_replays += replays
                if piece:
                    now = time.monotonic()
                    gaps.append(now - last)
                    text, last, count = text + piece, now, count + 1
                    on_token(count)
        except APIError as error:
            told.failed.append(f"{getattr(error, 'code', None)}: {error}")
            return
        if text != due:
            told.wrong.append(text)
        told.replays += num_replays
        if num_replays:
            told.pauses_s.append(max(gaps) - statistics.median(gaps))

    async def _all_there(self, stage: int) -> None:
        """Wait until the last one that was struck at this stage is back, and every node has a link."""
        recovery = self._recoveries[stage]
        if recovery is not None:
            await recovery
        async with asyncio.timeout(KNOWN_TIMEOUT_S), httpx.AsyncClient() as client:
            while await self._num_linked(client) < len(self._replicas):
                await asyncio.sleep(LOOK_S)

    async def _num_linked(self, client: httpx.AsyncClient) -> int:
        url = str(self.gateway.ready["url"]).removesuffix("/v1") + "/metrics"
        text = (await client.get(url)).text
        line = next(
            it for it in text.splitlines() if it.startswith('diffuse_network_nodes_linked{path="direct"}')
        )
        return int(float(line.split()[-1]))


def spread(pauses_s: Sequence[float]) -> str:
    """Pauses in words."""
    median = statistics.median(pauses_s)
    return f"{len(pauses_s)} pauses, median {median:.2f} s, longest {max(pauses_s):.2f} s"
