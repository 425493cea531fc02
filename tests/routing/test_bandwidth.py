"""What a line brings: the estimate over made-up arrivals, bursts over real links, and quotas for who asks."""

from __future__ import annotations

import asyncio
import random
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from routing import bandwidth_check
from routing.bandwidth import (
    ALL_BYTES,
    BITS,
    BURST,
    FIRST_BURST,
    FORGET_AFTER_S,
    LEAST_TRAIN,
    MAX_RATE,
    PEER_BYTES,
    QUOTA_S,
    BurstQuota,
    InboundRate,
)
from routing.bandwidth_check import BandwidthCheck
from routing.dispatcher import Dispatcher
from routing.endpoint import Endpoint
from routing.identity import Identity
from routing.link import Link
from routing.types import Burst, BurstRequest, Capabilities, NodeAddress, NodeId
from tests.routing.peers import NETWORK_ID, Inbox, Rig, step
from tests.routing.swarms import open_swarm, until
from tests.support.delay_proxy import DelayProxy, Path

PIECE = 16 << 10


class Line:
    """Messages in parts over a line of `rate` bytes/s, as they arrive."""

    def __init__(self, rate: float) -> None:
        self.rate = rate
        self.inbound = InboundRate()
        self.now, self.total = 100.0, 0
        self._free_at = 100.0

    def bring(self, size: int, pauses: list[float] = [], delays: list[float] = []) -> None:  # noqa: B006
        """One message; before its records the sender pauses, and we look at each so much later."""
        pieces = [PIECE] * (size // PIECE) + ([size % PIECE] if size % PIECE else [])
        sent_at = self.now
        for number, piece in enumerate(pieces):
            sent_at += pauses[number % len(pauses)] if pauses else 0.0
            self._free_at = max(self._free_at, sent_at) + piece / self.rate
            late = delays[number % len(delays)] if delays else 0.0
            self.now = max(self.now, self._free_at + late)
            self.total += piece
            if number == 0:
                self.inbound.begun(self.total, self.now)
            else:
                self.inbound.went_on(self.total, self.now, is_last=number == len(pieces) - 1)

    def told(self) -> float:
        rate = self.inbound.bytes_per_s(self.now)
        assert rate is not None
        return rate


rates = st.floats(20e3, 500e6)
sizes = st.integers(LEAST_TRAIN + PIECE, 4 << 20)


# --- the estimate


@given(rates, st.lists(sizes, min_size=1, max_size=5))
def test_a_steady_line_is_told_as_it_is(rate: float, messages: list[int]) -> None:
    line = Line(rate)
    for size in messages:
        line.bring(size)
    assert line.told() == pytest.approx(rate, rel=1e-3)


@given(rates, st.lists(st.tuples(sizes, st.lists(st.floats(0, 0.5), max_size=8)), min_size=1, max_size=5))
def test_a_sender_that_pauses_never_makes_a_line_look_faster(
    rate: float, messages: list[tuple[int, list[float]]]
) -> None:
    line = Line(rate)
    for size, pauses in messages:
        line.bring(size, pauses)
    assert line.told() <= rate * 1.001


@given(rates, st.lists(st.floats(0.01, 2.0), min_size=2, max_size=2))
def test_a_slow_sender_does_not_make_a_slow_line_once_it_was_quick(rate: float, pauses: list[float]) -> None:
    line = Line(rate)
    line.bring(LEAST_TRAIN + PIECE)
    for pause_s in pauses:
        line.bring(LEAST_TRAIN + PIECE, [pause_s])
    assert line.told() == pytest.approx(rate, rel=1e-3)


@given(rates, st.lists(st.floats(0, 1), min_size=3, max_size=9))
def test_jitter_of_a_tenth_of_a_trains_time_costs_little(rate: float, shares: list[float]) -> None:
    line = Line(rate)
    jitter_s = 0.1 * LEAST_TRAIN / rate
    for _ in range(4):
        line.bring(LEAST_TRAIN + PIECE, delays=[share * jitter_s for share in shares])
    assert rate / 1.2 <= line.told() <= rate * 1.2


def test_one_train_that_we_saw_too_late_does_not_rule() -> None:
    line = Line(1e6)
    for number in range(8):
        line.bring(LEAST_TRAIN + PIECE, delays=[0.08, 0.06, 0.05, 0.03, 0.02] if number == 3 else [])
    assert line.told() == pytest.approx(1e6, rel=0.01)


def test_short_messages_tell_nothing() -> None:
    line = Line(1e6)
    for _ in range(50):
        line.bring(LEAST_TRAIN)  # less than a train comes after its first record
    assert line.inbound.bytes_per_s(line.now) is None


def test_what_is_old_is_forgotten_and_a_line_that_slows_down_shows() -> None:
    line = Line(8e6)
    line.bring(1 << 20)
    line.rate = 1e6
    for _ in range(4):
        line.bring(1 << 20)
    assert line.told() == pytest.approx(1e6, rel=0.01)
    assert line.inbound.bytes_per_s(line.now + FORGET_AFTER_S + 1) is None


def test_messages_under_way_at_once_are_one_train_and_nothing_passes_the_bound() -> None:
    inbound = InboundRate()
    inbound.begun(PIECE, 1.0)
    inbound.begun(2 * PIECE, 1.0)
    inbound.went_on(2 * PIECE + LEAST_TRAIN, 1.0, is_last=True)  # no time at all
    assert inbound.bytes_per_s(1.0) == MAX_RATE
    inbound.went_on(3 * PIECE + LEAST_TRAIN, 1.5, is_last=True)
    assert inbound.bytes_per_s(1.5) == MAX_RATE


# --- what others may make us send


def test_a_peer_gets_its_share_and_no_more_until_time_has_passed() -> None:
    quota, peer = BurstQuota(), NodeId(b"p" * 32)
    granted = sum(BURST for _ in range(100) if quota.take(peer, BURST, 0.0))
    assert FIRST_BURST + BURST <= granted <= PEER_BYTES
    assert quota.take(NodeId(b"q" * 32), BURST, 0.0)
    assert quota.take(peer, BURST, QUOTA_S)


def test_many_keys_get_no_more_than_all_may() -> None:
    quota, draws = BurstQuota(), random.Random(1)
    peers = [NodeId(draws.randbytes(32)) for _ in range(3000)]
    assert sum(BURST for peer in peers if quota.take(peer, BURST, 0.0)) <= ALL_BYTES


# --- over real links


@dataclass
class Asker:
    """An endpoint with a check of its own."""

    endpoint: Endpoint
    check: BandwidthCheck
    address: NodeAddress
    inbox: Inbox


async def asker(rig: Rig) -> Asker:
    dispatcher, inbox = Dispatcher(), Inbox()
    endpoint = Endpoint(Identity.generate(), NETWORK_ID, Capabilities, dispatcher)
    check = BandwidthCheck(endpoint, frozenset)
    dispatcher.add(check, BandwidthCheck.KINDS)
    dispatcher.add(inbox, [type(step())])
    rig._stack.push_async_callback(endpoint.close)
    host, port = await endpoint.listen("127.0.0.1", 0)
    return Asker(endpoint, check, NodeAddress(endpoint.node_id, host, port), inbox)


async def linked(rig: Rig, here: Asker, there: Asker, path: Path) -> Link:
    proxy = DelayProxy((there.address.host, there.address.port), path)
    host, port = await proxy.start()
    rig._stack.push_async_callback(proxy.close)
    return await here.endpoint.dial(NodeAddress(there.address.node_id, host, port))


@pytest.mark.parametrize("rate", [0.5e6, 4e6])
async def test_a_burst_tells_the_limit_of_a_line(rig: Rig, rate: float) -> None:
    here, there = await asker(rig), await asker(rig)
    link = await linked(rig, here, there, Path(delay_s=0.005, rate_bps=rate))
    assert link.mbps is None
    await here.check.measure(link)
    assert link.mbps is not None
    assert link.mbps == pytest.approx(rate * BITS, rel=0.3)
    assert here.check.counts["asked"] == (1 if rate < 1e6 else 2)  # a slow line is not asked for more


async def test_ordinary_bulk_tells_it_without_a_burst(rig: Rig) -> None:
    here, there = await asker(rig), await asker(rig)
    link = await linked(rig, here, there, Path(rate_bps=4e6))
    await link.send(step(bytes(1 << 20)))
    await here.endpoint.links[0].ping()
    await there.inbox.receive()
    mbps = there.endpoint.links[0].mbps
    assert mbps == pytest.approx(4e6 * BITS, rel=0.3)


async def test_an_asker_without_measure_gets_its_quota_and_keeps_its_link(rig: Rig) -> None:
    victim = await asker(rig)
    greedy = await rig.peer()
    link = await greedy.endpoint.dial(victim.address)
    for _ in range(200):
        link.post(BurstRequest(BURST))
    link.post(BurstRequest(BURST + 1))
    await until(lambda: victim.check.counts["answered"] + victim.check.counts["refused"] == 201)
    await link.ping()
    assert sum(victim.check.counts[name] for name in ("asked", "unasked")) == 0
    assert victim.check.counts["answered"] * BURST <= PEER_BYTES
    assert victim.endpoint.counters.payload_bytes_sent < PEER_BYTES + (64 << 10)


async def test_a_burst_that_nobody_asked_for_changes_nothing(rig: Rig) -> None:
    here, there = await asker(rig), await asker(rig)
    link = await linked(rig, here, there, Path())
    link.post(Burst(bytes(100)))
    await until(lambda: there.check.counts["unasked"] == 1)


async def test_a_peer_that_knows_no_bursts_is_left_unknown(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bandwidth_check, "ANSWER_S", 0.05)
    here, silent = await asker(rig), await rig.peer()
    link = await here.endpoint.dial(silent.address)
    await here.check.measure(link)
    assert link.mbps is None
    assert not link.is_closed


async def test_a_small_message_passes_a_burst(rig: Rig) -> None:
    here, there = await asker(rig), await rig.peer()
    link = await here.endpoint.dial(there.address)
    link.post(Burst(bytes(BURST)))
    link.post(step())
    received = await there.inbox.receive(2)
    assert [type(message).__name__ for message in received] == ["Step", "Burst"]


async def test_nodes_measure_their_lines_once_and_tell(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bandwidth_check, "FIRST_LOOK_S", 0.2)
    monkeypatch.setattr(bandwidth_check, "LOOK_S", 0.1)
    async with open_swarm() as swarm:
        sentinel = await swarm.sentinel()
        one, two = await swarm.node(sentinel), await swarm.node(sentinel)
        await until(lambda: all(it.bandwidth_check.counts["asked"] >= 4 for it in (one, two)))
        await until(lambda: all(it.mbps is not None for it in one.status().nodes))
        await asyncio.sleep(0.5)
        assert all(it.bandwidth_check.counts["asked"] <= 4 for it in (one, two))  # two neighbours, twice each
        told = one._compose()
        assert {prefix for prefix, _ in told.neighbour_mbps} == {it.node_id[:8] for it in (two, sentinel)}
        one.announcer._said_at -= 3600  # the next record is due
        one.announce()
        await until(lambda: two.neighbourhood.announcements[one.node_id].neighbour_mbps)
        await until(lambda: one.lines)
        shown = two.status().as_json()["nodes"]
        mine = next(node for node in shown if node["node_id"] == one.node_id.hex())
        assert all(it["mbps"] > 0 for it in mine["neighbours"])
