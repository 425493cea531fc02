"""Real processes that only gossip: who joins is known everywhere, and who is gone is routed to by nobody.

No node computes here, so a dozen processes fit two cores. The long version is `make chaos`.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from routing.identity import Identity
from routing.network import Network, NetworkSettings
from routing.types import NodeAddress
from tests.support.gossip_process import NETWORK_ID
from tests.support.gossip_swarm import GossipSwarm, Member, open_swarm

KNOWN_WITHIN_S = 10.0  # what is promised of a machine that is not busy: `make chaos`
SETTLED_WITHIN_S = 60.0  # of one that runs other tests at the same time
NUM_NODES = 8
pytestmark = pytest.mark.processes


@pytest_asyncio.fixture
async def swarm(tmp_path: Path) -> AsyncIterator[GossipSwarm]:
    async with open_swarm(tmp_path) as opened:
        yield opened


async def grow(swarm: GossipSwarm) -> list[NodeAddress]:
    """A sentinel and eight nodes, settled; returns the bootstraps."""
    sentinel = await swarm.start("--sentinel", bootstraps=[])
    bootstraps = [sentinel.address]
    await asyncio.gather(*(swarm.start(bootstraps=bootstraps) for _ in range(NUM_NODES)))
    await swarm.until(swarm.is_settled, 60.0)
    return bootstraps


async def test_a_join_and_a_leave_are_known_everywhere_in_time(swarm: GossipSwarm) -> None:
    bootstraps = await grow(swarm)
    late = await swarm.start(bootstraps=bootstraps)
    assert await swarm.until(swarm.is_settled, SETTLED_WITHIN_S) < SETTLED_WITHIN_S
    await swarm.leave(late)
    assert await swarm.until(swarm.is_settled, SETTLED_WITHIN_S) < SETTLED_WITHIN_S


@pytest.mark.long
async def test_nodes_that_are_killed_and_restarted_are_routable_and_dead_ones_are_not(
    swarm: GossipSwarm,
) -> None:
    await churn(swarm, num_restarts=5, over_s=8.0, within_s=SETTLED_WITHIN_S)


@pytest.mark.chaos
async def test_twenty_restarts_in_a_minute(swarm: GossipSwarm) -> None:
    await churn(swarm, num_restarts=20, over_s=60.0, within_s=KNOWN_WITHIN_S)


async def churn(swarm: GossipSwarm, *, num_restarts: int, over_s: float, within_s: float) -> None:
    """Kill a node again and again, with the same key and with new ones, at the same place and at others."""
    bootstraps = await grow(swarm)
    key = swarm.new_key()
    victim = await swarm.start(bootstraps=bootstraps, key=key)
    settings = NetworkSettings(NETWORK_ID, bootstraps=tuple(bootstraps))
    async with Network(Identity.generate(), settings).running() as gateway:
        await gateway.first_look(10.0)
        for number in range(num_restarts):
            began = time.monotonic()
            await swarm.kill(victim)
            victim = await restart(swarm, number, victim, key, bootstraps)
            await asyncio.sleep(max(0.0, over_s / num_restarts - (time.monotonic() - began)))
        took_s = await swarm.until(lambda: swarm.is_settled() and offers_all(gateway, swarm), within_s)
        assert took_s < within_s


async def restart(
    swarm: GossipSwarm, number: int, victim: Member, key: Path, bootstraps: list[NodeAddress]
) -> Member:
    port = victim.address.port if number % 4 < 2 else 0
    same_key = key if number % 2 else None
    return await swarm.start("--port", str(port), bootstraps=bootstraps, key=same_key)


def offers_all(gateway: Network, swarm: GossipSwarm) -> bool:
    """Whether a gateway would route to every live node, on a link of its own, and to nobody else."""
    nodes = {member.address.node_id for member in swarm.members[1:]}
    records = gateway.directory.records()
    return (
        {record.address.node_id for record in records if record.is_verified}
        == nodes
        == {record.address.node_id for record in records}
    )
