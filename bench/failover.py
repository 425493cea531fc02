"""How long an answer pauses when a node of its route is killed, or stops without closing, at some token.

Two replicas of two slices, real processes; whoever was hurt comes back before the next answer. The pause is the
longest silence between two tokens, less the usual one; an unbroken answer is the oracle for the text.
"""

from __future__ import annotations

import asyncio
import os
import signal
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import AsyncExitStack
from pathlib import Path

from app.engine.request import TextDelta
from app.engine.swarm import Swarm, SwarmSettings, open_swarm
from bench.local_swarm import MODEL, chat_prompt, greedy_request
from bench.report import Report, quartiles
from cli.children import Child, Children, thread_environment
from cli.membership import read_membership
from cli.options import DEFAULT_NETWORK
from routing.addresses import parse_address
from routing.types import NodeAddress, NodeId

SLICES = ("1:16", "16:30")
REPLICAS = 2
NUM_TOKENS = 24
PROMPT = "Explain how rivers shape valleys."
TOKENS_HIT = (2, 5, 9, 14, 20)
BACK_S = 60.0


class _Node:
    """One node that keeps its key and its port over restarts."""

    def __init__(self, layers: str, key: Path) -> None:
        self._arguments = [
            "host",
            "--model",
            MODEL,
            "--layers",
            layers,
            "--key",
            str(key),
            "--dtype",
            "float32",
        ]
        self._arguments += ["--events", "json", "--until-eof", "--threads", "1"]
        self._listen = "127.0.0.1:0"
        self._child: Child | None = None
        self.address: NodeAddress | None = None

    async def start(self, children: Children) -> None:
        arguments = [*self._arguments, "--listen", self._listen]
        self._child = await children.start(
            self._listen, arguments, on_event=lambda _: None, environment=thread_environment(1)
        )
        ready = await self._child.wait_for("ready")
        self.address = parse_address(str(ready["address"]))
        self._listen = f"{self.address.host}:{self.address.port}"

    def send(self, number: signal.Signals) -> None:
        assert self._child is not None
        os.kill(self._child.pid, number)


async def measure_failover(report: Report) -> None:
    """A closed connection: at most 1 s and the replay. Silence: found within 2 s."""
    report.section("failover")
    async with AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        children = await stack.enter_async_context(Children())
        nodes = [_Node(layers, folder / f"{number}.key") for number, layers in enumerate(SLICES * REPLICAS)]
        await asyncio.gather(*(node.start(children) for node in nodes))
        swarm = await stack.enter_async_context(open_swarm(_settings(nodes)))
        expected, _ = await _answer(swarm)
        for name, number, bar in (
            ("killed", signal.SIGKILL, "<= 1000 and the replay"),
            ("frozen", signal.SIGSTOP, "<= 2000 to detect, and the replay"),
        ):
            pauses, num_wrong = [], 0
            for stage, token in _places():
                victim = _Victim(nodes, stage, token, number)
                text, gaps = await _answer(swarm, victim.look)
                pauses.append((max(gaps) - statistics.median(gaps)) * 1000)
                num_wrong += text != expected
                await victim.bring_back(children)
                await _until_known(swarm, len(nodes))
            report.add("failover", f"{name}: pause, {len(pauses)} answers", quartiles(pauses), "ms", bar)
            report.add("failover", f"{name}: worst pause", max(pauses), "ms")
            report.add("failover", f"{name}: answers with another text", num_wrong, "", "0")


def _places() -> Iterator[tuple[int, int]]:
    for stage in range(len(SLICES)):
        for token in TOKENS_HIT:
            yield stage, token


def _settings(nodes: list[_Node]) -> SwarmSettings:
    return SwarmSettings(
        model=MODEL,
        nodes=tuple(node.address for node in nodes if node.address is not None),
        network_id=read_membership(DEFAULT_NETWORK, None).network_id,
        dtype="float32",
    )


class _Victim:
    """Whoever computes a stage when a token has come."""

    def __init__(self, nodes: list[_Node], stage: int, token: int, number: signal.Signals) -> None:
        self._nodes, self._stage, self._token, self._number = nodes, stage, token, number
        self._hit: _Node | None = None

    def look(self, swarm: Swarm, num_tokens: int) -> None:
        """Hurt it, once."""
        if num_tokens >= self._token and self._hit is None:
            node_id = _route_ids(swarm)[self._stage]
            self._hit = next(node for node in self._nodes if node.address and node.address.node_id == node_id)
            self._hit.send(self._number)

    async def bring_back(self, children: Children) -> None:
        assert self._hit is not None
        if self._number is signal.SIGKILL:
            await self._hit.start(children)
        else:
            self._hit.send(signal.SIGCONT)


async def _answer(
    swarm: Swarm, look: Callable[[Swarm, int], None] = lambda swarm, num_tokens: None
) -> tuple[str, list[float]]:
    """The text, and the silences between its pieces in seconds."""
    request = greedy_request(chat_prompt(swarm, PROMPT), NUM_TOKENS)
    text, gaps, last, count = "", [], 0.0, 0
    async for event in swarm.engine.generate(request):
        if isinstance(event, TextDelta):
            now = time.perf_counter()
            gaps += [now - last] if last else []
            text, last, count = text + event.text, now, count + event.num_tokens
            look(swarm, count)
    return text, gaps


def _route_ids(swarm: Swarm) -> list[NodeId]:
    """The nodes of the one route that is open now."""
    return [hop.address.node_id for hop in swarm.switchboard.routes[0].hops]


async def _until_known(swarm: Swarm, num_nodes: int) -> None:
    async with asyncio.timeout(BACK_S):
        while sum(record.is_verified for record in swarm.directory.records()) < num_nodes:  # noqa: ASYNC110
            await asyncio.sleep(0.1)
