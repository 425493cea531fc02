"""`POST /v1/videos` and what belongs to it: a job is asked for, looked at, fetched, and let go.

The journey of a job: `create` here, then `app.jobs.runner`, then `content`.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from functools import partial
from typing import Final, Literal, NoReturn

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from app.api.answering import Pulse
from app.api.body import BodyLimits
from app.api.diffusion_protocol import size_text
from app.api.errors import ApiError, invalid
from app.api.file_answer import file_answer
from app.api.multipart import read_fields
from app.api.scope import key_of, tenant_of
from app.api.sse import DONE, KEEPALIVE, EventStream, frame, until_disconnect
from app.api.video_protocol import (
    FORM_TYPES,
    VideoDeleted,
    VideoRequest,
    describe_job,
    list_of,
    parse_video,
    seconds_text,
)
from app.engine.diffusion.request import DiffusionRequest
from app.engine.merge import merge
from app.gateway import Gateway
from app.jobs.film_files import FILM, SHEET, THUMBNAIL
from app.jobs.job import Job, new_id
from app.jobs.progress import Progress
from app.jobs.runner import PREVIEWS, JobRunner
from app.keys import ApiKey
from app.media.film import FILM_TYPE
from app.records import owner_of
from slicing.diffusion.kinds import Kind

PATH = "/v1/videos"
ONE_PATH = "/v1/videos/{id}"
CONTENT_PATH = "/v1/videos/{id}/content"
EVENTS_PATH = "/v1/videos/{id}/events"
NOT_BUILT = (
    "/v1/videos/edits",
    "/v1/videos/extensions",
    "/v1/videos/characters",
    "/v1/videos/{id}/remix",
)

DEFAULT_LIMIT = 20
MAX_LIMIT = 100
POLL_HEADER = "openai-poll-after-ms"
POLL_MS = (500, 10_000)  # at most and at least so often; a step's time in between
QUEUED_POLL_MS = 2000
NOT_READY_RETRY_S = 5

FILES: Final[dict[str, tuple[str, str]]] = {
    "video": (FILM, FILM_TYPE),
    "thumbnail": (THUMBNAIL, "image/webp"),
    "spritesheet": (SHEET, "image/webp"),
}


class Videos:
    """The endpoints, over one gateway and its jobs. A key sees its own jobs only."""

    def __init__(self, gateway: Gateway, runner: JobRunner) -> None:
        self._gateway = gateway
        self._runner = runner
        self._limits = BodyLimits(gateway.settings.max_body_bytes, gateway.settings.body_timeout_s)

    async def create(self, request: Request) -> Response:
        """Take a job; JSON and multipart forms are alike."""
        asked = parse_video(await read_fields(request, self._limits, FORM_TYPES))
        await self._runner.ready()
        planning = self._plan(asked, key_of(request.scope))
        job, planned = await until_disconnect(request.receive, planning)
        await self._runner.submit(job, planned)  # from here on it is a job, whether its client stays or not
        return await self._answer(job)

    async def index(self, request: Request) -> Response:
        """List the jobs of this key, newest first unless `order` says otherwise."""
        await self._runner.ready()
        query = request.query_params
        limit = _limit(query.get("limit"))
        order = _order(query.get("order"))
        try:
            jobs, has_more = await self._runner.store.page(
                _owner(request), limit=limit, after=query.get("after") or None, order=order
            )
        except KeyError:
            raise invalid("after", "after names no job of yours") from None
        told = [describe_job(job, await self._runner.progress(job)) for job in jobs]
        page = list_of(told, has_more=has_more)
        return JSONResponse(page.model_dump(mode="json"))

    async def retrieve(self, request: Request) -> Response:
        """Say how a job stands, and when to look again."""
        return await self._answer(await self._job(request))

    async def content(self, request: Request) -> Response:
        """Send a job's video, a picture of it, or a sheet of its frames; `Range` works."""
        job = await self._job(request)
        variant = request.query_params.get("variant") or "video"
        if variant not in FILES:
            raise invalid("variant", "variant is video, thumbnail or spritesheet")
        name, media_type = FILES[variant]
        if job.status != "completed":
            return await self._early(job, variant)
        file = await self._runner.store.file(job.id, name)
        if file is None:
            raise ApiError(404, "not_found", "there is no such file any more")
        return await file_answer(request, file, media_type, f"{job.id}-{variant}")

    async def events(self, request: Request) -> Response:
        """Send the job as it stands, and again whenever that changes, until it is over."""
        job = await self._job(request)
        return EventStream(self._frames(job), partial(self._gateway.failure, request.scope))

    async def delete(self, request: Request) -> Response:
        """Cancel a job that waits or runs, and forget it with all its files."""
        job = await self._job(request)
        await self._runner.remove(job)
        return JSONResponse(VideoDeleted(id=job.id).model_dump())

    async def not_built(self, request: Request) -> Response:
        """What begins from another video."""
        raise ApiError(
            404, "not_found", f"this is not built here: videos begin from a prompt, at POST {PATH}"
        )

    async def _plan(self, asked: VideoRequest, key: ApiKey) -> tuple[Job, DiffusionRequest]:
        settings, wishes = self._gateway.settings, asked.diffuse
        engine = await self._gateway.ready_diffusion(asked.model, Kind.VIDEO, key)
        job_id = new_id()
        request = DiffusionRequest(
            request_id=job_id,
            model=engine.model_name,
            prompt=asked.prompt,
            num_frames=asked.num_frames,
            seconds=asked.seconds,
            previews=PREVIEWS,
            route=settings.route if wishes is None else wishes.over(settings.route),
            tenant=key.digest,
            **asked.pixels(engine.defaults, settings.max_pixels),
            **asked.common(engine.defaults),
        )
        await asyncio.to_thread(engine.check, request)
        job = Job(
            id=job_id,
            owner=owner_of(key.digest),
            model=asked.model or engine.model_name,
            prompt=asked.prompt,
            size=size_text(request, engine.defaults),
            seconds=seconds_text(request, engine.defaults),
            seed=request.seed,
            steps=request.steps or 0,
        )
        return job, request

    async def _job(self, request: Request) -> Job:
        await self._runner.ready()
        job = await self._runner.store.get(request.path_params["id"], _owner(request))
        if job is None:
            _refuse_unknown()
        return job

    async def _early(self, job: Job, variant: str) -> Response:
        """What can be had of a job that is not completed: an early look, from a preview."""
        progress = await self._runner.progress(job)
        if variant == "thumbnail" and progress is not None and progress.thumbnail:
            headers = {"cache-control": "no-store"}
            return Response(progress.thumbnail, media_type="image/webp", headers=headers)
        if job.status == "failed":
            raise ApiError(404, "video_failed", "the job failed: there is no video")
        message = f"the video is not there yet: the job is {job.status}"
        headers = {"retry-after": str(NOT_READY_RETRY_S), "x-should-retry": "false"}
        raise ApiError(409, "video_not_ready", message, headers=headers)

    async def _frames(self, job: Job) -> AsyncGenerator[bytes, None]:
        pulse = Pulse(self._gateway.settings.keepalive_s, float("inf"))
        changes = [self._runner.changes(job)]
        merging = merge(changes, silence_s=pulse.tick_s, stop=self._gateway.stop)
        async with aclosing(merging) as jobs:
            async for item in jobs:
                if item is not None:
                    yield frame(describe_job(*item[1]).model_dump(mode="json"))
                    pulse.note_chunk()
                elif pulse.is_due:
                    yield KEEPALIVE
                    pulse.note_comment()
        yield DONE

    async def _answer(self, job: Job) -> Response:
        progress = await self._runner.progress(job)
        headers = {} if job.is_over else {POLL_HEADER: str(_poll_ms(job, progress))}
        return JSONResponse(describe_job(job, progress).model_dump(mode="json"), headers=headers)


def _poll_ms(job: Job, progress: Progress | None) -> int:
    """When it is worth asking again: after about a step."""
    if job.status == "queued" or progress is None:
        return QUEUED_POLL_MS
    least, most = POLL_MS
    return min(most, max(least, round(progress.seconds_per_step * 1000)))


def _limit(text: str | None) -> int:
    if not text:
        return DEFAULT_LIMIT
    if not text.isdecimal() or len(text) > len(str(MAX_LIMIT)) or not 1 <= int(text) <= MAX_LIMIT:
        raise invalid("limit", f"limit is a number from 1 to {MAX_LIMIT}")
    return int(text)


def _order(text: str | None) -> Literal["asc", "desc"]:
    match text or "desc":
        case "asc" | "desc" as order:
            return order
    raise invalid("order", "order is asc or desc")


def _owner(request: Request) -> str:
    return owner_of(tenant_of(request.scope))


def _refuse_unknown() -> NoReturn:
    raise ApiError(404, "not_found", "no such video: it was deleted, or its time is over", param="video_id")
