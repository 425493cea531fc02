"""A client far away, nodes near each other: the chain against visiting each node, and the two ways back.

A delay proxy stands on each of the client's links; the nodes reach each other directly. Counts network time only:
what the nodes compute is taken out.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterable, Sequence
from dataclasses import dataclass, replace

from bench.report import Report
from cli.children import Children, thread_environment
from cli.layout import plan_nodes
from cli.membership import read_membership
from cli.options import DEFAULT_NETWORK
from routing.addresses import parse_address
from routing.chain import Chain
from routing.directory import StaticDirectory
from routing.endpoint import Endpoint
from routing.errors import ErrorCode, LinkError
from routing.identity import Identity
from routing.link import Link
from routing.opening import ChainOptions
from routing.planner import RouteRequest
from routing.switchboard import Switchboard
from routing.types import WIDTHS, Capabilities, Description, Hop, NodeAddress, NodeId, NodeRecord, SliceSpec
from tests.support.delay_proxy import DelayProxy, Path

MODEL = "smollm2"
NUM_LAYERS = 30
DELAYS_MS = (25, 50)  # one way, of the client's link
NUM_NODES = (2, 4, 8)
BARS = {2: "<= 0.6", 8: "<= 0.2"}
NUM_TOKENS = 24


async def measure_wan(report: Report) -> None:
    """Network time per token of the chain over that of visiting each node; direct return over return down the chain."""
    report.section("wan")
    for num_nodes in NUM_NODES:
        async with _nodes(num_nodes) as addresses:
            for delay_ms in DELAYS_MS:
                async with _far_client(addresses, delay_ms) as client:
                    chain = await client.chain_ms()
                    visits = await client.visits_ms()
                async with _far_client(addresses, delay_ms, only_first=True) as client:
                    down = await client.chain_ms()
                name = f"{num_nodes} nodes, client link {delay_ms} ms"
                report.add("wan", f"{name}: chain, direct return", chain, "ms per token")
                report.add("wan", f"{name}: return down the chain", down, "ms per token")
                report.add("wan", f"{name}: client visits each node", visits, "ms per token")
                report.add("wan", f"{name}: chain over visits", chain / visits, "", BARS.get(num_nodes, ""))
                report.add("wan", f"{name}: direct over down the chain", chain / down, "", "<= 1")


@contextlib.asynccontextmanager
async def _nodes(num_nodes: int) -> AsyncIterator[list[NodeAddress]]:
    plans = plan_nodes(NUM_LAYERS, num_nodes, local_layers=(0, 0), is_thin=False)
    async with Children() as children:
        nodes = []
        for plan in plans:
            arguments = ["host", "--model", MODEL, "--layers", plan.layers, "--listen", "127.0.0.1:0"]
            arguments += ["--events", "json", "--until-eof", "--threads", "1"]
            nodes.append(
                await children.start(
                    plan.name, arguments, on_event=lambda _: None, environment=thread_environment(1)
                )
            )
        yield [parse_address((await node.wait_for("ready"))["address"]) for node in nodes]


class _Fixed:
    """A directory that was looked up before: the plan names the nodes' own addresses, our links go through proxies."""

    def __init__(self, records: Sequence[NodeRecord]) -> None:
        self._records = tuple(records)

    def records(self) -> tuple[NodeRecord, ...]:
        return self._records

    def note_description(self, link: Link, description: Description) -> None: ...

    def note_loss(self, node_id: NodeId) -> None: ...

    async def first_look(self, timeout_s: float) -> None: ...


class _Near(Switchboard):
    """Reaches only the nodes that it has links to: no direct return from the others."""

    async def reach(self, hop: Hop, timeout_s: float) -> Link:
        link = self.live_link(hop.address.node_id)
        if link is None:
            raise LinkError(ErrorCode.LINK_LOST, "out of reach by choice")
        return link

    def reach_soon(self, hop: Hop) -> None: ...


@dataclass
class _Client:
    switchboard: Switchboard
    records: list[NodeRecord]

    async def chain_ms(self) -> float:
        """One step through all nodes, again and again."""
        chain = await self._open(self.records)
        return await _run([chain])

    async def visits_ms(self) -> float:
        """One step through the first node and back, then through the second, and so on."""
        chains = [await self._open([record]) for record in self.records]
        return await _run(chains)

    async def _open(self, records: Sequence[NodeRecord]) -> Chain:
        offers = [record.offers[0] for record in records]
        spec = SliceSpec(offers[0].spec.start, offers[-1].spec.end)
        request = RouteRequest(offers[0].model_name, offers[0].model_digest, spec)
        return await self.switchboard.open_chain(request, ChainOptions(max_positions=256))


async def _run(chains: Sequence[Chain]) -> float:
    """Network milliseconds per token, the first two left out."""
    assert chains[0].route is not None
    offer = chains[0].route.hops[0].offer
    payload = bytes(offer.hidden_size * WIDTHS[offer.dtype])
    for position in range(2):
        await _token(chains, payload, position)
    before = sum(chain.times.network_s for chain in chains)
    for position in range(2, 2 + NUM_TOKENS):
        await _token(chains, payload, position)
    spent = sum(chain.times.network_s for chain in chains) - before
    for chain in chains:
        await chain.close()
    return spent * 1000 / NUM_TOKENS


async def _token(chains: Iterable[Chain], payload: bytes, position: int) -> None:
    for chain in chains:
        answer = await chain.step(payload, position=position, rows=1)
        payload = bytes(answer.payload)


@contextlib.asynccontextmanager
async def _far_client(
    addresses: Sequence[NodeAddress], delay_ms: float, *, only_first: bool = False
) -> AsyncIterator[_Client]:
    network_id = read_membership(DEFAULT_NETWORK, None).network_id
    records = await _look(addresses, network_id)
    switchboard: Switchboard = _Near()
    endpoint = Endpoint(Identity.generate(), network_id, Capabilities, switchboard)
    switchboard.connect(endpoint, _Fixed(records))
    proxies = []
    try:
        for address in addresses[:1] if only_first else addresses:
            proxy = DelayProxy((address.host, address.port), Path(delay_s=delay_ms / 1000))
            proxies.append(proxy)
            host, port = await proxy.start()
            await endpoint.dial(replace(address, host=host, port=port))
        yield _Client(switchboard, records)
    finally:
        await endpoint.close()
        for proxy in proxies:
            await proxy.close()


async def _look(addresses: Sequence[NodeAddress], network_id: bytes) -> list[NodeRecord]:
    """What the nodes serve, in the order of their layers."""
    switchboard = Switchboard()
    endpoint = Endpoint(Identity.generate(), network_id, Capabilities, switchboard)
    directory = StaticDirectory(endpoint, addresses)
    switchboard.connect(endpoint, directory)
    keeping = asyncio.create_task(directory.run())
    try:
        await directory.first_look(10)
        return sorted(directory.records(), key=lambda record: record.offers[0].spec.start)
    finally:
        keeping.cancel()
        await asyncio.gather(keeping, return_exceptions=True)
        await endpoint.close()
