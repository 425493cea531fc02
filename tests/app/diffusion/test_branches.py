"""The other guidance branch is started ahead, and used only if it is what is then asked for, bit for bit."""

from __future__ import annotations

import copy
import functools
import itertools
import threading
from typing import Any

import pytest
import torch

from app.engine.diffusion.branches import Branch, BranchDropped, Branches
from app.engine.diffusion.generation import PipelineEngine
from app.engine.diffusion.model import OpenedPipeline
from app.engine.diffusion.pipeline_call import call_arguments, taken
from slicing.diffusion.patches import Mode
from tests.app.diffusion.conftest import Open
from tests.app.diffusion.local_blocks import LocalBackend
from tests.support.opened_pictures import STEPS, draw, made_bytes, request_for
from tests.support.tiny_pipelines import TinyPipelines, quiet


async def test_every_step_but_the_first_is_guessed_right(opened: Open) -> None:
    pipeline = opened("wan")
    made = await draw(PipelineEngine(pipeline, LocalBackend(pipeline.source)), request_for("wan"))
    assert (made.timings.prefetched, made.timings.hits) == (STEPS - 1, STEPS - 1)
    assert made.timings.passes == 2 * STEPS, "no pass is made twice"


async def test_nothing_is_guessed_where_it_is_off_and_the_bytes_are_the_same(opened: Open) -> None:
    pipeline = opened("wan")
    backend = LocalBackend(pipeline.source)
    plain = await draw(PipelineEngine(pipeline, backend, prefetches=False), request_for("wan"))
    guessed = await draw(PipelineEngine(pipeline, backend), request_for("wan"))
    assert plain.timings.prefetched == 0
    assert made_bytes(plain) == made_bytes(guessed)


async def test_both_branches_are_under_way_at_once_over_two_groups(opened: Open) -> None:
    pipeline = opened("wan")
    meet = threading.Barrier(2)
    backend = LocalBackend(pipeline.source, groups=2)
    ran = backend.ranges[0].run

    passes = itertools.count()

    def run_together(*args: Any, **options: Any) -> Any:
        if next(passes) >= 2:  # both branches have had their first step, one behind the other
            meet.wait(timeout=10)
        return ran(*args, **options)

    backend.ranges[0].run = run_together  # type: ignore[method-assign]
    made = await draw(PipelineEngine(pipeline, backend), request_for("wan"))
    assert made.timings.hits == STEPS - 1
    assert [session.group for session in backend.opened] == [0, 1]


async def test_with_one_group_only_both_branches_use_it(opened: Open) -> None:
    pipeline = opened("wan")
    backend = LocalBackend(pipeline.source, groups=1)
    await draw(PipelineEngine(pipeline, backend), request_for("wan"))
    assert [session.group for session in backend.opened] == [0, 0]


async def test_a_pipeline_that_changes_its_text_on_the_way_misses_and_is_still_equal(
    opened: Open, tiny_pipelines: TinyPipelines
) -> None:
    pipeline, request = changing_its_text(opened("wan")), request_for("wan")
    made = await draw(PipelineEngine(pipeline, LocalBackend(pipeline.source)), request)
    assert (made.timings.prefetched, made.timings.hits) == (STEPS - 1, STEPS - 2)
    whole = tiny_pipelines.whole("wan")
    whole.__class__ = pipeline.pipeline.__class__
    with quiet():
        fields = taken(
            pipeline.kind, whole(**call_arguments(whole, pipeline.kind, pipeline.defaults, request))
        )
    assert made_bytes(made) == b"".join(frame.tobytes() for frame in fields["frames"])


async def test_after_a_wrong_guess_the_next_pass_of_that_branch_is_whole(opened: Open) -> None:
    pipeline = changing_its_text(opened("wan"), at=5)
    backend = LocalBackend(pipeline.source, cuts=(2,))
    await draw(PipelineEngine(pipeline, backend), request_for("wan", steps=9, patches=2))
    first, second = ([mode is Mode.PATCH for mode in session.modes] for session in backend.opened)
    assert first == [False] * 4 + [True] * 5
    assert second == [False] * 4 + [True] * 3 + [False] + [True] * 2, "the wrong guess was a patch, too"


def test_a_step_without_guidance_ends_the_guessing() -> None:
    ran: list[Branch] = []
    branches = fake_branches(ran)
    for calls in (2, 2, 1, 1):
        for ordinal in range(calls):
            branches.call("transformer", lambda x: x + 1, (torch.ones(2) * ordinal,), {})
        branches.step_done()
    branches.close()
    assert (branches.counts.guesses, branches.counts.hits) == (2, 1)


def test_a_guess_that_fails_fails_the_call_that_asks_for_it() -> None:
    branches = fake_branches([])

    def forward(x: torch.Tensor) -> torch.Tensor:
        if threading.current_thread() is not threading.main_thread():
            raise ValueError("in its own thread")
        return x

    for step in range(2):
        branches.call("transformer", forward, (torch.zeros(2),), {})
        if step:
            with pytest.raises(ValueError, match="its own thread"):
                branches.call("transformer", forward, (torch.ones(2),), {})
        else:
            branches.call("transformer", forward, (torch.ones(2),), {})
            branches.step_done()
    branches.close()


def test_a_dropped_guess_ends_at_its_next_pass() -> None:
    dropped = threading.Event()
    branches: Branches

    def forward(x: torch.Tensor, text: torch.Tensor) -> torch.Tensor:
        if threading.current_thread() is threading.main_thread():
            return x
        attempt = attempts[-1]
        try:
            while True:
                attempt.check()
        except BranchDropped:
            dropped.set()
            raise

    attempts: list[Any] = []
    branches = fake_branches([], attempts)
    for step in range(2):
        for text in (0.0, 1.0 + step):
            branches.call("transformer", forward, (torch.zeros(2), torch.full((2,), text)), {})
        branches.step_done()
    branches.close()
    assert dropped.is_set()
    assert branches.counts.hits == 0


def fake_branches(ran: list[Branch], attempts: list[Any] | None = None) -> Branches:
    """Branches whose first pass is sent at once."""
    from contextlib import contextmanager

    @contextmanager
    def running(attempt: Any) -> Any:
        ran.append(attempt.branch)
        if attempts is not None:
            attempts.append(attempt)
        attempt.note_sent()
        yield

    return Branches(running)


def changing_its_text(opened: OpenedPipeline, at: int = 1) -> OpenedPipeline:
    """The same pipeline, of a class that takes another negative text after step `at`."""
    kind: Any = type(opened.pipeline)

    def change(pipeline: Any, step: int, timestep: Any, tensors: dict[str, Any]) -> dict[str, Any]:
        text = tensors["negative_prompt_embeds"]
        return {"negative_prompt_embeds": text * 0.5 if step == at else text}

    @functools.wraps(kind.__call__)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        inputs = ["negative_prompt_embeds"]
        return kind.__call__(
            self, *args, callback_on_step_end=change, callback_on_step_end_tensor_inputs=inputs, **kwargs
        )

    changed = copy.copy(opened)
    changed.pipeline = copy.copy(opened.pipeline)
    changed.pipeline.__class__ = type(
        kind.__name__, (kind,), {"__call__": call, "__module__": kind.__module__}
    )
    return changed
