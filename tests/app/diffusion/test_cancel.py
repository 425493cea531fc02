"""A picture that nobody wants any more ends soon, wherever it is, and leaves nothing behind."""

from __future__ import annotations

import asyncio
import threading
import time
from contextlib import aclosing
from typing import Any

import pytest
import torch

from app.engine.diffusion.generation import PipelineEngine
from app.engine.diffusion.request import Decoding, Loading, StepDone
from routing.errors import ErrorCode, NoRouteError, WorkError
from tests.app.diffusion.conftest import Open
from tests.app.diffusion.local_blocks import LocalBackend, LocalSession
from tests.support.opened_pictures import draw, request_for, until_event

SOON_S = 3.0


def picture_threads() -> list[str]:
    names = [thread.name for thread in threading.enumerate()]
    return [name for name in names if name.startswith(("picture-", "branch-"))]


@pytest.mark.parametrize("after", [Loading, StepDone, Decoding])
async def test_closing_it_frees_sessions_and_threads(opened: Open, after: type) -> None:
    pipeline = opened("wan")
    backend = LocalBackend(pipeline.source, delay_s=0.01)
    engine = PipelineEngine(pipeline, backend)
    async with aclosing(engine.generate(request_for("wan"))) as events:
        await until_event(events, after)
    assert backend.num_open == 0
    assert picture_threads() == []
    assert engine.num_running == 0
    assert not pipeline.ends_lock.locked()


async def test_cancelling_whoever_waits_frees_them_too(opened: Open) -> None:
    pipeline = opened("wan")
    backend = LocalBackend(pipeline.source, delay_s=0.05)
    task = asyncio.create_task(draw(PipelineEngine(pipeline, backend), request_for("wan")))
    while not backend.opened:
        await asyncio.sleep(0.01)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert backend.num_open == 0
    assert picture_threads() == []


async def test_a_long_decoding_is_ended_on_the_way(opened: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    pipeline = opened("pixart")

    def decode_for_ever(self: Any, latents: Any, **options: Any) -> Any:
        while True:
            latents = torch.nn.Identity()(latents)

    monkeypatch.setattr(type(pipeline.pipeline.vae), "decode", decode_for_ever)
    engine = PipelineEngine(pipeline, LocalBackend(pipeline.source))
    began = time.monotonic()
    async with aclosing(engine.generate(request_for("pixart"))) as events:
        await until_event(events, Decoding)
    assert time.monotonic() - began < SOON_S
    assert picture_threads() == []


async def test_a_picture_that_takes_too_long_ends_with_its_deadline(opened: Open) -> None:
    pipeline = opened("wan")
    backend = LocalBackend(pipeline.source, delay_s=0.2)
    with pytest.raises(WorkError) as caught:
        await draw(PipelineEngine(pipeline, backend), request_for("wan", deadline_s=0.3))
    assert caught.value.code is ErrorCode.DEADLINE
    assert backend.num_open == 0


async def test_an_error_of_the_network_ends_it_as_it_is(opened: Open) -> None:
    pipeline = opened("wan")
    backend = LocalBackend(pipeline.source)

    def fail(session: LocalSession, number: int) -> None:
        if number == 2:
            raise NoRouteError([(0, 4)], "wan")

    backend.hook = fail
    with pytest.raises(NoRouteError, match="layers 0:4 of wan"):
        await draw(PipelineEngine(pipeline, backend), request_for("wan"))
    assert backend.num_open == 0
    assert picture_threads() == []


async def test_a_branch_that_loses_its_own_group_goes_on_with_the_others(opened: Open) -> None:
    pipeline = opened("wan")
    backend = LocalBackend(pipeline.source, groups=2)
    lost = False

    def fail(session: LocalSession, number: int) -> None:
        nonlocal lost
        if session.group == 1 and number == 2 and not lost:
            lost = True
            backend.groups = 1
            raise NoRouteError([(0, 4)], "wan")

    backend.hook = fail
    made = await draw(PipelineEngine(pipeline, backend), request_for("wan"))
    assert [session.group for session in backend.opened] == [0, 1, 0]
    assert made.timings.steps == 4
