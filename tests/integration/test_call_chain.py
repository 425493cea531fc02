"""Calls of blocks over chains of real nodes: the same bits as one machine, whoever is lost and whoever lies."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch

from routing.errors import ErrorCode, NoRouteError, RemoteError
from routing.types import Answer, Step
from slicing.diffusion.patches import Cut, Mode
from slicing.diffusion.wire import CallHeader, WireForm
from tests.integration.home import forget_sessions, home, loser
from tests.integration.pictures import Branch, blocks_of, open_branch, same, two_of_each
from tests.node.block_rig import GRID, add_block_node, run_whole, toy_pass
from tests.node.fake_runner import NUM_LAYERS
from tests.node.rig import until

NUM_PASSES = 4
CUT = Cut(GRID, 0, 2)


@pytest.mark.parametrize("cuts", [(), (3,), (1, 5), (2, 4)])
async def test_any_cut_of_the_stack_gives_the_bytes_of_one_machine(cuts: tuple[int, ...]) -> None:
    async with home() as here:
        ends = (0, *cuts, NUM_LAYERS)
        pairs = list(itertools.pairwise(ends))
        await here.know(*[await add_block_node(here.rig, start, end) for start, end in pairs])
        branch = await open_branch(here)
        for number in range(NUM_PASSES):
            assert same(await branch.run(number), run_whole(toy_pass(number)))
        assert branch.chain.num_recorded == 0, "what was answered is not needed for another route"
        await branch.chain.close()


async def test_constants_cross_each_link_once() -> None:
    async with home() as here:
        await here.know(await add_block_node(here.rig, 0, 3), await add_block_node(here.rig, 3, NUM_LAYERS))
        branch = await open_branch(here)
        for number in range(NUM_PASSES):
            await branch.run(number)
        made = toy_pass(0)
        saved = made.slots[0].nbytes + len(made.plan.to_json())
        steps = [
            [len(message.payload) for message in link.sent if isinstance(message, Step)]
            for link in here.rig.network.links
        ]
        steps = [sizes for sizes in steps if sizes]
        assert len(steps) == 2
        for sizes in steps:
            assert len(sizes) == NUM_PASSES
            assert all(size < sizes[0] - saved + 100 for size in sizes[1:])
        await branch.chain.close()


@pytest.mark.parametrize("hop", [0, 1, 2])
@pytest.mark.parametrize("lost_at", range(NUM_PASSES))
async def test_a_node_lost_at_any_pass_is_replaced_and_the_bytes_are_the_same(hop: int, lost_at: int) -> None:
    async with home() as here:
        await two_of_each(here, 2, 4)
        branch = await open_branch(here)
        for number in range(NUM_PASSES):
            if number == lost_at:
                here.rig.network.cut_off(loser(here, branch.chain, hop).node_id)
            assert same(await branch.run(number), run_whole(toy_pass(number)))
        assert branch.chain.replays == 1
        await branch.chain.close()


@pytest.mark.parametrize("hop", [0, 1])
async def test_a_node_lost_while_it_computes_is_replaced(hop: int) -> None:
    async with home() as here:
        await two_of_each(here, 3)
        branch = await open_branch(here)
        await branch.run(0)
        lost = loser(here, branch.chain, hop)
        blocks_of(lost).hold()
        waiting = asyncio.create_task(branch.run(1))
        await asyncio.to_thread(blocks_of(lost).entered.wait)
        here.rig.network.cut_off(lost.node_id)
        assert same(await waiting, run_whole(toy_pass(1)))
        assert branch.chain.replays == 1
        blocks_of(lost).release()
        await branch.chain.close()


async def test_with_no_replica_left_the_error_names_the_layers() -> None:
    async with home() as here:
        await here.know(await add_block_node(here.rig, 0, 3), await add_block_node(here.rig, 3, NUM_LAYERS))
        branch = await open_branch(here)
        await branch.run(0)
        here.rig.network.cut_off(loser(here, branch.chain, 1).node_id)
        with pytest.raises(NoRouteError, match=r"layers 3:6"):
            await branch.run(1)
        await branch.chain.close()


async def test_a_session_that_a_node_forgot_begins_anew_on_the_same_nodes() -> None:
    async with home() as here:
        nodes = [await add_block_node(here.rig, 0, 3), await add_block_node(here.rig, 3, NUM_LAYERS)]
        await here.know(*nodes)
        branch = await open_branch(here)
        for number in range(3):
            await branch.run(number)
            forget_sessions(nodes[number % 2])
        assert same(await branch.run(3), run_whole(toy_pass(3)))
        assert branch.chain.replays == 3
        assert {node.stats.num_sessions for node in nodes} == {1}
        await branch.chain.close()


async def test_branches_over_the_same_nodes_do_not_mix() -> None:
    async with home() as here:
        nodes = [await add_block_node(here.rig, 0, 3), await add_block_node(here.rig, 3, NUM_LAYERS)]
        await here.know(*nodes)
        branches = [await open_branch(here, number) for number in range(4)]

        async def run(branch: Branch) -> None:
            for number in range(6):
                made = toy_pass(number, branch=branch.number)
                assert same(await branch.run(number), run_whole(made))

        await asyncio.gather(*map(run, branches))
        assert [len(blocks_of(node).passes) for node in nodes] == [24, 24]
        for branch in branches:
            await branch.chain.close()


async def test_several_passes_under_way_come_back_in_order_and_run_on_both_nodes_at_once() -> None:
    async with home() as here:
        nodes = [await add_block_node(here.rig, 0, 3), await add_block_node(here.rig, 3, NUM_LAYERS)]
        await here.know(*nodes)
        branch = await open_branch(here)
        await branch.run(0)
        blocks_of(nodes[1]).hold()
        sent = [await branch.send(toy_pass(number), CallHeader(pass_number=number)) for number in range(1, 5)]
        await until(lambda: len(blocks_of(nodes[0]).passes) == 5)  # the first is done with all of them
        await until(lambda: len(blocks_of(nodes[1]).passes) == 2)
        blocks_of(nodes[1]).release()
        for number, recorded in enumerate(sent, start=1):
            assert same(await branch.take(recorded), run_whole(toy_pass(number)))
        await branch.chain.close()


async def test_passes_under_way_are_made_again_when_a_node_is_lost() -> None:
    async with home() as here:
        await two_of_each(here, 3)
        branch = await open_branch(here)
        await branch.run(0)
        lost = loser(here, branch.chain, 1)
        blocks_of(lost).hold()
        sent = [await branch.send(toy_pass(number), CallHeader(pass_number=number)) for number in range(1, 4)]
        await asyncio.to_thread(blocks_of(lost).entered.wait)
        before = len(branch.sent_bytes)
        here.rig.network.cut_off(lost.node_id)
        for number, recorded in enumerate(sent, start=1):
            assert same(await branch.take(recorded), run_whole(toy_pass(number)))
        again = branch.sent_bytes[before:]
        assert len(again) == 3
        assert again[0] > again[1] == again[2], "only the first brings the constants"
        blocks_of(lost).release()
        await branch.chain.close()


def no_number(streams: list[torch.Tensor]) -> list[torch.Tensor]:
    return [stream.index_fill(1, torch.tensor([2]), float("nan")) for stream in streams]


def another_shape(streams: list[torch.Tensor]) -> list[torch.Tensor]:
    return [stream[:, 1:] for stream in streams]


def another_type(streams: list[torch.Tensor]) -> list[torch.Tensor]:
    return [stream.double() for stream in streams]


@pytest.mark.parametrize("spoil", [no_number, another_shape, another_type])
@pytest.mark.parametrize("looks", [True, False], ids=["honest", "lying"])
async def test_a_wrong_answer_replaces_its_node(
    spoil: Callable[[list[torch.Tensor]], list[torch.Tensor]], looks: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not looks:  # a node that does not look at what it computed
        monkeypatch.setattr("node.call_job.is_finite", lambda _: True)
    async with home() as here:
        await two_of_each(here, 3)
        branch = await open_branch(here)
        await branch.run(0)
        wrong = loser(here, branch.chain, 1)
        blocks_of(wrong).spoil = spoil
        assert same(await branch.run(1), run_whole(toy_pass(1)))
        assert loser(here, branch.chain, 1) is not wrong
        assert same(await branch.run(2), run_whole(toy_pass(2)))
        await branch.chain.close()


def cut_short(payload: bytes) -> bytes:
    return payload[:-1]


def no_call(payload: bytes) -> bytes:
    return bytes(len(payload))


@pytest.mark.parametrize("change", [cut_short, no_call, "another shape"])
async def test_what_the_next_hop_or_we_cannot_read_replaces_who_sent_it(change: Any) -> None:
    """The only node of the second half is innocent: the first half is what must go another way."""
    async with home() as here:
        nodes = [
            await add_block_node(here.rig, start, end) for start, end in ((0, 3), (0, 3), (3, NUM_LAYERS))
        ]
        await here.know(*nodes)
        branch = await open_branch(here)
        await branch.run(0)
        wrong = loser(here, branch.chain, 0)
        if callable(change):
            state = next(iter(wrong.server._sessions)).state
            pack = state.sender.pack
            state.sender.pack = lambda *args, **options: change(pack(*args, **options))
        else:
            blocks_of(wrong).spoil = another_shape
        assert same(await branch.run(1), run_whole(toy_pass(1)))
        assert loser(here, branch.chain, 0) is not wrong
        await branch.chain.close()


async def test_where_every_answer_is_wrong_the_reason_is_told_in_the_end() -> None:
    async with home() as here:
        for node in await two_of_each(here, 3):
            blocks_of(node).spoil = another_shape
        branch = await open_branch(here)
        with pytest.raises(RemoteError, match="other shapes or types") as caught:
            await branch.run(0)
        assert caught.value.code is ErrorCode.MALFORMED
        await branch.chain.close()


@pytest.mark.parametrize("hop", range(5))
@pytest.mark.parametrize("num_liars", [1, 2])
async def test_who_makes_a_wrong_answer_is_found_wherever_it_stands(hop: int, num_liars: int) -> None:
    """All after it pass its shape on, and each could be replaced in turn for nothing."""
    async with home() as here:
        await two_of_each(here, 1, 2, 3, 4)
        branch = await open_branch(here)
        await branch.run(0)
        for place in range(hop, min(hop + num_liars, 5)):
            blocks_of(loser(here, branch.chain, place)).spoil = another_shape
        assert same(await branch.run(1), run_whole(toy_pass(1)))
        assert branch.chain.replays <= 2
        replays = branch.chain.replays
        assert same(await branch.run(2), run_whole(toy_pass(2)))
        assert branch.chain.replays == replays, "and it stays away"
        await branch.chain.close()


async def test_who_makes_a_wrong_answer_is_found_among_nodes_that_nobody_replaces() -> None:
    async with home() as here:
        spans = [(0, 1), (1, 2), (1, 2), (2, 3), (3, 4), (4, NUM_LAYERS), (4, NUM_LAYERS)]
        await here.know(*[await add_block_node(here.rig, start, end) for start, end in spans])
        branch = await open_branch(here)
        await branch.run(0)
        blocks_of(loser(here, branch.chain, 1)).spoil = another_shape
        assert same(await branch.run(1), run_whole(toy_pass(1)))
        assert branch.chain.replays <= 4
        await branch.chain.close()


async def test_an_answer_far_larger_than_the_call_is_not_collected(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, size in (("PART_BYTES", 1000), ("MIN_PART_BYTES", 500), ("VERDICTS_BYTES", 1000)):
        monkeypatch.setattr(f"routing.parts.{name}", size)
    async with home() as here:
        await two_of_each(here, 3)
        branch = await open_branch(here)
        await branch.run(0)
        blocks_of(loser(here, branch.chain, 1)).spoil = lambda streams: [torch.zeros(1, 200, 8)]
        assert same(await branch.run(1), run_whole(toy_pass(1)))
        for node in here.rig.nodes:
            blocks_of(node).spoil = lambda streams: [torch.zeros(1, 2000, 8)]
        with pytest.raises(RemoteError, match="a call of more than"):
            await branch.run(2)
        await branch.chain.close()


async def test_a_wrong_answer_among_several_costs_only_itself() -> None:
    async with home() as here:
        await two_of_each(here, 3)
        branch = await open_branch(here)
        await branch.run(0)
        wrong = blocks_of(loser(here, branch.chain, 1))
        count = itertools.count()
        wrong.spoil = lambda streams: another_shape(streams) if next(count) == 1 else streams
        sent = [await branch.send(toy_pass(number), CallHeader(pass_number=number)) for number in range(1, 5)]
        for number, recorded in enumerate(sent, start=1):
            assert same(await branch.take(recorded), run_whole(toy_pass(number)))
        assert same(await branch.run(5), run_whole(toy_pass(5)))
        assert branch.chain.replays == 1
        await branch.chain.close()


async def test_a_call_that_no_node_can_run_says_why() -> None:
    async with home() as here:
        await here.know(await add_block_node(here.rig, 0, 3), await add_block_node(here.rig, 3, NUM_LAYERS))
        branch = await open_branch(here)
        made = toy_pass(0)
        made.streams[0] = torch.randn(1, 16, 5)
        with pytest.raises(RemoteError, match=r"block 0 of .* cannot run this call") as caught:
            await branch.take(await branch.send(made, CallHeader()))
        assert caught.value.code is ErrorCode.COMPUTE
        await branch.chain.close()


async def test_cancelling_frees_everything_between_two_blocks() -> None:
    async with home() as here:
        nodes = [await add_block_node(here.rig, 0, 3), await add_block_node(here.rig, 3, NUM_LAYERS)]
        await here.know(*nodes)
        branch = await open_branch(here, room=64)
        await branch.run(0, mode=Mode.WHOLE_KEEP, cut=CUT)
        assert all(node.stats.kv_bytes > 64 * 1024 * 3 for node in nodes)
        num_before = len(blocks_of(nodes[0]).passes)
        blocks_of(nodes[0]).hold()
        sent = [await branch.send(toy_pass(number), CallHeader(pass_number=number)) for number in (1, 2)]
        await asyncio.to_thread(blocks_of(nodes[0]).entered.wait)
        await branch.chain.close()
        await until(lambda: all(node.stats.num_sessions == 0 == node.stats.kv_bytes for node in nodes))
        with pytest.raises(RemoteError):
            await branch.take(sent[0])
        assert len(blocks_of(nodes[0]).passes) == num_before + 1, "the queued one never began"
        assert all(node.server._outbox.call_bytes == 0 for node in nodes)
        assert here.switchboard.num_chains == 0
        blocks_of(nodes[0]).release()


async def test_calls_arrive_in_parts_and_sealed_where_the_last_node_has_no_link_to_us(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, size in (("PART_BYTES", 100), ("MIN_PART_BYTES", 50)):
        monkeypatch.setattr(f"routing.parts.{name}", size)
    async with home() as here:
        nodes = [await add_block_node(here.rig, 0, 3), await add_block_node(here.rig, 3, NUM_LAYERS)]
        await here.know(*nodes)
        branch = await open_branch(here)
        here.switchboard.forget(branch.chain)  # the loss of this link is not the chain's business here
        here.rig.network.cut(here.endpoint.node_id, nodes[1].node_id)
        here.switchboard.register(branch.chain)
        parts: list[Answer] = []

        def watch(link: Any, message: Any) -> bool:
            if isinstance(message, Answer) and link.own_id == nodes[0].node_id:
                parts.append(message)
            return False

        here.rig.network.drop = watch
        for number in range(2):
            assert same(await branch.run(number), run_whole(toy_pass(number)))
        of_first = [part for part in parts if part.step == 1]
        assert [part.rows for part in of_first] == list(range(len(of_first), 0, -1))
        assert len(of_first) > 5
        assert run_whole(toy_pass(0))[0].numpy().tobytes() not in b"".join(
            bytes(part.payload) for part in of_first
        )
        await branch.chain.close()


async def test_int8_differences_halve_what_travels_everywhere() -> None:
    async def run(form: WireForm) -> tuple[list[int], float]:
        async with home() as here:
            width = 128
            nodes = [
                await add_block_node(here.rig, 0, 3, width=width),
                await add_block_node(here.rig, 3, NUM_LAYERS, width=width),
            ]
            await here.know(*nodes)
            branch, worst = await open_branch(here, form=form), 0.0
            for number in range(4):
                made = toy_pass(0, tokens=256, width=width)
                made.streams[0] += 0.1 * number
                got = await branch.take(await branch.send(made, CallHeader(pass_number=number)))
                worst = max(worst, float((got[0] - run_whole(made, width)[0]).abs().max()))
            await branch.chain.close()
            last = [
                [len(message.payload) for message in side.sent if isinstance(message, Step | Answer)][-1:]
                for link in here.rig.network.links
                for side in (link, link.other_side)
            ]
            return [size for sizes in last for size in sizes], worst

    short, short_error = await run(WireForm.BF16)
    delta, delta_error = await run(WireForm.INT8_DELTA)
    assert len(short) == len(delta) == 3, "gateway to first, first to last, last to gateway"
    assert all(less < 0.53 * more for less, more in zip(delta, short, strict=True))
    assert delta_error < 4 * short_error < 0.2
