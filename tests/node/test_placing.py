"""Nodes find their places: alone, many at once, after losses, and when speeds change. Fake swarms, real decisions."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import random
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest

from node.loading import LoadedSlice
from node.placing import Placer, PlacingTimes, Room
from node.pool import ModelFacts, choose, demands, line_ms, lines_of, max_layers, pool_of
from node.slice_mover import SliceMover
from node.slice_table import SliceTable
from node.stats import NodeStats
from routing.announcement import Announcement
from routing.placement import PoolNode, score
from routing.types import NodeId, SliceOffer, SliceSpec
from tests.node.rig import DIGEST, TIMEOUT_S, fake_offer
from tests.node.test_slice_table import OTHER_DIGEST, fake_held

LAYER_BYTES = 100
FAST = PlacingTimes(
    first_look=1.0,
    settle=0.03,
    confirm=0.03,
    delay=0.05,
    debounce=0.02,
    every=0.3,
    stay=0.3,
    retry=0.02,
    last_retry=0.1,
    patience=0.4,
)
FACTS = ModelFacts("fake", "fake", DIGEST, 6, 1.0, LAYER_BYTES, 0)


def told(
    key: int,
    *specs: tuple[int, int],
    intends: Sequence[tuple[int, int]] = (),
    layer_ms: float = 1.0,
    free_layers: int = 6,
    digest: bytes = DIGEST,
    roles: tuple[str, ...] = ("node",),
) -> Announcement:
    """What a node announces, in layers of the fake model."""
    offers = [offer_of(SliceSpec(*spec), layer_ms, digest) for spec in specs]
    return Announcement(
        hashlib.sha256(bytes([key])).digest(),
        1,
        0,
        1,
        roles=roles,
        offers=tuple(offers),
        free_bytes=free_layers * LAYER_BYTES,
        intends=tuple((digest[:8], start, end) for start, end in intends),
    )


def test_a_nodes_line_is_its_best_one_by_the_lower_of_both_words() -> None:
    one, two, liar = (NodeId(bytes([number]) * 32) for number in (1, 2, 9))
    told = {one: {two[:8]: 90.0, liar[:8]: 80.0}, two: {one[:8]: 70.0, b"?" * 8: 1.0}, liar: {one[:8]: 0.01}}
    assert lines_of(told) == {one: 70.0, two: 70.0, liar: 0.01}
    facts = [replace(FACTS, row_bytes=8192), replace(FACTS, digest=b"e" * 32)]
    assert line_ms(65.536, facts) == {DIGEST: pytest.approx(1.0)}
    assert line_ms(None, facts) == {}


def test_the_pool_holds_what_lines_take() -> None:
    facts = [replace(FACTS, row_bytes=8192)]
    there = replace(told(1, (0, 3)), neighbour_mbps=((b"m" * 8, 65.536),))
    lines = lines_of({there.node_id: dict(there.neighbour_mbps), NodeId(b"m" * 32): {}})
    pool = pool_of([there], facts, lines=lines)
    assert pool.others[0].line_ms == {DIGEST: pytest.approx(1.0)}
    assert pool_of([there], facts).others[0].line_ms == {}


def offer_of(spec: SliceSpec, layer_ms: float, digest: bytes = DIGEST) -> SliceOffer:
    return replace(fake_offer(spec), layer_ms=layer_ms, model_digest=digest)


class Swarm:
    """Announcements that reach all the others a moment later."""

    def __init__(self, delay_s: float = 0.003) -> None:
        self.delay_s = delay_s
        self.known: dict[NodeId, Announcement] = {}
        self.members: list[Member] = []

    def hear(self, announcement: Announcement) -> None:
        self.known[announcement.node_id] = announcement
        self._tell()

    def lose(self, node_id: NodeId) -> None:
        self.known.pop(node_id, None)
        self._tell()

    def spread(self, announcement: Announcement) -> None:
        asyncio.get_running_loop().call_later(self.delay_s, self.hear, announcement)

    def pool(self) -> list[PoolNode]:
        return list(pool_of(self.known.values(), [FACTS]).others)

    def _tell(self) -> None:
        for member in self.members:
            for call in member.on_change:
                call()


class Member:
    """A node without links: it announces, loads fake slices, and finds its place. Also its own directory and loader."""

    def __init__(
        self, swarm: Swarm, key: int, *, num_layers: int = 6, layer_ms: float = 1.0, free: int = 6
    ) -> None:
        self.swarm, self.key, self.layer_ms = swarm, key, layer_ms
        self.node_id = told(key).node_id
        self.on_change: list[Callable[[], None]] = []
        self.events: list[dict[str, Any]] = []
        self.num_layers, self.free = num_layers, free  # that fit in all, and beside
        self.load_s = 0.02
        self.errors: list[Exception] = []
        self.slices = SliceTable()
        self.stats = NodeStats()
        mover = SliceMover(
            self.slices,
            self,
            {DIGEST: "fake"},
            drain_s=0.05,
            stats=self.stats,
            announce=self.announce,
            on_loaded=lambda loaded: None,
            on_event=lambda event: self.events.append(dict(event)),
        )
        self.placer = Placer(
            self.node_id,
            [FACTS],
            mover,
            self,
            first_look=self.first_look,
            layer_ms=lambda digest: self.layer_ms,
            room=lambda: Room(self.num_layers * LAYER_BYTES, self.free * LAYER_BYTES),
            announce=self.announce,
            on_event=lambda event: self.events.append(dict(event)),
            times=FAST,
            rng=random.Random(key),
        )
        swarm.members.append(self)
        self.announce()

    def announced(self) -> list[Announcement]:
        return [known for node_id, known in self.swarm.known.items() if node_id != self.node_id]

    async def first_look(self, timeout_s: float) -> None:
        pass

    async def load(self, model: str, layers: SliceSpec | None) -> LoadedSlice:
        await asyncio.sleep(self.load_s)
        if self.errors:
            raise self.errors.pop()
        assert layers is not None
        held = fake_held(layers.start, layers.end, layer_ms=self.layer_ms)
        return LoadedSlice(held, 1, 0.0, held.weights_bytes, 0)

    def announce(self) -> None:
        placer = getattr(self, "placer", None)
        intends = [(start, end) for _, start, end in placer.intentions] if placer is not None else []
        self.swarm.spread(
            told(self.key, *self.held, intends=intends, layer_ms=self.layer_ms, free_layers=self.num_layers)
        )

    @property
    def held(self) -> list[tuple[int, int]]:
        return [(offer.spec.start, offer.spec.end) for offer in self.slices.offers()]

    def names(self) -> list[str]:
        return [event["event"] for event in self.events]


@contextlib.asynccontextmanager
async def placing(*members: Member) -> AsyncIterator[None]:
    tasks = [asyncio.create_task(member.placer.run()) for member in members]
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def until(is_true: Callable[[], bool]) -> None:
    async with asyncio.timeout(TIMEOUT_S):
        while not is_true():
            await asyncio.sleep(0.002)


def covered(*members: Member) -> set[int]:
    return {layer for member in members for start, end in member.held for layer in range(start, end)}


# What announcements mean ------------------------------------------------------------------------------------------


def test_a_pool_is_made_of_what_nodes_hold_or_are_about_to() -> None:
    announced = [
        told(1, (0, 3)),
        told(2, (0, 3), intends=[(3, 6)]),
        told(3, intends=[(2, 4)]),
        told(4),
        told(5, roles=("sentinel",)),
        told(6, (0, 2), digest=OTHER_DIGEST),
    ]
    pool = pool_of(announced, [FACTS])
    held = {node.node_id: [str(placed.spec) for placed in node.held] for node in pool.others}
    assert held == {
        announced[0].node_id: ["0:3"],
        announced[1].node_id: ["3:6"],
        announced[2].node_id: ["2:4"],
        announced[5].node_id: [],
    }
    assert [node.node_id for node in pool.waiting] == [announced[3].node_id]
    assert pool.movers == {announced[1].node_id}


def test_plans_of_nodes_that_are_ignored_do_not_count() -> None:
    announced = [told(1, (0, 3), intends=[(3, 6)]), told(2)]
    pool = pool_of(announced, [FACTS], ignored={told_.node_id for told_ in announced})
    assert [node.held[0].spec for node in pool.others] == [SliceSpec(0, 3)]
    assert (pool.waiting, pool.movers) == ((), frozenset())


def test_an_intention_beyond_the_model_is_not_believed() -> None:
    pool = pool_of([told(1, intends=[(4, 9)])], [FACTS])
    assert pool.others[0].held == ()


def test_layers_that_fit_leave_room_for_sessions() -> None:
    facts = replace(FACTS, cache_bytes=1)  # 4096 positions of it beside 100 bytes of weights
    assert max_layers(6 * LAYER_BYTES, FACTS) == 6
    assert max_layers(99 * LAYER_BYTES, FACTS) == 6
    assert max_layers(2 * (LAYER_BYTES + 4096), facts) == 2
    assert max_layers(-1, facts) == 0


def test_a_node_leaves_to_others_that_wait_what_they_will_take_first() -> None:
    lower, higher = sorted((told(1, free_layers=3), told(2, free_layers=3)), key=lambda told_: told_.node_id)
    chosen = []
    for me, other in ((lower, higher), (higher, lower)):
        node = PoolNode(me.node_id, {DIGEST: 1.0}, {DIGEST: 3})
        chosen.append(choose(node, pool_of([other], [FACTS]), demands([FACTS])))
    assert all(chosen)
    assert {str(placed.spec) for slices in chosen for placed in slices or ()} == {"0:3", "3:6"}


# What nodes do ----------------------------------------------------------------------------------------------------


async def test_a_new_node_fills_the_gap() -> None:
    swarm = Swarm()
    swarm.hear(told(1, (0, 2)))
    swarm.hear(told(2, (4, 6)))
    member = Member(swarm, 3, num_layers=2)
    async with placing(member):
        await until(lambda: bool(member.held))
        assert member.held == [(2, 4)]
    assert member.names() == ["placing"]
    assert member.placer.intends == ()


@pytest.mark.parametrize("num_members", [2, 3, 6])
async def test_nodes_that_start_together_do_not_take_the_same_gap(num_members: int) -> None:
    swarm = Swarm()
    members = [Member(swarm, key, num_layers=6 // num_members) for key in range(num_members)]
    async with placing(*members):
        await until(lambda: all(member.held for member in members))
        assert covered(*members) == set(range(6))
        await asyncio.sleep(0.5)  # longer than a node stays at a place that another one has too
    assert all(member.names() == ["placing"] for member in members)


async def test_a_node_that_claims_what_another_is_loading_gives_way() -> None:
    swarm = Swarm()
    first, second = Member(swarm, 1, num_layers=3), Member(swarm, 2, num_layers=3)
    first.load_s = 0.3
    async with placing(first):
        await until(lambda: bool(first.placer.intends))
        async with placing(second):
            await until(lambda: bool(first.held and second.held))
    assert covered(first, second) == set(range(6))


async def test_the_layers_of_a_node_that_left_are_taken_over() -> None:
    swarm = Swarm()
    swarm.hear(told(1, (0, 3)))
    swarm.hear(told(2, (3, 6)))
    member = Member(swarm, 3, num_layers=3)
    async with placing(member):
        await until(lambda: bool(member.held))
        ((start, _),) = member.held
        swarm.lose(told(1 if start else 2).node_id)  # the other half
        await until(lambda: "moved" in member.names())
        assert member.held in ([(0, 3)], [(3, 6)])
        known = [tuple(o.spec for o in told_.offers) for told_ in swarm.known.values()]
        assert covered(member) | {
            layer for specs in known for s in specs for layer in range(s.start, s.end)
        } == set(range(6))


async def test_only_one_of_several_replicas_moves_to_a_gap() -> None:
    swarm = Swarm()
    swarm.hear(told(1, (3, 6)))
    members = [Member(swarm, key, num_layers=3) for key in (2, 3, 4)]
    async with placing(*members):
        await until(lambda: all(member.held for member in members))
        await asyncio.sleep(FAST.stay * 1.3)
        for member in members:
            member.events.clear()
        swarm.lose(told(1).node_id)
        await until(lambda: covered(*members) == set(range(6)))
        await asyncio.sleep(0.3)
    assert sum(member.names().count("moved") for member in members) <= 1


async def test_a_slowed_stage_loses_layers_to_faster_ones() -> None:
    swarm = Swarm()
    members = [Member(swarm, 1), Member(swarm, 2)]
    slow, fast = members
    for member, spec in ((slow, SliceSpec(0, 3)), (fast, SliceSpec(3, 6))):
        member.slices.add(fake_held(spec.start, spec.end))
        member.announce()
    await until(lambda: all(told_.offers for told_ in swarm.known.values()))
    slow.layer_ms = 8.0
    slow.announce()
    await until(lambda: any(node.layer_ms[DIGEST] == 8.0 for node in swarm.pool()))
    equal_split = score(swarm.pool(), demands([FACTS]))
    async with placing(*members):
        await until(lambda: "moved" in fast.names())
        await until(lambda: score(swarm.pool(), demands([FACTS])).rate >= 1.5 * equal_split.rate)
        num_moves = len(fast.events) + len(slow.events)
        await asyncio.sleep(FAST.stay * 2)
        assert (
            len(fast.events) + len(slow.events) <= num_moves + 2
        )  # the slow one may give up what is held twice


async def test_a_node_that_loaded_what_another_did_meanwhile_moves_to_what_is_still_missing() -> None:
    swarm = Swarm()
    member = Member(swarm, 3, num_layers=3)
    member.load_s = 0.2
    async with placing(member):
        await until(lambda: bool(member.placer.intends))
        ((_, start, end),) = member.placer.intentions
        swarm.hear(told(1, (start, end)))  # it was not heard of before
        await until(lambda: bool(member.held) and member.held != [(start, end)])
        assert member.held in ([(0, 3)], [(3, 6)])


async def test_a_node_without_room_for_one_layer_says_so() -> None:
    member = Member(Swarm(), 3, num_layers=0)
    async with placing(member):
        await until(lambda: bool(member.events))
        await asyncio.sleep(FAST.every * 2)
    assert [event["event"] for event in member.events] == ["waiting"]
    assert "memory" in member.events[0]["text"]


async def test_a_plan_that_is_never_carried_out_is_not_waited_for_for_ever() -> None:
    swarm = Swarm()
    swarm.hear(told(1, intends=[(0, 3)]))
    swarm.hear(told(2, (3, 6)))
    member = Member(swarm, 3, num_layers=3)
    async with placing(member):
        await until(lambda: (0, 3) in member.held)


async def test_a_load_that_fails_is_tried_again() -> None:
    member = Member(Swarm(), 1)
    member.errors = [OSError(28, "No space left on device")]
    async with placing(member):
        await until(lambda: member.held == [(0, 6)])
    assert member.names() == ["placing", "load_failed", "placing"]


async def test_a_mistake_in_deciding_leaves_the_node_serving(caplog: pytest.LogCaptureFixture) -> None:
    member = Member(Swarm(), 1)
    healthy = member.placer._room
    member.placer._room = lambda: 1 / 0  # type: ignore[assignment,return-value]
    async with placing(member):
        await until(lambda: "placement" in caplog.text)
        member.placer._room = healthy
        await until(lambda: member.held == [(0, 6)])


async def test_what_is_held_twice_elsewhere_is_left_where_memory_holds_one_slice_only() -> None:
    swarm = Swarm()
    member = Member(swarm, 3, num_layers=3, free=0)
    member.slices.add(fake_held(0, 3))
    swarm.hear(told(1, (0, 3)))
    swarm.hear(told(2, (0, 3)))
    async with placing(member):
        await until(lambda: member.held == [(3, 6)])
    assert member.stats.slices_drained == 1


async def test_a_node_whose_layers_nobody_else_holds_stays() -> None:
    swarm = Swarm()
    member = Member(swarm, 3, num_layers=3)
    member.slices.add(fake_held(0, 3))
    member.announce()
    async with placing(member):
        await asyncio.sleep(FAST.every * 2)
    assert member.held == [(0, 3)]
    assert member.names() == []
