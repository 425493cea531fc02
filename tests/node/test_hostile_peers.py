"""What a peer that asks a node without end, or sends it elsewhere, comes to."""

from __future__ import annotations

from typing import Any

import pytest

from node import member
from routing.address_policy import AddressPolicy, Scope
from routing.outbox import MAX_QUEUED
from routing.types import Describe, Description, Failure, NodeAddress, NodeId
from tests.node.rig import NUM_LAYERS, Rig, until

ELSEWHERE = NodeId(b"e" * 32)


async def test_a_peer_that_takes_nothing_has_one_description_waiting_however_often_it_asks(rig: Rig) -> None:
    node = await rig.add_fake_node()
    link = await rig.gateway.endpoint.dial(node.address)
    link.other_side.stall()
    for _ in range(100):
        await link.send(Describe())
    await until(lambda: link.other_side.counters.messages_received["Describe"] == 100)
    assert link.other_side.num_waiting == 1
    link.other_side.resume()
    await rig.gateway.receive(Description)
    await link.send(Describe())
    await rig.gateway.receive(Description)


async def test_a_peer_that_takes_nothing_is_not_refused_without_end(rig: Rig) -> None:
    node = await rig.add_fake_node()
    script = rig.script((node, 0, NUM_LAYERS))
    link = await rig.gateway.endpoint.dial(node.address)
    link.other_side.stall()
    for number in range(MAX_QUEUED + 200):
        await link.send(script.step(number + 1, 0, [[0.0] * 4]))
    received = link.other_side.counters.messages_received
    await until(lambda: received["Step"] == MAX_QUEUED + 200)
    assert link.other_side.num_waiting == MAX_QUEUED + 1
    link.other_side.resume()
    await rig.gateway.receive(Failure)


class _Network:
    """As much of a network as is asked where a node may dial."""

    def __init__(self, scope: Scope) -> None:
        self.policy = AddressPolicy(scope)
        self.directory = self

    def addresses_of(self, node_id: NodeId) -> tuple[NodeAddress, ...]:
        return ()


@pytest.mark.parametrize("is_placed", [True, False])
@pytest.mark.parametrize("host", ["127.0.0.1", "10.0.0.1", "169.254.169.254", "::ffff:10.0.0.1", "localhost"])
def test_a_public_node_is_not_sent_to_internal_places(host: str, is_placed: bool) -> None:
    node: Any = object.__new__(member.Node)
    node._network = _Network(Scope.PUBLIC)
    node._settings = type("Settings", (), {"is_placed": is_placed})()
    assert not node._may_dial(NodeAddress(ELSEWHERE, host, 80))
    assert node._may_dial(NodeAddress(ELSEWHERE, "9.9.9.9", 80))


def test_a_node_of_a_list_made_by_hand_dials_by_name() -> None:
    node: Any = object.__new__(member.Node)
    node._network = _Network(Scope.LOOPBACK)
    node._settings = type("Settings", (), {"is_placed": False})()
    assert node._may_dial(NodeAddress(ELSEWHERE, "a-host", 80))
