"""Chains over real node servers in one process: routes, replays, roll-back, deadlines, and what travels."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest

from routing import chain as chain_module
from routing.errors import ErrorCode, NoRouteError, RemoteError, WorkError
from routing.types import Answer, AnswerKind, Step, Want
from slicing.sampler import SamplingParams
from tests.integration.home import Home, forget_sessions, home, loser, rows, run, unbroken
from tests.node.fake_runner import HIDDEN_SIZE, NUM_LAYERS
from tests.node.rig import until


async def test_two_slices_give_what_one_gives() -> None:
    async with home() as here:
        whole = await unbroken(here, await here.rig.add_fake_node())
    async with home() as here:
        halves = await here.rig.add_fake_node(0, 3), await here.rig.add_fake_node(3, NUM_LAYERS)
        cut = await unbroken(here, *halves)
    for one, other in zip(whole, cut, strict=True):
        np.testing.assert_array_equal(one, other)


async def test_a_token_costs_one_step_and_one_answer_on_the_clients_links() -> None:
    async with home() as here:
        await here.know(await here.rig.add_fake_node(0, 3), await here.rig.add_fake_node(3, NUM_LAYERS))
        sent, received = here.messages_sent(), here.messages_received()
        dials = here.endpoint.num_dials
        chain = await here.open()
        for position in range(10):
            await run(chain, position, rows(1, position))
        now_sent, now_received = here.messages_sent(), here.messages_received()
        assert now_sent["Step"] - sent.get("Step", 0) == 10
        assert now_sent["Open"] - sent.get("Open", 0) == 1
        assert sum(now_sent.values()) - sum(sent.values()) == 11
        assert sum(now_received.values()) - sum(received.values()) == 10
        assert here.endpoint.num_dials == dials, "warm links need no handshake"
        await chain.close()


@pytest.mark.parametrize("hop", [0, 1])
async def test_a_node_cut_mid_answer_is_replaced_and_the_answer_is_the_unbroken_one(hop: int) -> None:
    async with home() as here:
        whole = await unbroken(here, await here.rig.add_fake_node())
    async with home() as here:
        nodes = [await here.rig.add_fake_node(s, e) for s, e in ((0, 3), (3, NUM_LAYERS)) for _ in range(2)]
        await here.know(*nodes)
        chain = await here.open()
        outputs = [await run(chain, 0, rows(3)), await run(chain, 3, rows(1, 1))]
        here.rig.network.cut_off(loser(here, chain, hop).node_id)
        outputs.append(await run(chain, 4, rows(1, 2)))
        for one, other in zip(whole, outputs, strict=True):
            np.testing.assert_array_equal(one, other)
        assert chain.replays == 1
        await chain.close()


async def test_a_node_lost_while_its_step_runs_is_replaced() -> None:
    async with home() as here:
        whole = await unbroken(here, await here.rig.add_fake_node())
    async with home() as here:
        nodes = [await here.rig.add_fake_node(s, e) for s, e in ((0, 3), (3, NUM_LAYERS), (3, NUM_LAYERS))]
        await here.know(*nodes)
        chain = await here.open()
        await run(chain, 0, rows(3))
        await run(chain, 3, rows(1, 1))
        lost = loser(here, chain, 1)
        lost.runner.hold()
        waiting = asyncio.create_task(run(chain, 4, rows(1, 2)))
        await asyncio.to_thread(lost.runner.entered.wait)
        here.rig.network.cut_off(lost.node_id)
        np.testing.assert_array_equal(await waiting, whole[2])
        lost.runner.release()
        await chain.close()


async def test_a_link_lost_between_two_nodes_is_mended_too() -> None:
    async with home() as here:
        whole = await unbroken(here, await here.rig.add_fake_node())
    async with home() as here:
        nodes = [await here.rig.add_fake_node(s, e) for s, e in ((0, 3), (3, NUM_LAYERS), (3, NUM_LAYERS))]
        await here.know(*nodes)
        chain = await here.open()
        await run(chain, 0, rows(3))
        here.rig.network.cut(nodes[0].node_id, loser(here, chain, 1).node_id)
        np.testing.assert_array_equal(await run(chain, 3, rows(1, 1)), whole[1])
        await chain.close()


async def test_with_no_replica_left_the_error_names_the_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chain_module, "RETURN_GRACE_S", 0.3)
    async with home() as here:
        await here.know(await here.rig.add_fake_node(0, 3), await here.rig.add_fake_node(3, NUM_LAYERS))
        chain = await here.open()
        await run(chain, 0, rows(3))
        here.rig.network.cut_off(loser(here, chain, 1).node_id)
        with pytest.raises(NoRouteError, match=r"layers 3:6 of fake"):
            await run(chain, 3, rows(1))
        await chain.close()


async def test_a_silent_node_is_left_when_a_replica_is_there() -> None:
    async with home() as here:
        whole = await unbroken(here, await here.rig.add_fake_node())
    async with home() as here:
        nodes = [await here.rig.add_fake_node(s, e) for s, e in ((0, 3), (3, NUM_LAYERS), (3, NUM_LAYERS))]
        await here.know(*nodes)
        chain = await here.open()
        await run(chain, 0, rows(3))
        stopped = loser(here, chain, 1)
        for link in here.rig.network.links:
            for side in (link, link.other_side):
                if side.own_id == stopped.node_id:
                    side.stall()
        np.testing.assert_array_equal(await run(chain, 3, rows(1, 1)), whole[1])
        assert chain.replays == 1
        await chain.close()


async def test_a_session_that_its_node_forgot_is_replayed_on_the_same_node() -> None:
    async with home() as here:
        node = await here.rig.add_fake_node()
        whole = await unbroken(here, node)
        chain = await here.open()
        await run(chain, 0, rows(3))
        forget_sessions(node)
        np.testing.assert_array_equal(await run(chain, 3, rows(1, 1)), whole[1])
        assert chain.replays == 1
        await chain.close()


async def test_a_failing_computation_says_so_and_harms_no_other_session() -> None:
    async with home() as here:
        node = await here.rig.add_fake_node()
        whole = await unbroken(here, node)
        poisoned, other = await here.open(), await here.open()
        await run(other, 0, rows(3))
        node.runner.error = ValueError("a secret of the prompt")
        with pytest.raises(RemoteError) as caught:
            await run(poisoned, 0, rows(3))
        assert caught.value.code is ErrorCode.COMPUTE
        assert "secret" not in str(caught.value)
        np.testing.assert_array_equal(await run(other, 3, rows(1, 1)), whole[1])
        await poisoned.close()
        await other.close()


async def test_a_step_at_an_earlier_position_rolls_the_session_back() -> None:
    async with home() as here:
        node = await here.rig.add_fake_node()
        whole = await unbroken(here, node)
        chain = await here.open()
        await run(chain, 0, rows(3))
        await run(chain, 3, rows(4, 9))  # drafts that were not taken
        np.testing.assert_array_equal(await run(chain, 3, rows(1, 1)), whole[1])
        forget_sessions(node)  # what is replayed then is the rolled back session
        np.testing.assert_array_equal(await run(chain, 4, rows(1, 2)), whole[2])
        await chain.close()


async def test_a_roll_back_into_the_middle_of_a_step_keeps_its_first_rows() -> None:
    async with home() as here:
        node = await here.rig.add_fake_node()
        await here.know(node)
        chain = await here.open()
        await run(chain, 0, rows(5))
        once = await run(chain, 2, rows(1, 7))
        forget_sessions(node)
        await run(chain, 3, rows(1, 8))
        straight = await here.open()
        await run(straight, 0, rows(5)[:2])
        np.testing.assert_array_equal(once, await run(straight, 2, rows(1, 7)))
        assert chain.replays == 1
        await chain.close()
        await straight.close()


async def test_a_deadline_ends_the_wait() -> None:
    async with home() as here:
        node = await here.rig.add_fake_node()
        await here.know(node)
        chain = await here.open()
        node.runner.hold()
        with pytest.raises(WorkError) as caught:
            await chain.step(rows(1).tobytes(), position=0, rows=1, deadline_s=0.05)
        assert caught.value.code is ErrorCode.DEADLINE
        await chain.close()
        node.runner.release()


async def test_closing_a_chain_frees_every_node() -> None:
    async with home() as here:
        nodes = [await here.rig.add_fake_node(s, e) for s, e in ((0, 2), (2, 4), (4, NUM_LAYERS))]
        await here.know(*nodes)
        chain = await here.open()
        await run(chain, 0, rows(3))
        assert [node.stats.num_sessions for node in nodes] == [1, 1, 1]
        await chain.close()
        await until(lambda: all(node.stats.num_sessions == 0 for node in nodes))
        await until(lambda: all(not cache.is_open for node in nodes for cache in node.runner.caches))
        assert here.switchboard.num_chains == 0


async def test_answers_come_down_the_chain_sealed_when_the_last_node_has_no_link_to_us() -> None:
    async with home() as here:
        nodes = [await here.rig.add_fake_node(s, e) for s, e in ((0, 3), (3, NUM_LAYERS))]
        whole = await unbroken(here, *nodes)
        chain = await here.open()
        here.switchboard.forget(chain)  # the loss of this link is not the chain's business here
        here.rig.network.cut(here.endpoint.node_id, nodes[1].node_id)
        here.switchboard.register(chain)
        middle: list[Answer] = []

        def watch(link: Any, message: Any) -> bool:
            if isinstance(message, Answer) and link.own_id == nodes[0].node_id:
                middle.append(message)
            return isinstance(message, Step) and False

        here.rig.network.drop = watch
        np.testing.assert_array_equal(await run(chain, 0, rows(3)), whole[0])
        assert middle
        assert whole[0].tobytes() not in bytes(middle[0].payload)
        await chain.close()


async def test_the_thin_mode_draws_the_same_tokens_after_a_loss() -> None:
    params = SamplingParams(temperature=1.0, seed=11, presence_penalty=1.5)
    sampling = {"params": params.to_map(), "prompt_ids": []}

    async def draw(here: Home, cut_after: int | None) -> list[int]:
        chain = await here.open(takes_token_ids=True, runs_closing=True, sampling=sampling)
        drawn, position, ids = [], 0, [3, 1, 4]
        for number in range(6):
            if number == cut_after:
                here.rig.network.cut_off(loser(here, chain, 1).node_id)
            payload = np.asarray(ids, dtype="<i4").tobytes()
            answer = await chain.step(payload, position=position, rows=len(ids))
            assert answer.kind is AnswerKind.TOKEN_IDS
            position += len(ids)
            ids = [int(np.frombuffer(answer.payload, "<u4")[-1])]
            drawn += ids
        assert chain.replays == (0 if cut_after is None else 1)
        await chain.close()
        return drawn

    async with home() as here:
        nodes = [await here.rig.add_fake_node(s, e) for s, e in ((0, 3), (3, NUM_LAYERS), (3, NUM_LAYERS))]
        await here.know(*nodes)
        straight = await draw(here, None)
        assert await draw(here, 4) == straight


async def test_prefill_chunks_travel_together_and_acknowledge_without_rows() -> None:
    async with home() as here:
        await here.know(await here.rig.add_fake_node(0, 3), await here.rig.add_fake_node(3, NUM_LAYERS))
        chain = await here.open()
        values = rows(9)
        sent = [
            await chain.send(values[at : at + 3].tobytes(), position=at, rows=3, want=want)
            for at, want in ((0, Want.LIST), (3, Want.LIST), (6, Want.LAST))
        ]
        answers = [await chain.answer(step) for step in sent]
        assert [len(answer.payload) for answer in answers] == [0, 0, HIDDEN_SIZE * 4]
        await chain.close()
