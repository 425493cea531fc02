"""Patches over chains of real nodes: kept keys, their room, and what becomes of them when a node is lost."""

from __future__ import annotations

import asyncio
import itertools

import pytest
import torch

from routing.errors import ErrorCode, RemoteError
from routing.recorded import CannotRemake
from slicing.diffusion.calls import Pass
from slicing.diffusion.patches import Cut, Mode
from slicing.diffusion.wire import CallHeader
from tests.integration.home import home, loser
from tests.integration.pictures import blocks_of, open_branch, same, two_of_each
from tests.node.block_rig import GRID, add_block_node, run_whole, toy_pass
from tests.node.fake_runner import NUM_LAYERS

CUT = Cut(GRID, 0, 2)


async def test_a_lost_patch_may_be_made_whole_and_those_behind_it_left_out() -> None:
    """As an engine may play it: the numbers have a gap then, and the session goes on."""
    async with home() as here:
        await two_of_each(here, 3)
        branch = await open_branch(here)
        await branch.run(0)
        lost = loser(here, branch.chain, 1)
        blocks_of(lost).hold()
        first = await branch.send(toy_pass(1), CallHeader(pass_number=1))
        behind = []
        for one in CUT.all():
            made = toy_pass(2)
            patch = Pass(made.plan, [one.take(made.streams[0])], made.slots)
            behind.append(await branch.send(patch, CallHeader(Mode.PATCH, 2, one)))
        await asyncio.to_thread(blocks_of(lost).entered.wait)
        here.rig.network.cut_off(lost.node_id)
        branch.refuses_all_patches = True
        assert same(await branch.take(first), run_whole(toy_pass(1)))
        for recorded in behind:
            with pytest.raises(CannotRemake):
                await branch.take(recorded)
        assert same(await branch.run(3), run_whole(toy_pass(3)))
        assert branch.chain.replays == 1
        blocks_of(lost).release()
        await branch.chain.close()


async def test_patches_under_way_at_once_give_what_one_node_gives() -> None:
    async def run(*cuts: int) -> list[list[torch.Tensor]]:
        async with home() as here:
            ends = (0, *cuts, NUM_LAYERS)
            pairs = list(itertools.pairwise(ends))
            await here.know(*[await add_block_node(here.rig, start, end) for start, end in pairs])
            branch = await open_branch(here, room=64)
            outputs = [await branch.run(0, mode=Mode.WHOLE_KEEP, cut=CUT)]
            assert [(verdict.hop, verdict.allowed) for verdict in branch.verdicts] == [
                (hop, True) for hop in range(len(pairs))
            ]
            outputs += [await branch.run_patches(number, CUT) for number in (1, 2)]
            outputs.append(await branch.run(3, mode=Mode.WHOLE_KEEP, cut=CUT))
            await branch.chain.close()
            return outputs

    one, three = await run(), await run(2, 4)
    for outputs in (one, three):
        assert same(outputs[0], run_whole(toy_pass(0)))
        assert same(outputs[3], run_whole(toy_pass(3)))
    for a, b in zip(one[1:3], three[1:3], strict=True):
        assert same(a, b), "where the stages are cut must not matter"


async def test_without_room_for_keys_patches_are_refused_and_the_pass_is_right() -> None:
    async with home() as here:
        await here.know(await add_block_node(here.rig))
        branch = await open_branch(here)
        assert same(await branch.run(0, mode=Mode.WHOLE_KEEP, cut=CUT), run_whole(toy_pass(0)))
        assert not branch.verdicts[0].allowed
        assert "set aside" in branch.verdicts[0].reason
        await branch.chain.close()


@pytest.mark.parametrize("hop", [0, 1])
async def test_patches_cannot_be_made_again_and_the_next_pass_is_whole(hop: int) -> None:
    async with home() as here:
        await two_of_each(here, 3)
        branch = await open_branch(here, room=64)
        await branch.run(0, mode=Mode.WHOLE_KEEP, cut=CUT)
        await branch.run_patches(1, CUT)
        here.rig.network.cut_off(loser(here, branch.chain, hop).node_id)
        with pytest.raises(CannotRemake):
            await branch.run_patches(2, CUT)
        assert same(await branch.run(2, mode=Mode.WHOLE_KEEP, cut=CUT), run_whole(toy_pass(2)))
        await branch.run_patches(3, CUT)
        assert branch.chain.replays == 1
        await branch.chain.close()


async def test_who_has_no_room_says_how_much_there_is_before_anything_is_sent() -> None:
    async with home() as here:
        await here.know(await add_block_node(here.rig, keeps=True, kv_budget_bytes=6 * 100 * 1024))
        with pytest.raises(RemoteError) as caught:
            await open_branch(here, room=101, confirms=True)
        assert caught.value.code is ErrorCode.NO_ROOM
        assert caught.value.room == 100
        branch = await open_branch(here, room=50, confirms=True)
        assert same(await branch.run(0), run_whole(toy_pass(0)))
        await branch.chain.close()
