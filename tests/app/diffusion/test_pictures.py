"""What an engine makes is what the uncut stock pipeline makes, in every byte, whatever else it does meanwhile."""

from __future__ import annotations

import asyncio
from itertools import pairwise

import pytest

from app.engine.diffusion.generation import PipelineEngine
from app.engine.diffusion.request import Decoding, Loading, Made, Preview, Started, StepDone
from tests.app.diffusion.conftest import Open
from tests.app.diffusion.local_blocks import LocalBackend
from tests.support.opened_pictures import STEPS, draw, drawn, made_bytes, request_for, whole_bytes
from tests.support.tiny_pipelines import PIPELINES, TinyPipelines


@pytest.mark.parametrize("name", PIPELINES)
async def test_every_pipeline_makes_the_bytes_of_the_uncut_one(
    tiny_pipelines: TinyPipelines, opened: Open, name: str
) -> None:
    pipeline, request = opened(name), request_for(name)
    backend = LocalBackend(pipeline.source, cuts=(1, 3))
    made = await draw(PipelineEngine(pipeline, backend), request)
    assert made_bytes(made) == whole_bytes(tiny_pipelines, name, pipeline, request)
    assert backend.num_open == 0


async def test_two_requests_at_once_equal_each_alone(opened: Open) -> None:
    pipeline = opened("wan")
    engine = PipelineEngine(pipeline, LocalBackend(pipeline.source, cuts=(2,), delay_s=0.002))
    requests = [request_for("wan"), request_for("wan", prompt="a blue square", seed=4)]
    alone = [await draw(engine, request) for request in requests]
    together = await asyncio.gather(*(draw(engine, request) for request in requests))
    assert [made_bytes(made) for made in together] == [made_bytes(made) for made in alone]
    assert made_bytes(together[0]) != made_bytes(together[1])


async def test_events_tell_of_every_step_in_order(opened: Open) -> None:
    pipeline = opened("pixart")
    events = await drawn(PipelineEngine(pipeline, LocalBackend(pipeline.source)), request_for("pixart"))
    assert [type(event) for event in events] == [Loading, Started, *[StepDone] * STEPS, Decoding, Made]
    steps = [event for event in events if isinstance(event, StepDone)]
    assert [(step.number, step.of) for step in steps] == [(n + 1, STEPS) for n in range(STEPS)]
    started = events[1]
    assert isinstance(started, Started)
    assert (started.steps, started.picture_tokens) == (STEPS, 64)
    assert started.text_tokens > 0


@pytest.mark.parametrize("name", ["pixart", "flux", "wan", "cogvideox"])
async def test_previews_change_nothing(opened: Open, name: str) -> None:
    pipeline = opened(name)
    engine = PipelineEngine(pipeline, LocalBackend(pipeline.source))
    plain = await draw(engine, request_for(name))
    events = await drawn(engine, request_for(name, previews=2))
    previews = [event for event in events if isinstance(event, Preview)]
    exact = [preview for preview in previews if not preview.is_rough]
    assert [preview.index for preview in exact] == [0, 1]
    assert all(preview.image.size == (32, 32) for preview in exact)
    assert len(previews) == STEPS - 1
    assert all(one.step < other.step for one, other in pairwise(previews))
    last = events[-1]
    assert isinstance(last, Made)
    assert made_bytes(last) == made_bytes(plain)


async def test_a_scheduler_option_makes_another_picture(opened: Open, tiny_pipelines: TinyPipelines) -> None:
    pipeline = opened("wan")
    engine = PipelineEngine(pipeline, LocalBackend(pipeline.source))
    shifted = request_for("wan", scheduler={"shift": 3.0})
    assert made_bytes(await draw(engine, shifted)) != made_bytes(await draw(engine, request_for("wan")))
