"""Diffusion engines without models and networks, with the production interface: pictures of flat colours, by seed.

Each counts its open answers, so that a test can see that a client's leaving was noticed.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass, field

import numpy as np
from PIL import Image

from app.engine.diffusion.request import (
    Decoding,
    DiffusionDefaults,
    DiffusionEvent,
    DiffusionRequest,
    DiffusionTimings,
    Loading,
    Made,
    PatchVerdict,
    Preview,
    StackUse,
    Started,
    StepDone,
)
from app.engine.request import ModelStatus, RequestError, RouteHop
from slicing.diffusion.kinds import Kind

FINGERPRINT = "fp_pictures"
PICTURES = DiffusionDefaults(64, 48, steps=4, guidance_scale=3.0, size_step=16, max_text=77)
VIDEOS = DiffusionDefaults(
    64, 48, steps=4, guidance_scale=5.0, size_step=16, max_text=77, num_frames=9, frame_step=4, fps=8
)
SOUNDS = DiffusionDefaults(
    None, None, steps=4, guidance_scale=7.0, size_step=1, max_text=77, seconds=0.5, rate=44_100
)
REFUSED = PatchVerdict(allowed=False, reason="its blocks are of two streams: steps run whole")
ROUTE = (RouteHop("0a1b2c3d", 0, 4), RouteHop("4e5f6a7b", 4, 8, is_relayed=True))


@dataclass
class FakePictures:
    """Makes what `kind` says. `before_step(n)` may raise, or return something to wait for (-1: before it starts)."""

    kind: Kind = Kind.PICTURE
    model_name: str = "painter"
    defaults: DiffusionDefaults = PICTURES
    created: int = 1_700_000_000
    status: ModelStatus = field(default_factory=lambda: ModelStatus("ready", 8))
    before_step: Callable[[int], object] = lambda _: None
    verdict: PatchVerdict = REFUSED
    num_open: int = 0
    requests: list[DiffusionRequest] = field(default_factory=list)

    def coverage(self) -> ModelStatus:
        return self.status

    def check(self, request: DiffusionRequest) -> None:
        step = self.defaults.size_step
        if (request.width or 0) % step or (request.height or 0) % step:
            raise RequestError("size", "invalid_value", f"width and height are multiples of {step}")
        if request.patches > 2:
            raise RequestError("patches", "invalid_value", "at most 2 patches: the route has 2 stages")

    async def generate(self, request: DiffusionRequest) -> AsyncGenerator[DiffusionEvent, None]:
        self.requests.append(request)
        self.num_open += 1
        steps = request.steps or self.defaults.steps
        try:
            yield Loading()
            await self._wait(-1)
            yield Started((StackUse("transformer.blocks", 0, 8, (ROUTE,)),), steps, 5, 12)
            for number in range(steps):
                await self._wait(number)
                if request.patches > 1 and number == 0:
                    yield self.verdict
                yield StepDone(number + 1, steps, 0.01, (0.6, 0.5))
                async for preview in self._previews(request, number, steps):
                    yield preview
            yield Decoding()
            yield self._made(request, steps)
        finally:
            self.num_open -= 1

    async def _previews(
        self, request: DiffusionRequest, number: int, steps: int
    ) -> AsyncGenerator[Preview, None]:
        if request.previews and self.kind is not Kind.AUDIO:
            yield Preview(-1, number + 1, Image.new("RGB", (8, 8)), is_rough=True)
            points = [steps * (one + 1) // (request.previews + 1) for one in range(request.previews)]
            if number + 1 in points:
                yield Preview(points.index(number + 1), number + 1, self.picture(request, 100))

    def picture(self, request: DiffusionRequest, shade: int = 200) -> Image.Image:
        """A flat picture whose colour tells the seed."""
        size = (request.width or self.defaults.width or 1, request.height or self.defaults.height or 1)
        return Image.new("RGB", size, (request.seed % 256, shade, 40))

    def _made(self, request: DiffusionRequest, steps: int) -> Made:
        timings = DiffusionTimings(
            total_s=1.0,
            steps_s=0.8,
            steps=steps,
            compute_s=0.5,
            passes=2 * steps,
            bytes_sent=1000,
            busy=(0.6, 0.5),
        )
        told = {"timings": timings, "seed": request.seed, "route": ROUTE, "fingerprint": FINGERPRINT}
        match self.kind:
            case Kind.PICTURE:
                return Made(self.kind, image=self.picture(request), **told)
            case Kind.VIDEO:
                count = request.num_frames or self.defaults.num_frames or 1
                frames = tuple(self.picture(request, 20 * number % 256) for number in range(count))
                return Made(self.kind, frames=frames, fps=self.defaults.fps, **told)
            case Kind.AUDIO:
                rate = self.defaults.rate
                times = np.arange(int(rate * (request.seconds or self.defaults.seconds or 1))) / rate
                tone = np.stack([np.sin(2 * np.pi * 440 * times)] * 2).astype(np.float32) / 2
                return Made(self.kind, samples=tone, rate=rate, **told)

    async def _wait(self, number: int) -> None:
        waiting = self.before_step(number)
        if asyncio.iscoroutine(waiting) or asyncio.isfuture(waiting):
            await waiting
        else:
            await asyncio.sleep(0)


def fake_videos(name: str = "filmer") -> FakePictures:
    return FakePictures(Kind.VIDEO, name, VIDEOS)


def fake_sounds(name: str = "composer") -> FakePictures:
    return FakePictures(Kind.AUDIO, name, SOUNDS)
