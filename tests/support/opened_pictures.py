"""Tiny pipelines opened as a gateway opens them, requests for them, and what the uncut pipeline makes of the same."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from dataclasses import replace
from typing import Any

import numpy as np

from app.engine.diffusion.model import OpenedPipeline, load_opened, look_up_pipeline
from app.engine.diffusion.pipeline_call import call_arguments, taken
from app.engine.diffusion.request import DiffusionEngine, DiffusionEvent, DiffusionRequest, Made
from app.engine.model import EndsSettings
from tests.support.tiny_pipelines import PROMPT, TinyPipelines, pipeline_named, quiet

STEPS = 4


def open_tiny(pipelines: TinyPipelines, name: str, *, per_block: bool = False) -> OpenedPipeline:
    """The pipeline of this name without its remote blocks."""
    settings = EndsSettings(per_block=per_block)
    with quiet():
        found = look_up_pipeline(str(pipelines.folder(name)), settings)
        return load_opened(found, settings)


def request_for(name: str, **changes: Any) -> DiffusionRequest:
    """The small call of a pipeline of this name as a request."""
    call = pipeline_named(name).call
    request = DiffusionRequest(
        "test",
        name,
        PROMPT,
        call.get("negative_prompt"),
        width=call.get("width"),
        height=call.get("height"),
        num_frames=call.get("num_frames"),
        seconds=call.get("audio_end_in_s"),
        steps=STEPS,
        guidance_scale=call.get("guidance_scale"),
        seed=3,
    )
    return replace(request, **changes)


def whole_bytes(
    pipelines: TinyPipelines, name: str, opened: OpenedPipeline, request: DiffusionRequest
) -> bytes:
    """What the uncut stock pipeline makes of a request."""
    pipeline = pipelines.whole(name)
    with quiet():
        arguments = call_arguments(pipeline, opened.kind, opened.defaults, request)
        return _bytes(taken(opened.kind, pipeline(**arguments)))


def made_bytes(made: Made) -> bytes:
    """The pixels, frames or samples of an answer."""
    return _bytes({"image": made.image, "frames": made.frames, "samples": made.samples})


async def drawn(engine: DiffusionEngine, request: DiffusionRequest) -> list[DiffusionEvent]:
    """All events of one answer."""
    return [event async for event in engine.generate(request)]


async def draw(engine: DiffusionEngine, request: DiffusionRequest) -> Made:
    """The last event of one answer."""
    last = (await drawn(engine, request))[-1]
    assert isinstance(last, Made)
    return last


async def until_event(events: AsyncGenerator[DiffusionEvent, None], kind: type) -> DiffusionEvent:
    """The next event of a kind."""
    async for event in events:
        if isinstance(event, kind):
            return event
    raise AssertionError(f"there was no {kind.__name__}")


def _bytes(fields: dict[str, Any]) -> bytes:
    parts = [fields.get("image"), *(fields.get("frames") or ())]
    pixels = [part.tobytes() for part in parts if part is not None]
    samples = fields.get("samples")
    return b"".join(pixels) + (b"" if samples is None else np.ascontiguousarray(samples).tobytes())
