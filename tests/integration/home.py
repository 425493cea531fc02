"""The gateway's side over a rig of node servers, in one process, and what tests do with it."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from routing.chain import Chain
from routing.directory import StaticDirectory
from routing.identity import Identity
from routing.opening import ChainOptions
from routing.planner import RouteRequest
from routing.switchboard import Switchboard
from routing.types import Capabilities, SliceSpec
from tests.node.fake_runner import HIDDEN_SIZE, NUM_LAYERS
from tests.node.rig import DIGEST, NETWORK_ID, Node, Rig, fake_rig, rows_of


@dataclass
class Home:
    """The gateway's side: a switchboard over a static directory, and links that tests can look at."""

    rig: Rig
    switchboard: Switchboard
    endpoint: Any
    tasks: list[asyncio.Task[None]] = field(default_factory=list)

    async def know(self, *nodes: Node) -> None:
        directory = StaticDirectory(self.endpoint, [node.address for node in nodes])
        self.switchboard.connect(self.endpoint, directory)
        self.tasks.append(asyncio.create_task(directory.run()))
        await directory.first_look(5.0)

    async def open(self, **options: Any) -> Chain:
        is_thin = options.get("runs_closing", False)
        request = RouteRequest(
            "fake", DIGEST, SliceSpec(0, NUM_LAYERS), needs_opening=is_thin, needs_closing=is_thin
        )
        return await self.switchboard.open_chain(request, ChainOptions(max_positions=64, **options))

    def messages_sent(self) -> Counter[str]:
        return self._count("messages_sent")

    def messages_received(self) -> Counter[str]:
        return self._count("messages_received")

    def _count(self, name: str) -> Counter[str]:
        """A counter of all our links, added up by message class."""
        own = [link for link in self.rig.network.links if link.own_id == self.endpoint.node_id]
        return sum((getattr(link.counters, name) for link in own), Counter())


@contextlib.asynccontextmanager
async def home() -> AsyncIterator[Home]:
    async with fake_rig() as rig:
        switchboard = Switchboard()
        endpoint = rig._make_endpoint(Identity.generate(), NETWORK_ID, Capabilities, switchboard)
        here = Home(rig, switchboard, endpoint)
        try:
            yield here
        finally:
            for task in here.tasks:
                task.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await task
            await switchboard.close()
            await endpoint.close()


def rows(count: int, seed: int = 0) -> np.ndarray[Any, Any]:
    return np.random.default_rng(seed).standard_normal((count, HIDDEN_SIZE)).astype("<f4")


async def run(chain: Chain, position: int, values: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    answer = await chain.step(values.tobytes(), position=position, rows=len(values))
    return rows_of(answer)


async def unbroken(here: Home, *nodes: Node) -> list[np.ndarray[Any, Any]]:
    """What three steps give when nothing goes wrong."""
    await here.know(*nodes)
    chain = await here.open()
    outputs = [await run(chain, 0, rows(3)), await run(chain, 3, rows(1, 1)), await run(chain, 4, rows(1, 2))]
    await chain.close()
    return outputs


def forget_sessions(node: Node) -> None:
    """As an expiry would: nobody asked for longer than a session is kept."""
    node.now[0] += 3600
    node.server.sweep()


def loser(here: Home, chain: Chain, hop: int) -> Node:
    assert chain.route is not None
    node_id = chain.route.hops[hop].address.node_id
    return next(node for node in here.rig.nodes if node.node_id == node_id)
