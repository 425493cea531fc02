"""The engine in this process as a `Drawer`: what `query --node` and its like run for a model that makes no text.

Imports torch and diffusers, and only once it is called.
"""

from __future__ import annotations

import asyncio
import logging
import re
import secrets
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing, asynccontextmanager
from dataclasses import asdict
from typing import TYPE_CHECKING, Final

from cli.drawing import Drawn, Order, Said, StepTold, Told
from cli.engine import settings_of
from cli.failures import CommandError
from cli.runtime import start_logging
from cli.survey import name_of
from cli.target import Target

if TYPE_CHECKING:
    from app.engine.diffusion.request import DiffusionEngine, DiffusionRequest, Made
    from app.engine.request import ModelStatus

SIZE: Final = re.compile(r"([1-9][0-9]{0,4})x([1-9][0-9]{0,4})")
OUTPUTS: Final = {"PICTURE": "image", "VIDEO": "video", "AUDIO": "audio"}  # by the name of the engine's kind


@asynccontextmanager
async def open_drawing_nodes(target: Target, model: str) -> AsyncIterator[EngineDrawer]:
    """Load the pipeline without the blocks that nodes run, link to the nodes, and check that they serve every block."""
    start_logging(logging.ERROR)  # what goes wrong is said once, by the command
    settings = settings_of(target, model)
    from app.engine.diffusion.swarm import open_pictures
    from app.engine.swarm import open_songs
    from slicing.music import is_music

    opening = open_songs(settings) if is_music(model) else open_pictures(settings)
    async with opening as opened:
        status = opened.engine.coverage()
        if not status.is_ready:
            errors = opened.directory.last_errors.items()
            reasons = [f"{name_of(address)}: {reason}" for address, reason in errors]
            raise CommandError("; ".join([_missing(status), *reasons]))
        yield EngineDrawer(opened.engine)


class EngineDrawer:
    """Makes things over chains of nodes."""

    def __init__(self, engine: DiffusionEngine) -> None:
        self._engine = engine
        self.model = engine.model_name
        self.output = OUTPUTS[engine.kind.name]

    async def draw(self, order: Order, suffix: str) -> AsyncGenerator[Told, None]:
        """Run the steps and encode what they make; raises what the engine raises."""
        from app.engine.diffusion.request import Made, PatchVerdict, Started, StepDone

        request = self._request(order)
        await asyncio.to_thread(self._engine.check, request)
        async with aclosing(self._engine.generate(request)) as events:
            async for event in events:
                match event:
                    case Started():
                        for note in event.notes:
                            yield Said(note)
                    case StepDone():
                        yield StepTold(event.number, event.of, event.seconds)
                    case PatchVerdict():
                        said = event.reason or ("used from here on" if event.allowed else "not used")
                        yield Said(f"patches: {said}")
                    case Made():
                        content = await asyncio.to_thread(_encoded, event, suffix)
                        timings = asdict(event.timings)
                        yield Drawn(content, event.seed, event.replays, event.fingerprint, timings)

    def _request(self, order: Order) -> DiffusionRequest:
        from app.engine.diffusion.request import WARMUP_STEPS, DiffusionRequest

        match = SIZE.fullmatch(order.size or "")
        return DiffusionRequest(
            request_id=secrets.token_hex(8),
            model=self.model,
            prompt=order.prompt,
            negative_prompt=order.negative,
            width=int(match[1]) if match else self._engine.defaults.width,
            height=int(match[2]) if match else self._engine.defaults.height,
            num_frames=order.frames,
            seconds=order.seconds,
            steps=order.steps or self._engine.defaults.steps or None,
            guidance_scale=order.guidance,
            seed=order.seed,
            patches=order.patches or 1,
            warmup=WARMUP_STEPS if order.warmup is None else order.warmup,
            extrapolate=order.extrapolate,
            two_streams=order.two_streams,
            temperature=order.temperature,
        )


def _encoded(made: Made, suffix: str) -> bytes:
    """Return the file. Blocking."""
    from app.media.film import encode_film
    from app.media.pictures import encode_picture
    from app.media.sound import encode_sound

    form = suffix.removeprefix(".")
    if made.image is not None:
        return encode_picture(made.image, "jpeg" if form == "jpg" else form)  # type: ignore[arg-type]
    if made.samples is not None:
        return encode_sound(made.samples, made.rate, form)  # type: ignore[arg-type]  # checked against SUFFIXES
    return encode_film(made.frames, made.fps)


def _missing(status: ModelStatus) -> str:
    from cli import show

    return f"no node serves blocks {show.ranges(status.missing)} of {status.num_layers}"
