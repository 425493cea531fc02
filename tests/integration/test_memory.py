"""Encoder states over whole chains: sent once, there after any loss, and the answer the same to the last bit."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import pytest_asyncio

from node import openings
from routing import live_route, route_watch
from routing.chain import Chain
from routing.frames import MEMORY_PIECE_BYTES, memory_pieces
from routing.opening import ChainOptions
from routing.planner import RouteRequest
from routing.types import (
    Answer,
    AnswerKind,
    Buffer,
    Message,
    NodeId,
    Prefix,
    SliceSpec,
    Step,
    StepFlag,
    Want,
    WireDtype,
)
from slicing.sampler import SamplingParams
from tests.integration.home import Home, home, rows
from tests.integration.streams import STAGES, nodes_of
from tests.node.fake_runner import HIDDEN_SIZE, NUM_LAYERS, VOCAB_SIZE, FakeRunner
from tests.node.rig import DIGEST, Node, until
from tests.node.test_resuming import sent_between

STREAMS, BRANCHES, NUM_FRAMES = 4, 2, 8
MEMORY = rows(40 * BRANCHES, 33)
SONG = SamplingParams(temperature=0.9, top_k=20, seed=3, guidance_scale=3.0, frequency_penalty=0.4)
GUIDED: dict[str, Any] = {"branches": BRANCHES, "memory_rows": len(MEMORY), "axes": 2}
SUNG: dict[str, Any] = {
    "takes_token_ids": True,
    "runs_closing": True,
    "sampling": {"params": SONG.to_map()},
    "branches": BRANCHES,
    "streams": STREAMS,
    "memory_rows": len(MEMORY),
}
Event = Callable[[int], None]


@pytest.fixture(autouse=True)
def _timing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(route_watch, "SUSPECT_AFTER_S", 0.3)
    monkeypatch.setattr(live_route, "SUSPECT_POLL_S", 0.05)
    monkeypatch.setattr(route_watch, "SLACK_S", 60.0)
    monkeypatch.setattr(live_route, "REDIAL_TIMEOUT_S", 60.0)
    monkeypatch.setattr(openings, "REDIAL_TIMEOUT_S", 60.0)


@pytest_asyncio.fixture
async def here() -> AsyncIterator[Home]:
    async with home() as made:
        yield made


async def staged(here: Home, replicas: int = 2) -> None:
    nodes = [
        await here.rig.add_fake_node(start, end, runner=FakeRunner(num_streams=STREAMS, takes_memory=True))
        for start, end in STAGES
        for _ in range(replicas)
    ]
    await here.know(*nodes)


async def remember(chain: Chain, *, confirms: bool = False) -> None:
    pieces = list(memory_pieces(len(MEMORY), MEMORY_PIECE_BYTES // 12, BRANCHES))  # as if rows were long
    assert len(pieces) == 7
    assert chain.memory_wire is WireDtype.FLOAT32
    for first, count in pieces:
        piece = MEMORY[first : first + count].tobytes()
        recorded = await chain.send_memory(piece, count, confirms=confirms and first + count == len(MEMORY))
    if confirms:
        assert (await chain.answer(recorded)).rows == 0


def nothing(index: int) -> None:
    pass


async def say(chain: Chain, before: Event = nothing) -> list[bytes]:
    """Rows of two branches with positions of two axes; each step is made from the last one's rows."""
    before(0)
    await remember(chain)
    values, said, position = rows(3 * BRANCHES), [], 0
    for index in range(1, NUM_FRAMES + 1):
        before(index)
        places = np.arange(position, position + len(values) * 2, dtype="<i4").reshape(2, len(values))
        payload = values.astype("<f4").tobytes() + places.tobytes()
        answer = await chain.step(payload, position=position, rows=len(values))
        assert answer.rows == BRANCHES
        position += len(values) // BRANCHES
        said.append(bytes(answer.payload))
        values = np.tanh(np.frombuffer(said[-1], "<f4").reshape(BRANCHES, HIDDEN_SIZE)) + np.float32(index)
    return said


async def sing(chain: Chain, before: Event = nothing) -> list[list[int]]:
    """Ids of four streams at a time, drawn at the last hop."""
    before(0)
    await remember(chain)
    ids, drawn, position = np.full((2, STREAMS), VOCAB_SIZE), [], 0
    for index in range(1, NUM_FRAMES + 1):
        before(index)
        fed = np.repeat(ids, BRANCHES, axis=0)
        answer = await chain.step(fed.astype("<i4").tobytes(), position=position, rows=len(fed))
        assert (answer.kind, len(answer.payload)) == (AnswerKind.TOKEN_IDS, STREAMS * 2)
        position += len(ids)
        drawn.append(np.frombuffer(answer.payload, "<u2").tolist())
        ids = np.array([drawn[-1]])
    return drawn


async def unbroken(speak: Any, options: dict[str, Any]) -> Any:
    async with home() as here:
        await staged(here, 1)
        chain = await here.open(**options)
        said = await speak(chain)
        await chain.close()
        return said


async def lose_at(index: int, stage: int, speak: Any, options: dict[str, Any], expected: Any) -> None:
    async with home() as here:
        await staged(here)
        chain = await here.open(**options)
        route = nodes_of(here, chain)

        def event(number: int) -> None:
            if number == index:
                here.rig.network.cut_off(route[stage].node_id)

        assert await speak(chain, event) == expected
        assert chain.replays == 1
        held = [node for node in here.rig.nodes if node.server._sessions.get(chain.session_id)]
        caches = [node.server._sessions.get(chain.session_id).state.cache for node in held]  # type: ignore[union-attr]
        assert all(cache.memory_rows in (0, len(MEMORY)) for cache in caches)
        await chain.close()


@pytest.mark.parametrize("stage", range(len(STAGES)))
async def test_guided_rows_survive_the_loss_of_any_stage_at_any_step(stage: int) -> None:
    expected = await unbroken(say, GUIDED)
    losses = [lose_at(index, stage, say, GUIDED, expected) for index in range(NUM_FRAMES + 1)]
    await asyncio.gather(*losses)


@pytest.mark.parametrize("stage", range(len(STAGES)))
async def test_a_song_drawn_remotely_survives_the_loss_of_any_stage_at_any_step(stage: int) -> None:
    expected = await unbroken(sing, SUNG)
    losses = [lose_at(index, stage, sing, SUNG, expected) for index in range(NUM_FRAMES + 1)]
    await asyncio.gather(*losses)


async def test_a_loss_between_two_pieces_of_memory_is_mended(here: Home) -> None:
    expected = await unbroken(say, GUIDED)
    await staged(here)
    chain = await here.open(**GUIDED)
    first = nodes_of(here, chain)[0]
    send, count = chain.send_memory, 0

    async def send_and_lose(*arguments: Any, **options: Any) -> Any:
        nonlocal count
        count += 1
        if count == 3:
            here.rig.network.cut_off(first.node_id)
        return await send(*arguments, **options)

    chain.send_memory = send_and_lose  # type: ignore[method-assign]
    assert await say(chain) == expected
    await chain.close()


def memory_bytes(messages: list[Message]) -> int:
    return sum(len(m.payload) for m in messages if isinstance(m, Step) and m.is_memory)


async def test_memory_crosses_each_link_once_in_a_whole_session(here: Home) -> None:
    await staged(here, 1)
    chain = await here.open(**GUIDED)
    await say(chain)
    route = nodes_of(here, chain)
    own = [link for link in here.rig.network.links if link.own_id == here.endpoint.node_id]
    assert memory_bytes([m for link in own for m in link.sent]) == MEMORY.nbytes
    for one, other in pairwise(route):
        assert memory_bytes(sent_between(here.rig, one, other)) == MEMORY.nbytes
    await chain.close()


async def test_after_a_loss_memory_crosses_only_the_new_nodes_links(here: Home) -> None:
    await staged(here)
    chain = await here.open(**GUIDED)
    a, b, c = nodes_of(here, chain)

    def lose(index: int) -> None:
        if index == 5:
            here.rig.network.cut_off(b.node_id)

    await say(chain, lose)
    spare = nodes_of(here, chain)[1]
    own = [link for link in here.rig.network.links if link.own_id == here.endpoint.node_id]
    assert memory_bytes([m for link in own for m in link.sent]) == MEMORY.nbytes
    assert memory_bytes(sent_between(here.rig, a, spare)) == MEMORY.nbytes
    assert memory_bytes(sent_between(here.rig, spare, c)) == 0
    await chain.close()


async def test_a_confirmed_memory_is_everywhere(here: Home) -> None:
    await staged(here, 1)
    chain = await here.open(**GUIDED)
    await remember(chain, confirms=True)
    for node in nodes_of(here, chain):
        session = node.server._sessions.get(chain.session_id)
        assert session is not None
        assert session.state.cache.memory_rows == len(MEMORY)
    await chain.close()


async def test_a_confirmation_that_was_lost_is_given_again(here: Home) -> None:
    await staged(here)
    chain = await here.open(**GUIDED)
    last = nodes_of(here, chain)[-1]
    here.rig.network.drop = lambda link, message: isinstance(message, Answer) and link.own_id == last.node_id
    waiting = asyncio.create_task(remember(chain, confirms=True))
    await until(lambda: memory_rows(last, chain) == len(MEMORY))
    here.rig.network.drop = None
    here.rig.network.cut_off(last.node_id)
    await waiting
    assert memory_rows(nodes_of(here, chain)[-1], chain) == len(MEMORY)
    await chain.close()


def memory_rows(node: Node, chain: Chain) -> int:
    session = node.server._sessions.get(chain.session_id)
    return 0 if session is None else session.state.cache.memory_rows


async def test_going_back_to_the_beginning_keeps_memory_over_a_loss(here: Home) -> None:
    expected = await unbroken(sing, SUNG)
    await staged(here)
    chain = await here.open(**SUNG)
    assert await sing(chain) == expected
    ids = np.repeat(np.full((2, STREAMS), VOCAB_SIZE), BRANCHES, axis=0).astype("<i4")
    here.rig.network.cut_off(nodes_of(here, chain)[1].node_id)
    answer = await chain.step(ids.tobytes(), position=0, rows=len(ids))
    assert np.frombuffer(answer.payload, "<u2").tolist() == expected[0]
    await chain.close()


class _Eager:
    """A beginning that would take and keep anything."""

    num_rows, num_held = 64, 0
    holders: Mapping[NodeId, SliceSpec] = {}

    def candidates(self, context: bytes) -> list[Prefix]:
        return [Prefix(16, bytes(16))]

    def note_held(self, context: bytes, num_held: int) -> None:
        raise AssertionError("nobody asked")

    async def rows(self, start: int, end: int, wire: WireDtype) -> Buffer:
        raise AssertionError("nothing was left out")

    def names(self, context: bytes, num_positions: int) -> list[bytes]:
        return [bytes(16)]


async def test_a_session_with_memory_neither_takes_nor_leaves_a_prefix(here: Home) -> None:
    here.rig.takes_memory = True
    node = await here.rig.add_fake_node(keeps=True)
    await here.know(node)
    request = RouteRequest("fake", DIGEST, SliceSpec(0, NUM_LAYERS))
    options = ChainOptions(max_positions=64, memory_rows=len(MEMORY), branches=BRANCHES, confirms=True)
    chain = await here.switchboard.open_chain(request, options, beginning=_Eager())
    assert chain.num_held == 0
    await remember(chain)
    await chain.step(rows(20 * BRANCHES).tobytes(), position=0, rows=20 * BRANCHES)
    assert not await chain.close(keeps=True)
    await until(lambda: node.stats.num_sessions == 0)
    assert (node.stats.prefixes_kept, node.stats.prefix_hits, node.stats.kv_bytes) == (0, 0, 0)


async def test_rows_are_wanted_by_position(here: Home) -> None:
    await here.know(await here.rig.add_fake_node())
    chain = await here.open(branches=BRANCHES)
    recorded = await chain.send(
        rows(5 * BRANCHES).tobytes(), position=0, rows=5 * BRANCHES, want=Want.LIST, want_rows=(0, 3)
    )
    assert recorded.end == 5
    answer = await chain.answer(recorded)
    assert (answer.rows, answer.position) == (2 * BRANCHES, 0)
    await chain.close()


async def test_a_thin_answer_of_four_codebooks_fits_74_bytes(here: Home) -> None:
    """Its message is 40 bytes; frame, record and tag are 32 more (`tests/routing/test_link.py` counts those)."""
    await staged(here, 1)
    chain = await here.open(**SUNG, trace=False)
    await sing(chain)
    own = [link for link in here.rig.network.links if link.own_id == here.endpoint.node_id]
    answers = [m for link in own for m in link.other_side.sent if isinstance(m, Answer)]
    assert len(answers) == NUM_FRAMES
    assert {32 + len(answer.payload) for answer in answers if StepFlag.SEALED not in answer.flags} == {40}
    assert not any(StepFlag.SEALED in answer.flags for answer in answers)
    assert 40 + 32 <= 74
    await chain.close()


async def test_an_answer_with_too_few_streams_is_the_last_nodes_fault(here: Home) -> None:
    expected = await unbroken(sing, SUNG)
    await staged(here)
    chain = await here.open(**SUNG)
    last = nodes_of(here, chain)[-1]
    returns = last.server._returns
    send = returns.send

    def shorten(session: Any, message: Any, *arguments: Any) -> None:
        if isinstance(message, Answer):
            message = replace(message, payload=bytes(message.payload)[:4])
        send(session, message, *arguments)

    returns.send = shorten  # type: ignore[method-assign]
    assert await sing(chain) == expected
    assert nodes_of(here, chain)[-1] is not last
    await chain.close()
