"""Room on a node: set aside when a session opens, made by ending idle ones, refused with numbers or a time."""

from __future__ import annotations

import pytest

from node import room
from routing.errors import ErrorCode
from routing.types import Answer, Opened
from tests.node.fake_runner import CACHE_BYTES_PER_POSITION
from tests.node.rig import Node, Rig, Script, rows_of, until
from tests.node.test_steps import Whole, some_rows


async def small_node(rig: Rig, positions: int = 192) -> Node:
    return await rig.add_fake_node(kv_budget_bytes=positions * CACHE_BYTES_PER_POSITION)


def asking(rig: Rig, node: Node, positions: int) -> Script:
    """A session that asks for so much room, and to be told that it has it."""
    return rig.script((node, 0, 6), changes={"room": positions, "confirms": True})


async def opened(script: Script) -> None:
    await script.open()
    assert (await script.gateway.receive(Opened)).session_id == script.session_id


async def test_memory_is_set_aside_before_the_first_step(rig: Rig) -> None:
    node = await small_node(rig)
    script = asking(rig, node, 100)
    await opened(script)
    assert node.stats.kv_bytes == 128 * CACHE_BYTES_PER_POSITION
    await script.run(1, 0, some_rows(100))
    assert node.stats.kv_bytes == 128 * CACHE_BYTES_PER_POSITION
    await script.first.send(script.cancel())
    await until(lambda: node.stats.kv_bytes == 0)


async def test_a_session_without_room_is_refused_before_anything_is_computed(rig: Rig) -> None:
    node = await small_node(rig)
    await opened(asking(rig, node, 100))
    refused = asking(rig, node, 100)
    await refused.open()
    failure = await refused.failure()
    assert (failure.code, failure.session_id) == (ErrorCode.BUSY, refused.session_id)
    assert 0 < failure.retry_ms <= room.MAX_RETRY_MS
    assert (node.stats.num_sessions, node.stats.rows_run, node.stats.sessions_refused) == (1, 0, 1)


async def test_what_can_never_have_room_is_told_how_much_there_is(rig: Rig) -> None:
    node = await small_node(rig, 100)
    script = asking(rig, node, 200)
    await script.open()
    failure = await script.failure()
    assert (failure.code, failure.room) == (ErrorCode.NO_ROOM, 64)
    assert "200 positions asked, there is room for 64" in failure.text


async def test_a_gateway_is_told_to_come_back_when_a_session_may_have_ended(rig: Rig) -> None:
    node = await small_node(rig)
    script = asking(rig, node, 100)
    await opened(script)
    node.now[0] += 5  # ten positions in five seconds: forty-five more for the other ninety
    await script.run(1, 0, some_rows(10))
    refused = asking(rig, node, 100)
    await refused.open()
    assert (await refused.failure()).retry_ms == room.MAX_RETRY_MS
    node.now[0] += 5
    await script.run(2, 10, some_rows(80))
    await refused.open()
    assert 500 < (await refused.failure()).retry_ms < 1500  # ninety in ten seconds: one more for the last ten


async def test_an_idle_session_makes_way_and_is_missed_when_it_comes_back(rig: Rig) -> None:
    node = await small_node(rig)
    idle, other = asking(rig, node, 100), asking(rig, node, 100)
    await opened(idle)
    await idle.run(1, 0, some_rows(3))
    node.now[0] += room.EVICT_IDLE_S
    await opened(other)
    assert (node.stats.sessions_evicted, node.stats.num_sessions) == (1, 1)
    await idle.send(2, 3, some_rows(1))
    failure = await idle.failure()
    assert (failure.code, failure.session_id) == (ErrorCode.NO_SESSION, idle.session_id)
    await other.run(1, 0, some_rows(2))


async def test_the_longest_idle_goes_first_and_no_more_than_is_needed(rig: Rig) -> None:
    node = await small_node(rig, 256)
    scripts = [asking(rig, node, 64) for _ in range(4)]
    for script in scripts:
        await opened(script)
        node.now[0] += 1
    await scripts[0].run(1, 0, some_rows(1))
    node.now[0] += room.EVICT_IDLE_S
    await opened(asking(rig, node, 64))
    assert node.stats.sessions_evicted == 1
    await scripts[1].send(1, 0, some_rows(1))
    assert (await scripts[1].failure()).code == ErrorCode.NO_SESSION
    await scripts[0].run(2, 1, some_rows(1))


async def test_a_session_with_a_step_under_way_is_never_evicted(rig: Rig) -> None:
    node = await small_node(rig)
    script = asking(rig, node, 100)
    await opened(script)
    node.runner.hold()
    await script.send(1, 0, some_rows(2))
    await until(node.runner.entered.is_set)
    node.now[0] += 100
    refused = asking(rig, node, 100)
    await refused.open()
    assert (await refused.failure()).code == ErrorCode.BUSY
    node.runner.release()
    answer = await rig.gateway.receive(Answer)
    assert (rows_of(answer) == Whole().run(0, some_rows(2))[-1:]).all()


async def test_nothing_is_evicted_where_that_would_not_help(rig: Rig) -> None:
    node = await small_node(rig)
    busy, idle = asking(rig, node, 128), asking(rig, node, 64)
    await opened(busy)
    await opened(idle)
    node.now[0] += room.EVICT_IDLE_S
    await busy.run(1, 0, some_rows(1))
    refused = asking(rig, node, 128)
    await refused.open()
    assert (await refused.failure()).code == ErrorCode.BUSY
    assert node.stats.sessions_evicted == 0


async def test_a_session_that_outgrows_its_room_gets_that_of_an_idle_one(rig: Rig) -> None:
    node = await small_node(rig, 160)
    idle, growing = asking(rig, node, 64), asking(rig, node, 64)
    await opened(idle)
    await opened(growing)
    node.now[0] += room.EVICT_IDLE_S
    await growing.run(1, 0, some_rows(65))
    assert node.stats.sessions_evicted == 1
    assert node.stats.kv_bytes == 128 * CACHE_BYTES_PER_POSITION


async def test_places_are_made_free_as_room_is(rig: Rig) -> None:
    node = await rig.add_fake_node(max_sessions=1)
    await opened(asking(rig, node, 64))
    node.now[0] += room.EVICT_IDLE_S
    await opened(asking(rig, node, 64))
    assert (node.stats.sessions_evicted, node.stats.num_sessions) == (1, 1)


@pytest.mark.parametrize("positions", [0, 1])
async def test_a_gateway_that_asks_for_no_room_gets_it_step_by_step(rig: Rig, positions: int) -> None:
    node = await small_node(rig)
    script = asking(rig, node, positions)
    await opened(script)
    assert node.stats.kv_bytes == (64 * CACHE_BYTES_PER_POSITION if positions else 0)
    await script.run(1, 0, some_rows(65))
    assert node.stats.kv_bytes == 128 * CACHE_BYTES_PER_POSITION
