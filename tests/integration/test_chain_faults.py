"""Chains whose nodes and links fail at bad moments, and callers that leave: the answer goes on, or nothing is left."""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from node import return_path
from routing import blame, follower, live_route, route_watch, switchboard
from routing import chain as chain_module
from routing.errors import ErrorCode, NoRouteError, RemoteError, WorkError
from routing.switchboard import Switchboard
from routing.types import Cancel, Capabilities, Message, Open, Resumed, SliceSpec, Step, Want, WireDtype
from slicing.sampler import SamplingParams
from tests.integration.home import Home, forget_sessions, home, loser, rows, run, unbroken
from tests.node.fake_runner import HIDDEN_SIZE, NUM_LAYERS, FakeRunner
from tests.node.rig import Node, fake_offer, rows_of, until
from tests.support import fake_link
from tests.support.fake_link import FakeLink


async def halves(here: Home, num_first: int = 1, num_last: int = 2) -> list[Node]:
    spans = [(0, 3)] * num_first + [(3, NUM_LAYERS)] * num_last
    nodes = [await here.rig.add_fake_node(*span) for span in spans]
    await here.know(*nodes)
    return nodes


async def all_is_freed(here: Home) -> None:
    await until(lambda: all(node.stats.num_sessions == 0 for node in here.rig.nodes))
    await until(lambda: all(not cache.is_open for node in here.rig.nodes for cache in node.runner.caches))
    assert here.switchboard.num_chains == 0


async def test_a_second_node_lost_during_the_replay_is_replaced_too() -> None:
    async with home() as here:
        whole = await unbroken(here, await here.rig.add_fake_node())
    async with home() as here:
        await halves(here, num_last=3)
        chain = await here.open()
        await run(chain, 0, rows(3))
        await run(chain, 3, rows(1, 1))
        lost: list[Node] = []

        def lose_again(link: Any, message: Message) -> bool:
            if isinstance(message, Step) and message.epoch == 2 and message.step == 2 and len(lost) == 1:
                lost.append(loser(here, chain, 1))
                here.rig.network.cut_off(lost[-1].node_id)
            return False

        here.rig.network.drop = lose_again
        lost.append(loser(here, chain, 1))
        here.rig.network.cut_off(lost[0].node_id)
        np.testing.assert_array_equal(await run(chain, 4, rows(1, 2)), whole[2])
        assert len(lost) == 2
        assert chain.epoch == 3
        await chain.close()


@pytest.mark.parametrize("hop", [0, 1])
async def test_a_node_lost_while_the_route_opens_is_replaced(hop: int) -> None:
    async with home() as here:
        whole = await unbroken(here, await here.rig.add_fake_node())
    async with home() as here:
        nodes = await halves(here, num_first=2)
        lost: list[Node] = []

        def lose(link: Any, message: Message) -> bool:
            if isinstance(message, Open) and message.hop == hop and not lost:
                lost.append(next(node for node in nodes if node.node_id == link.peer_id))
                here.rig.network.cut_off(link.peer_id)
            return False

        here.rig.network.drop = lose
        chain = await here.open()
        np.testing.assert_array_equal(await run(chain, 0, rows(3)), whole[0])
        assert lost
        await chain.close()


async def test_a_node_lost_with_chunks_in_flight_gives_each_chunk_one_answer() -> None:
    values = rows(12)
    async with home() as here:
        await here.know(await here.rig.add_fake_node())
        chain = await here.open()
        whole = rows_of(
            await chain.answer(await chain.send(values.tobytes(), position=0, rows=12, want=Want.ALL))
        )
        await chain.close()
    async with home() as here:
        await halves(here)
        chain = await here.open()
        lost = loser(here, chain, 1)
        sent = [await chain.send(values[:3].tobytes(), position=0, rows=3, want=Want.ALL)]
        first = await chain.answer(sent[0])
        lost.runner.hold()
        for at in (3, 6, 9):
            sent.append(await chain.send(values[at : at + 3].tobytes(), position=at, rows=3, want=Want.ALL))
        await asyncio.to_thread(lost.runner.entered.wait)
        here.rig.network.cut_off(lost.node_id)
        answers = [first, *[await chain.answer(step) for step in sent[1:]]]
        np.testing.assert_allclose(np.concatenate([rows_of(answer) for answer in answers]), whole, rtol=1e-6)
        assert [answer.position for answer in answers] == [0, 3, 6, 9]
        lost.runner.release()
        await chain.close()


async def test_a_link_that_is_cut_to_the_only_node_is_dialled_again() -> None:
    async with home() as here:
        node = await here.rig.add_fake_node()
        whole = await unbroken(here, node)
        chain = await here.open()
        await run(chain, 0, rows(3))
        here.rig.network.cut(here.endpoint.node_id, node.node_id)
        np.testing.assert_array_equal(await run(chain, 3, rows(1, 1)), whole[1])
        assert chain.replays == 1
        await chain.close()
        await all_is_freed(here)


async def test_a_session_that_opens_while_the_only_node_is_away_waits_for_it() -> None:
    async with home() as here:
        node = await here.rig.add_fake_node()
        whole = await unbroken(here, node)
        network = here.rig.network
        network.cut_off(node.node_id)
        await until(lambda: not here.switchboard.directory.records())
        opening = asyncio.create_task(here.open())
        await until(lambda: here.switchboard.num_chains == 1)
        network.bring_back(node.node_id)
        chain = await opening
        np.testing.assert_array_equal(await run(chain, 0, rows(3)), whole[0])
        await chain.close()
        await all_is_freed(here)


async def test_a_cut_between_the_only_two_nodes_is_mended_on_them() -> None:
    async with home() as here:
        whole = await unbroken(here, await here.rig.add_fake_node())
    async with home() as here:
        nodes = await halves(here, num_last=1)
        chain = await here.open()
        await run(chain, 0, rows(3))
        here.rig.network.cut(nodes[0].node_id, nodes[1].node_id)
        np.testing.assert_array_equal(await run(chain, 3, rows(1, 1)), whole[1])
        await chain.close()
        await all_is_freed(here)


async def test_the_loss_of_one_of_two_links_to_a_node_costs_a_replay_and_not_the_node() -> None:
    async with home() as here:
        node = await here.rig.add_fake_node()
        whole = await unbroken(here, node)
        chain = await here.open()
        await run(chain, 0, rows(3))
        (link,) = here.endpoint.links_to(node.node_id)
        second = await here.endpoint._dial_new(node.address)
        node.runner.hold()
        waiting = asyncio.create_task(run(chain, 3, rows(1, 1)))
        await asyncio.to_thread(node.runner.entered.wait)
        link.cut()
        node.runner.release()
        np.testing.assert_array_equal(await waiting, whole[1])
        assert not second.is_closed
        await chain.close()


async def test_losses_now_and_then_never_add_up_to_a_cap() -> None:
    async with home() as here:
        node = await here.rig.add_fake_node()
        await here.know(node)
        chain = await here.open()
        for position in range(12):
            await run(chain, position, rows(1, position))
            forget_sessions(node)
        assert chain.replays == 11
        await chain.close()


async def test_a_node_that_forgets_at_every_try_ends_in_its_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blame, "LAST_PAUSE_S", 0.01)
    async with home() as here:
        node = await here.rig.add_fake_node()
        await here.know(node)
        chain = await here.open()
        await run(chain, 0, rows(1))

        def forget(link: Any, message: Message) -> bool:
            if isinstance(message, Resumed):
                forget_sessions(node)
            return False

        here.rig.network.drop = forget
        forget_sessions(node)
        with pytest.raises(WorkError) as caught:
            await run(chain, 1, rows(1))
        assert caught.value.code is ErrorCode.NO_SESSION
        await chain.close()


async def test_a_full_node_is_waited_for_within_the_deadline() -> None:
    async with home() as here:
        node = await here.rig.add_fake_node(max_sessions=1)
        await here.know(node)
        first, second = await here.open(), await here.open()
        await run(first, 0, rows(1))
        with pytest.raises(WorkError) as caught:
            await second.step(rows(1).tobytes(), position=0, rows=1, deadline_s=0.2)
        assert caught.value.code is ErrorCode.DEADLINE
        await second.close()
        third = await here.open()
        waiting = asyncio.create_task(run(third, 0, rows(1)))
        await asyncio.sleep(0.05)
        await first.close()
        await waiting
        await third.close()
        await all_is_freed(here)


async def test_a_long_replay_is_never_more_than_two_windows_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chain_module, "REPLAY_STEPS", 8)
    async with home() as here:
        nodes = await halves(here, num_first=2)
        chain = await here.open()
        for position in range(50):
            await run(chain, position, rows(1, position))
        lost = loser(here, chain, 0)
        spare = next(node for node in nodes[:2] if node is not lost)
        spare.runner.hold()
        before = here.messages_sent()["Step"]
        here.rig.network.cut_off(lost.node_id)
        waiting = asyncio.create_task(run(chain, 50, rows(1, 50)))
        asked = here.messages_sent()["Inquire"]
        await until(lambda: here.messages_sent()["Inquire"] > asked + 2)  # it looks how far the node is
        assert here.messages_sent()["Step"] - before == 2 * 8
        spare.runner.release()
        await waiting
        assert chain.rows_repeated == 51
        await chain.close()


async def test_what_was_handed_out_is_not_kept() -> None:
    async with home() as here:
        await here.know(await here.rig.add_fake_node())
        chain = await here.open()
        sent = await chain.send(rows(3).tobytes(), position=0, rows=3, want=Want.ALL)
        await chain.answer(sent)
        assert sent.answer is None
        assert chain._live is not None
        assert not chain._live._sent
        await chain.close()


async def speaking(here: Home, dtype: WireDtype, *spoken: WireDtype) -> Node:
    node = await here.rig.add_node(FakeRunner(), replace(fake_offer(SliceSpec(0, NUM_LAYERS)), dtype=dtype))
    told = Capabilities(dtypes=spoken, seal_key=node.seal_key.public)
    node.endpoint.capabilities = lambda: told
    return node


def halved(values: np.ndarray[Any, Any]) -> bytes:
    """float32 rows cut to bfloat16."""
    return (values.view("<u4") >> 16).astype("<u2").tobytes()


@pytest.mark.parametrize("spoken", [(WireDtype.FLOAT32,), (WireDtype.FLOAT32, WireDtype.BFLOAT16)])
async def test_recorded_steps_go_in_again_bit_for_bit_at_a_node_of_another_dtype(
    spoken: tuple[WireDtype, ...],
) -> None:
    async with home() as here:
        half = await speaking(here, WireDtype.BFLOAT16, WireDtype.BFLOAT16, WireDtype.FLOAT32)
        await here.know(half)
        chain = await here.open()
        assert chain.first_wire is WireDtype.BFLOAT16
        values = rows(3)
        sent = await chain.send(halved(values), position=0, rows=3)
        assert len((await chain.answer(sent)).payload) == HIDDEN_SIZE * 2
        assert sent.wire_back is WireDtype.BFLOAT16
        other = await speaking(here, WireDtype.FLOAT32, *spoken)
        await here.know(other)
        here.rig.network.cut_off(half.node_id)
        sent = await chain.send(halved(rows(1, 1)), position=3, rows=1)
        answer = await chain.answer(sent)
        assert sent.wire_back is WireDtype.FLOAT32
        assert chain.first_wire is (WireDtype.BFLOAT16 if len(spoken) > 1 else WireDtype.FLOAT32)
        straight = await here.open()
        assert straight.first_wire is WireDtype.FLOAT32
        cut = [(v.view("<u4") & 0xFFFF0000).view("<f4") for v in (values, rows(1, 1))]
        await run(straight, 0, cut[0])
        np.testing.assert_array_equal(rows_of(answer), await run(straight, 3, cut[1]))
        await chain.close()
        await straight.close()


async def test_a_roll_back_into_a_drawing_step_does_not_draw_again_in_a_replay() -> None:
    params = SamplingParams(temperature=1.0, seed=5, frequency_penalty=2.0)
    sampling = {"params": params.to_map(), "prompt_ids": []}

    async def draw(here: Home, node: Node, forgets: bool) -> int:
        chain = await here.open(takes_token_ids=True, runs_closing=True, sampling=sampling)
        ids = np.array([3, 1, 4, 1, 5], "<i4")
        await chain.step(ids.tobytes(), position=0, rows=5)
        await chain.step(ids[:1].tobytes(), position=2, rows=1)
        if forgets:
            forget_sessions(node)
        answer = await chain.step(ids[1:2].tobytes(), position=3, rows=1)
        assert chain.replays == int(forgets)
        await chain.close()
        return int(np.frombuffer(answer.payload, "<u4")[-1])

    async with home() as here:
        node = await here.rig.add_fake_node()
        await here.know(node)
        assert await draw(here, node, False) == await draw(here, node, True)


async def test_a_stopped_node_that_comes_back_is_told_and_not_listened_to() -> None:
    async with home() as here:
        whole = await unbroken(here, await here.rig.add_fake_node())
    async with home() as here:
        await halves(here)
        chain = await here.open()
        await run(chain, 0, rows(3))
        stopped = loser(here, chain, 1)
        links = [
            s
            for link in here.rig.network.links
            for s in (link, link.other_side)
            if s.own_id == stopped.node_id
        ]
        for link in links:
            link.stall()
        np.testing.assert_array_equal(await run(chain, 3, rows(1, 1)), whole[1])
        for link in links:
            link.resume()
        np.testing.assert_array_equal(await run(chain, 4, rows(1, 2)), whole[2])
        await until(lambda: stopped.stats.num_sessions == 0)
        await chain.close()
        await all_is_freed(here)


async def test_a_node_that_was_away_when_the_session_ended_is_told_when_it_is_back() -> None:
    async with home() as here:
        node = await here.rig.add_fake_node()
        await here.know(node)
        chain = await here.open()
        await run(chain, 0, rows(3))
        here.rig.network.cut(here.endpoint.node_id, node.node_id)
        await chain.close()
        assert node.stats.num_sessions == 1
        await all_is_freed(here)


@pytest.mark.parametrize("place", ["gateway to first", "first to second", "gateway to second"])
async def test_a_path_that_fell_silent_is_left_for_another_to_the_same_node(
    place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(route_watch, "SLACK_S", 0.3)
    monkeypatch.setattr(route_watch, "SUSPECT_AFTER_S", 0.1)
    for module in (fake_link, route_watch, live_route, switchboard, return_path):
        monkeypatch.setattr(module, "STALE_AFTER_S", 0.2)
    async with home() as here:
        nodes = await here.rig.add_fake_node(0, 3), await here.rig.add_fake_node(3, NUM_LAYERS)
        whole = await unbroken(here, *nodes)
        chain = await here.open()
        await run(chain, 0, rows(3))
        ends = {"gateway": here.endpoint, "first": nodes[0], "second": nodes[1]}
        one, other = (ends[name].node_id for name in place.split(" to "))
        for link in here.rig.network.links_between(one, other):
            link.stall()
            link.other_side.stall()
        async with asyncio.timeout(4):
            np.testing.assert_array_equal(await run(chain, 3, rows(1, 1)), whole[1])
        assert sum(node.stats.rows_run for node in nodes) == 2 * 5 + 2 * 4  # nothing was computed again
        await chain.close()


async def test_an_end_that_was_lost_with_its_link_is_told_again() -> None:
    async with home() as here:
        node = await here.rig.add_fake_node()
        await here.know(node)
        chain = await here.open()
        await run(chain, 0, rows(3))
        await chain.close()  # its cancel is on the wire
        here.rig.network.cut(here.endpoint.node_id, node.node_id)
        assert node.stats.num_sessions == 1
        await until(lambda: node.stats.num_sessions == 0)


async def test_a_caller_that_leaves_at_any_moment_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(follower, "FIRST_REDIAL_S", 0.01)
    monkeypatch.setattr(follower, "LAST_REDIAL_S", 0.01)
    async with home() as here:
        nodes = [await here.rig.add_fake_node(s, e) for s, e in ((0, 2), (0, 2), (2, 4), (4, 6), (4, 6))]
        await here.know(*nodes)

        async def answer_something(loses: bool) -> None:
            chain = await here.open()
            try:
                sent = [
                    await chain.send(rows(3).tobytes(), position=at, rows=3, want=Want.LIST) for at in (0, 3)
                ]
                for step in sent:
                    await chain.answer(step)
                if loses:
                    here.rig.network.cut(here.endpoint.node_id, loser(here, chain, 2).node_id)
                for position in range(6, 9):
                    await run(chain, position, rows(1, position))
            finally:
                await chain.close()

        for loses in (False, True):
            for ticks in range(0, 60, 1 + loses):
                await until(lambda: len(here.switchboard.directory.records()) == 5)
                task = asyncio.create_task(answer_something(loses))
                for _ in range(ticks):
                    await asyncio.sleep(0)
                task.cancel()
                await asyncio.sleep(0)
                task.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await task
                assert here.switchboard.num_chains == 0
        await all_is_freed(here)
        assert all(not link.num_watches for link in here.endpoint._links)


async def test_a_chain_closed_by_another_task_ends_the_wait_and_opens_nothing() -> None:
    async with home() as here:
        nodes = await halves(here)
        chain = await here.open()
        await run(chain, 0, rows(3))
        nodes[0].runner.hold()
        waiting = asyncio.create_task(run(chain, 3, rows(1)))
        await asyncio.to_thread(nodes[0].runner.entered.wait)
        await chain.close()
        with pytest.raises(WorkError) as caught:
            await waiting
        assert caught.value.code is ErrorCode.CANCELLED
        nodes[0].runner.release()
        await all_is_freed(here)


async def test_a_deadline_ends_a_replay_too() -> None:
    async with home() as here:
        nodes = await halves(here)
        chain = await here.open()
        for position in range(3):
            await run(chain, position, rows(1, position))
        lost = loser(here, chain, 1)
        other = next(node for node in nodes[1:] if node is not lost)
        other.runner.hold()
        here.rig.network.cut_off(lost.node_id)
        with pytest.raises(WorkError) as caught:
            await chain.step(rows(1).tobytes(), position=3, rows=1, deadline_s=0.1)
        assert caught.value.code is ErrorCode.DEADLINE
        await chain.close()
        other.runner.release()
        await until(lambda: not any(node.stats.num_sessions for node in nodes if node is not lost))


async def test_steps_that_had_deadlines_of_their_own_are_replayed_without() -> None:
    async with home() as here:
        node = await here.rig.add_fake_node()
        await here.know(node)
        chain = await here.open()
        for position in range(2):
            await chain.step(rows(1).tobytes(), position=position, rows=1, deadline_s=0.1)
        await asyncio.sleep(0.15)
        forget_sessions(node)
        await chain.step(rows(1).tobytes(), position=2, rows=1, deadline_s=5)
        assert chain.replays == 1
        await chain.close()


async def test_nodes_that_a_route_leaves_are_cancelled_even_when_the_caller_leaves_then() -> None:
    async with home() as here:
        await halves(here)
        chain = await here.open()
        await run(chain, 0, rows(3))
        left = loser(here, chain, 1)
        here.rig.network.cut(here.endpoint.node_id, left.node_id)
        waiting = asyncio.create_task(run(chain, 3, rows(1)))
        while chain.epoch == 1:
            await asyncio.sleep(0)
        waiting.cancel()
        await chain.close()
        with contextlib.suppress(asyncio.CancelledError):
            await waiting
        await all_is_freed(here)


async def test_a_failing_replica_is_left_for_one_that_can() -> None:
    async with home() as here:
        whole = await unbroken(here, await here.rig.add_fake_node())
    async with home() as here:
        await halves(here)
        chain = await here.open()
        loser(here, chain, 1).runner.error = ValueError("broken")
        np.testing.assert_array_equal(await run(chain, 0, rows(3)), whole[0])
        await chain.close()


async def test_a_middle_node_lost_out_of_our_sight_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    async with home() as here:
        whole = await unbroken(here, await here.rig.add_fake_node())
    async with home() as here:
        nodes = [await here.rig.add_fake_node(s, e) for s, e in ((0, 2), (2, 4), (2, 4), (4, 6))]
        await here.know(*nodes)
        with monkeypatch.context() as patch:
            patch.setattr(Switchboard, "live_link", lambda self, node_id: None)
            chain = await here.open()
        assert chain._live is not None
        assert chain._live._links[1] is None
        await run(chain, 0, rows(3))
        here.rig.network.cut_off(loser(here, chain, 1).node_id)
        np.testing.assert_array_equal(await run(chain, 3, rows(1, 1)), whole[1])
        await chain.close()


async def test_a_cancel_reaches_what_a_route_left_behind() -> None:
    async with home() as here:
        nodes = await halves(here)
        chain = await here.open()
        await run(chain, 0, rows(3))
        left = loser(here, chain, 1)
        here.rig.network.cut(nodes[0].node_id, left.node_id)
        cancels: list[Any] = []

        def watch(link: Any, message: Message) -> bool:
            if isinstance(message, Cancel):
                cancels.append((link.peer_id, message.epoch))
            return False

        here.rig.network.drop = watch
        await run(chain, 3, rows(1, 1))
        assert (left.node_id, 1) in cancels
        await until(lambda: left.stats.num_sessions == 0)
        await chain.close()


async def test_no_route_at_all_is_said_at_once() -> None:
    async with home() as here:
        await here.know(await here.rig.add_fake_node(0, 3))
        with pytest.raises(NoRouteError, match="3:6"):
            async with asyncio.timeout(chain_module.RETURN_GRACE_S):
                await here.open()
        assert here.switchboard.num_chains == 0


async def test_a_node_whose_key_is_no_key_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    async with home() as here:
        bad, good = await here.rig.add_fake_node(), await here.rig.add_fake_node()
        told = Capabilities(seal_key=bytes(32))
        bad.endpoint.capabilities = lambda: told
        await here.know(bad)
        with monkeypatch.context() as patch:
            patch.setattr(chain_module, "RETURN_GRACE_S", 0.3)
            with pytest.raises((RemoteError, NoRouteError)):
                await here.open()
        await here.know(bad, good)
        chain = await here.open()
        await run(chain, 0, rows(1))
        await chain.close()


async def test_a_chunk_that_does_not_leave_does_not_hold_up_the_suspicion(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def send(self: FakeLink, message: Message) -> None:
        gone = asyncio.Event()
        self.post(message, gone.set)
        await gone.wait()  # as a link without credit does

    monkeypatch.setattr(FakeLink, "send", send)
    monkeypatch.setattr(live_route, "SMALL_BYTES", 0)
    monkeypatch.setattr(route_watch, "SUSPECT_AFTER_S", 0.1)
    monkeypatch.setattr(live_route, "SUSPECT_POLL_S", 0.02)
    async with home() as here:
        nodes = [await here.rig.add_fake_node() for _ in range(2)]
        whole = await unbroken(here, *nodes)
        chain = await here.open()
        await run(chain, 0, rows(3))
        (link,) = here.endpoint.links_to(loser(here, chain, 0).node_id)
        link.stall()
        np.testing.assert_array_equal(await run(chain, 3, rows(1, 1)), whole[1])
        assert chain.replays == 1
        for side in here.endpoint.links_to(loser(here, chain, 0).node_id):
            side.stall()
        link.stall()
        with pytest.raises(WorkError) as caught:
            await chain.send(rows(1).tobytes(), position=4, rows=1, deadline_s=0.05)
        assert caught.value.code is ErrorCode.DEADLINE
        await chain.close()


async def test_a_busy_replica_is_not_waited_for_when_another_is_free() -> None:
    async with home() as here:
        full, free = [await here.rig.add_fake_node(max_sessions=1) for _ in range(2)]
        await here.know(full)
        first = await here.open()
        await run(first, 0, rows(1))
        await here.know(full, free)
        chain = await here.open()
        async with asyncio.timeout(0.5):
            await run(chain, 0, rows(1))
        await chain.close()
        await first.close()
