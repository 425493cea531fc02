"""Whom we link to, how lost peers are looked for, and what others can have us do; over fake links."""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import pytest_asyncio

from routing import liveness as liveness_module
from routing import neighbourhood as neighbourhood_module
from routing import suspicion as suspicion_module
from routing.announcement import Announcement, Contact
from routing.background import Background
from routing.dispatcher import Dispatcher
from routing.errors import ErrorCode, LinkError
from routing.identity import Identity
from routing.known_peers import KnownPeers
from routing.liveness import Liveness
from routing.neighbourhood import FULL_MESH, NUM_NEIGHBOURS, Neighbourhood
from routing.reach import place_of
from routing.suspicion import Suspicion
from routing.types import (
    Capabilities,
    Digest,
    Message,
    NodeAddress,
    NodeId,
    PingReport,
    PingRequest,
    Pull,
    Records,
)
from tests.support.fake_link import FakeEndpoint, FakeNetwork


@dataclass
class StubGossip:
    """Members as a test sets them; remembers what it was told."""

    announcements: dict[NodeId, Announcement] = field(default_factory=dict)
    version: int = 0
    next_tick: float = 0.0
    ups: list[NodeId] = field(default_factory=list)
    downs: list[NodeId] = field(default_factory=list)
    received: list[Message] = field(default_factory=list)
    suspicion: Suspicion | None = None
    asked: set[NodeId] = field(default_factory=set)

    def is_asking(self, peer_id: NodeId) -> bool:
        return peer_id in self.asked

    def tick(self) -> list[Any]:
        return []

    def peer_up(self, peer_id: NodeId) -> list[Any]:
        self.ups.append(peer_id)
        return [(peer_id, Digest(()))]

    def peer_down(self, peer_id: NodeId) -> None:
        self.downs.append(peer_id)

    def receive(self, peer_id: NodeId, message: Message) -> list[Any]:
        self.received.append(message)
        return [] if isinstance(message, Records) else [(peer_id, Records(()))]

    def announce(self, *ways: NodeAddress, sequence: int = 1) -> None:
        contacts = tuple(Contact(way) for way in ways)
        self.announcements[ways[0].node_id] = Announcement(b"", sequence, 0, 0, contacts)
        self.version += 1
        if self.suspicion is not None:  # as Network wires gossip
            self.suspicion.note_record(ways[0].node_id, sequence)


@dataclass
class Watcher:
    """A peer that counts links and keeps what it got."""

    received: list[Message] = field(default_factory=list)
    links: list[Any] = field(default_factory=list)

    def on_message(self, link: Any, message: Message) -> None:
        self.received.append(message)

    def on_link_up(self, link: Any) -> None:
        self.links.append(link)

    def on_link_closed(self, link: Any, error: Any) -> None: ...


class Town:
    """One neighbourhood under test and the peers around it."""

    def __init__(self, known: KnownPeers | None = None, bootstraps: tuple[NodeAddress, ...] = ()) -> None:
        self.network = FakeNetwork()
        self.gossip = StubGossip()
        self.dispatcher = Dispatcher()
        identity = Identity.generate()
        self.endpoint = FakeEndpoint(
            identity,
            bytes(32),
            Capabilities,
            self.dispatcher,
            network=self.network,  # type: ignore[arg-type]
        )
        self.known = known or KnownPeers(None, identity.node_id)
        self.background = Background()
        rng = random.Random(3)
        self.suspicion = Suspicion(identity.node_id, rng=rng, now=time.monotonic)
        self.gossip.suspicion = self.suspicion
        self.neighbourhood = Neighbourhood(
            self.endpoint,  # type: ignore[arg-type]
            self.gossip,  # type: ignore[arg-type]
            self.suspicion,
            self.background,
            self.known,
            bootstraps=bootstraps,
            is_reachable=lambda: False,
            on_change=lambda: None,
            rng=rng,
        )
        self.liveness = self.neighbourhood.liveness = Liveness(
            self.endpoint,  # type: ignore[arg-type]
            self.suspicion,
            self.background,
            ways=self.neighbourhood.ways,
            sequence=self.neighbourhood.sequence_of,
            tell=lambda node_id: None,
            end_doubt=lambda node_id: None,
            on_change=lambda: None,
        )
        self.dispatcher.add(self.neighbourhood, (Digest, Pull, Records))
        self.dispatcher.add(self.liveness, (PingRequest, PingReport))
        self.tasks: list[asyncio.Task[None]] = []

    def open(self) -> None:
        for job in (self.neighbourhood.run(), self.liveness.run()):
            self.tasks.append(asyncio.create_task(job))

    async def peer(self, host: str = "127.0.0.1") -> tuple[NodeAddress, Watcher]:
        watcher = Watcher()
        endpoint = FakeEndpoint(Identity.generate(), bytes(32), Capabilities, watcher, network=self.network)
        bound = await endpoint.listen(host, 0)
        return NodeAddress(endpoint.node_id, *bound), watcher

    async def member(self, host: str = "127.0.0.1") -> NodeAddress:
        address, _ = await self.peer(host)
        self.gossip.announce(address)
        return address

    @property
    def linked(self) -> set[NodeId]:
        return {link.peer_id for link in self.endpoint._links}

    async def close(self) -> None:
        for task in self.tasks:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task
        await self.background.close()


@pytest_asyncio.fixture
async def town() -> AsyncIterator[Town]:
    made = Town()
    yield made
    await made.close()


def unreachable(address: NodeAddress) -> FakeEndpoint:
    raise LinkError(ErrorCode.LINK_LOST, "no network")


async def until(condition: Callable[[], object], timeout_s: float = 10.0) -> None:
    async with asyncio.timeout(timeout_s):
        while not condition():
            await asyncio.sleep(0.005)


async def test_a_small_swarm_is_a_full_mesh(town: Town) -> None:
    members = [await town.member() for _ in range(FULL_MESH)]
    town.open()
    await until(lambda: town.linked == {address.node_id for address in members})
    assert sorted(town.gossip.ups) == sorted(town.linked)


async def test_in_a_large_swarm_a_dozen_from_different_places_are_picked(town: Town) -> None:
    members = [await town.member(f"9.{number % 20}.0.{number}") for number in range(60)]
    hosts = {address.node_id: address.host for address in members}
    town.open()
    await until(lambda: len(town.linked) == NUM_NEIGHBOURS)
    await asyncio.sleep(0.1)
    assert len(town.linked) == NUM_NEIGHBOURS
    assert len({place_of(hosts[node_id]) for node_id in town.linked}) == NUM_NEIGHBOURS


async def test_the_picked_stay_and_a_lost_one_is_replaced(town: Town) -> None:
    for number in range(60):
        await town.member(f"9.{number}.0.1")
    town.open()
    await until(lambda: len(town.linked) == NUM_NEIGHBOURS)
    before = town.linked
    lost = next(iter(before))
    town.network.cut_off(lost)
    await until(lambda: lost in town.suspicion.suspected)
    await until(lambda: len(town.linked) == NUM_NEIGHBOURS)
    assert len(before & town.linked) == NUM_NEIGHBOURS - 1


async def test_a_lost_peer_that_does_not_answer_is_suspected_at_once(
    town: Town, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module, name in (
        (suspicion_module, "PERIOD_S"),
        (suspicion_module, "PING_TIMEOUT_S"),
        (neighbourhood_module, "QUICK_REDIAL_S"),
        (neighbourhood_module, "LOOK_S"),
    ):
        monkeypatch.setattr(module, name, 600.0)  # none of them is waited for
    address = await town.member()
    town.open()
    await until(lambda: town.linked)
    town.network.cut_off(address.node_id)
    await until(lambda: town.neighbourhood.suspected == {address.node_id})
    assert town.gossip.downs == [address.node_id]


async def test_a_lost_link_to_a_peer_that_lives_is_made_again_without_suspicion(town: Town) -> None:
    address = await town.member()
    town.open()
    await until(lambda: town.linked)
    town.network.cut(town.endpoint.node_id, address.node_id)
    await until(lambda: len(town.gossip.ups) == 2)
    assert town.neighbourhood.suspected == frozenset()


async def test_a_suspected_peer_that_announces_itself_anew_is_dialled_at_once(town: Town) -> None:
    address = await town.member()
    town.open()
    await until(lambda: town.linked)
    town.network.cut_off(address.node_id)
    await until(lambda: town.neighbourhood.suspected)
    again = FakeEndpoint(town.endpoint.identity, bytes(32), Capabilities, Watcher(), network=town.network)
    again.node_id = address.node_id
    await again.listen(address.host, address.port)
    town.gossip.announce(address, sequence=2)
    town.neighbourhood.look()
    await until(lambda: town.linked == {address.node_id}, 1.0)
    assert town.neighbourhood.suspected == frozenset()


async def test_bootstraps_are_tried_again_and_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(neighbourhood_module, "FIRST_REDIAL_S", 0.01)
    dead = NodeAddress(Identity.generate().node_id, "127.0.0.1", 9)
    town = Town(bootstraps=(dead,))
    town.open()
    await town.neighbourhood.first_word()
    assert "nobody listens" in town.neighbourhood.bootstrap_errors[dead]
    late = FakeEndpoint(Identity.generate(), bytes(32), Capabilities, Watcher(), network=town.network)
    late.node_id = dead.node_id
    await late.listen(dead.host, dead.port)
    await until(lambda: town.linked == {dead.node_id})
    assert not town.neighbourhood.bootstrap_errors
    await town.close()


async def test_a_first_word_is_all_that_a_peer_knows_and_not_what_it_pushes(town: Town) -> None:
    address, _ = await town.peer()
    link: Any = await town.endpoint._dial_new(address)
    town.dispatcher.on_message(link, Records(()))  # its own record, as it links to us
    assert not town.neighbourhood.heard.is_set()
    town.gossip.asked.add(address.node_id)
    town.dispatcher.on_message(
        link, Digest(((bytes(8), 1),), is_reply=True)
    )  # we lack what it knows, and ask for it
    assert not town.neighbourhood.heard.is_set()
    town.gossip.receive = lambda peer_id, message: town.gossip.asked.clear() or []  # type: ignore[method-assign,func-returns-value]
    town.dispatcher.on_message(link, Records(()))
    assert town.neighbourhood.heard.is_set()


async def test_after_an_outage_of_our_own_everybody_is_tried_at_once(town: Town) -> None:
    members = [await town.member() for _ in range(5)]
    town.open()
    await until(lambda: len(town.linked) == 5)
    find, town.network._find = town.network._find, unreachable  # type: ignore[method-assign,assignment]
    for address in members:
        town.network.cut(town.endpoint.node_id, address.node_id)
    await until(lambda: len(town.suspicion.suspected) == 5)
    for attempt in town.neighbourhood._tries.values():
        attempt.due, attempt.pause = time.monotonic() + 20.0, 30.0
    town.network._find = find  # type: ignore[method-assign]
    await town.endpoint.dial(members[0])
    await until(lambda: len(town.linked) == 5, 2.0)
    assert not town.suspicion.suspected


async def test_known_peers_are_tried_while_there_are_few_links() -> None:
    known = KnownPeers(None, Identity.generate().node_id)
    town = Town(known=known)
    address, _ = await town.peer()
    known.note(address)
    town.open()
    await until(lambda: town.linked == {address.node_id})
    await town.close()


async def test_an_answer_goes_to_the_link_that_asked(town: Town) -> None:
    address, _ = await town.peer()
    first = await town.endpoint._dial_new(address)
    second = await town.endpoint._dial_new(address)
    for link in (first, second):
        before = len(link.sent)
        town.dispatcher.on_message(link, Pull(()))  # type: ignore[arg-type]
        assert link.sent[before:] == [Records(())]


async def test_who_leaves_dials_nobody(town: Town) -> None:
    address = await town.member()
    town.open()
    await until(lambda: town.linked)
    town.neighbourhood.leave()
    town.network.cut(town.endpoint.node_id, address.node_id)
    await asyncio.sleep(0.05)
    assert not town.linked


# --- pings for others


async def test_a_member_is_pinged_for_a_peer_and_a_stranger_is_not(town: Town) -> None:
    member = await town.member()
    asker, watcher = await town.peer()
    link = await town.endpoint.dial(asker)
    stranger, _ = await town.peer()
    for target in (member.node_id, stranger.node_id):
        town.dispatcher.on_message(link, PingRequest(1, target))  # type: ignore[arg-type]
    await until(lambda: len([it for it in watcher.received if isinstance(it, PingReport)]) == 2)
    reports = [it.is_alive for it in watcher.received if isinstance(it, PingReport)]
    assert sorted(reports) == [False, True]


async def test_a_peer_cannot_have_us_ping_without_end(town: Town) -> None:
    member = await town.member()
    asker, watcher = await town.peer()
    link = await town.endpoint.dial(asker)
    for nonce in range(100):
        town.dispatcher.on_message(link, PingRequest(nonce, member.node_id))  # type: ignore[arg-type]
    await until(lambda: not len(town.background))
    await asyncio.sleep(0.02)
    num_answered = len([it for it in watcher.received if isinstance(it, PingReport)])
    assert num_answered <= liveness_module.REQUESTS_PER_S + 1


async def test_a_report_that_nobody_asked_for_is_not_believed(town: Town) -> None:
    member = await town.member()
    town.suspicion.note_record(member.node_id, 1)
    town.suspicion.note_failed(member.node_id)
    liar, _ = await town.peer()
    link = await town.endpoint.dial(liar)
    town.dispatcher.on_message(link, PingReport(1, True))  # type: ignore[arg-type]
    assert member.node_id in town.suspicion.suspected
