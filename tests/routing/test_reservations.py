from __future__ import annotations

import asyncio
import time
from typing import Any

from routing.reservations import FIRST_RETRY_S, LAST_RETRY_S, Reservations
from routing.types import NodeAddress, NodeId
from tests.routing.peers import Rig
from tests.support.fake_link import FakeEndpoint, FakeNetwork

SENTINEL = NodeId(b"s" * 32)


def keeper(*sentinels: NodeAddress, own_id: NodeId = NodeId(b"o" * 32)) -> Reservations:  # noqa: B008
    class Endpoint:
        node_id = own_id

    endpoint: Any = Endpoint()
    return Reservations(endpoint, lambda: sentinels)


def pause_after(kept: Reservations, up_s: float) -> float:
    kept._retry_later(SENTINEL, up_s)
    return kept._retries[SENTINEL].not_before - time.monotonic()


def test_first_retry_comes_after_a_quarter_second_and_later_ones_within_a_growing_bound() -> None:
    kept = keeper()
    pauses = []
    for _ in range(12):
        pauses.append(pause_after(kept, 0.0))
    assert FIRST_RETRY_S - 0.05 < pauses[0] <= FIRST_RETRY_S
    assert all(pause <= min(LAST_RETRY_S, FIRST_RETRY_S * 2**n) for n, pause in enumerate(pauses))


def test_reservation_that_held_for_a_minute_begins_with_the_first_pause_again() -> None:
    kept = keeper()
    for _ in range(8):
        pause_after(kept, 1.0)
    assert pause_after(kept, 61.0) <= FIRST_RETRY_S


def test_own_address_relayed_and_repeated_ones_are_not_asked() -> None:
    one = NodeAddress(SENTINEL, "192.0.2.1", 1)
    own = NodeAddress(NodeId(b"o" * 32), "192.0.2.2", 1)
    relayed = NodeAddress(NodeId(b"r" * 32), "192.0.2.3", 1, SENTINEL)
    assert keeper(one, own, relayed, one)._known() == [one]


async def test_sentinel_that_does_not_answer_is_left_for_the_next(rig: Rig, monkeypatch: Any) -> None:
    monkeypatch.setattr("routing.reservations.ANSWER_TIMEOUT_S", 0.05)
    deaf, good = await rig.peer(), await rig.sentinel()
    node = await rig.hidden(good, count=1, places=[deaf.address, good.address])
    assert node.reservations.sentinels == (good.endpoint.node_id,)
    assert "does not answer" in node.reservations.last_errors[deaf.address]


async def test_sentinel_that_is_learned_of_later_is_asked_at_once(rig: Rig, monkeypatch: Any) -> None:
    monkeypatch.setattr("routing.reservations._LOOK_S", 600.0)
    first, second = await rig.sentinel(), await rig.sentinel()
    places = [first.address]
    node = await rig.hidden(first, places=places)
    places.append(second.address)
    node.reservations.wake()
    async with asyncio.timeout(10.0):
        while len(node.reservations.sentinels) < 2:
            await asyncio.sleep(0.01)


async def test_nothing_is_left_behind_when_it_is_cancelled() -> None:
    class Identity:
        node_id = NodeId(b"o" * 32)

    network = FakeNetwork()
    endpoint: Any = FakeEndpoint(Identity(), b"n" * 32, lambda: None, None, network=network)  # type: ignore[arg-type, return-value]
    kept = Reservations(endpoint, lambda: [NodeAddress(SENTINEL, "192.0.2.1", 1)])
    before = asyncio.all_tasks()
    running = asyncio.create_task(kept.run())
    await asyncio.sleep(0.05)
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    assert asyncio.all_tasks() == before
    assert kept.contacts == ()
