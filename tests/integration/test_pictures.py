"""Pictures, videos and sounds over chains of real nodes: the bytes of the uncut pipeline, whoever is lost."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from contextlib import aclosing
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import torch

from app.engine.diffusion import call_session
from app.engine.diffusion.backend import ChainBackend
from app.engine.diffusion.generation import PipelineEngine
from app.engine.diffusion.model import OpenedPipeline
from app.engine.diffusion.request import DiffusionRequest, Made, PatchVerdict, Started, StepDone
from app.engine.request import ModelUnavailableError, RequestError
from routing import live_route, route_watch
from routing.errors import NoRouteError
from slicing.diffusion.block_range import BlockRange
from slicing.diffusion.calls import Pass
from slicing.diffusion.patches import Mode
from tests.integration.home import Home, home
from tests.integration.picture_nodes import engine_over, picture_nodes, sessions_left
from tests.node.rig import Node, until
from tests.support.opened_pictures import (
    STEPS,
    draw,
    drawn,
    made_bytes,
    open_tiny,
    request_for,
    until_event,
    whole_bytes,
)
from tests.support.tiny_pipelines import PIPELINES, TinyPipelines, quiet

Open = Callable[[str], OpenedPipeline]
PATCHED_STEPS = 9
PASS_S = 0.2  # at a slow node


@pytest.fixture(autouse=True)
def _surroundings(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """One thread, no warnings of diffusers, and slowness is no reason to leave a node: these machines do much else."""
    torch.set_num_threads(1)
    monkeypatch.setattr(route_watch, "SLACK_S", 60.0)
    monkeypatch.setattr(live_route, "REDIAL_TIMEOUT_S", 60.0)
    with quiet():
        yield


@pytest.fixture(scope="module")
def opened(tiny_pipelines: TinyPipelines) -> Open:
    return cache(lambda name: open_tiny(tiny_pipelines, name))


@pytest.fixture
def modes(monkeypatch: pytest.MonkeyPatch) -> dict[int, list[tuple[int, Mode]]]:
    """By session, the number and mode of every call that was packed."""
    packed: dict[int, list[tuple[int, Mode]]] = {}
    really = call_session._Call.make

    def make(self: call_session._Call, is_fresh: bool) -> object:
        payload = really(self, is_fresh)
        packed.setdefault(id(self.group.session), []).append((self.group.number, self.mode))
        return payload

    monkeypatch.setattr(call_session._Call, "make", make)
    return packed


async def test_blocks_that_are_no_plain_thread_run_one_by_one_and_a_gateway_without_says_how(
    opened: Open, tiny_pipelines: TinyPipelines
) -> None:
    name = "hunyuan-dit"
    pipeline, request = open_tiny(tiny_pipelines, name, per_block=True), request_for(name)
    async with home() as here:
        nodes = await picture_nodes(here, pipeline, cuts=(1, 3))
        events = await drawn(engine_over(here, pipeline), request)
        made = events[-1]
        assert isinstance(made, Made)
        assert made_bytes(made) == whole_bytes(tiny_pipelines, name, pipeline, request)
        assert made.timings.passes == 4 * STEPS
        assert [node.stats.calls_run for node in nodes] == [4 * STEPS] * 3
        (started,) = [event for event in events if isinstance(event, Started)]
        assert started.notes == ("its 4 blocks are sent one by one (--per-block), at one round trip a block",)
        with pytest.raises(RequestError, match="--per-block") as refused:
            engine_over(here, pipeline).check(replace(request, patches=2, steps=PATCHED_STEPS))
        assert refused.value.param == "patches"
        with pytest.raises(ModelUnavailableError) as caught:
            await draw(engine_over(here, opened(name)), request)
        told = "block 3 of transformer.blocks, argument skip, is an output of block 0; these blocks cannot run on "
        told += "other nodes in one pass: start the gateway with --per-block, at one round trip a block"
        assert told in str(caught.value)


@pytest.mark.parametrize("name", PIPELINES)
async def test_every_pipeline_makes_the_bytes_of_the_uncut_one_over_three_nodes(
    opened: Open, tiny_pipelines: TinyPipelines, name: str
) -> None:
    pipeline, request = opened(name), request_for(name)
    async with home() as here:
        await picture_nodes(here, pipeline, (1, 3))
        made = await draw(engine_over(here, pipeline), request)
        await until(lambda: sessions_left(here) == 0)
    assert made_bytes(made) == whole_bytes(tiny_pipelines, name, pipeline, request)
    assert len(made.timings.busy) == 3
    assert made.timings.bytes_sent > 0


@pytest.mark.parametrize("cuts", [(), (1,), (2,), (3,), (1, 2), (2, 3), (1, 2, 3)])
async def test_the_bytes_do_not_depend_on_where_the_stack_is_cut(
    opened: Open, tiny_pipelines: TinyPipelines, cuts: tuple[int, ...]
) -> None:
    pipeline, request = opened("pixart"), request_for("pixart", steps=2)
    async with home() as here:
        await picture_nodes(here, pipeline, cuts)
        made = await draw(engine_over(here, pipeline), request)
    assert made_bytes(made) == whole_bytes(tiny_pipelines, "pixart", pipeline, request)


@pytest.mark.parametrize("hop", [0, 1])
@pytest.mark.parametrize("step", range(1, STEPS))
async def test_a_node_lost_at_any_step_costs_no_byte(
    opened: Open, tiny_pipelines: TinyPipelines, step: int, hop: int
) -> None:
    pipeline, request = opened("wan"), request_for("wan")
    async with home() as here:
        await picture_nodes(here, pipeline, (2,), replicas=2)
        made = await draw_losing(here, engine_over(here, pipeline, splits_branches=False), request, step, hop)
    assert made.replays >= 1
    assert made_bytes(made) == whole_bytes(tiny_pipelines, "wan", pipeline, request)


@pytest.mark.parametrize("step", [2, 5, 6, 8])
async def test_a_node_lost_among_patches_is_followed_by_a_whole_pass(
    opened: Open, modes: dict[int, list[tuple[int, Mode]]], step: int
) -> None:
    pipeline, request = opened("pixart"), request_for("pixart", steps=PATCHED_STEPS, patches=2)
    async with home() as here:
        await picture_nodes(here, pipeline, (2,), replicas=2)
        engine = engine_over(here, pipeline, splits_branches=False)
        made = await draw_losing(here, engine, request, step, hop=1)
    assert made.replays == 1
    (packed,) = modes.values()
    of_pass = {number: [mode for other, mode in packed if other == number] for number in range(PATCHED_STEPS)}
    lost = step if Mode.WHOLE_KEEP in of_pass[step] else step + 1  # the pass that was under way, or the next
    assert of_pass[lost][-1] is Mode.WHOLE_KEEP
    if lost + 1 < PATCHED_STEPS:
        assert of_pass[lost + 1] == [Mode.WHOLE_KEEP]
    for number in range(max(4, lost + 2), PATCHED_STEPS):
        assert of_pass[number] == [Mode.PATCH] * 2


async def test_branches_take_a_group_of_nodes_each_and_go_on_when_one_group_is_lost(
    opened: Open, tiny_pipelines: TinyPipelines
) -> None:
    pipeline, request = opened("wan"), request_for("wan")
    async with home() as here:
        nodes = await picture_nodes(here, pipeline, replicas=2)
        engine = engine_over(here, pipeline)
        made = await draw(engine, request)
        (use,) = made.stacks
        first, second = ({hop.node for hop in route} for route in use.routes)
        assert not first & second
        async with aclosing(engine.generate(request)) as events:
            await until_event(events, StepDone)
            here.rig.network.cut_off(nodes[1].node_id)
            last = await until_event(events, Made)
    assert isinstance(last, Made)
    assert made_bytes(last) == made_bytes(made) == whole_bytes(tiny_pipelines, "wan", pipeline, request)


@pytest.mark.long
@pytest.mark.parametrize(("replicas", "bar"), [(1, 0.85), (2, 0.65)])
async def test_the_other_branch_fills_the_stages_or_a_group_of_its_own(
    opened: Open, replicas: int, bar: float
) -> None:
    """Two stages that take so long for a pass that little else counts; the first step cannot be guessed.

    By the schedule it is 0.78 and 0.55; the rest is for machines that do much else.
    """
    pipeline, request = opened("wan"), request_for("wan", steps=10)
    seconds = {}
    async with home() as here:
        for node in await picture_nodes(here, pipeline, (2,), replicas=replicas):
            slow_down(node)
        for prefetches in (False, True):
            backend = ChainBackend(pipeline.facts, pipeline.source.remote, here.switchboard)
            made = await draw(PipelineEngine(pipeline, backend, prefetches=prefetches), request)
            assert made.timings.hits == (9 if prefetches else 0)
            seconds[prefetches] = made.timings.steps_s
    assert seconds[True] / seconds[False] < bar, seconds


async def test_guidance_in_one_call_goes_to_two_groups_and_costs_no_byte(
    opened: Open, tiny_pipelines: TinyPipelines
) -> None:
    pipeline, request = opened("pixart"), request_for("pixart")
    async with home() as here:
        await picture_nodes(here, pipeline, replicas=2)
        made = await draw(engine_over(here, pipeline), request)
    (use,) = made.stacks
    assert len(use.routes) == 2
    assert use.routes[0] != use.routes[1]
    assert made_bytes(made) == whole_bytes(tiny_pipelines, "pixart", pipeline, request)


@pytest.mark.parametrize("route", [0, 1])
async def test_one_of_those_groups_can_be_lost(
    opened: Open, tiny_pipelines: TinyPipelines, route: int
) -> None:
    pipeline, request = opened("pixart"), request_for("pixart")
    async with home() as here:
        await picture_nodes(here, pipeline, replicas=2)
        made = await draw_losing(here, engine_over(here, pipeline), request, step=2, hop=0, route=route)
    assert made_bytes(made) == whole_bytes(tiny_pipelines, "pixart", pipeline, request)


async def test_a_node_whose_numbers_are_none_is_replaced(opened: Open, tiny_pipelines: TinyPipelines) -> None:
    pipeline, request = opened("pixart"), request_for("pixart")
    async with home() as here:
        nodes = await picture_nodes(here, pipeline, (2,), replicas=2)
        for node in nodes[2:]:
            spoil(node, at=2)
        made = await draw(engine_over(here, pipeline, splits_branches=False), request)
    assert made.replays == 1
    assert made_bytes(made) == whole_bytes(tiny_pipelines, "pixart", pipeline, request)


async def test_without_room_for_keys_steps_are_whole_and_the_numbers_are_said(opened: Open) -> None:
    pipeline = opened("pixart")
    async with home() as here:
        await picture_nodes(here, pipeline, kv_budget_bytes=200 << 10)
        request = request_for("pixart", steps=PATCHED_STEPS, patches=2, extrapolate=True)
        events = await drawn(engine_over(here, pipeline), request)
        (verdict,) = [event for event in events if isinstance(event, PatchVerdict)]
    assert not verdict.allowed
    # 64 tokens of two rows, keys and values of 32 numbers of 4 bytes, those of the step before, too; four blocks
    assert "64 KiB a block are needed to keep keys and values, 50 are free" in verdict.reason


async def test_differences_in_8_bits_halve_the_bytes_of_16_and_change_little(opened: Open) -> None:
    pipeline = opened("cogvideox")
    async with home() as here:
        await picture_nodes(here, pipeline, (2,))
        sent = {}
        for wire in ("compute", "bf16", "int8-delta"):
            made = await draw(engine_over(here, pipeline), request_for("cogvideox", steps=8, wire=wire))
            sent[wire] = made.timings.bytes_received, np.stack([np.asarray(f, float) for f in made.frames])
    assert sent["bf16"][0] < 0.55 * sent["compute"][0]
    assert sent["int8-delta"][0] < 0.7 * sent["bf16"][0]
    for wire in ("bf16", "int8-delta"):
        assert np.abs(sent[wire][1] - sent["compute"][1]).mean() < 2.0  # of 255, with random weights


async def test_a_picture_that_nobody_wants_any_more_frees_its_sessions(opened: Open) -> None:
    pipeline = opened("wan")
    async with home() as here:
        await picture_nodes(here, pipeline, (2,))
        async with aclosing(engine_over(here, pipeline).generate(request_for("wan", steps=50))) as events:
            await until_event(events, StepDone)
            assert sessions_left(here) == 4, "two branches at two nodes"
        await until(lambda: sessions_left(here) == 0)
        await until(lambda: all(node.budget.free_bytes == node.budget.limit_bytes for node in here.rig.nodes))


async def test_blocks_that_nobody_has_are_named_by_stack(opened: Open) -> None:
    pipeline = opened("flux")
    async with home() as here:
        nodes = await picture_nodes(here, pipeline, (1, 4))
        engine = engine_over(here, pipeline)
        assert engine.coverage().is_ready
        here.rig.network.cut_off(nodes[2].node_id)
        await until(lambda: not engine.coverage().is_ready)
        assert engine.coverage().missing == ((4, 5),)
        assert engine.coverage().reason == "blocks 2:3 of transformer.single_transformer_blocks"
        with pytest.raises(NoRouteError, match=r"layers 4:5.*blocks 2:3 of transformer.single_transformer"):
            await asyncio.wait_for(draw(engine, request_for("flux")), 30)


async def draw_losing(
    here: Home, engine: PipelineEngine, request: DiffusionRequest, step: int, hop: int, route: int = 0
) -> Made:
    """Draw, and lose the node at a hop of the first session, or another, after a step."""
    async with aclosing(engine.generate(request)) as events:
        async for event in events:
            if isinstance(event, StepDone) and event.number == step:
                hops = here.switchboard.routes[route].hops
                here.rig.network.cut_off(hops[hop].address.node_id)
            if isinstance(event, Made):
                return event
    raise AssertionError("nothing was made")


def slow_down(node: Node) -> None:
    """A pass takes its time there."""
    blocks: BlockRange = node.runner
    really = blocks.run

    def run(made: Pass, **options: object) -> list[torch.Tensor]:
        time.sleep(PASS_S)
        return really(made, **options)  # type: ignore[arg-type]

    blocks.run = run  # type: ignore[method-assign]


def spoil(node: Node, at: int) -> None:
    """From its pass `at` on, a node's numbers are none."""
    blocks: BlockRange = node.runner
    really, passes = blocks.run, iter(range(1 << 20))

    def run(made: Pass, **options: object) -> list[torch.Tensor]:
        streams = really(made, **options)  # type: ignore[arg-type]
        return [stream * float("nan") for stream in streams] if next(passes) >= at else streams

    blocks.run = run  # type: ignore[method-assign]
