"""Whatever moment a client leaves at, nothing of its session stays behind."""

from __future__ import annotations

import asyncio
import gc
import random
import weakref

from node.session import Session
from routing.types import SessionId
from tests.node.rig import Rig, until
from tests.node.test_steps import Whole, rows_of, some_rows

NUM_SESSIONS = 200


async def abort_at_random(rig: Rig, chance: random.Random) -> SessionId:
    script = rig.script((rig.nodes[0], 0, 3), (rig.nodes[1], 3, 6))
    await script.open()
    position = 0
    for number in range(1, chance.randrange(1, 6)):
        rows = chance.choice([1, 1, 1, 7])
        await script.send(number, position, some_rows(rows))
        position += rows
        for _ in range(chance.randrange(4)):
            await asyncio.sleep(0)
    cancel = script.cancel()
    await script.first.send(cancel)
    if chance.random() < 0.5:
        for link in rig.gateway.endpoint.links_to(rig.nodes[1].node_id):
            await link.send(cancel)
    return script.session_id


async def test_two_hundred_aborted_sessions_leave_nothing(rig: Rig) -> None:
    a, b = await rig.add_fake_node(0, 3), await rig.add_fake_node(3, 6)
    await rig.gateway.endpoint.dial(b.address)
    chance = random.Random(7)
    aborted: set[SessionId] = set()
    for _ in range(NUM_SESSIONS // 10):
        aborted.update(await asyncio.gather(*(abort_at_random(rig, chance) for _ in range(10))))
    for node in (a, b):
        await until(lambda node=node: node.stats.num_sessions == 0 and node.stats.kv_bytes == 0)
        await until(lambda node=node: not any(cache.is_open for cache in node.runner.caches))
    assert a.stats.sessions_opened == NUM_SESSIONS
    gc.collect()
    left = [thing for thing in gc.get_objects() if type(thing) is Session]
    assert [session for session in left if session.session_id in aborted] == []
    assert len(aborted) == NUM_SESSIONS
    healthy = rig.script((a, 0, 3), (b, 3, 6))
    while not rig.gateway.inbox.empty():
        rig.gateway.inbox.get_nowait()
    await healthy.open()
    answer = await healthy.run(1, 0, some_rows(3))
    assert rows_of(answer).tolist() == Whole().run(0, some_rows(3))[-1:].tolist()


async def test_a_freed_session_is_forgotten_by_everybody(rig: Rig) -> None:
    node = await rig.add_fake_node()
    script = rig.script((node, 0, 6))
    await script.open()
    await script.run(1, 0, some_rows(2))
    session = weakref.ref(node.server._sessions.get(script.session_id))
    await script.first.send(script.cancel())
    await until(lambda: node.stats.sessions_cancelled == 1)
    await asyncio.sleep(0)
    gc.collect()
    assert session() is None


async def test_a_link_that_breaks_in_the_middle_of_a_step_breaks_nothing_else(rig: Rig) -> None:
    a, b = await rig.add_fake_node(0, 3), await rig.add_fake_node(3, 6)
    script = rig.script((a, 0, 3), (b, 3, 6))
    await script.open()
    await script.run(1, 0, some_rows(1))
    b.runner.hold()
    await script.send(2, 1, some_rows(1))
    await until(b.runner.entered.is_set)
    rig.network.cut(a.node_id, b.node_id)
    assert (await script.failure()).hop == 1
    b.runner.release()
    script.epoch = 2  # the same nodes again
    await script.first.send(script.opening())
    await script.run(1, 0, some_rows(1))
    assert rig.gateway.endpoint.receiver_errors == a.endpoint.receiver_errors == []
