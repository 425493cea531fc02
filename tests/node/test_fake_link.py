"""The in-memory links do what tests count on: order, delay, loss, silence, breaking."""

from __future__ import annotations

import asyncio

import pytest

from routing.errors import LinkError
from routing.identity import Identity
from routing.types import Capabilities, Describe, NodeAddress
from tests.node.rig import NETWORK_ID, Gateway
from tests.support.fake_link import FakeEndpoint, FakeLink, FakeNetwork


async def two_ends(network: FakeNetwork) -> tuple[FakeLink, Gateway, FakeEndpoint]:
    """A link from here to a listening end, that end's inbox, and the dialling endpoint."""
    there, here = Gateway(), Gateway()
    end = FakeEndpoint(there.identity, NETWORK_ID, Capabilities, there, network=network)
    host, port = await end.listen("127.0.0.1", 0)
    dialler = FakeEndpoint(here.identity, NETWORK_ID, Capabilities, here, network=network)
    link = await dialler.dial(NodeAddress(there.identity.node_id, host, port))
    return link, there, dialler


async def test_a_stalled_side_is_silent_until_it_resumes() -> None:
    link, there, _ = await two_ends(FakeNetwork())
    link.stall()
    await link.send(Describe())
    await asyncio.sleep(0.01)
    assert there.inbox.empty()
    assert link.waiting_bytes > 0
    assert link.other_side.silent_for_s > 0
    link.resume()
    await there.receive(Describe)
    assert link.silent_for_s == 0


async def test_a_dropped_message_is_lost_and_the_next_arrives() -> None:
    network = FakeNetwork(drop=lambda link, _: len(link.sent) == 1)
    link, there, _ = await two_ends(network)
    await link.send(Describe())
    await link.send(Describe())
    await there.receive(Describe)
    assert there.inbox.empty()


async def test_a_cut_link_is_lost_on_both_sides() -> None:
    link, there, dialler = await two_ends(FakeNetwork())
    await link.send(Describe())
    link.cut()
    assert isinstance(await there.losses.get(), LinkError)
    assert isinstance(await link.wait_closed(), LinkError)
    assert there.inbox.empty()
    assert dialler.links_to(there.identity.node_id) == []
    with pytest.raises(LinkError):
        await link.send(Describe())


async def test_links_are_used_again_and_wrong_ids_refused() -> None:
    network = FakeNetwork(delay_s=0.005)
    link, there, dialler = await two_ends(network)
    (bound,) = network._listening
    address = NodeAddress(there.identity.node_id, *bound)
    assert await dialler.dial(address) is link
    assert dialler.num_dials == 1
    with pytest.raises(Exception, match="ID_MISMATCH"):
        await dialler.dial(NodeAddress(Identity.generate().node_id, *bound))
    assert await link.ping() == pytest.approx(10.0)
