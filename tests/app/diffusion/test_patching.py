"""When passes run as patches: after the warm-up, where all hops agree and have room; else whole, and it is said why."""

from __future__ import annotations

import numpy as np
import pytest

from app.engine.diffusion.generation import PipelineEngine
from app.engine.diffusion.request import DiffusionEvent, Made, PatchVerdict
from slicing.diffusion.patches import Mode
from slicing.diffusion.replay import Verdict
from tests.app.diffusion.conftest import Open
from tests.app.diffusion.local_blocks import LocalBackend, LocalSession
from tests.support.opened_pictures import draw, drawn, made_bytes, request_for

W, K, P = Mode.WHOLE, Mode.WHOLE_KEEP, Mode.PATCH
STEPS = 9


def verdicts_in(events: list[DiffusionEvent]) -> list[PatchVerdict]:
    return [event for event in events if isinstance(event, PatchVerdict)]


@pytest.mark.parametrize("patches", [2, 4])
async def test_patches_follow_the_warm_up_in_every_branch(opened: Open, patches: int) -> None:
    pipeline = opened("wan")
    backend = LocalBackend(pipeline.source, cuts=(2,))
    request = request_for("wan", steps=STEPS, patches=patches, warmup=3, height=64)
    events = await drawn(PipelineEngine(pipeline, backend), request)
    assert verdicts_in(events) == [PatchVerdict(True)]
    assert [session.modes for session in backend.opened] == [[K] * 3 + [P] * 6] * 2
    made = events[-1]
    assert isinstance(made, Made)
    assert (made.timings.passes, made.timings.patched) == (18, 12)


async def test_a_warm_up_as_long_as_the_steps_gives_the_bytes_of_whole_steps(opened: Open) -> None:
    pipeline = opened("pixart")
    engine = PipelineEngine(pipeline, LocalBackend(pipeline.source))
    patched = await draw(engine, request_for("pixart", steps=STEPS, patches=2, warmup=STEPS))
    assert made_bytes(patched) == made_bytes(await draw(engine, request_for("pixart", steps=STEPS)))


async def test_patched_pictures_are_near_the_whole_one(opened: Open) -> None:
    pipeline = opened("pixart")
    engine = PipelineEngine(pipeline, LocalBackend(pipeline.source, cuts=(2,)))
    whole = await draw(engine, request_for("pixart", steps=STEPS))
    patched = await draw(engine, request_for("pixart", steps=STEPS, patches=2, extrapolate=True))
    difference = np.abs(np.asarray(whole.image, float) - np.asarray(patched.image, float))
    assert patched.timings.patched > 0
    assert difference.mean() < 2


async def test_one_hop_that_refuses_makes_all_steps_whole(
    opened: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    pipeline = opened("wan")
    backend = LocalBackend(pipeline.source, cuts=(2,))
    really = LocalSession._run

    def refuse(self: LocalSession, *given: object) -> object:
        made = really(self, *given)  # type: ignore[arg-type]
        if made.verdicts:
            made.verdicts[-1] = Verdict(False, "its attention is linear")  # type: ignore[index]
        return made

    monkeypatch.setattr(LocalSession, "_run", refuse)
    events = await drawn(PipelineEngine(pipeline, backend), request_for("wan", steps=STEPS, patches=2))
    (verdict,) = verdicts_in(events)
    assert not verdict.allowed
    assert "its attention is linear" in verdict.reason
    assert backend.opened[0].modes == [K] + [W] * (STEPS - 1)


async def test_without_room_steps_are_whole_and_the_numbers_are_said(opened: Open) -> None:
    pipeline = opened("wan")
    backend = LocalBackend(pipeline.source, room_kib=1)
    events = await drawn(PipelineEngine(pipeline, backend), request_for("wan", steps=STEPS, patches=2))
    (verdict,) = verdicts_in(events)
    assert not verdict.allowed
    # 12 tokens, two buffers of 24 numbers of 4 bytes each
    assert "3 KiB a block are needed" in verdict.reason or "KiB a block are needed" in verdict.reason
    assert "1 are free" in verdict.reason
    assert {mode for session in backend.opened for mode in session.modes} == {W}


@pytest.mark.parametrize("name", ["sd3", "flux"])
async def test_two_streams_run_whole_unless_patches_of_them_are_asked_for(opened: Open, name: str) -> None:
    pipeline = opened(name)
    engine = PipelineEngine(pipeline, LocalBackend(pipeline.source))
    request = request_for(name, steps=STEPS, patches=2)
    (verdict,) = verdicts_in(await drawn(engine, request))
    assert not verdict.allowed
    assert "text goes through its blocks" in verdict.reason
    asked = request_for(name, steps=STEPS, patches=2, two_streams=True)
    assert verdicts_in(await drawn(engine, asked)) == [PatchVerdict(True)]


async def test_a_route_that_takes_over_between_steps_gets_a_whole_pass_first(opened: Open) -> None:
    pipeline = opened("pixart")
    backend = LocalBackend(pipeline.source, cuts=(2,))

    def lose(session: LocalSession, number: int) -> None:
        if number == 6:
            session.forget()

    backend.hook = lose
    await draw(PipelineEngine(pipeline, backend), request_for("pixart", steps=STEPS, patches=2))
    (session,) = backend.opened
    # The patch that was lost is made again as a whole pass, and so is the next.
    assert session.modes == [K] * 4 + [P] * 2 + [K] * 2 + [P]


async def test_a_route_with_one_stage_refuses_five_patches(opened: Open) -> None:
    from app.engine.request import RequestError

    pipeline = opened("pixart")
    engine = PipelineEngine(pipeline, LocalBackend(pipeline.source))
    with pytest.raises(RequestError, match="5 patches are too many for 1 stages: at most 4") as caught:
        engine.check(request_for("pixart", steps=STEPS, patches=5))
    assert caught.value.param == "patches"
