"""Runs video jobs, a few at a time and the others in turn, and puts what comes of them into the store.

Each job ends in exactly one way: completed, failed with a code, or removed. Where gateways share the store, a job may
be asked about, watched and removed at any of them. Knows no HTTP.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing, suppress
from contextvars import Context
from dataclasses import dataclass, replace

from app.api.errors import ApiError, from_exception, unavailable
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
from app.jobs.errors import RemovedError, StorageError
from app.jobs.film_files import files_of, thumbnail
from app.jobs.job import INTERRUPTED, Job, length_text
from app.jobs.progress import Progress
from app.jobs.store import JobStore
from app.jobs.uncancelled import to_its_end
from app.keys import ANYONE
from app.state.state import StateError
from routing.describing import describe
from slicing.diffusion.kinds import Kind

log = logging.getLogger(__name__)

PREVIEWS = 1  # one from the VAE on the way, beside the rough ones of each step
SWEEP_S = 60.0
PASSING = ("model_loading", "overloaded")  # what a job waits for instead of failing
OPENING_S = 2.0
FULL_RETRY_S = 30
TELL_S = 1.0  # how often gateways that share a store tell of their jobs, and look for those removed elsewhere
PATIENCE_S = 300.0  # with a store that is away when a video is done
LOOK_S = 0.5  # how often a job of another gateway is looked at for who watches it
SHUTTING_DOWN = "the gateway is shutting down: ask again"


@dataclass(slots=True)
class _Running:
    job: Job
    task: asyncio.Task[None]
    progress: Progress
    news: asyncio.Event  # set, and replaced, at each change
    told: bytes = b""  # what other gateways know of its progress
    is_made: bool = False  # its end is being kept


class JobRunner:
    """The jobs of one gateway that are not over, each a task of its own. Use `close` at the end."""

    def __init__(self, gateway: Gateway, store: JobStore, endpoint: str) -> None:
        self.store = store
        self._gateway = gateway
        self._endpoint = endpoint
        self._places = asyncio.Semaphore(gateway.settings.videos_at_once)
        self._running: dict[str, _Running] = {}
        self._num_coming = 0  # taken, and not kept yet
        self._sweeping: asyncio.Task[None] | None = None
        self._telling: asyncio.Task[None] | None = None
        self._opening = asyncio.Lock()
        self._is_open = False
        self._is_closing = False

    async def open(self) -> None:
        """Read what an earlier process left, once. Raises StorageError, StateError."""
        async with self._opening:
            if not self._is_open:
                await self.store.open()
                self._is_open = True
                self._sweeping = asyncio.create_task(self._sweep(), context=Context())

    async def ready(self) -> None:
        """The same for a request. Raises `ApiError` 503 where the folder cannot be used, StateError."""
        try:
            await self.open()
        except StorageError as error:
            raise unavailable(error.code, str(error), FULL_RETRY_S) from None

    async def submit(self, job: Job, request: DiffusionRequest) -> None:
        """Keep a new job and start it when it is its turn. Raises `ApiError` 503 when there is no room, StateError."""
        most = self._gateway.settings.videos_waiting
        if self._gateway.is_draining or self._is_closing:
            raise unavailable("shutting_down", SHUTTING_DOWN, FULL_RETRY_S)
        if len(self._running) + self._num_coming >= most:
            raise unavailable(
                "overloaded", f"{most} videos wait already, the most this gateway lets wait", FULL_RETRY_S
            )
        await self._add(job)
        if self._is_closing:  # meanwhile: nobody would end it
            await self.store.fail(job, INTERRUPTED, SHUTTING_DOWN)
            raise unavailable("shutting_down", SHUTTING_DOWN, FULL_RETRY_S)
        progress = Progress(steps=job.steps)
        task = asyncio.create_task(self._run(job, request, progress))
        self._running[job.id] = _Running(job, task, progress, asyncio.Event())
        if self.store.is_shared and (self._telling is None or self._telling.done()):
            self._telling = asyncio.create_task(self._tell_others(), context=Context())

    async def _add(self, job: Job) -> None:
        self._num_coming += 1
        try:
            await self.store.add(job)
        except StorageError as error:
            raise unavailable(error.code, str(error), FULL_RETRY_S) from None
        finally:
            self._num_coming -= 1

    async def progress(self, job: Job) -> Progress | None:
        """How far a job is, also one of another gateway; None for one that is over."""
        if job.is_over:
            return None
        if (running := self._running.get(job.id)) is not None:
            return running.progress
        told = await self.store.noted(job.id) if self.store.is_shared else None
        return None if told is None else Progress.decode(told)

    async def changes(self, job: Job) -> AsyncGenerator[tuple[Job, Progress | None], None]:
        """Yield the job at once, and whenever something about it has changed, until it is over or gone."""
        last: tuple[Job, Progress | None] | None = None
        while True:
            running = self._running.get(job.id)
            news = None if running is None else running.news
            if (found := await self.store.get(job.id, job.owner)) is None:
                return
            now = found, await self.progress(found)
            if news is not None or now != last:
                yield now
            if found.is_over:
                return
            if news is not None:
                await news.wait()
            else:  # it is another gateway's, or its end could not be kept yet
                await asyncio.sleep(LOOK_S)
            last = now

    async def remove(self, job: Job) -> None:
        """Cancel a job, freeing all it holds on every node, and forget it. Raises StateError.

        One of another gateway is cancelled by that as soon as it looks.
        """
        await self._cancel(job.id)
        await self.store.remove(job)

    async def close(self) -> None:
        """End every job as failed: a later process could not go on with it."""
        self._is_closing = True
        left = list(self._running.values())
        for running in left:
            running.task.cancel()
        await asyncio.gather(*(running.task for running in left), return_exceptions=True)
        # A task that was cancelled before it began has not said so itself.
        await asyncio.gather(*(self.store.fail(one.job, INTERRUPTED, SHUTTING_DOWN) for one in left))
        for running in left:
            self._forget(running.job.id)
        for task in (self._sweeping, self._telling):
            if task is not None:
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
        await self.store.close()

    # One job --------------------------------------------------------------------------------------------------

    async def _run(self, job: Job, request: DiffusionRequest, progress: Progress) -> None:
        try:
            async with self._places:
                await self._make(replace(job, status="in_progress"), request, progress)
        except StorageError as error:
            await self._note_failure(job, error.code, str(error))
        except RemovedError:
            log.info("job %s was removed while it was made", job.id, extra={"job": job.id})
        except Exception as error:  # whatever it was: the job says so, and nobody else waits for it
            failure = from_exception(error, job.id)
            if failure.code == "internal_error":
                about = describe(error)
                log.error("job %s failed: %s", job.id, about, extra={"job": job.id})  # noqa: TRY400 - no text
            await self._note_failure(job, failure.code or str(failure.status), failure.message)
        except asyncio.CancelledError:
            if self._is_closing:
                await self.store.fail(job, INTERRUPTED, SHUTTING_DOWN)
            raise
        finally:
            self._forget(job.id)

    async def _make(self, job: Job, request: DiffusionRequest, progress: Progress) -> None:
        await self.store.update(job)
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
                return await self._gateway.ready_diffusion(model, Kind.VIDEO, ANYONE)
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
            case PatchVerdict():
                progress.patches = event.reason or ("allowed" if event.allowed else "steps run whole")
            case Preview():
                progress.thumbnail = await asyncio.to_thread(thumbnail, event.image)
            case Made():
                files = await asyncio.to_thread(files_of, event)
                seconds = length_text(len(event.frames) / event.fps)
                self._running[job.id].is_made = True
                await self._keep(job.done(seconds, self.store.lifetime_s), files)
                told = {"job": job.id, "model": job.model, "took_s": time.time() - job.created}
                log.info("job %s finished", job.id, extra=told)
        self._tell(job.id)

    async def _keep(self, job: Job, files: dict[str, bytes]) -> None:
        """Put a finished job into the store; one that is away is waited for: the video may have taken hours."""
        until = time.monotonic() + PATIENCE_S
        while True:
            try:
                return await to_its_end(self.store.complete(job, files))
            except StateError:
                if time.monotonic() > until:
                    raise
            await asyncio.sleep(TELL_S)

    async def _note_failure(self, job: Job, code: str, message: str) -> None:
        self._gateway.metrics.count_error(self._endpoint, code)
        log.info("job %s failed: %s", job.id, code, extra={"job": job.id, "code": code})
        await self.store.fail(job, code, message)

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

    async def _cancel(self, job_id: str) -> None:
        running = self._running.get(job_id)
        if running is not None:
            running.task.cancel()
            await asyncio.gather(running.task, return_exceptions=True)
            self._forget(job_id)

    # All of them ----------------------------------------------------------------------------------------------

    async def _tell_others(self) -> None:
        """Tell the gateways that share the store how far our jobs are, and end those that were removed there."""
        while self._running:
            await asyncio.sleep(TELL_S)
            for job_id, running in list(self._running.items()):
                with suppress(StateError):
                    if not running.is_made and not await self.store.is_wanted(running.job):
                        await self._cancel(job_id)
                    elif (told := running.progress.encode()) != running.told:
                        await self.store.note(running.job, told)
                        running.told = told

    async def _sweep(self) -> None:
        """Forget jobs whose time is over, and fail those of gateways that died."""
        while True:
            await asyncio.sleep(SWEEP_S)
            with suppress(StateError):
                await self.store.sweep()
