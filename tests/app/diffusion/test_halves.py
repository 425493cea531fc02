"""Guidance in one call of two rows: halves go to two groups of nodes, but only where they give the same bits."""

from __future__ import annotations

import pytest
import torch

from app.engine.diffusion.generation import PipelineEngine
from app.engine.diffusion.halves import halves_of, joined_halves
from app.engine.diffusion.request import PatchVerdict
from slicing.diffusion.calls import BlockCall, Pass, Plan
from tests.app.diffusion.conftest import Open
from tests.app.diffusion.local_blocks import LocalBackend, LocalSession
from tests.support.opened_pictures import STEPS, draw, drawn, made_bytes, request_for, whole_bytes
from tests.support.tiny_pipelines import TinyPipelines

PLAN = Plan("transformer.blocks", (BlockCall(0, (0, 1)),), ({"args": [], "kwargs": {}},), None, 1)


@pytest.mark.parametrize("name", ["pixart", "sd3", "cogvideox", "stable-audio"])
async def test_over_two_groups_the_bytes_are_those_of_the_uncut_pipeline(
    opened: Open, tiny_pipelines: TinyPipelines, name: str
) -> None:
    pipeline, request = opened(name), request_for(name)
    backend = LocalBackend(pipeline.source, cuts=(2,), groups=2)
    made = await draw(PipelineEngine(pipeline, backend), request)
    assert made_bytes(made) == whole_bytes(tiny_pipelines, name, pipeline, request)
    assert [session.group for session in backend.opened] == [0, 1]
    first, second = (len(session.modes) for session in backend.opened)
    # The trial is both halves on the second group; then each pass is a half on both, or whole on the first.
    assert (first, second) in {(STEPS, 2 + STEPS - 1), (STEPS, 2)}
    assert made.timings.passes == STEPS
    assert backend.num_open == 0


async def test_halves_that_differ_in_a_bit_are_not_used(
    opened: Open, tiny_pipelines: TinyPipelines, monkeypatch: pytest.MonkeyPatch
) -> None:
    pipeline, request = opened("pixart"), request_for("pixart")
    backend = LocalBackend(pipeline.source, groups=2)
    really = LocalSession._run

    def differ(self: LocalSession, made: Pass, order: object) -> object:
        result = really(self, made, order)  # type: ignore[arg-type]
        if made.streams[0].shape[0] == 1:
            result.streams[0].view(torch.int32)[0, 0, 0] ^= 1
        return result

    monkeypatch.setattr(LocalSession, "_run", differ)
    made = await draw(PipelineEngine(pipeline, backend), request)
    assert [session.is_closed for session in backend.opened] == [True, True]
    assert [len(session.modes) for session in backend.opened] == [STEPS, 2]
    assert made_bytes(made) == whole_bytes(tiny_pipelines, "pixart", pipeline, request)


async def test_halves_and_patches_go_together(opened: Open) -> None:
    pipeline = opened("pixart")
    backend = LocalBackend(pipeline.source, cuts=(2,), groups=2)
    events = await drawn(PipelineEngine(pipeline, backend), request_for("pixart", steps=9, patches=2))
    assert [event for event in events if isinstance(event, PatchVerdict)] == [PatchVerdict(True)]


def test_rows_go_with_the_streams_and_all_else_is_shared() -> None:
    stream, text, table = torch.randn(4, 3, 2), torch.randn(4, 5), torch.randn(3, 2)
    halves = halves_of(Pass(PLAN, [stream], [text, table]))
    assert halves is not None
    assert [half.streams[0].shape[0] for half in halves] == [2, 2]
    assert torch.equal(torch.cat([half.slots[0] for half in halves]), text)
    assert halves[0].slots[1] is halves[1].slots[1] is table
    (joined,) = joined_halves(halves[0].streams, halves[1].streams)
    assert torch.equal(joined, stream)


@pytest.mark.parametrize("rows", [1, 3])
def test_an_odd_number_of_rows_has_no_halves(rows: int) -> None:
    assert halves_of(Pass(PLAN, [torch.randn(rows, 3, 2)], [])) is None
