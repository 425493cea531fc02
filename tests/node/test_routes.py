"""How sessions open, change their route, are attached, cancelled, lost and limited."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import numpy as np
import pytest

from routing import wire
from routing.errors import ErrorCode
from routing.types import (
    Answer,
    Cancel,
    Describe,
    Description,
    Failure,
    NodeAddress,
    Open,
    SessionId,
    WireDtype,
)
from tests.node.fake_runner import CACHE_BYTES_PER_POSITION
from tests.node.rig import DIGEST, Gateway, Rig, Script, rows_of, until
from tests.node.test_steps import Whole, some_rows


def another_gateway(rig: Rig) -> Gateway:
    """A gateway with its own identity, on the same network."""
    gateway = Gateway()
    gateway.endpoint = type(rig.gateway.endpoint)(
        gateway.identity,
        rig.gateway.endpoint.network_id,
        rig.gateway.endpoint.capabilities,
        gateway,
        network=rig.network,
    )
    return gateway


async def test_steps_may_follow_the_open_at_once(rig: Rig) -> None:
    rig.network.delay_s = 0.02
    script = rig.script((await rig.add_fake_node(0, 3), 0, 3), (await rig.add_fake_node(3, 6), 3, 6))
    await script.open()
    for number in (1, 2, 3):
        await script.send(number, number - 1, some_rows(1, number))
    answers = [wire.open_answer(script.answer_key, await rig.gateway.receive(Answer)) for _ in range(3)]
    whole = Whole()
    for number, answer in enumerate(answers, start=1):
        assert np.array_equal(rows_of(answer), whole.run(number - 1, some_rows(1, number)))


async def test_opening_twice_changes_nothing(rig: Rig) -> None:
    node = await rig.add_fake_node()
    script = rig.script((node, 0, 6))
    await script.open()
    await script.run(1, 0, some_rows(2))
    await script.first.send(script.opening())
    await script.run(2, 2, some_rows(1))
    assert node.stats.sessions_opened == 1


async def test_a_route_that_resumes_keeps_the_cache_and_goes_on_with_the_steps(rig: Rig) -> None:
    node = await rig.add_fake_node()
    script = rig.script((node, 0, 6))
    await script.open()
    await script.run(1, 0, some_rows(3))
    await script.run(2, 3, some_rows(1))
    resumed = await script.reopen(answered=2)
    assert (resumed.epoch, resumed.next_step) == (2, 3)
    after = await script.run(3, 3, some_rows(1, seed=5))  # a roll-back, as on any route
    whole = Whole()
    whole.run(0, some_rows(3))
    assert np.array_equal(rows_of(after), whole.run(3, some_rows(1, seed=5)))
    assert len(node.runner.caches) == 1


async def test_a_route_that_does_not_resume_starts_with_nothing(rig: Rig) -> None:
    node = await rig.add_fake_node()
    script = rig.script((node, 0, 6))
    await script.open()
    before = await script.run(1, 0, some_rows(3))
    script.epoch = 2
    await script.first.send(script.opening())
    await script.send(2, 3, some_rows(1))
    assert (await script.failure()).code == ErrorCode.STEP
    again = await script.run(1, 0, some_rows(3))
    assert bytes(again.payload) == bytes(before.payload)
    assert [cache.is_open for cache in node.runner.caches] == [False, True]


async def test_steps_and_outputs_of_an_older_route_vanish(rig: Rig) -> None:
    node = await rig.add_fake_node()
    script = rig.script((node, 0, 6))
    await script.open()
    node.runner.hold()
    await script.send(1, 0, some_rows(2))
    await until(node.runner.entered.is_set)
    await script.send(2, 2, some_rows(1))
    old_step = script.step(3, 3, some_rows(1))
    script.epoch = 2
    await script.first.send(script.opening())
    await script.first.send(old_step)
    await script.send(1, 0, some_rows(1))
    node.runner.release()
    answer = await rig.gateway.receive(Answer)
    assert (answer.epoch, answer.step) == (2, 1)
    assert np.array_equal(rows_of(answer), Whole().run(0, some_rows(1)))
    assert rig.gateway.inbox.empty()


async def test_a_reroute_replaces_the_next_hop(rig: Rig) -> None:
    a, b, spare = await rig.add_fake_node(0, 3), await rig.add_fake_node(3, 6), await rig.add_fake_node(3, 6)
    script = rig.script((a, 0, 3), (b, 3, 6))
    await script.open()
    await script.run(1, 0, some_rows(3))
    rig.network.cut_off(b.node_id)
    failure = await script.failure()
    assert (failure.code, failure.hop) == (ErrorCode.HOP_LOST, 1)
    script.hops, script.epoch = ((a, 0, 3), (spare, 3, 6)), 2
    await script.first.send(script.opening())
    answer = wire.open_answer(script.answer_key, await script.run(1, 0, some_rows(3)))
    assert np.array_equal(rows_of(answer), Whole().run(0, some_rows(3))[-1:])
    assert a.stats.sessions_rerouted == 1


async def test_a_reroute_to_other_layers_starts_with_an_empty_cache(rig: Rig) -> None:
    node = await rig.add_fake_node()
    script = rig.script((node, 0, 6))
    await script.open()
    await script.run(1, 0, some_rows(3))
    script.hops, script.epoch = ((node, 2, 4),), 2
    await script.first.send(script.opening())
    await script.send(1, 3, some_rows(1))
    assert (await script.failure()).code == ErrorCode.STEP
    await script.run(1, 0, some_rows(3))
    assert [cache.is_open for cache in node.runner.caches] == [False, True]


async def test_the_session_of_another_key_cannot_be_taken(rig: Rig) -> None:
    node = await rig.add_fake_node()
    script = rig.script((node, 0, 6))
    await script.open()
    await script.run(1, 0, some_rows(1))
    thief = another_gateway(rig)
    stolen = Script(thief, script.hops, thief.identity.node_id, session_id=script.session_id, epoch=2)
    await stolen.open()
    assert (await stolen.failure()).code == ErrorCode.NOT_ALLOWED
    await stolen.send(1, 0, some_rows(1))
    assert (await stolen.failure()).code == ErrorCode.NOT_ALLOWED
    await script.run(2, 1, some_rows(1))


async def test_a_step_runs_only_on_a_bound_link_and_attach_binds_one(rig: Rig) -> None:
    node = await rig.add_fake_node()
    script = rig.script((node, 0, 6))
    await script.open()
    await script.run(1, 0, some_rows(1))
    moved = another_gateway(rig)
    script.first = await moved.endpoint.dial(node.address)
    await script.send(2, 1, some_rows(1))
    refusal = await moved.receive(Failure)
    assert (refusal.code, refusal.step) == (ErrorCode.NOT_ALLOWED, 2)
    await script.first.send(replace(script.attach(), proof=bytes(32)))
    assert (await moved.receive(Failure)).code == ErrorCode.NOT_ALLOWED
    await script.first.send(script.attach())
    await script.run(2, 1, some_rows(1))


async def test_a_cancel_frees_every_node_between_two_layers(rig: Rig) -> None:
    a, b = await rig.add_fake_node(0, 3), await rig.add_fake_node(3, 6)
    script = rig.script((a, 0, 3), (b, 3, 6))
    await script.open()
    await script.run(1, 0, some_rows(1))
    b.runner.hold()
    await script.send(2, 1, some_rows(1))
    await until(b.runner.entered.is_set)
    await script.first.send(script.cancel())
    await until(lambda: not any(cache.is_open for node in (a, b) for cache in node.runner.caches))
    assert [node.stats.kv_bytes for node in (a, b)] == [0, 0]
    assert [node.stats.num_sessions for node in (a, b)] == [0, 0]
    assert b.runner.layers_run == [3, 4, 5]
    await script.send(3, 2, some_rows(1))
    assert (await script.failure()).code == ErrorCode.NO_SESSION


async def test_a_forged_or_outdated_cancel_changes_nothing(rig: Rig) -> None:
    node = await rig.add_fake_node()
    script = rig.script((node, 0, 6))
    await script.open()
    await script.first.send(replace(script.cancel(), proof=bytes(32)))
    outdated = script.cancel()
    script.epoch = 2
    await script.first.send(script.opening())
    await script.first.send(outdated)
    await script.run(1, 0, some_rows(1))


async def test_a_cancel_that_overtakes_its_open_wins(rig: Rig) -> None:
    node = await rig.add_fake_node()
    script, forged = rig.script((node, 0, 6)), rig.script((node, 0, 6))
    link = await rig.gateway.endpoint.dial(node.address)
    await link.send(script.cancel())
    await link.send(Cancel(forged.session_id, 1, bytes(32)))
    await script.open()
    await script.send(1, 0, some_rows(1))
    assert (await script.failure()).code == ErrorCode.NO_SESSION
    await forged.open()
    await forged.run(1, 0, some_rows(1))
    script.epoch = 2  # the cancel was for epoch 1
    await script.open()
    await script.run(1, 0, some_rows(1))


async def test_a_next_hop_that_cannot_be_reached_is_named(rig: Rig) -> None:
    a, b = await rig.add_fake_node(0, 3), await rig.add_fake_node(3, 6)
    rig.network.cut_off(b.node_id)
    script = rig.script((a, 0, 3), (b, 3, 6))
    await script.open()
    failure = await script.failure()
    assert (failure.code, failure.hop) == (ErrorCode.HOP_LOST, 1)
    await script.send(1, 0, some_rows(1))
    assert (await script.failure()).code == ErrorCode.HOP_LOST


async def test_another_node_at_the_next_hops_address_is_not_trusted(rig: Rig) -> None:
    a, b, c = [await rig.add_fake_node(*layers) for layers in ((0, 3), (3, 6), (3, 6))]
    b.address = NodeAddress(b.node_id, c.address.host, c.address.port)
    script = rig.script((a, 0, 3), (b, 3, 6))
    await script.open()
    failure = await script.failure()
    assert failure.code == ErrorCode.HOP_LOST
    assert "ID_MISMATCH" in failure.text
    assert c.stats.sessions_opened == 0


async def test_only_the_next_hop_may_answer_for_what_comes_after(rig: Rig) -> None:
    a, b = await rig.add_fake_node(0, 3), await rig.add_fake_node(3, 6)
    script = rig.script((a, 0, 3), (b, 3, 6))
    await script.open()
    answer = await script.run(1, 0, some_rows(1))
    liar = another_gateway(rig)
    link = await liar.endpoint.dial(a.address)
    await link.send(answer)
    await link.send(Failure(script.session_id, 1, 1, int(ErrorCode.COMPUTE), 1))
    await link.send(Describe())
    await liar.receive(Description)
    assert rig.gateway.inbox.empty()


async def test_a_next_hop_cannot_blame_those_before_it(rig: Rig) -> None:
    a, b = await rig.add_fake_node(0, 3), await rig.add_fake_node(3, 6)
    script = rig.script((a, 0, 3), (b, 3, 6))
    await script.open()
    await script.run(1, 0, some_rows(1))
    (link,) = b.endpoint.links_to(a.node_id)
    await link.send(Failure(script.session_id, 1, 2, int(ErrorCode.BUSY), 0))
    assert (await script.failure()).hop == 1


@pytest.mark.parametrize(
    ("changes", "layers", "code", "text"),
    [
        ({}, (0, 5), ErrorCode.NO_SLICE, "layers 0:5 asked; held here: layers 1:4"),
        ({"model_digest": b"x" * 32}, (1, 4), ErrorCode.NO_SLICE, "another model"),
        ({"run_closing": True}, (1, 4), ErrorCode.NO_SLICE, "closing end"),
        ({"run_opening": True, "wire_in": WireDtype.INT32}, (1, 4), ErrorCode.NO_SLICE, "opening end"),
        ({"wire_in": WireDtype.INT32}, (1, 4), ErrorCode.MALFORMED, "opening hop"),
        ({"wire_out": WireDtype.INT32}, (1, 4), ErrorCode.MALFORMED, "wire dtype"),
        ({"answer_key": b""}, (1, 4), ErrorCode.MALFORMED, "answer key"),
        ({"num_hops": 2}, (1, 4), ErrorCode.MALFORMED, "place in the chain"),
        ({"max_positions": 257}, (1, 4), ErrorCode.TOO_BIG, "257 positions"),
        ({}, (2, 2), ErrorCode.MALFORMED, "empty range"),
    ],
)
async def test_work_that_is_not_held_here_is_refused(
    rig: Rig, changes: dict[str, object], layers: tuple[int, int], code: ErrorCode, text: str
) -> None:
    node = await rig.add_fake_node(1, 4)
    script = rig.script((node, *layers), changes=changes)
    await script.open()
    failure = await script.failure()
    assert failure.code == code
    assert text in failure.text
    assert node.stats.num_sessions == 0


async def test_an_entry_that_cannot_be_opened_harms_nobody(rig: Rig) -> None:
    node = await rig.add_fake_node()
    healthy, garbage = rig.script((node, 0, 6)), rig.script((node, 0, 6))
    await healthy.open()
    await healthy.first.send(Open(garbage.session_id, 1, 0, (b"\x00" * 200,)))
    assert (await healthy.failure()).code == ErrorCode.DECRYPT
    moved = replace(garbage.opening(), session_id=SessionId(bytes(16)))  # sealed for another session
    await healthy.first.send(moved)
    assert (await healthy.failure()).code == ErrorCode.DECRYPT
    await healthy.run(1, 0, some_rows(1))


async def test_impossible_sampling_is_refused_at_the_open(rig: Rig) -> None:
    node = await rig.add_fake_node()
    script = rig.script((node, 0, 6), opens=True, closes=True, sampling={"params": {"temperature": -1.0}})
    await script.open()
    assert (await script.failure()).code == ErrorCode.MALFORMED


async def test_a_full_node_asks_for_patience(rig: Rig) -> None:
    node = await rig.add_fake_node(max_sessions=2, max_sessions_per_peer=2)
    scripts = [rig.script((node, 0, 6)) for _ in range(3)]
    for script in scripts:
        await script.open()
    failure = await scripts[2].failure()
    assert (failure.code, failure.session_id) == (ErrorCode.BUSY, scripts[2].session_id)
    assert failure.retry_ms > 0
    await scripts[0].first.send(scripts[0].cancel())
    await until(lambda: node.stats.num_sessions == 1)
    await scripts[2].open()
    await scripts[2].run(1, 0, some_rows(1))


async def test_one_peer_cannot_take_every_place(rig: Rig) -> None:
    node = await rig.add_fake_node(max_sessions=4, max_sessions_per_peer=1)
    scripts = [rig.script((node, 0, 6)) for _ in range(2)]
    for script in scripts:
        await script.open()
    assert (await scripts[1].failure()).code == ErrorCode.BUSY
    other = another_gateway(rig)
    welcome = Script(other, scripts[0].hops, other.identity.node_id)
    await welcome.open()
    await welcome.run(1, 0, some_rows(1))


async def test_a_step_beyond_the_memory_budget_is_refused_and_the_session_lives(rig: Rig) -> None:
    node = await rig.add_fake_node(
        kv_budget_bytes=192 * CACHE_BYTES_PER_POSITION
    )  # storage comes in 64s, and doubles
    script, other = rig.script((node, 0, 6)), rig.script((node, 0, 6))
    await script.open()
    await other.open()
    await script.run(1, 0, some_rows(65))
    await other.send(1, 0, some_rows(65))
    failure = await other.failure()
    assert (failure.code, failure.session_id) == (ErrorCode.BUSY, other.session_id)
    await other.run(1, 0, some_rows(64))
    await script.first.send(script.cancel())
    await until(lambda: node.stats.kv_bytes == 64 * CACHE_BYTES_PER_POSITION)
    await other.run(2, 64, some_rows(1))
    assert node.stats.kv_bytes == 128 * CACHE_BYTES_PER_POSITION


async def test_an_idle_session_expires(rig: Rig) -> None:
    a, b = await rig.add_fake_node(0, 3), await rig.add_fake_node(3, 6)
    script = rig.script((a, 0, 3), (b, 3, 6))
    await script.open()
    await script.run(1, 0, some_rows(1))
    a.now[0] += 59
    a.server.sweep()
    assert a.stats.num_sessions == 1
    await script.run(2, 1, some_rows(1))
    a.now[0] += 61
    a.server.sweep()
    assert a.stats.sessions_expired == 1
    await until(lambda: b.stats.num_sessions == 0)  # the rest of the chain is told


async def test_a_session_that_no_link_leads_to_is_freed_after_a_grace(rig: Rig) -> None:
    node = await rig.add_fake_node()
    script = rig.script((node, 0, 6))
    await script.open()
    await script.run(1, 0, some_rows(1))
    script.first.cut()
    node.server.sweep()
    node.now[0] += 9
    node.server.sweep()
    script.first = await rig.gateway.endpoint.dial(node.address)
    await script.first.send(script.attach())
    await script.run(2, 1, some_rows(1))
    script.first.cut()
    node.server.sweep()
    node.now[0] += 10
    node.server.sweep()
    assert node.stats.num_sessions == 0
    assert node.stats.kv_bytes == 0


async def test_a_node_describes_what_it_serves(rig: Rig) -> None:
    node = await rig.add_fake_node(2, 5, kv_budget_bytes=1000)
    script = rig.script((node, 2, 5))
    await script.open()
    await script.first.send(Describe())
    described = await rig.gateway.receive(Description)
    assert (described.load, described.free_bytes) == (1, 1000)
    assert [(offer.model_digest, str(offer.spec)) for offer in described.slices] == [(DIGEST, "2:5")]


async def test_nothing_of_a_session_is_written_to_logs(rig: Rig, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("DEBUG")
    node = await rig.add_fake_node()
    script = rig.script((node, 0, 6))
    await script.open()
    node.runner.error = ValueError("the values are 0.25 and 17")
    await script.send(1, 0, some_rows(1))
    await script.failure()
    words = " ".join(record.getMessage() for record in caplog.records)
    assert script.session_id[:4].hex() in words
    assert "0.25" not in words
    assert script.route_key.hex() not in words
    assert repr(bytes(script.route_key)) not in words


async def test_a_stopping_node_frees_all_and_says_goodbye(rig: Rig) -> None:
    node = await rig.add_fake_node()
    script = rig.script((node, 0, 6))
    await script.open()
    await script.run(1, 0, some_rows(1))
    node.server.close()
    await script.send(
        2, 1, some_rows(1)
    )  # on its way while the node stops: no failure that invites a retry here
    await node.endpoint.close()
    async with asyncio.timeout(5):
        assert await rig.gateway.losses.get() is None  # a proper close
    assert rig.gateway.inbox.empty()
    assert node.stats.num_sessions == 0
    assert not node.runner.caches[0].is_open
