"""Asking real nodes over real links: what answers, what refuses, what is not there."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing

from cli.diagnosis import HomeParts, examine
from cli.failures import explain
from cli.membership import Membership, network_id
from cli.ports import bind_loopback
from cli.survey import survey
from routing.endpoint import Endpoint
from routing.errors import ErrorCode
from routing.identity import Identity
from routing.types import Capabilities, NodeAddress, NodeId
from tests.cli.swarm import Describer
from tests.cli.test_diagnosis import node, offer

HOME = Membership(network_id("home"))


@asynccontextmanager
async def serving(start: int, end: int) -> AsyncIterator[NodeAddress]:
    description = node(1, offer(start, end)).description
    assert description is not None
    identity = Identity.generate()
    endpoint = Endpoint(identity, HOME.network_id, lambda: Capabilities(), Describer(description))
    host, port = await endpoint.listen("127.0.0.1", 0)
    try:
        yield NodeAddress(identity.node_id, host, port)
    finally:
        await endpoint.close()


async def test_nodes_say_what_they_serve() -> None:
    async with serving(1, 11) as first, serving(11, 30) as second:
        reports = await survey([first, second], HOME)
    assert [report.description.slices[0].spec.start for report in reports if report.description] == [1, 11]
    assert all(report.rtt_ms is not None for report in reports)
    assert all(finding.level == "ok" for finding in examine(reports, HomeParts(1, 0)))


async def test_another_identity_than_the_one_meant_is_refused() -> None:
    async with serving(1, 30) as address:
        wrong = NodeAddress(NodeId(bytes(32)), address.host, address.port)
        (report,) = await survey([wrong], HOME)
    assert report.error is not None
    assert report.error.code in (ErrorCode.ID_MISMATCH, ErrorCode.HANDSHAKE)
    assert "id@host:port" in explain(report.error)


async def test_another_network_is_refused() -> None:
    async with serving(1, 30) as address:
        (report,) = await survey([address], Membership(network_id("work")))
    assert report.error is not None
    assert report.error.code in (ErrorCode.NETWORK, ErrorCode.HANDSHAKE)


async def test_a_port_where_nothing_listens_is_a_lost_link() -> None:
    with closing(bind_loopback(0)) as listener:
        port = listener.getsockname()[1]
    (report,) = await survey([NodeAddress(NodeId(bytes(32)), "127.0.0.1", port)], HOME)
    assert report.error is not None
    assert report.error.code in (ErrorCode.LINK_LOST, ErrorCode.TIMEOUT)


async def test_a_secret_that_the_node_does_not_have_is_refused() -> None:
    async with serving(1, 30) as address:
        (report,) = await survey([address], Membership(HOME.network_id, psk=bytes(32)))
    assert report.error is not None
