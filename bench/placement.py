"""Tokens per second when one of two machines is eight times slower: an equal split, and layers that follow the speed.

Real processes; the slow one is stopped seven eighths of the time. Both are measured with it slow from a running start,
so that the second has to notice, to move and to fail nothing on the way.
"""

from __future__ import annotations

import asyncio
import contextlib
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field

from app.engine.request import TextDelta
from app.engine.swarm import Swarm, SwarmSettings, open_swarm
from bench.local_swarm import MODEL, chat_prompt, greedy_request
from bench.report import Report
from cli.children import Child, Children, Event, thread_environment
from cli.membership import read_membership
from cli.options import DEFAULT_NETWORK
from routing.addresses import parse_address
from routing.errors import DiffuseError
from routing.types import NodeAddress
from tests.support.slow_process import slowed

EQUAL = ("0:15", "15:30")
MEMORY = "500MB"  # about 24 of the 30 layers, with room for sessions
SLOWER = 8.0
STREAMS = 4
NUM_TOKENS = 16
NUM_ROUNDS = 3
FOLLOW_S = 240.0  # until the layers have followed
QUIET_S = 45.0  # without a move: they have


@dataclass
class _Node:
    """A child with the layers that it says it holds."""

    child: Child | None = None
    layers: str = ""
    num_moves: int = 0
    changed_at: float = field(default_factory=time.monotonic)

    def on_event(self, event: Event) -> None:
        if event["event"] == "ready":
            self._take(str(event["layers"]))
        elif event["event"] == "moved":
            self.num_moves += 1
            self._take(", ".join(it["layers"] for it in event["layers"]))

    def _take(self, layers: str) -> None:
        self.layers, self.changed_at = layers, time.monotonic()


async def measure_placement(report: Report) -> None:
    """Layers that follow measured speed give at least 1.5 times the tokens of an equal split."""
    report.section("placement")
    async with (
        _nodes(EQUAL) as (nodes, _),
        _engine(await _addresses(nodes), ()) as swarm,
        slowed(_pid(nodes[1]), SLOWER),
    ):
        equal, num_failed = await _tokens_per_s(swarm)
    report.add("placement", f"equal split {EQUAL[0]} and {EQUAL[1]}, the second slow", equal, "tokens/s")
    async with _nodes(("", "")) as (nodes, sentinel), _engine((), (sentinel,)) as swarm:
        before = [node.layers for node in nodes]
        async with slowed(_pid(nodes[1]), SLOWER):
            num_failed = await _until_followed(swarm, nodes)
            placed, num_late = await _tokens_per_s(swarm)
    report.add("placement", "placed, before one was slow", " and ".join(before))
    report.add("placement", "placed, the second slow", " and ".join(node.layers for node in nodes))
    report.add("placement", "moves", sum(node.num_moves for node in nodes))
    report.add("placement", "answers failed meanwhile", num_failed + num_late, "", "0")
    report.add("placement", "placed, the second slow: speed", placed, "tokens/s")
    report.add("placement", "placed over equal", placed / equal, "", ">= 1.5")


@contextlib.asynccontextmanager
async def _nodes(slices: Sequence[str]) -> AsyncIterator[tuple[list[_Node], NodeAddress]]:
    """A sentinel, and a node for each "A:B" ("": it chooses), once all of them serve."""
    async with Children() as children:
        with tempfile.TemporaryDirectory() as folder:
            environment = thread_environment(1) | {"DIFFUSE_STATE_DIR": folder}
            tail = ["--listen", "127.0.0.1:0", "--events", "json", "--until-eof"]
            sentinel = await children.start(
                "sentinel", ["sentinel", *tail], on_event=lambda _: None, environment=environment
            )
            address = str((await sentinel.wait_for("ready"))["address"])
            nodes = []
            for layers in slices:
                arguments = ["host", "--model", MODEL, "--dtype", "float32", "--threads", "1", *tail]
                arguments += ["--layers", layers] if layers else ["--memory", MEMORY]
                arguments += ["--bootstrap", address]
                node = _Node()
                node.child = await children.start(
                    "node", arguments, on_event=node.on_event, environment=environment
                )
                nodes.append(node)
            await _addresses(nodes)
            yield nodes, parse_address(address)


async def _addresses(nodes: Sequence[_Node]) -> tuple[NodeAddress, ...]:
    ready = [await node.child.wait_for("ready") for node in nodes if node.child is not None]
    return tuple(parse_address(str(event["address"])) for event in ready)


def _pid(node: _Node) -> int:
    assert node.child is not None
    return node.child.pid


@contextlib.asynccontextmanager
async def _engine(
    nodes: tuple[NodeAddress, ...], bootstraps: tuple[NodeAddress, ...]
) -> AsyncIterator[Swarm]:
    settings = SwarmSettings(
        model=MODEL,
        nodes=nodes,
        bootstraps=bootstraps,
        network_id=read_membership(DEFAULT_NETWORK, None).network_id,
        dtype="float32",
    )
    async with open_swarm(settings) as swarm:
        yield swarm


async def _until_followed(swarm: Swarm, nodes: Sequence[_Node]) -> int:
    """Ask until no layers have moved for a while; how many answers failed."""
    began, num_failed = time.monotonic(), 0
    for node in nodes:
        node.changed_at = began
    while time.monotonic() - began < FOLLOW_S:
        num_failed += (await _round(swarm))[1]
        if time.monotonic() - max(node.changed_at for node in nodes) > QUIET_S:
            break
    return num_failed


async def _tokens_per_s(swarm: Swarm) -> tuple[float, int]:
    """Over a few rounds of all streams, after one that is not counted; and how many answers failed."""
    await _round(swarm)
    began, num_tokens, num_failed = time.perf_counter(), 0, 0
    for _ in range(NUM_ROUNDS):
        tokens, failed = await _round(swarm)
        num_tokens, num_failed = num_tokens + tokens, num_failed + failed
    return num_tokens / (time.perf_counter() - began), num_failed


async def _round(swarm: Swarm) -> tuple[int, int]:
    """One answer on every stream: their tokens, and how many failed."""
    told = await asyncio.gather(*(_answer(swarm, number) for number in range(STREAMS)))
    return sum(told), told.count(0)


async def _answer(swarm: Swarm, number: int) -> int:
    request = greedy_request(chat_prompt(swarm, f"Count from {number} upwards."), NUM_TOKENS)
    count = 0
    try:
        async for event in swarm.engine.generate(request):
            count += event.num_tokens if isinstance(event, TextDelta) else 0
    except DiffuseError:
        return 0
    return count
