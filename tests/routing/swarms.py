"""Whole `Network`s over loopback in one process, for tests."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

from routing.identity import Identity
from routing.network import Network, NetworkSettings, Offering
from routing.types import Describe, NodeAddress, SliceOffer
from tests.support.gossip_process import NETWORK_ID, Describer, offer


class Swarm:
    """Makes members and closes what is left of them."""

    def __init__(self, stack: contextlib.AsyncExitStack) -> None:
        self._stack = stack
        self._blocks: dict[Network, contextlib.AsyncExitStack] = {}

    async def node(self, *bootstraps: Network | NodeAddress, **options: Any) -> Network:
        """A node with one slice. `options`: `identity`, `clock`, `offers` (a list may change later), or settings."""
        offers = options.pop("offers", (offer(),))
        return await self._start(bootstraps, lambda: Offering(tuple(offers), 0, 4, 0), offers, options)

    async def sentinel(self, *bootstraps: Network | NodeAddress, **options: Any) -> Network:
        return await self._start(bootstraps, None, (), {"is_sentinel": True, **options})

    async def guest(self, *bootstraps: Network | NodeAddress, **options: Any) -> Network:
        """What a gateway has: nothing listens, nothing is announced."""
        return await self._start(bootstraps, None, (), {"listen": None, **options})

    async def stop(self, network: Network) -> None:
        """End one without a word of leave."""
        await self._blocks.pop(network).aclose()

    async def _start(
        self,
        bootstraps: tuple[Network | NodeAddress, ...],
        offering: Callable[[], Offering] | None,
        offers: Sequence[SliceOffer],
        options: dict[str, Any],
    ) -> Network:
        identity = options.pop("identity", None) or Identity.generate()
        made = {name: options.pop(name) for name in ("clock",) if name in options}
        known = tuple(address_of(it) if isinstance(it, Network) else it for it in bootstraps)
        options = {"listen": ("127.0.0.1", 0), **options}
        settings = NetworkSettings(NETWORK_ID, bootstraps=known, **options)
        network = Network(identity, settings, seal_key=b"s" * 32, offering=offering, **made)
        network.dispatcher.add(Describer(offers), (Describe,))
        block = contextlib.AsyncExitStack()
        self._blocks[network] = block
        self._stack.push_async_callback(block.aclose)
        await block.enter_async_context(network.running())
        return network


@contextlib.asynccontextmanager
async def open_swarm() -> AsyncIterator[Swarm]:
    """A swarm that leaves no task behind."""
    before = asyncio.all_tasks()
    async with contextlib.AsyncExitStack() as stack:
        yield Swarm(stack)
    assert asyncio.all_tasks() - before <= {asyncio.current_task()}


def address_of(network: Network) -> NodeAddress:
    assert network.bound is not None
    return NodeAddress(network.node_id, *network.bound)


def knows(network: Network, *others: Network) -> bool:
    """Whether it would route to these, and to nobody else."""
    return {it.node_id for it in network.directory.announced()} == {it.node_id for it in others}


async def until(condition: Callable[[], object], timeout_s: float = 15.0) -> None:
    async with asyncio.timeout(timeout_s):
        while not condition():
            await asyncio.sleep(0.01)


def free_port() -> int:
    """A port where nobody listens now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@contextlib.asynccontextmanager
async def forwarded(port: int, target: NodeAddress) -> AsyncIterator[None]:
    """A port of a router that leads to a node, while the block runs."""
    async with asyncio.TaskGroup() as tasks:
        pumps: list[asyncio.Task[None]] = []

        async def join(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            near, far = await asyncio.open_connection(target.host, target.port)
            pumps.extend(tasks.create_task(it) for it in (_pump(reader, far), _pump(near, writer)))

        server = await asyncio.start_server(join, "127.0.0.1", port)
        try:
            yield
        finally:
            server.close()
            for pump in pumps:
                pump.cancel()


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        while content := await reader.read(65536):
            writer.write(content)
    except ConnectionError:
        return
    finally:
        writer.close()
