from __future__ import annotations

import asyncio
import socket
from dataclasses import replace

import pytest
import structlog

from routing.endpoint import Endpoint
from routing.errors import ErrorCode, LinkError, RelayError, RemoteError, SecurityError, SettingsError
from routing.identity import Identity
from routing.link import Link
from routing.race import race
from routing.types import Capabilities, Describe, Message, NodeAddress, NodeId
from tests.routing.peers import NETWORK_ID, Inbox, Peer, Rig

OLD, NEW = b"o" * 32, b"n" * 32


async def refusal(dialler: Peer, address: NodeAddress) -> RemoteError:
    with pytest.raises(RemoteError) as caught:
        await dialler.endpoint.dial(address)
    return caught.value


# --- ways to a node


async def test_direct_link_is_dialled_beside_a_relayed_one_and_comes_first(rig: Rig) -> None:
    sentinel = await rig.sentinel()
    node, dialler = await rig.hidden(sentinel), await rig.peer()
    relayed = await dialler.endpoint.dial(node.address)
    host, port = await node.endpoint.listen("127.0.0.1", 0)
    direct = await dialler.endpoint.dial(NodeAddress(node.endpoint.node_id, host, port))
    assert not direct.is_relayed
    assert (direct.peer_host, direct.peer_port) == (host, port)
    assert dialler.endpoint.links_to(node.endpoint.node_id) == [direct, relayed]
    assert await dialler.endpoint.dial(node.address) is direct
    await relayed.close()
    await direct.send(Describe())
    await node.inbox.receive()
    assert dialler.endpoint.links_to(node.endpoint.node_id) == [direct]


async def test_reach_uses_the_direct_address_although_the_relayed_one_is_named_first(rig: Rig) -> None:
    sentinel = await rig.sentinel()
    node, dialler = await rig.hidden(sentinel), await rig.peer()
    host, port = await node.endpoint.listen("127.0.0.1", 0)
    link = await dialler.endpoint.reach([node.address, NodeAddress(node.endpoint.node_id, host, port)])
    assert not link.is_relayed
    assert await dialler.endpoint.reach([node.address]) is link


async def test_reach_falls_back_to_the_relay_when_nobody_listens(rig: Rig) -> None:
    sentinel = await rig.sentinel()
    node, dialler = await rig.hidden(sentinel), await rig.peer()
    dead = NodeAddress(node.endpoint.node_id, "127.0.0.1", 1)
    link = await dialler.endpoint.reach([dead, node.address], timeout_s=1.0)
    assert link.is_relayed


async def test_reach_does_not_wait_for_an_address_that_swallows_packets(rig: Rig) -> None:
    sentinel = await rig.sentinel()
    node, dialler = await rig.hidden(sentinel), await rig.peer()
    with socket.socket() as deaf:  # accepts in the kernel and never answers
        deaf.bind(("127.0.0.1", 0))
        deaf.listen()
        silent = NodeAddress(node.endpoint.node_id, *deaf.getsockname())
        link = await dialler.endpoint.reach([silent, node.address], timeout_s=2.0)
        assert link.is_relayed
        stranger = replace(silent, node_id=NodeId(b"x" * 32))
        with pytest.raises(LinkError) as caught:
            await dialler.endpoint.reach([stranger], timeout_s=0.05)
        assert caught.value.code is ErrorCode.TIMEOUT


async def test_reach_raises_the_last_failure(rig: Rig) -> None:
    sentinel, dialler = await rig.sentinel(), await rig.peer()
    nobody, place = NodeId(b"x" * 32), sentinel.address
    relayed = NodeAddress(nobody, place.host, place.port, place.node_id)
    with pytest.raises(RelayError):
        await dialler.endpoint.reach([NodeAddress(nobody, "127.0.0.1", 1), relayed])
    with pytest.raises(LinkError):
        await dialler.endpoint.reach([])


async def test_race_begins_the_next_attempt_late_and_cancels_the_loser() -> None:
    order: list[str] = []

    async def slow() -> str:
        order.append("slow")
        try:
            await asyncio.sleep(10)
        except asyncio.CancelledError:
            order.append("cancelled")
            raise
        return "slow"

    async def quick() -> str:
        order.append("quick")
        return "quick"

    assert await race([slow, quick], 0.01) == "quick"
    assert order == ["slow", "quick", "cancelled"]
    assert await race([quick, slow], 10.0) == "quick"


# --- probing


async def test_probe_proves_an_address_and_leaves_no_link(rig: Rig) -> None:
    prober, node = await rig.peer(), await rig.peer()
    link = await prober.endpoint.dial(node.address)
    await prober.endpoint.probe(node.address)
    assert prober.inbox.ups == [link]
    assert prober.endpoint.links_to(node.address.node_id) == [link]
    await node.inbox.until(lambda: node.inbox.ends == [None])


async def test_probe_fails_with_what_was_found(rig: Rig) -> None:
    prober, node = await rig.peer(), await rig.peer()
    for address, code in (
        (replace(node.address, port=1), ErrorCode.LINK_LOST),
        (replace(node.address, node_id=NodeId(b"x" * 32)), ErrorCode.ID_MISMATCH),
    ):
        with pytest.raises(RemoteError) as caught:
            await prober.endpoint.probe(address)
        assert caught.value.code is code


async def test_probe_of_a_silent_address_times_out(rig: Rig) -> None:
    prober = await rig.peer()
    with socket.socket() as deaf:
        deaf.bind(("127.0.0.1", 0))
        deaf.listen()
        with pytest.raises(LinkError) as caught:
            await prober.endpoint.probe(NodeAddress(NodeId(b"x" * 32), *deaf.getsockname()), 0.1)
    assert caught.value.code is ErrorCode.TIMEOUT


# --- who may stay


async def test_allow_sees_who_and_what_for(rig: Rig) -> None:
    asked: list[tuple[NodeId, Capabilities]] = []

    def allow(node_id: NodeId, capabilities: Capabilities) -> bool:
        asked.append((node_id, capabilities))
        return capabilities.token == b"guest"

    acceptor, stranger = await rig.peer(allow=allow), await rig.peer()
    assert (await refusal(stranger, acceptor.address)).code is ErrorCode.NOT_ALLOWED
    guest = Endpoint(Identity.generate(), NETWORK_ID, lambda: Capabilities(token=b"guest"), Inbox())
    assert await guest.dial(acceptor.address)
    assert [node_id for node_id, _ in asked] == [stranger.endpoint.node_id, guest.node_id]
    await guest.close()


async def test_peer_that_is_no_longer_allowed_is_disconnected_and_told(rig: Rig) -> None:
    allowed: set[NodeId] = set()
    acceptor = await rig.peer(allow=lambda node_id, _: node_id in allowed)
    stays, goes = await rig.peer(), await rig.peer()
    allowed |= {stays.endpoint.node_id, goes.endpoint.node_id}
    for dialler in (stays, goes):
        await dialler.endpoint.dial(acceptor.address)
    allowed.discard(goes.endpoint.node_id)
    acceptor.endpoint.recheck_allowed()
    await goes.inbox.until(lambda: len(goes.inbox.ends) == 1)
    assert [error.code for error in goes.inbox.ends if error] == [ErrorCode.NOT_ALLOWED]
    assert [link.peer_id for link in acceptor.endpoint.links] == [stays.endpoint.node_id]


async def test_peer_that_is_not_allowed_hears_it_through_a_sentinel_too(rig: Rig) -> None:
    sentinel = await rig.sentinel()
    allowed = {sentinel.endpoint.node_id}
    node = await rig.hidden(sentinel, allow=lambda node_id, _: node_id in allowed)
    dialler = await rig.peer()
    assert (await refusal(dialler, node.address)).code is ErrorCode.NOT_ALLOWED
    allowed.add(dialler.endpoint.node_id)
    link = await dialler.endpoint.dial(node.address)
    allowed.discard(dialler.endpoint.node_id)
    node.endpoint.recheck_allowed()
    error = await link.wait_closed()
    assert error is not None
    assert error.code is ErrorCode.NOT_ALLOWED


async def test_node_that_is_not_allowed_is_not_dialled_unless_it_is_trusted(rig: Rig) -> None:
    dialler, acceptor = await rig.peer(allow=lambda *_: False), await rig.peer()
    error = await refusal(dialler, acceptor.address)
    assert isinstance(error, SecurityError)
    assert error.code is ErrorCode.NOT_ALLOWED
    await acceptor.inbox.until(lambda: len(acceptor.inbox.ends) == len(acceptor.inbox.ups))
    dialler.endpoint.trusted.add(acceptor.endpoint.node_id)
    assert await dialler.endpoint.dial(acceptor.address)
    dialler.endpoint.recheck_allowed()
    assert len(dialler.endpoint.links) == 1


# --- swarm secrets


async def test_secret_is_rotated_by_accepting_both(rig: Rig) -> None:
    rotating = await rig.peer(psk=NEW, accepted_psks=[b"x" * 32, OLD])
    for psk in (OLD, NEW, b"x" * 32):
        dialler = await rig.peer(psk=psk)
        link = await dialler.endpoint.dial(rotating.address)
        await link.send(Describe())
    await rotating.inbox.receive(3)
    other = await rig.peer(psk=b"y" * 32)
    assert (await refusal(other, rotating.address)).code is ErrorCode.HANDSHAKE
    rotating.endpoint.set_secrets(NEW)
    assert (await refusal(await rig.peer(psk=OLD), rotating.address)).code is ErrorCode.HANDSHAKE


async def test_rotated_secret_holds_through_a_sentinel(rig: Rig) -> None:
    sentinel = await rig.sentinel(psk=NEW, accepted_psks=[OLD])
    node = await rig.hidden(sentinel, psk=NEW, accepted_psks=[OLD])
    dialler = await rig.peer(psk=OLD)
    link = await dialler.endpoint.dial(node.address)
    await link.send(Describe())
    await node.inbox.receive()


async def test_wrong_secret_inside_a_circuit_is_a_failed_handshake(rig: Rig) -> None:
    """The sentinel is in both swarms' secrets; the node is not."""
    sentinel = await rig.sentinel(psk=NEW, accepted_psks=[OLD])
    node, dialler = await rig.hidden(sentinel, psk=NEW), await rig.peer(psk=OLD)
    assert (await refusal(dialler, node.address)).code is ErrorCode.HANDSHAKE
    assert node.endpoint.links_to(dialler.endpoint.node_id) == []


@pytest.mark.parametrize(("psk", "accepted"), [(b"short", []), (NEW, [b"short"]), (None, [OLD])])
def test_secret_of_a_wrong_size_or_place_is_a_settings_error(
    psk: bytes | None, accepted: list[bytes]
) -> None:
    with pytest.raises(SettingsError):
        Endpoint(Identity.generate(), NETWORK_ID, Capabilities, Inbox(), psk=psk, accepted_psks=accepted)


# --- limits


async def test_circuits_are_limited_per_source_and_not_by_the_sentinels_address(rig: Rig) -> None:
    sentinel = await rig.sentinel()
    node = await rig.hidden(sentinel)
    way = node.endpoint.links_to(sentinel.endpoint.node_id)[0]
    may_begin = [node.endpoint._may_begin_circuit(way, NodeId(b"x" * 32)) for _ in range(30)]
    assert may_begin.count(True) == 20
    assert node.endpoint._may_begin_circuit(way, NodeId(b"y" * 32))


# --- whose link it is


async def test_a_link_that_a_request_dialled_is_not_part_of_the_request(rig: Rig) -> None:
    node, dialler = await rig.peer(), await rig.peer()
    seen: list[dict[str, object]] = []
    really = dialler.inbox.on_message

    def note(link: Link, message: Message) -> None:
        seen.append(structlog.contextvars.get_contextvars())
        really(link, message)

    dialler.inbox.on_message = note  # type: ignore[method-assign]
    structlog.contextvars.bind_contextvars(request_id="req_1")
    try:
        link = await dialler.endpoint.dial(node.address)
        await link.send(Describe())
        await node.inbox.receive()
        await node.inbox.ups[0].send(Describe())
        await dialler.inbox.receive()
    finally:
        structlog.contextvars.clear_contextvars()
    assert seen == [{}]
