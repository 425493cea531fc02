"""A directory over a fixed list, whose nodes lie, stay silent, move, and come and go."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from routing import directory as directory_module
from routing import follower as follower_module
from routing.announcement import Announcement, Contact
from routing.directory import LiveDirectory, StaticDirectory
from routing.errors import ErrorCode, LinkError
from routing.identity import Identity
from routing.node_records import chosen_to_follow
from routing.types import (
    Capabilities,
    Describe,
    Description,
    Message,
    NodeAddress,
    NodeId,
    SliceOffer,
    SliceSpec,
    WireDtype,
)
from tests.support.fake_link import FakeEndpoint, FakeNetwork

OFFER = SliceOffer("m", b"d" * 32, 30, 64, SliceSpec(0, 30), WireDtype.FLOAT32, "plain/fp32")


@dataclass
class Peer:
    """A node that says what it serves; a test may change what, or hush it."""

    offers: tuple[SliceOffer, ...] = (OFFER,)
    is_silent: bool = False
    num_asked: int = 0
    links: list[Any] = field(default_factory=list)

    def on_link_up(self, link: Any) -> None:
        self.links.append(link)

    def on_link_closed(self, link: Any, error: Any) -> None:
        pass

    def on_message(self, link: Any, message: Message) -> None:
        if isinstance(message, Describe):
            self.num_asked += 1
            if not self.is_silent:
                link.post(Description(self.offers))


@dataclass
class Gateway:
    """Hands descriptions and losses on, as the switchboard does."""

    directory: LiveDirectory | None = None

    def on_link_up(self, link: Any) -> None:
        pass

    def on_link_closed(self, link: Any, error: Any) -> None:
        assert self.directory is not None
        self.directory.note_loss(link.peer_id)

    def on_message(self, link: Any, message: Message) -> None:
        assert self.directory is not None
        if isinstance(message, Description):
            self.directory.note_description(link, message)


@dataclass
class Air:
    network: FakeNetwork = field(default_factory=FakeNetwork)
    tasks: list[asyncio.Task[None]] = field(default_factory=list)

    async def add(self, peer: Peer, seal_key: bytes = b"s" * 32) -> NodeAddress:
        told = Capabilities(seal_key=seal_key)
        endpoint = FakeEndpoint(Identity.generate(), bytes(32), lambda: told, peer, network=self.network)
        host, port = await endpoint.listen("127.0.0.1", 0)
        return NodeAddress(endpoint.node_id, host, port)

    async def watch(self, addresses: Iterable[NodeAddress]) -> tuple[StaticDirectory, FakeEndpoint]:
        gateway = Gateway()
        endpoint = FakeEndpoint(Identity.generate(), bytes(32), Capabilities, gateway, network=self.network)
        gateway.directory = StaticDirectory(endpoint, addresses)  # type: ignore[arg-type]
        self.tasks.append(asyncio.create_task(gateway.directory.run()))
        await gateway.directory.first_look(5.0)
        return gateway.directory, endpoint


@pytest.fixture
async def air() -> AsyncIterator[Air]:
    made = Air()
    yield made
    for task in made.tasks:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


SOON_S = 5.0  # on a busy machine


async def until(is_true: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not is_true():
            await asyncio.sleep(0.005)


async def test_a_dead_second_address_does_not_hide_a_node(air: Air, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(follower_module, "FIRST_REDIAL_S", 0.01)
    address = await air.add(Peer())
    dead = replace(address, port=9)
    for addresses in ([address, dead], [dead, address]):
        directory, _ = await air.watch(addresses)
        await until(lambda d=directory: len(d.records()) == 1)  # type: ignore[misc]
        for _ in range(20):
            await asyncio.sleep(0.005)
            assert [record.address for record in directory.records()] == [address]


async def test_an_address_that_is_listed_twice_is_kept_once(air: Air) -> None:
    peer = Peer()
    address = await air.add(peer)
    directory, endpoint = await air.watch([address, address])
    assert directory.addresses == (address,)
    assert (len(directory.records()), endpoint.num_dials, peer.num_asked) == (1, 1, 1)


async def test_what_makes_no_sense_is_not_taken(air: Air) -> None:
    bad = [
        replace(OFFER, spec=SliceSpec(5, 5)),
        replace(OFFER, spec=SliceSpec(20, 31)),
        replace(OFFER, layer_ms=-1.0),
    ]
    directory, _ = await air.watch([await air.add(Peer((*bad, OFFER)))])
    assert directory.records()[0].offers == (OFFER,)


async def test_a_node_that_nothing_can_be_sealed_for_is_not_offered(air: Air) -> None:
    directory, _ = await air.watch([await air.add(Peer(), seal_key=b"")])
    assert directory.records() == ()


async def test_a_description_that_nobody_asked_for_is_ignored(air: Air) -> None:
    peer, stranger = Peer(), Peer()
    address = await air.add(peer)
    directory, endpoint = await air.watch([address])
    peer.links[0].post(Description((replace(OFFER, spec=SliceSpec(0, 1)),)))
    await endpoint.dial(await air.add(stranger))
    stranger.links[0].post(Description((OFFER,)))
    await asyncio.sleep(0.02)
    assert [record.offers for record in directory.records()] == [(OFFER,)]


async def test_a_node_that_stops_describing_itself_is_not_offered_and_keeps_its_link(
    air: Air, monkeypatch: pytest.MonkeyPatch
) -> None:
    peer = Peer()
    directory, endpoint = await air.watch([await air.add(peer)])
    monkeypatch.setattr(follower_module, "DESCRIBE_TIMEOUT_S", 0.03)
    peer.is_silent = True
    directory.note_loss(peer.links[0].own_id)
    await until(lambda: peer.num_asked == 2)
    await asyncio.sleep(0.06)
    assert directory.records() == ()
    assert len(endpoint._links) == 1
    peer.is_silent = False
    directory.note_loss(peer.links[0].own_id)
    await until(lambda: len(directory.records()) == 1)


async def test_a_node_that_never_describes_itself_is_given_up_and_named(
    air: Air, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(follower_module, "DESCRIBE_TIMEOUT_S", 0.03)
    address = await air.add(Peer(is_silent=True))
    directory, _ = await air.watch([address])
    assert directory.records() == ()
    assert "does not say what it serves" in directory.last_errors[address]


async def test_a_false_alarm_is_cleared_at_once(air: Air) -> None:
    peer = Peer()
    directory, _ = await air.watch([await air.add(peer)])
    directory.note_loss(peer.links[0].own_id)
    assert directory.records() == ()
    async with asyncio.timeout(SOON_S):
        await until(lambda: len(directory.records()) == 1)


async def test_a_bug_about_one_node_is_told_and_the_others_stay(
    air: Air, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(follower_module, "FIRST_REDIAL_S", 0.01)
    good = await air.add(Peer())
    bad = NodeAddress(Identity.generate().node_id, "x", 1)
    find = air.network._find

    def break_one(address: NodeAddress) -> FakeEndpoint:
        if address == bad:
            raise ValueError("a secret")
        return find(address)

    monkeypatch.setattr(air.network, "_find", break_one)
    directory, _ = await air.watch([good, bad])
    await until(lambda: bad in directory.last_errors)
    assert len(directory.records()) == 1
    assert "ValueError" in caplog.text
    assert "secret" not in caplog.text


async def test_a_node_that_drops_us_at_once_is_dialled_ever_more_slowly(
    air: Air, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(follower_module, "FIRST_REDIAL_S", 0.02)
    peer = Peer()
    address = await air.add(peer)
    directory, endpoint = await air.watch([address])
    for _ in range(30):
        await asyncio.sleep(0.01)
        for link in endpoint.links_to(address.node_id):
            link.cut()
    assert endpoint.num_dials <= 6
    assert directory.records() == ()


# --- members of a swarm


@dataclass
class Members:
    """What gossip and suspicion tell the directory."""

    announcements: dict[NodeId, Announcement] = field(default_factory=dict)
    suspected: frozenset[NodeId] = frozenset()
    failed: list[NodeId] = field(default_factory=list)

    def note_failed(self, node_id: NodeId) -> None:
        self.failed.append(node_id)

    def note_alive(self, node_id: NodeId) -> None:
        pass

    def announce(
        self, *ways: NodeAddress, sequence: int = 1, offers: tuple[SliceOffer, ...] = (OFFER,)
    ) -> None:
        node_id = ways[0].node_id
        contacts = tuple(Contact(way) for way in ways)
        told = Announcement(b"", sequence, 0, 0, contacts, seal_key=b"s" * 32, offers=offers, load=7)
        self.announcements[node_id] = told


async def live(air: Air, members: Members, **options: Any) -> tuple[LiveDirectory, FakeEndpoint]:
    gateway = Gateway()
    endpoint = FakeEndpoint(Identity.generate(), bytes(32), Capabilities, gateway, network=air.network)
    directory = gateway.directory = LiveDirectory(endpoint, **options)  # type: ignore[arg-type]
    directory.connect(members)
    air.tasks.append(asyncio.create_task(directory.run()))
    await directory.first_look(5.0)
    return directory, endpoint


def unknown(number: int, host: str = "127.0.0.1") -> NodeAddress:
    return NodeAddress(NodeId(number.to_bytes(32, "big")), host, 9)


async def test_a_node_that_gossip_names_is_linked_and_described(air: Air) -> None:
    members = Members()
    address = await air.add(Peer())
    members.announce(address)
    directory, _ = await live(air, members)
    record = directory.records()[0]
    assert (record.address, record.is_verified, record.load) == (address, True, 0)


async def test_a_node_that_nobody_has_tried_yet_is_offered_as_a_claim(air: Air) -> None:
    members = Members()
    directory, _ = await live(air, members)
    members.announce(await air.add(Peer(is_silent=True)))
    directory.refresh()
    record = directory.records()[0]
    assert (record.is_verified, record.load, record.rtt_ms) == (False, 7, None)


async def test_a_claim_that_does_not_hold_is_withdrawn_and_told(air: Air) -> None:
    members = Members()
    members.announce(unknown(1))
    directory, _ = await live(air, members)
    assert directory.records() == ()
    assert members.failed[0] == unknown(1).node_id


async def test_who_is_suspected_is_neither_a_claim_nor_announced(air: Air) -> None:
    members = Members()
    members.announce(unknown(1))
    members.suspected = frozenset({unknown(1).node_id})
    directory, _ = await live(air, members, interests=frozenset())
    directory.interests = None
    assert (directory.records(), directory.announced()) == ((), ())
    assert directory.announcement(unknown(1).node_id) is not None


async def test_only_models_of_interest_are_followed(air: Air) -> None:
    members = Members()
    members.announce(await air.add(Peer()))
    directory, endpoint = await live(air, members, interests=frozenset({b"x" * 32}))
    assert (directory.records(), endpoint.num_dials, len(directory.announced())) == ((), 0, 1)
    directory.interests = frozenset({OFFER.model_digest})
    await until(lambda: [it.is_verified for it in directory.records()] == [True])


async def test_a_node_that_is_announced_no_more_is_dropped(air: Air) -> None:
    members = Members()
    address = await air.add(Peer())
    members.announce(address)
    directory, _ = await live(air, members)
    members.announcements.clear()
    directory.refresh()
    await until(lambda: directory.records() == ())


async def test_other_slices_are_asked_for_when_they_are_announced(air: Air) -> None:
    members, peer = Members(), Peer()
    address = await air.add(peer)
    members.announce(address)
    directory, _ = await live(air, members)
    other = replace(OFFER, spec=SliceSpec(3, 9))
    peer.offers = (other,)
    members.announce(address, sequence=2, offers=peer.offers)
    directory.refresh()
    async with asyncio.timeout(SOON_S):
        await until(lambda: directory.records()[0].offers == (other,))


async def test_a_direct_way_is_taken_up_when_it_appears(air: Air, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(directory_module, "RETIRE_AFTER_S", 0.02)
    members = Members()
    sentinel, address = await air.add(Peer()), await air.add(Peer())
    node = next(it for it in air.network.endpoints if it.node_id == address.node_id)
    await node.dial(sentinel)
    relayed = NodeAddress(address.node_id, sentinel.host, sentinel.port, sentinel.node_id)
    members.announce(relayed)
    directory, endpoint = await live(air, members)
    assert directory.records()[0].address == relayed
    members.announce(relayed, address, sequence=2)
    directory.refresh()
    await until(lambda: directory.records()[0].address == address)
    assert directory.records()[0].alternatives == (relayed,)
    await until(lambda: [it.is_relayed for it in endpoint.links_to(address.node_id)] == [False])


async def test_a_relayed_link_that_a_chain_uses_is_kept(air: Air, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(directory_module, "RETIRE_LOOK_S", 0.02)
    members = Members()
    sentinel, address = await air.add(Peer()), await air.add(Peer())
    node = next(it for it in air.network.endpoints if it.node_id == address.node_id)
    await node.dial(sentinel)
    members.announce(NodeAddress(address.node_id, sentinel.host, sentinel.port, sentinel.node_id))
    directory, endpoint = await live(air, members)
    used = set(endpoint.links_to(address.node_id))
    directory.in_use = lambda link: link in used  # type: ignore[comparison-overlap]
    members.announce(address, sequence=2)
    directory.refresh()
    await until(lambda: len(endpoint.links_to(address.node_id)) == 2)
    await asyncio.sleep(0.1)
    assert len(endpoint.links_to(address.node_id)) == 2
    used.clear()
    await until(lambda: len(endpoint.links_to(address.node_id)) == 1)


async def test_a_loss_that_a_chain_saw_is_told_even_of_a_node_without_a_link(air: Air) -> None:
    members = Members()
    directory, _ = await live(air, members)
    directory.note_loss(unknown(5).node_id)
    assert members.failed == [unknown(5).node_id]


async def test_hundreds_of_nodes_are_not_dialled_at_once(air: Air, monkeypatch: pytest.MonkeyPatch) -> None:
    members = Members()
    for number in range(300):
        members.announce(unknown(number))
    gate, most = asyncio.Event(), 0
    dialling: set[NodeAddress] = set()

    async def dial(self: FakeEndpoint, address: NodeAddress) -> Any:
        nonlocal most
        dialling.add(address)
        most = max(most, len(dialling))
        await gate.wait()
        dialling.discard(address)
        raise LinkError(ErrorCode.LINK_LOST, "nobody there")

    monkeypatch.setattr(FakeEndpoint, "dial", dial)
    gateway = Gateway()
    endpoint = FakeEndpoint(Identity.generate(), bytes(32), Capabilities, gateway, network=air.network)
    directory = gateway.directory = LiveDirectory(endpoint)  # type: ignore[arg-type]
    directory.connect(members)
    air.tasks.append(asyncio.create_task(directory.run()))
    await until(lambda: len(dialling) == directory_module.MAX_DIALS)
    assert len(directory.records()) == 300
    gate.set()
    await directory.first_look(5.0)
    assert most == directory_module.MAX_DIALS
    assert len(directory.records()) == 300 - directory_module.MAX_FOLLOWED


def test_of_many_nodes_some_of_each_layer_are_followed() -> None:
    members = Members()
    common = replace(OFFER, spec=SliceSpec(0, 10))
    for number in range(200):
        members.announce(unknown(number), offers=(common,))
    rare = [unknown(number) for number in range(200, 204)]
    for address in rare:
        members.announce(address, offers=(replace(OFFER, spec=SliceSpec(10, 30)),))
    fresh = list(members.announcements)
    chosen = chosen_to_follow(fresh[:20], fresh[20:], members.announcements, 24)
    assert len(chosen) == 24
    assert len(chosen & {address.node_id for address in rare}) >= 3
