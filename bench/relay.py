"""What a sentinel between two peers costs: round trips through it and direct ones, and a small message beside a bulk.

A real sentinel, and a node that nobody can dial; delay proxies stand for the wires. Everything in pairs within one run.
"""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

from bench.children import free_port
from bench.report import Report, quartiles
from cli.children import Children, thread_environment
from cli.membership import read_membership
from cli.options import DEFAULT_NETWORK
from routing.addresses import parse_address
from routing.endpoint import Endpoint
from routing.errors import RelayError, RemoteError
from routing.identity import Identity
from routing.link import Link
from routing.types import Capabilities, Message, NodeAddress, SessionId, Step
from tests.support.delay_proxy import DelayProxy, Path

MODEL = "smollm2"
LEG_MS = 12.5
NUM_PINGS = 200
NUM_DELAYED_PINGS = 40
BULK_BYTES = 1 << 20
RATE_BPS = 50e6 / 8
RESERVED_S = 30.0


class _Deaf:
    """A receiver that wants nothing."""

    def on_message(self, link: Link, message: Message) -> None: ...

    def on_link_up(self, link: Link) -> None: ...

    def on_link_closed(self, link: Link, error: RemoteError | None) -> None: ...


async def measure_relay(report: Report) -> None:
    """A round trip through a sentinel: at most one more round trip and 1 ms. Bulk beside it: at most twice as long."""
    report.section("relay")
    await _compare(report, "loopback", Path(), NUM_PINGS)
    await _compare(report, f"legs of {LEG_MS} ms", Path(delay_s=LEG_MS / 1000), NUM_DELAYED_PINGS)
    await _beside_bulk(report)


async def _compare(report: Report, name: str, path: Path, num_pings: int) -> None:
    async with _relayed(path) as (address, sentinel), _client() as near, _client() as far:
        proxy = DelayProxy(("127.0.0.1", address.port), path)
        host, port = await proxy.start()
        direct = await near.dial(replace(address, host=host, port=port))
        relayed = await _dial_relayed(far, address, sentinel)
        pairs = [(await direct.ping(), await relayed.ping()) for _ in range(num_pings)]
        await proxy.close()
    report.add("relay", f"{name}: direct round trip", quartiles([pair[0] for pair in pairs]), "ms")
    report.add("relay", f"{name}: through a sentinel", quartiles([pair[1] for pair in pairs]), "ms")
    extra = quartiles([relayed_ms - 2 * direct_ms for direct_ms, relayed_ms in pairs])
    report.add("relay", f"{name}: beyond one more round trip", extra, "ms", "median <= 1")


async def _beside_bulk(report: Report) -> None:
    """Small round trips of one client while another sends 1 MB through the same sentinel to the same node."""
    path = Path(delay_s=LEG_MS / 1000, rate_bps=RATE_BPS)
    async with _relayed(path) as (address, sentinel), _client() as one, _client() as two:
        small = await _dial_relayed(one, address, sentinel)
        bulk = await _dial_relayed(two, address, sentinel)
        idle = [await small.ping() for _ in range(NUM_DELAYED_PINGS)]
        step = Step(SessionId(bytes(16)), 1, 1, 0, 1, bytes(BULK_BYTES))
        during: list[float] = []
        for _ in range(4):
            sending = asyncio.create_task(bulk.send(step))
            while not sending.done():
                during.append(await small.ping())
            await sending
    report.add("relay", "beside 1 MB: idle round trip", quartiles(idle), "ms")
    report.add("relay", "beside 1 MB: meanwhile", quartiles(during), "ms")
    ratio = quartiles(during)["median"] / quartiles(idle)["median"]
    report.add("relay", "beside 1 MB: meanwhile over idle", ratio, "", "<= 2")


async def _dial_relayed(endpoint: Endpoint, address: NodeAddress, sentinel: NodeAddress) -> Link:
    """Once the node has its reservation: it asks for one when nobody could dial it back."""
    relayed = NodeAddress(address.node_id, sentinel.host, sentinel.port, sentinel.node_id)
    async with asyncio.timeout(RESERVED_S):
        while True:
            try:
                return await endpoint.dial(relayed)
            except RelayError:
                await asyncio.sleep(0.1)


@asynccontextmanager
async def _client() -> AsyncIterator[Endpoint]:
    network_id = read_membership(DEFAULT_NETWORK, None).network_id
    endpoint = Endpoint(Identity.generate(), network_id, Capabilities, _Deaf())
    try:
        yield endpoint
    finally:
        await endpoint.close()


@asynccontextmanager
async def _relayed(path: Path) -> AsyncIterator[tuple[NodeAddress, NodeAddress]]:
    """A node (its real address, which it does not tell) that is reached through a sentinel behind a slow wire."""
    async with Children() as children, _state_folder() as environment:
        proxies: list[DelayProxy] = []
        try:
            sentinel_port = free_port()
            sentinel = await _start(
                children, environment, "sentinel", ["--listen", f"127.0.0.1:{sentinel_port}"]
            )
            ports = []
            for _ in range(2):  # one wire for the node, one for the clients
                proxy = DelayProxy(("127.0.0.1", sentinel_port), path)
                proxies.append(proxy)
                ports.append((await proxy.start())[1])
            port, dark = free_port(), free_port()
            arguments = [
                "--model",
                MODEL,
                "--layers",
                "0:1",
                "--threads",
                "1",
                "--listen",
                f"127.0.0.1:{port}",
            ]
            arguments += ["--public-addr", f"127.0.0.1:{dark}"]
            arguments += ["--bootstrap", str(replace(sentinel, port=ports[0]))]
            node = await _start(children, environment, "host", arguments)
            address = NodeAddress(node.node_id, "127.0.0.1", port)
            yield address, replace(sentinel, port=ports[1])
        finally:
            for proxy in proxies:
                await proxy.close()


@asynccontextmanager
async def _state_folder() -> AsyncIterator[dict[str, str]]:
    """The environment of children that keep their keys to themselves."""
    with tempfile.TemporaryDirectory() as folder:
        yield thread_environment(1) | {"DIFFUSE_STATE_DIR": folder}


async def _start(
    children: Children, environment: dict[str, str], command: str, arguments: list[str]
) -> NodeAddress:
    child = await children.start(
        command,
        [command, *arguments, "--events", "json", "--until-eof"],
        on_event=lambda _: None,
        environment=environment,
    )
    ready = await child.wait_for("ready")
    return parse_address(str(ready["address"]))
