"""`POST /v1/images/generations`: one or several pictures of a prompt, whole or with previews on the way.

The journey of a request, read downwards: parse, find the engine, plan, make, encode, write.
"""

from __future__ import annotations

import asyncio
import base64
import secrets
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from functools import partial

from starlette.requests import Request
from starlette.responses import Response

from app.api.answering import Pulse
from app.api.body import BodyLimits, read_json_object
from app.api.diffusion_protocol import size_text
from app.api.errors import ApiError, invalid
from app.api.image_protocol import (
    EventType,
    ImageAnswer,
    ImageEvent,
    ImageItem,
    ImageRequest,
    parse_image,
    shown_quality,
    size_of,
    usage_of,
)
from app.api.making import Making, route_of, timing_headers, timings_of
from app.api.picture_links import PictureLinks, public_base
from app.api.scope import caller_of, request_id_of
from app.api.sse import KEEPALIVE, EventStream, named_frame, until_disconnect
from app.diffusion_metrics import DiffusionMeter
from app.engine.diffusion.request import (
    DiffusionEvent,
    DiffusionRequest,
    Made,
    PatchVerdict,
    Preview,
    Started,
    StepDone,
)
from app.gateway import Gateway
from app.keys import Caller
from app.media.pictures import encode_picture
from slicing.diffusion.kinds import Kind

PATH = "/v1/images/generations"
ALIAS = "/v1/images"
NOT_BUILT = ("/v1/images/edits", "/v1/images/variations")


class Images:
    """The endpoint, over one gateway."""

    def __init__(self, gateway: Gateway, links: PictureLinks) -> None:
        self._gateway = gateway
        self._links = links
        self._limits = BodyLimits(gateway.settings.max_body_bytes, gateway.settings.body_timeout_s)

    async def create(self, request: Request) -> Response:
        """Make pictures. Streams when the body says `"stream": true`."""
        arrived = time.perf_counter()
        asked = parse_image(await read_json_object(request, self._limits))
        if asked.num_pictures > self._gateway.settings.max_requests:
            raise invalid("n", f"n is at most {self._gateway.settings.max_requests} here")
        beginning = self._begin(asked, request_id_of(request.scope), arrived, caller_of(request.scope))
        making = await until_disconnect(request.receive, beginning)
        if asked.stream:
            return EventStream(self._frames(asked, making), partial(self._gateway.failure, request.scope))
        base = public_base(request)
        return await until_disconnect(request.receive, self._whole(asked, making, base))

    async def not_built(self, request: Request) -> Response:
        """Edits and variations begin from a picture, which nothing here does."""
        message = f"this is not built here: pictures begin from a prompt, at POST {PATH}"
        raise ApiError(404, "not_found", message)

    async def _begin(self, asked: ImageRequest, request_id: str, arrived: float, caller: Caller) -> Making:
        settings, wishes = self._gateway.settings, asked.diffuse
        engine = await self._gateway.ready_diffusion(asked.model, Kind.PICTURE, caller.key)
        common = asked.common(engine.defaults) | {"steps": asked.num_steps(engine.defaults)}
        seed = common.pop("seed")
        image_id = f"img_{secrets.token_hex(12)}"
        planned = [
            DiffusionRequest(
                request_id=f"{image_id}-{index}",
                model=engine.model_name,
                prompt=asked.prompt,
                seed=seed + index,
                previews=asked.partial_images or 0,
                deadline_s=settings.request_timeout_s or None,
                route=settings.route if wishes is None else wishes.over(settings.route),
                tenant=caller.tenant,
                **asked.pixels(engine.defaults, settings.max_pixels),
                **common,
            )
            for index in range(asked.num_pictures)
        ]
        await asyncio.to_thread(engine.check, planned[0])
        meter = DiffusionMeter(self._gateway.metrics, model=engine.model_name, endpoint=PATH, arrived=arrived)
        return Making(self._gateway, engine, planned, meter, request_id, caller)

    async def _whole(self, asked: ImageRequest, making: Making, base: str) -> Response:
        """Wait for every picture and return the answer as one document."""
        writing = _Writing(asked, making)
        items: dict[int, ImageItem] = {}
        async with aclosing(making.events()) as events:
            async for item in events:
                if item is None:
                    continue
                index, event = item
                writing.note(index, event)
                if isinstance(event, Made):
                    content = await writing.encoded(event)
                    items[index] = await self._item(asked, content, event.seed, base)
        answer = writing.answer([items[index] for index in sorted(items)])
        headers = timing_headers(writing.ends[0].timings)
        body = answer.model_dump_json(exclude_none=True)
        return Response(body, media_type="application/json", headers=headers)

    async def _item(self, asked: ImageRequest, content: bytes, seed: int, base: str) -> ImageItem:
        if asked.response_format == "url":
            return ImageItem(url=base + await self._links.keep(content, asked.format), seed=seed)
        return ImageItem(b64_json=base64.b64encode(content).decode(), seed=seed)

    async def _frames(self, asked: ImageRequest, making: Making) -> AsyncGenerator[bytes, None]:
        """Yield the events of a stream: previews as they come, each picture once, comments in between."""
        pulse = Pulse(self._gateway.settings.keepalive_s, float("inf"))
        writing = _Writing(asked, making)
        async with aclosing(making.events(silence_s=pulse.tick_s)) as events:
            async for item in events:
                if item is not None:
                    writing.note(*item)
                event = None if item is None else await writing.event(*item)
                if event is not None:
                    yield named_frame(event.type, event.model_dump(mode="json", exclude_none=True))
                    pulse.note_chunk()
                elif pulse.is_due:
                    yield KEEPALIVE
                    pulse.note_comment()


@dataclass
class _Writing:
    """Turns what the engine tells into the parts of one answer."""

    asked: ImageRequest
    making: Making
    started: dict[int, Started] = field(default_factory=dict)
    ends: dict[int, Made] = field(default_factory=dict)  # without their pictures, which are large
    created: int = field(default_factory=lambda: int(time.time()))
    size: str = ""

    def note(self, index: int, event: DiffusionEvent) -> None:
        """Remember what the answer says in the end."""
        match event:
            case Started():
                self.started[index] = event
            case Made():
                self.size = size_of(event)
                self.ends[index] = without_content(event)

    async def encoded(self, made: Made) -> bytes:
        assert made.image is not None
        return await asyncio.to_thread(encode_picture, made.image, self.asked.format, self.asked.compression)

    def answer(self, items: list[ImageItem]) -> ImageAnswer:
        first = self.ends[0]
        notes = [note for started in self.started.values() for note in started.notes]
        return ImageAnswer(
            created=self.created,
            data=items,
            output_format=self.asked.format,
            quality=shown_quality(self.asked),
            size=self.size,
            usage=usage_of(list(self.started.values())),
            model=self.asked.model or self.making.engine.model_name,
            seed=first.seed,
            steps=first.timings.steps,
            timings=timings_of(first.timings),
            replays=sum(end.replays for end in self.ends.values()),
            route=route_of(first.route),
            system_fingerprint=first.fingerprint,
            notes=tuple(dict.fromkeys(notes)),
        )

    async def event(self, index: int, event: DiffusionEvent) -> ImageEvent | None:
        """Return what a stream says of an event, if anything."""
        match event:
            case Preview() if not event.is_rough and self.asked.partial_images:
                picture = await self._picture(event)
                return self._picture_event("image_generation.partial_image", index, picture, event.index)
            case Made():
                made = self._picture_event(
                    "image_generation.completed", index, await self.encoded(event), None
                )
                return made.model_copy(update=self._end(index, event))
        return await self._progress(index, event) if wants_progress(self.asked) else None

    async def _progress(self, index: int, event: DiffusionEvent) -> ImageEvent | None:
        kind: EventType = "image_generation.progress"
        match event:
            case StepDone():
                return ImageEvent(
                    type=kind,
                    index=index,
                    step=event.number,
                    steps=event.of,
                    seconds=event.seconds,
                    busy=event.busy,
                )
            case PatchVerdict():
                said = event.reason or ("steps run as patches" if event.allowed else "steps run whole")
                return ImageEvent(type=kind, index=index, patches=said)
            case Preview() if event.is_rough:
                rough = await asyncio.to_thread(encode_picture, event.image, "webp", 60)
                return ImageEvent(
                    type=kind,
                    index=index,
                    step=event.step,
                    output_format="webp",
                    b64_json=base64.b64encode(rough).decode(),
                )
        return None

    async def _picture(self, preview: Preview) -> bytes:
        return await asyncio.to_thread(
            encode_picture, preview.image, self.asked.format, self.asked.compression
        )

    def _picture_event(
        self, kind: EventType, index: int, content: bytes, partial_index: int | None
    ) -> ImageEvent:
        engine = self.making.engine
        return ImageEvent(
            type=kind,
            index=index,
            created_at=self.created,
            b64_json=base64.b64encode(content).decode(),
            partial_image_index=partial_index,
            size=self.size or size_text(self.making.requests[index], engine.defaults),
            quality=shown_quality(self.asked),
            background="opaque",
            output_format=self.asked.format,
            seed=self.making.requests[index].seed,
        )

    def _end(self, index: int, made: Made) -> dict[str, object]:
        started = [self.started[index]] if index in self.started else []
        return {
            "usage": usage_of(started),
            "steps": made.timings.steps,
            "timings": timings_of(made.timings),
            "replays": made.replays,
            "route": route_of(made.route),
            "system_fingerprint": made.fingerprint,
        }


def wants_progress(asked: ImageRequest) -> bool:
    return bool(asked.stream_options and asked.stream_options.include_progress)


def without_content(made: Made) -> Made:
    """The end of an answer without what was made, so that it can be let go."""
    return replace(made, image=None, frames=(), samples=None)
