"""Sessions that begin with what nodes kept of others: the same rows come back, and a lost node changes nothing."""

from __future__ import annotations

import hashlib
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest
import pytest_asyncio

from routing import blame
from routing.chain import Chain
from routing.errors import ErrorCode, ProtocolError, WorkError
from routing.opening import ChainOptions
from routing.planner import RouteRequest
from routing.types import Buffer, Message, NodeId, Opened, Prefix, Route, SliceSpec, WireDtype
from tests.integration.home import Home, forget_sessions, home, loser, rows
from tests.node.fake_runner import CACHE_BYTES_PER_POSITION, NUM_LAYERS
from tests.node.rig import DIGEST, Node, rows_of

BLOCK = 16
HALVES = ((0, 3), (3, NUM_LAYERS))
PROMPT = rows(60, 1)
NEXT = np.concatenate([PROMPT, rows(30, 2)])  # the second turn: the first one and more


@dataclass
class Known:
    """A beginning made of rows instead of tokens: what the chain needs to know of them."""

    values: np.ndarray
    nodes: dict[NodeId, SliceSpec] = field(default_factory=dict)
    held: list[int] = field(default_factory=list)
    refilled: list[tuple[int, int]] = field(default_factory=list)
    asks: bool = True

    @property
    def num_rows(self) -> int:
        return len(self.values)

    @property
    def holders(self) -> Mapping[NodeId, SliceSpec]:
        return self.nodes

    @property
    def num_held(self) -> int:
        return 48

    def candidates(self, context: bytes) -> Sequence[Prefix]:
        names = self.names(context, len(self.values) - 1)
        found = [Prefix((n + 1) * BLOCK, name) for n, name in enumerate(names)]
        return found[::-1][:8] if self.asks else []

    def note_held(self, context: bytes, num_held: int) -> None:
        self.held.append(num_held)

    async def rows(self, start: int, end: int, wire: WireDtype) -> Buffer:
        self.refilled.append((start, end))
        return self.values[start:end].tobytes()

    def names(self, context: bytes, num_positions: int) -> Sequence[bytes]:
        ends = range(BLOCK, num_positions + 1, BLOCK)
        return [
            hashlib.blake2b(context + self.values[:end].tobytes(), digest_size=16).digest() for end in ends
        ]


@pytest_asyncio.fixture
async def here() -> AsyncIterator[Home]:
    async with home() as made:
        yield made


async def staged(here: Home, copies: int = 2, **settings: int) -> list[Node]:
    nodes = [
        await here.rig.add_fake_node(*span, keeps=True, **settings) for span in HALVES for _ in range(copies)
    ]
    await here.know(*nodes)
    return nodes


async def open_(here: Home, known: Known, **options: object) -> Chain:
    request = RouteRequest("fake", DIGEST, SliceSpec(0, NUM_LAYERS))
    asked = ChainOptions(max_positions=128, **options)  # type: ignore[arg-type]
    return await here.switchboard.open_chain(request, asked, beginning=known)


async def say(chain: Chain, values: np.ndarray, start: int) -> list[bytes]:
    """The rows of a prompt from `start` on, then one row after the other, each made of the one before."""
    last = await chain.step(values[start:].tobytes(), position=start, rows=len(values) - start)
    said = [rows_of(last).tobytes()]
    for position in range(len(values), len(values) + 5):
        row = np.tanh(rows_of(last))
        last = await chain.step(row.tobytes(), position=position, rows=1)
        said.append(rows_of(last).tobytes())
    return said


async def first_turn(here: Home) -> dict[NodeId, SliceSpec]:
    """An answer that is kept; who holds it."""
    known = Known(PROMPT)
    chain = await open_(here, known)
    await chain.step(PROMPT.tobytes(), position=0, rows=len(PROMPT))
    route = chain.route
    assert route is not None
    assert await chain.close(keeps=True)
    return {hop.address.node_id: hop.spec for hop in route.hops}


async def cold() -> list[bytes]:
    async with home() as here:
        await staged(here, 1)
        chain = await open_(here, Known(NEXT, asks=False))
        assert chain.num_held == 0
        said = await say(chain, NEXT, 0)
        await chain.close()
        return said


def on(here: Home, route: Route | None) -> list[Node]:
    assert route is not None
    by_id = {node.node_id: node for node in here.rig.nodes}
    return [by_id[hop.address.node_id] for hop in route.hops]


async def test_the_next_turn_computes_only_what_is_new(here: Home) -> None:
    await staged(here)
    holders = await first_turn(here)
    before = {node.node_id: node.stats.rows_run for node in here.rig.nodes}
    known = Known(NEXT, holders)
    chain = await open_(here, known)
    assert (chain.num_held, known.held) == (48, [48])
    assert await say(chain, NEXT, chain.num_held) == await cold()
    for node in on(here, chain.route):
        assert node.stats.rows_run - before[node.node_id] == len(NEXT) - 48 + 5
    assert (chain.replays, known.refilled) == (0, [])
    await chain.close()


async def test_a_route_goes_where_the_beginning_is_held(here: Home) -> None:
    nodes = await staged(here, 3)
    holders = await first_turn(here)
    for _ in range(4):
        chain = await open_(here, Known(NEXT, holders))
        assert {node.node_id for node in on(here, chain.route)} == holders.keys()
        await chain.close()
    assert len(nodes) == 6


@pytest.mark.parametrize("hop", [0, 1])
@pytest.mark.parametrize("at", ["opened", "prefilled", "later"])
async def test_a_node_lost_after_a_cached_start_changes_nothing(here: Home, hop: int, at: str) -> None:
    await staged(here)
    known = Known(NEXT, await first_turn(here))
    chain = await open_(here, known)
    assert chain.num_held == 48
    lost = loser(here, chain, hop)
    if at == "opened":
        here.rig.network.cut_off(lost.node_id)
    position, values, said = 48, NEXT[48:], []
    for count in range(6):
        answer = await chain.step(values.tobytes(), position=position, rows=len(values))
        said.append(rows_of(answer).tobytes())
        position, values = position + len(values), np.tanh(rows_of(answer))
        if (at, count) in (("prefilled", 0), ("later", 3)):
            here.rig.network.cut_off(lost.node_id)
    assert said == await cold()
    assert chain.replays == 1
    assert known.refilled == [(0, 48)]
    assert lost not in on(here, chain.route)
    await chain.close()


async def test_a_lost_link_after_a_cached_start_costs_no_prefix(here: Home) -> None:
    await staged(here, 1)
    known = Known(NEXT, await first_turn(here))
    chain = await open_(here, known)
    first = await chain.step(NEXT[48:].tobytes(), position=48, rows=42)
    node = loser(here, chain, 0)
    before = node.stats.rows_run
    for link in list(here.rig.network.links):
        if link.own_id == here.endpoint.node_id and link.peer_id == node.node_id:
            link.cut()
    await chain.step(np.tanh(rows_of(first)).tobytes(), position=90, rows=1)
    assert node.stats.rows_run - before == 1
    assert known.refilled == []
    await chain.close()


async def test_a_session_that_was_evicted_comes_back_by_replay(here: Home) -> None:
    await staged(here, 1)
    known = Known(NEXT, await first_turn(here))
    chain = await open_(here, known)
    expected = await cold()
    first = await chain.step(NEXT[48:].tobytes(), position=48, rows=42)
    forget_sessions(loser(here, chain, 1))
    second = await chain.step(np.tanh(rows_of(first)).tobytes(), position=90, rows=1)
    assert [rows_of(first).tobytes(), rows_of(second).tobytes()] == expected[:2]
    assert chain.replays == 1
    await chain.close()


async def test_what_a_node_lost_meanwhile_is_computed_as_if_for_the_first_time(here: Home) -> None:
    nodes = await staged(here, 1)
    holders = await first_turn(here)
    nodes[1].now[0] += 10_000
    nodes[1].server.sweep()
    known = Known(NEXT, holders)
    chain = await open_(here, known)
    assert (chain.num_held, known.held) == (0, [0])
    assert await say(chain, NEXT, 0) == await cold()
    await chain.close()


async def test_nodes_that_cannot_keep_are_asked_for_nothing(here: Home) -> None:
    nodes = [await here.rig.add_fake_node(0, 3, keeps=True), await here.rig.add_fake_node(3, 6)]
    await here.know(*nodes)
    known = Known(PROMPT)
    chain = await open_(here, known, confirms=True)
    await chain.step(PROMPT.tobytes(), position=0, rows=len(PROMPT))
    assert not await chain.close(keeps=True)
    assert known.held == []
    assert here.messages_received()["Opened"] == 0
    assert here.messages_sent()["Keep"] == 0


async def test_an_answer_under_way_is_not_kept(here: Home) -> None:
    await staged(here, 1)
    chain = await open_(here, Known(PROMPT))
    await chain.send(PROMPT.tobytes(), position=0, rows=len(PROMPT))
    assert not await chain.close(keeps=True)


async def test_opening_costs_no_round_trip_where_nothing_is_asked(here: Home) -> None:
    await staged(here, 1)
    chain = await open_(here, Known(PROMPT, asks=False))
    await chain.step(PROMPT.tobytes(), position=0, rows=len(PROMPT))
    assert here.messages_received()["Opened"] == 0
    await chain.close()


async def test_a_full_replica_is_left_for_another(here: Home) -> None:
    nodes = await staged(here, 2, kv_budget_bytes=200 * CACHE_BYTES_PER_POSITION)
    chains = [await open_(here, Known(PROMPT, asks=False), room=128, confirms=True) for _ in range(2)]
    assert {node.stats.num_sessions for node in nodes} == {1}
    for chain in chains:
        await chain.close()


async def test_where_every_replica_is_full_the_first_answer_says_when_to_ask_again(
    here: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(blame, "MAX_RETRY_S", 0.01)
    nodes = await staged(here, 2, kv_budget_bytes=200 * CACHE_BYTES_PER_POSITION)
    chains = [await open_(here, Known(PROMPT, asks=False), room=128, confirms=True) for _ in range(2)]
    with pytest.raises(WorkError) as caught:
        await open_(here, Known(PROMPT, asks=False), room=128, confirms=True)
    assert caught.value.code is ErrorCode.BUSY
    assert caught.value.retry_ms > 0
    assert sum(node.stats.rows_run for node in nodes) == 0
    for chain in chains:
        await chain.close()


async def test_a_session_too_large_for_every_node_is_refused_before_any_work(here: Home) -> None:
    nodes = await staged(here, 2, kv_budget_bytes=100 * CACHE_BYTES_PER_POSITION)
    with pytest.raises(WorkError) as caught:
        await open_(here, Known(PROMPT, asks=False), room=128, confirms=True)
    assert (caught.value.code, caught.value.room) == (ErrorCode.NO_ROOM, 64)
    assert sum(node.stats.rows_run for node in nodes) == 0


async def test_a_session_goes_to_the_node_that_is_large_enough(here: Home) -> None:
    small = await here.rig.add_fake_node(keeps=True, kv_budget_bytes=64 * CACHE_BYTES_PER_POSITION)
    large = await here.rig.add_fake_node(keeps=True)
    await here.know(small, large)
    for _ in range(3):
        chain = await open_(here, Known(PROMPT, asks=False), room=128, confirms=True)
        assert on(here, chain.route) == [large]
        await chain.close()


@pytest.mark.parametrize("held", [49, 64, 1 << 20])
async def test_a_node_cannot_claim_to_hold_what_nobody_asked_for(here: Home, held: int) -> None:
    await staged(here, 1)
    known = Known(NEXT, await first_turn(here))
    known.candidates = lambda context: Known.candidates(known, context)[-3:]  # type: ignore[method-assign]

    def lie(link: Any, message: Message) -> bool:
        if isinstance(message, Opened) and link.peer_id == here.endpoint.node_id and message.held != held:
            here.switchboard.on_message(link.other_side, replace(message, held=held))
            return True
        return False

    here.rig.network.drop = lie
    with pytest.raises(ProtocolError):
        await open_(here, known)
    assert known.held == []


async def test_a_node_that_holds_less_than_it_says_is_found_out_and_nothing_changes(here: Home) -> None:
    await staged(here, 1)
    known = Known(NEXT, await first_turn(here))

    def lie(link: Any, message: Message) -> bool:
        if isinstance(message, Opened) and link.peer_id == here.endpoint.node_id and message.held == 48:
            here.switchboard.on_message(link.other_side, replace(message, held=80))
            return True
        return False

    here.rig.network.drop = lie
    chain = await open_(here, known)
    assert chain.num_held == 80
    assert await say(chain, NEXT, 80) == await cold()
    assert chain.replays == 1  # the step did not fit: all of it was sent after all
    await chain.close()
