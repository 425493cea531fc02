"""Runs video jobs, a few at a time and the others in turn, and puts what comes of them into the store.

Each job ends in exactly one way: completed, failed with a code, or removed. Knows no HTTP.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Final

from app.api.errors import ApiError, describe, from_exception, unavailable
from app.diffusion_metrics import DiffusionMeter
from app.engine.diffusion.request import (
    DiffusionEngine,
    DiffusionEvent,
    DiffusionRequest,
    Made,
    PatchVerdict,
    Preview,
    StepDone,
)
from app.engine.merge import merge
from app.engine.request import ModelUnavailableError
from app.gateway import Gateway
from app.jobs.job import INTERRUPTED, Job, length_text
from app.jobs.store import JobStore, StorageError
from app.media.film import encode_film
from app.media.pictures import encode_picture, sheet_of, thumbnail_of
from slicing.diffusion.kinds import Kind

if TYPE_CHECKING:
    from PIL.Image import Image

log = logging.getLogger(__name__)

FILM: Final = "video.mp4"
THUMBNAIL: Final = "thumbnail.webp"
SHEET: Final = "spritesheet.webp"
PREVIEWS = 1  # one from the VAE on the way, beside the rough ones of each step
PICTURE_QUALITY = 80
STEPS_SHARE = 95  # percent of a job's progress; the rest is decoding and encoding
SWEEP_S = 60.0
PASSING = ("model_loading", "overloaded")  # what a job waits for instead of failing
OPENING_S = 2.0
FULL_RETRY_S = 30
SHUTTING_DOWN = "the gateway is shutting down: ask again"


@dataclass(slots=True)
class Progress:
    """How far a job is that runs now."""

    step: int = 0
    steps: int = 0
    seconds_per_step: float = 0.0
    patches: str = ""  # why steps run as patches or do not
    thumbnail: bytes = field(default=b"", repr=False)

    @property
    def percent(self) -> int:
        return STEPS_SHARE * self.step // self.steps if self.steps else 0


@dataclass(slots=True)
class _Running:
    task: asyncio.Task[None]
    progress: Progress
    news: asyncio.Event  # set, and replaced, at each change


class JobRunner:
    """The jobs of one gateway that are not over, each a task of its own. Use `close` at the end."""

    def __init__(self, gateway: Gateway, store: JobStore, endpoint: str) -> None:
        self.store = store
        self._gateway = gateway
        self._endpoint = endpoint
        self._places = asyncio.Semaphore(gateway.settings.videos_at_once)
        self._running: dict[str, _Running] = {}
        self._sweeping: asyncio.Task[None] | None = None
        self._opening = asyncio.Lock()
        self._is_open = False
        self._is_closing = False

    async def open(self) -> None:
        """Read what an earlier process left, once. Raises StorageError, OSError."""
        async with self._opening:
            if not self._is_open:
                await asyncio.to_thread(self.store.open)
                self._is_open = True
                if not self.store.is_empty:
                    self._start_sweeping()

    async def ready(self) -> None:
        """The same for a request. Raises `ApiError` 503 where the folder cannot be used."""
        try:
            await self.open()
        except StorageError as error:
            raise unavailable(error.code, str(error), FULL_RETRY_S) from None

    async def submit(self, job: Job, request: DiffusionRequest) -> None:
        """Keep a new job and start it when it is its turn. Raises `ApiError` 503 when there is no room."""
        most = self._gateway.settings.videos_waiting
        if self._gateway.is_draining or self._is_closing:
            raise unavailable("shutting_down", SHUTTING_DOWN, FULL_RETRY_S)
        if len(self._running) >= most:
            raise unavailable(
                "overloaded", f"{most} videos wait already, the most this gateway lets wait", FULL_RETRY_S
            )
        try:
            await asyncio.to_thread(self.store.add, job)
        except StorageError as error:
            raise unavailable(error.code, str(error), FULL_RETRY_S) from None
        progress = Progress(steps=job.steps)
        task = asyncio.create_task(self._run(job, request, progress))
        self._running[job.id] = _Running(task, progress, asyncio.Event())
        self._start_sweeping()

    def progress(self, job_id: str) -> Progress | None:
        """How far a job is; None for one that is over."""
        running = self._running.get(job_id)
        return None if running is None else running.progress

    async def changes(self, job_id: str) -> AsyncGenerator[Job, None]:
        """Yield the job at once, and whenever something about it has changed, until it is over or gone."""
        is_running = True
        while is_running:
            running = self._running.get(job_id)
            news = None if running is None else running.news
            is_running = running is not None
            if (job := self.store.peek(job_id)) is None:
                return
            yield job
            if news is not None:
                await news.wait()

    async def remove(self, job_id: str) -> None:
        """Cancel a job, freeing all it holds on every node, and forget it."""
        running = self._running.get(job_id)
        if running is not None:
            running.task.cancel()
            await asyncio.gather(running.task, return_exceptions=True)
            self._forget(job_id)
        await asyncio.to_thread(self.store.remove, job_id)

    async def close(self) -> None:
        """End every job as failed: a later process could not go on with it."""
        self._is_closing = True
        tasks = {job_id: running.task for job_id, running in self._running.items()}
        for task in tasks.values():
            task.cancel()
        await asyncio.gather(*tasks.values(), return_exceptions=True)
        for job_id in tasks:  # a task that was cancelled before it began has not said so itself
            await asyncio.to_thread(self.store.fail, job_id, INTERRUPTED, SHUTTING_DOWN)
            self._forget(job_id)
        if self._sweeping is not None:
            self._sweeping.cancel()
            await asyncio.gather(self._sweeping, return_exceptions=True)
        await asyncio.to_thread(self.store.close)

    # One job --------------------------------------------------------------------------------------------------

    async def _run(self, job: Job, request: DiffusionRequest, progress: Progress) -> None:
        try:
            async with self._places:
                await self._make(replace(job, status="in_progress"), request, progress)
        except StorageError as error:
            await self._note_failure(job.id, error.code, str(error))
        except Exception as error:  # whatever it was: the job says so, and nobody else waits for it
            failure = from_exception(error, job.id)
            if failure.code == "internal_error":
                log.error("job %s failed: %s", job.id, describe(error))  # noqa: TRY400 - its text may quote a prompt
            await self._note_failure(job.id, failure.code or str(failure.status), failure.message)
        except asyncio.CancelledError:
            if self._is_closing:
                self.store.fail(job.id, INTERRUPTED, SHUTTING_DOWN)
            raise
        finally:
            self._forget(job.id)

    async def _make(self, job: Job, request: DiffusionRequest, progress: Progress) -> None:
        await asyncio.to_thread(self.store.update, job)
        self._tell(job.id)
        engine = await self._engine(request.model)
        meter = DiffusionMeter(
            self._gateway.metrics,
            model=engine.model_name,
            endpoint=self._endpoint,
            arrived=time.perf_counter(),
        )
        limit_s = self._gateway.settings.request_timeout_s
        generators = [engine.generate(replace(request, deadline_s=limit_s or None))]
        merging = merge(generators, silence_s=float("inf"), stop=self._gateway.stop, time_limit_s=limit_s)
        meter.begin()
        try:
            async with aclosing(merging) as events:
                async for item in events:
                    if item is not None:
                        meter.count(item[1])
                        await self._take(job, item[1], progress)
            meter.count_answered()
        except asyncio.CancelledError:
            meter.count_aborted()
            raise
        finally:
            meter.end()

    async def _engine(self, model: str) -> DiffusionEngine:
        """Wait until the model is open: it was when the job was taken, and may have made room for another since."""
        while True:
            try:
                return await self._gateway.ready_diffusion(model, Kind.VIDEO)
            except (ApiError, ModelUnavailableError) as error:
                if error.code not in PASSING:
                    raise
            await asyncio.sleep(OPENING_S)

    async def _take(self, job: Job, event: DiffusionEvent, progress: Progress) -> None:
        match event:
            case StepDone():
                mean = progress.seconds_per_step * (event.number - 1) + event.seconds
                progress.step, progress.steps = event.number, event.of
                progress.seconds_per_step = mean / event.number
                self.store.note(replace(job, progress=progress.percent))
            case PatchVerdict():
                progress.patches = event.reason or ("allowed" if event.allowed else "steps run whole")
            case Preview():
                progress.thumbnail = await asyncio.to_thread(_thumbnail, event.image)
            case Made():
                files = await asyncio.to_thread(_files_of, event)
                seconds = length_text(len(event.frames) / event.fps)
                done = job.done(seconds, self.store.lifetime_s)
                await asyncio.to_thread(self.store.complete, done, files)
        self._tell(job.id)

    async def _note_failure(self, job_id: str, code: str, message: str) -> None:
        self._gateway.metrics.count_error(self._endpoint, code)
        log.info("job %s failed: %s", job_id, code)
        await asyncio.to_thread(self.store.fail, job_id, code, message)

    def _tell(self, job_id: str) -> None:
        running = self._running.get(job_id)
        if running is not None:
            running.news.set()
            running.news = asyncio.Event()

    def _forget(self, job_id: str) -> None:
        """A job's task is over: tell whoever watches it."""
        running = self._running.pop(job_id, None)
        if running is not None:
            running.news.set()

    def _start_sweeping(self) -> None:
        if self._sweeping is None or self._sweeping.done():
            self._sweeping = asyncio.create_task(self._sweep())

    async def _sweep(self) -> None:
        """Forget jobs whose time is over, as long as there are any."""
        while not self.store.is_empty:
            await asyncio.sleep(SWEEP_S)
            await asyncio.to_thread(self.store.sweep)


def _files_of(made: Made) -> dict[str, bytes]:
    """Return what is kept of a video, by name. Blocking."""
    middle = made.frames[len(made.frames) // 2]
    return {
        FILM: encode_film(made.frames, made.fps),
        THUMBNAIL: _thumbnail(middle),
        SHEET: encode_picture(sheet_of(made.frames), "webp", PICTURE_QUALITY),
    }


def _thumbnail(image: Image) -> bytes:
    return encode_picture(thumbnail_of(image), "webp", PICTURE_QUALITY)
