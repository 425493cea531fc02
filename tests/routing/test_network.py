"""Whole networks over loopback: who hears of whom, when nodes come, go, lie about time or share a key."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from routing import directory, gossip, neighbourhood, reach_check
from routing.errors import SettingsError
from routing.identity import Identity
from routing.reach import Verdict
from routing.types import NodeAddress, SliceSpec
from tests.routing.swarms import Swarm, address_of, forwarded, free_port, knows, open_swarm, until
from tests.support.gossip_process import offer

SOON_S = 5.0  # on a busy machine; without being told, peers would take several times as long
GIVEN_UP_S = 30.0


@pytest_asyncio.fixture
async def swarm() -> AsyncIterator[Swarm]:
    async with open_swarm() as opened:
        yield opened


async def test_nodes_of_one_sentinel_find_each_other_and_a_guest_finds_all(swarm: Swarm) -> None:
    sentinel = await swarm.sentinel()
    one, two = await swarm.node(sentinel), await swarm.node(sentinel)
    guest = await swarm.guest(sentinel)
    await until(lambda: knows(one, two, sentinel) and knows(two, one, sentinel))
    await until(
        lambda: {it.address.node_id for it in guest.directory.records()} == {one.node_id, two.node_id}
    )
    await until(lambda: all(it.is_verified and it.rtt_ms is not None for it in guest.directory.records()))
    assert all(guest.node_id not in it.gossip.announcements for it in (sentinel, one, two))


async def test_a_guest_that_comes_before_anybody_was_announced_is_not_kept_waiting(
    swarm: Swarm, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gossip, "PERIOD_S", 600.0)
    sentinel = await swarm.sentinel()
    guest = await swarm.guest(sentinel)
    async with asyncio.timeout(GIVEN_UP_S):
        await guest.first_look(600.0)
    assert sentinel.gossip.num_records == 0


async def test_any_member_can_be_a_bootstrap(swarm: Swarm) -> None:
    first = await swarm.node()
    second = await swarm.node(first)
    third = await swarm.node(second)
    await until(lambda: knows(first, second, third) and knows(third, first, second))


async def test_a_guest_dials_the_first_node_of_a_swarm_back_and_finds_its_slices(swarm: Swarm) -> None:
    first = await swarm.node(listen=("0.0.0.0", 0))
    await asyncio.sleep(0.1)
    assert first.status().contacts == ()
    assert first.bound is not None
    address = NodeAddress(first.node_id, "127.0.0.1", first.bound[1])
    guest = await swarm.guest(address)
    await until(lambda: [it.is_verified for it in guest.directory.records()] == [True])
    assert first.status().contacts == (address,)


async def test_a_sentinel_that_nobody_has_dialled_back_yet_is_announced_on_the_operators_word(
    swarm: Swarm,
) -> None:
    silent = await swarm.sentinel()
    told = await swarm.sentinel(public_addr=("127.0.0.1", 0))
    await until(lambda: told.status().contacts == (address_of(told),))
    assert silent.status().contacts == ()


async def test_a_bind_address_is_not_what_is_announced(swarm: Swarm) -> None:
    sentinel = await swarm.sentinel()
    node = await swarm.node(sentinel, listen=("0.0.0.0", 0))
    await until(lambda: node.status().contacts)
    assert node.bound is not None
    assert node.status().contacts == (NodeAddress(node.node_id, "127.0.0.1", node.bound[1]),)


async def test_a_node_that_nobody_can_dial_is_announced_through_its_sentinel(swarm: Swarm) -> None:
    sentinel = await swarm.sentinel()
    closed_port = 9
    node = await swarm.node(sentinel, public_addr=("127.0.0.1", closed_port))
    guest = await swarm.guest(sentinel)
    await until(lambda: node.status().contacts)
    assert node.reachability.verdict is Verdict.PRIVATE
    assert [it.relay_id for it in node.status().contacts] == [sentinel.node_id]
    await until(lambda: [it.is_verified for it in guest.directory.records()] == [True])
    assert guest.directory.records()[0].address.relay_id == sentinel.node_id


async def test_a_node_behind_a_sentinel_that_dies_is_not_offered_any_more(swarm: Swarm) -> None:
    sentinel = await swarm.sentinel()
    other = await swarm.node(sentinel)
    hidden = await swarm.node(sentinel, public_addr=("127.0.0.1", 9))
    guest = await swarm.guest(sentinel)
    await until(lambda: knows(other, hidden, sentinel))
    await until(lambda: len([it for it in guest.directory.records() if it.is_verified]) == 2)
    await swarm.stop(hidden)
    await until(lambda: knows(other, sentinel) and len(guest.directory.records()) == 1, 5.0)


async def test_a_direct_way_that_appears_is_proved_and_taken_up(
    swarm: Swarm, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reach_check, "PROBE_EVERY_S", 0.3)
    monkeypatch.setattr(directory, "RETIRE_AFTER_S", 0.1)
    sentinel = await swarm.sentinel()
    port = free_port()
    node = await swarm.node(sentinel, public_addr=("127.0.0.1", port))
    guest = await swarm.guest(sentinel)
    await until(lambda: [it.address.is_relayed for it in guest.directory.records()] == [True])
    async with forwarded(port, address_of(node)):
        await until(lambda: node.reachability.verdict is Verdict.PUBLIC)
        direct = NodeAddress(node.node_id, "127.0.0.1", port)
        await until(lambda: [it.address for it in guest.directory.records()] == [direct])
        await until(lambda: [it.is_relayed for it in guest.endpoint.links_to(node.node_id)] == [False])


async def test_a_leave_is_seen_everywhere_at_once(swarm: Swarm) -> None:
    sentinel = await swarm.sentinel()
    one, two, three = [await swarm.node(sentinel) for _ in range(3)]
    await until(lambda: knows(one, two, three, sentinel) and knows(two, one, three, sentinel))
    await three.leave()
    await until(lambda: knows(one, two, sentinel) and knows(two, one, sentinel), SOON_S)
    assert three.endpoint.links  # they did not merely see links close
    three.announce()
    await asyncio.sleep(0.1)
    assert knows(one, two, sentinel)


async def test_a_node_that_dies_is_not_offered_any_more(swarm: Swarm) -> None:
    sentinel = await swarm.sentinel()
    one, two = await swarm.node(sentinel), await swarm.node(sentinel)
    guest = await swarm.guest(sentinel)
    await until(lambda: len([it for it in guest.directory.records() if it.is_verified]) == 2)
    await until(lambda: knows(one, two, sentinel))
    await swarm.stop(two)
    await until(lambda: knows(one, sentinel) and len(guest.directory.records()) == 1, 3.0)


async def test_a_changed_offer_is_announced_and_described_soon(swarm: Swarm) -> None:
    sentinel = await swarm.sentinel()
    offers = [offer(0, 4)]
    node = await swarm.node(sentinel, offers=offers)
    guest = await swarm.guest(sentinel)
    await until(lambda: guest.directory.announced() and guest.directory.records())
    offers[0] = offer(4, 8)
    node.announce()
    await until(
        lambda: [it.offers[0].spec for it in guest.directory.announced() if it.offers] == [SliceSpec(4, 8)],
        3.0,
    )


async def test_a_sentinel_that_comes_back_is_dialled_again(swarm: Swarm) -> None:
    identity = Identity.generate()
    sentinel = await swarm.sentinel(identity=identity)
    place = address_of(sentinel)
    one = await swarm.node(sentinel)
    await until(lambda: knows(one, sentinel))
    await swarm.stop(sentinel)
    await until(lambda: not one.endpoint.links)
    again = await swarm.sentinel(identity=identity, listen=("127.0.0.1", place.port))
    two = await swarm.node(again)
    await until(lambda: knows(one, two, again) and knows(two, one, again), 10.0)


async def test_a_bootstrap_that_accepts_and_says_nothing_holds_up_nobody(
    swarm: Swarm, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(neighbourhood, "DIAL_TIMEOUT_S", 600.0)
    sentinel = await swarm.sentinel()
    writers: list[asyncio.StreamWriter] = []
    silent = await asyncio.start_server(lambda _, writer: writers.append(writer), "127.0.0.1", 0)
    port = silent.sockets[0].getsockname()[1]
    half_open = NodeAddress(Identity.generate().node_id, "127.0.0.1", port)
    try:
        async with asyncio.timeout(GIVEN_UP_S):
            node = await swarm.node(half_open, sentinel)
            guest = await swarm.guest(half_open, sentinel)
            await guest.first_look(600.0)
            await until(lambda: knows(node, sentinel), GIVEN_UP_S)
        assert half_open not in guest.status().bootstrap_errors  # it is still waited for
    finally:
        silent.close()
        for writer in writers:
            writer.close()


async def test_a_swarm_without_a_live_bootstrap_is_named_as_such(swarm: Swarm) -> None:
    dead = NodeAddress(Identity.generate().node_id, "127.0.0.1", 9)
    guest = await swarm.guest(dead)
    async with asyncio.timeout(GIVEN_UP_S):
        await guest.first_look(600.0)
    assert "LINK_LOST" in guest.status().bootstrap_errors[dead]


async def test_a_node_whose_clock_is_off_is_told_so_and_refused(
    swarm: Swarm, caplog: pytest.LogCaptureFixture
) -> None:
    sentinel = await swarm.sentinel()
    late = await swarm.node(sentinel, clock=lambda: time.time() - 600)
    await until(lambda: late.status().clock_skew_ms is not None)
    assert late.status().clock_skew_ms == pytest.approx(-600_000, abs=2000)
    await until(lambda: sentinel.gossip.faults["expired"])
    assert knows(sentinel)
    assert [it.levelno for it in caplog.records if "clock is 600 s behind" in it.message] == [logging.ERROR]


async def test_two_nodes_with_one_key_are_told_and_do_not_flood(
    swarm: Swarm, caplog: pytest.LogCaptureFixture
) -> None:
    sentinel = await swarm.sentinel()
    identity = Identity.generate()
    one = await swarm.node(sentinel, identity=identity)
    await until(lambda: one.status().contacts)
    other = await swarm.node(sentinel, identity=identity)
    await until(lambda: one.status().rival or other.status().rival)
    await until(lambda: knows(sentinel, one))
    assert "give each node a key of its own" in caplog.text
    before = one.known.sequence + other.known.sequence
    await asyncio.sleep(0.5)
    assert (
        one.known.sequence + other.known.sequence - before < 5000
    )  # a few records at most: sequences are ms


async def test_a_sequence_never_goes_backwards_over_a_restart(swarm: Swarm, tmp_path: Path) -> None:
    sentinel = await swarm.sentinel()
    identity = Identity.generate()
    node = await swarm.node(sentinel, identity=identity, state_dir=tmp_path, clock=lambda: time.time() + 50)
    await until(lambda: knows(sentinel, node))
    before = node.known.sequence
    await swarm.stop(node)
    again = await swarm.node(sentinel, identity=identity, state_dir=tmp_path)
    await until(lambda: again.known.sequence > before)
    await until(lambda: sentinel.gossip.announcements[node.node_id].sequence > before)
    assert sentinel.gossip.faults["replayed"] == 0


async def test_known_peers_are_dialled_when_the_bootstrap_is_gone(swarm: Swarm, tmp_path: Path) -> None:
    sentinel = await swarm.sentinel()
    one = await swarm.node(sentinel)
    identity = Identity.generate()
    two = await swarm.node(sentinel, identity=identity, state_dir=tmp_path)
    await until(lambda: two.endpoint.links_to(one.node_id) and address_of(one) in two.known.addresses)
    place = address_of(sentinel)
    await swarm.stop(two)
    await swarm.stop(sentinel)
    again = await swarm.node(place, identity=identity, state_dir=tmp_path)
    await until(lambda: again.endpoint.links_to(one.node_id))


async def test_a_public_address_that_nobody_could_dial_is_a_settings_error(swarm: Swarm) -> None:
    with pytest.raises(SettingsError, match=r"the public address 0\.0\.0\.0 is an address that nobody"):
        await swarm.node(public_addr=("0.0.0.0", 1))


async def test_a_public_address_that_does_not_resolve_is_a_settings_error(swarm: Swarm) -> None:
    with pytest.raises(SettingsError, match="cannot be resolved"):
        await swarm.node(public_addr=("no-such-host.invalid", 1))


async def test_a_status_sums_up_what_is_announced(swarm: Swarm) -> None:
    sentinel = await swarm.sentinel()
    await swarm.node(sentinel, offers=(offer(0, 3),))
    await swarm.node(sentinel, offers=(offer(2, 6),))
    guest = await swarm.guest(sentinel)
    await until(lambda: len(guest.directory.announced()) == 3)
    model = guest.status().models[0]
    assert model.holders == (1, 1, 2, 1, 1, 1, 0, 0)
    assert model.missing == ((6, 8),)
    assert not model.is_whole
    told = guest.status().as_json()
    assert {node["path"] for node in told["nodes"]} <= {"direct", "none"}
    assert told["models"][0]["missing"] == [[6, 8]]
