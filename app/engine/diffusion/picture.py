"""One picture being made: the stock pipeline runs in a thread of its own, its remote blocks elsewhere.

A copy of the pipeline's shell belongs to this picture alone; all weights are shared, so several are made at once. Text
encoders and autoencoder work for one picture at a time. Knows the network only as sessions.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import functools
import sys
import threading
from collections.abc import AsyncGenerator, Callable, Iterator
from contextvars import copy_context
from dataclasses import dataclass
from types import FrameType
from typing import Any

import torch
from torch import nn

from app.engine.diffusion.branches import Attempt, Branch, Branches
from app.engine.diffusion.defaults import token_pixels, tokenizers_of
from app.engine.diffusion.model import OpenedPipeline
from app.engine.diffusion.passes import Sessions
from app.engine.diffusion.patching import Patching, PatchWish
from app.engine.diffusion.pipeline_call import call_arguments, taken
from app.engine.diffusion.previews import Previews, clean_latents, decoder_of
from app.engine.diffusion.progress import StepClock
from app.engine.diffusion.remote_stacks import PictureCancelled, RemoteStacks
from app.engine.diffusion.request import (
    Decoding,
    DiffusionEvent,
    DiffusionRequest,
    Made,
    Preview,
    Started,
    StepDone,
)
from app.engine.diffusion.texts import TextWatch
from app.engine.diffusion.watched_scheduler import SchedulerStep, watched_scheduler
from app.engine.request import RequestError
from slicing.diffusion.calls import Pass
from slicing.diffusion.wire_tensors import is_finite

_MODULE_CALL = nn.Module._call_impl.__code__
SMALL_BYTES = 1 << 20
POLL_S = 0.1  # between two looks at whether a picture that waits for its turn is wanted still


@dataclass(frozen=True)
class Failed:
    """The pipeline ended with an error."""

    error: BaseException


class Picture:
    """Made once and run once. `events` yields what happens; `close` ends it and frees everything."""

    def __init__(
        self,
        opened: OpenedPipeline,
        request: DiffusionRequest,
        sessions: Sessions,
        *,
        prefetches: bool = True,
        splits_branches: bool = True,
    ) -> None:
        self._opened = opened
        self._request = request
        self._loop = asyncio.get_running_loop()
        self._events: asyncio.Queue[DiffusionEvent | Failed] = asyncio.Queue()
        self.patching = Patching(_wish(opened, request))
        self.remote = RemoteStacks(
            sessions,
            opened.source.remote,
            self.patching,
            on_pass=self._note_pass,
            splits_branches=splits_branches,
        )
        self.branches = Branches(
            self._running, on_change=self._changed, prefetches=prefetches, threads=opened.threads
        )
        self.clock = StepClock(self.remote, self.branches.counts)
        self._texts = TextWatch(request.prompt)
        self._turn = _Turn(opened.ends_lock, self._check)
        self._is_cancelled = threading.Event()
        self._has_started = False
        self._notes: tuple[str, ...] = ()
        self._steps = request.steps or opened.defaults.steps
        self._scheduler: Any = None
        self._previews: Previews | None = None
        self._thread = threading.Thread(
            target=copy_context().run,  # so that sessions that it opens are known as the request's
            args=(self._work,),
            name=f"picture-{request.request_id[:8]}",
            daemon=True,
        )

    async def events(self) -> AsyncGenerator[DiffusionEvent, None]:
        """Yield events until the picture is made. Raises what the pipeline or the network raised."""
        self._thread.start()
        while True:
            event = await self._events.get()
            if isinstance(event, Failed):
                raise event.error
            yield event
            if isinstance(event, Made):
                return

    async def close(self) -> None:
        """End it, if it still runs, free every session, and wait for its thread."""
        self._is_cancelled.set()
        await self.remote.close()
        if self._thread.is_alive():
            await asyncio.to_thread(self._thread.join)

    # In the pipeline's thread ---------------------------------------------------------------------------------

    def _work(self) -> None:
        torch.set_num_threads(self._opened.threads)
        try:
            self._turn.take()
            self._emit(self._draw())
        except PictureCancelled:
            self._emit(Failed(asyncio.CancelledError()))
        except BaseException as error:
            self._emit(Failed(self._opened.explained(error, self._request, self.clock.steps)))
        finally:
            self._turn.give_back()
            self._is_cancelled.set()
            self.branches.close()

    def _draw(self) -> Made:
        opened, request = self._opened, self._request
        pipeline = self._own_pipeline()
        arguments = call_arguments(pipeline, opened.kind, opened.defaults, request)
        if request.previews:
            decode = decoder_of(pipeline, arguments, opened.kind)
            self._previews = Previews(opened.kind, request.previews, decode, _channels(pipeline))
        with torch.no_grad():
            fields = taken(opened.kind, pipeline(**arguments))
        return Made(
            opened.kind,
            self.clock.timings(),
            request.seed,
            fps=opened.defaults.fps,
            rate=opened.defaults.rate,
            stacks=self.remote.uses(),
            route=next((hops for use in self.remote.uses() for hops in use.routes[:1]), ()),
            replays=self.remote.replays,
            **fields,
        )

    def _own_pipeline(self) -> Any:
        """A copy of the pipeline's shell, with a scheduler, transformers and tokenizers that tell this picture."""
        pipeline = copy.copy(self._opened.pipeline)
        own: dict[str, Any] = {}
        for name, part in pipeline.components.items():
            if isinstance(part, nn.Module):
                own[name] = copy.copy(part)  # what a model notes on itself in a call stays ours
        for name in self._opened.source.transformers:
            self._watch_transformer(name, own[name])
        for name, tokenizer in tokenizers_of(pipeline).items():
            own[name] = self._texts.watched(name, tokenizer)
        scheduler = self._opened.new_scheduler(self._request.scheduler)
        own["scheduler"] = self._scheduler = watched_scheduler(scheduler, self._note_step)
        pipeline.__dict__.update(own)  # not by assignment: that would write into the shared configuration
        return pipeline

    def _watch_transformer(self, name: str, shell: nn.Module) -> None:
        forward = shell.forward

        @functools.wraps(forward)
        def watched(*args: Any, **kwargs: Any) -> Any:
            self._check()
            self._turn.give_back()
            self._note_texts()
            return self.branches.call(name, forward, args, kwargs)

        shell.forward = watched

    @contextlib.contextmanager
    def _running(self, attempt: Attempt) -> Iterator[None]:
        """The context of one forward, in whatever thread: its blocks run for this branch."""
        token = self._opened.sink_of.set(self.remote.sink(attempt))
        try:
            yield
        finally:
            self._opened.sink_of.reset(token)

    def _changed(self, branch: Branch) -> None:
        self.remote.refresh(branch.component, branch.ordinal)

    def _note_texts(self) -> None:
        if self.clock.begun_at == 0.0:
            self.clock.begin()
            self._notes = (*self._opened.notes, *self._texts.check())

    def _note_pass(self, made: Pass) -> None:
        self._check_finite(made)
        if self._has_started:
            return
        self._has_started = True
        tokens = max((stream.shape[1] for stream in made.streams if stream.dim() > 1), default=0)
        uses = self.remote.uses()
        self._emit(Started(uses, self._steps, self._texts.num_tokens, tokens, self._notes))

    def _check_finite(self, made: Pass) -> None:
        """Refuse a pass whose numbers were lost here: a node would be blamed for what comes of it.

        Masks hold infinities; large slots are tables and texts, which no option of a request changes.
        """
        small = [slot for slot in made.slots if slot.nbytes <= SMALL_BYTES]
        if all(map(is_finite, made.streams)) and not any(_has_nan(slot) for slot in small):
            return
        text = (
            f"step {self.clock.steps + 1} has numbers that are none: other options, guidance or steps may do"
        )
        raise RequestError("scheduler" if self._request.scheduler else None, "invalid_value", text)

    def _note_step(self, step: SchedulerStep) -> None:
        """A step of the noise scheduler was made."""
        self._check()
        self.branches.step_done()
        self.patching.step = step.number + 1
        if (verdict := self.patching.verdict()) is not None:
            self._emit(verdict)
        seconds, busy = self.clock.step()
        self._emit(StepDone(step.number + 1, step.of, seconds, busy))
        self._preview(step)
        if step.number + 1 == step.of:
            self._turn.take()
            self.clock.end()
            self._emit(Decoding())

    def _preview(self, step: SchedulerStep) -> None:
        previews = self._previews
        if previews is None or not previews.is_on or step.number + 1 >= step.of:
            return
        latents = clean_latents(step, self._scheduler)
        if latents is None:
            return
        if previews.is_point(step.number, step.of):
            self._turn.take()
            image = previews.exact(latents)
            self._turn.give_back()
            if image is not None:
                self._emit(Preview(previews.made - 1, step.number + 1, image))
                return
        width, height = self._size
        if (image := previews.rough(latents, width, height)) is not None:
            self._emit(Preview(-1, step.number + 1, image, is_rough=True))

    @property
    def _size(self) -> tuple[int, int]:
        defaults = self._opened.defaults
        return self._request.width or defaults.width or 1, self._request.height or defaults.height or 1

    def _check(self) -> None:
        if self._is_cancelled.is_set():
            raise PictureCancelled

    def _emit(self, event: DiffusionEvent | Failed) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is gone
            self._loop.call_soon_threadsafe(self._events.put_nowait, event)


class _Turn:
    """The turn to use text encoders and autoencoder, which note things on themselves: one picture at a time.

    They may compute for minutes: while the turn is held, `check` is asked whenever this thread calls a module, so
    that a picture that nobody wants ends soon. (A torch mode would do that too, and could change which kernels run.)
    """

    def __init__(self, lock: threading.Lock, check: Callable[[], None]) -> None:
        self._lock = lock
        self._check = check
        self._is_mine = False

    def take(self) -> None:
        """Wait for the turn. Raises what `check` raises."""
        while not self._is_mine:
            self._check()
            self._is_mine = self._lock.acquire(timeout=POLL_S)
        sys.setprofile(self._profile)

    def give_back(self) -> None:
        """Let the next have it; nothing where it is not ours."""
        if self._is_mine:
            sys.setprofile(None)
            self._is_mine = False
            self._lock.release()

    def _profile(self, frame: FrameType, event: str, argument: object) -> None:
        if event == "call" and frame.f_code is _MODULE_CALL:  # anywhere else a lock could stay locked
            self._check()


def _has_nan(tensor: torch.Tensor) -> bool:
    return tensor.is_floating_point() and bool(tensor.isnan().any())


def _channels(pipeline: Any) -> int:
    config = getattr(getattr(pipeline, "vae", None), "config", {})
    return int(config.get("latent_channels") or config.get("z_dim") or 0)


def _wish(opened: OpenedPipeline, request: DiffusionRequest) -> PatchWish:
    step = token_pixels(opened.pipeline)
    return PatchWish(
        request.patches,
        request.warmup,
        request.extrapolate,
        request.two_streams,
        opened.patch_size,
        (request.height or opened.defaults.height or 0) // step,
        (request.width or opened.defaults.width or 0) // step,
    )
