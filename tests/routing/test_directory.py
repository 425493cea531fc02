"""A directory over a fixed list, whose nodes lie, stay silent, move, and come and go."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from routing import directory as directory_module
from routing.directory import StaticDirectory
from routing.identity import Identity
from routing.types import (
    Capabilities,
    Describe,
    Description,
    Message,
    NodeAddress,
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

    directory: StaticDirectory | None = None

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


async def until(is_true: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not is_true():
            await asyncio.sleep(0.005)


async def test_a_dead_second_address_does_not_hide_a_node(air: Air, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(directory_module, "FIRST_REDIAL_S", 0.01)
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
    monkeypatch.setattr(directory_module, "DESCRIBE_TIMEOUT_S", 0.03)
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
    monkeypatch.setattr(directory_module, "DESCRIBE_TIMEOUT_S", 0.03)
    address = await air.add(Peer(is_silent=True))
    directory, _ = await air.watch([address])
    assert directory.records() == ()
    assert "does not say what it serves" in directory.last_errors[address]


async def test_a_false_alarm_is_cleared_at_once(air: Air) -> None:
    peer = Peer()
    directory, _ = await air.watch([await air.add(peer)])
    directory.note_loss(peer.links[0].own_id)
    assert directory.records() == ()
    async with asyncio.timeout(0.5):
        await until(lambda: len(directory.records()) == 1)


async def test_a_bug_about_one_node_is_told_and_the_others_stay(
    air: Air, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(directory_module, "FIRST_REDIAL_S", 0.01)
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
    monkeypatch.setattr(directory_module, "FIRST_REDIAL_S", 0.02)
    peer = Peer()
    address = await air.add(peer)
    directory, endpoint = await air.watch([address])
    for _ in range(30):
        await asyncio.sleep(0.01)
        for link in endpoint.links_to(address.node_id):
            link.cut()
    assert endpoint.num_dials <= 6
    assert directory.records() == ()
