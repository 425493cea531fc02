"""A diffusion engine: checks what is asked, makes one picture per request, and ends it when nobody wants it any more.

Leaves running the pipeline to `picture.py`, and the network to its backend.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import replace

from app.engine.diffusion.backend import Backend
from app.engine.diffusion.model import OpenedPipeline
from app.engine.diffusion.picture import Picture
from app.engine.diffusion.pipeline_call import check_asked_patches, check_numbers
from app.engine.diffusion.request import (
    DiffusionDefaults,
    DiffusionEvent,
    DiffusionRequest,
    Loading,
    Made,
)
from app.engine.request import ModelStatus, RequestError
from routing.errors import ErrorCode, NoRouteError, WorkError
from slicing.diffusion.kinds import Kind


class PipelineEngine:
    """A `DiffusionEngine` over a pipeline whose blocks a backend runs."""

    def __init__(
        self,
        opened: OpenedPipeline,
        backend: Backend,
        *,
        prefetches: bool = True,
        splits_branches: bool = True,
    ) -> None:
        """`prefetches` and `splits_branches` off: for measuring what they gain; the picture is the same."""
        self.opened = opened
        self.num_running = 0  # pictures
        self._backend = backend
        self._prefetches = prefetches
        self._splits_branches = splits_branches

    @property
    def model_name(self) -> str:
        return self.opened.facts.name

    @property
    def created(self) -> int:
        return self.opened.created

    @property
    def kind(self) -> Kind:
        return self.opened.kind

    @property
    def defaults(self) -> DiffusionDefaults:
        return self.opened.defaults

    def coverage(self) -> ModelStatus:
        return self._backend.coverage()

    def check(self, request: DiffusionRequest) -> None:
        """See `DiffusionEngine.check`."""
        check_numbers(self.kind, self.defaults, request)
        self.opened.texts.check({"prompt": request.prompt, "negative_prompt": request.negative_prompt})
        self.opened.new_scheduler(request.scheduler)
        stages = self._backend.num_stages() if request.patches > 1 else 1
        check_asked_patches(self.defaults, request, stages)
        if request.patches > 1 and self.opened.is_per_block:
            text = "this gateway sends blocks one by one (--per-block), and patches are of whole passes: patches=1"
            raise RequestError("patches", "invalid_value", text)

    async def generate(self, request: DiffusionRequest) -> AsyncGenerator[DiffusionEvent, None]:
        """See `DiffusionEngine.generate`."""
        self.check(request)
        until = None if request.deadline_s is None else time.monotonic() + request.deadline_s
        sessions = self._backend.sessions(request, until)
        picture = Picture(
            self.opened,
            request,
            sessions,
            prefetches=self._prefetches,
            splits_branches=self._splits_branches,
        )
        self.num_running += 1
        try:
            yield Loading()
            async with aclosing(picture.events()) as events:
                while (event := await _next(events, until)) is not None:
                    if isinstance(event, Made):
                        event = replace(event, fingerprint=self._fingerprint(request))
                    yield event
        except NoRouteError as error:
            raise self._backend.blamed(error, request) from None
        finally:
            try:
                await picture.close()
            finally:
                self.num_running -= 1

    def _fingerprint(self, request: DiffusionRequest) -> str:
        """Names weights and forms: equal fingerprint and seed, equal picture."""
        dtype = str(self.opened.dtype)
        parts = [self.opened.facts.digest.hex(), dtype, request.wire, str(request.patches)]
        return "fp_" + hashlib.sha256("|".join(parts).encode()).hexdigest()[:12]


async def _next(events: AsyncGenerator[DiffusionEvent, None], until: float | None) -> DiffusionEvent | None:
    """The next event; None at the end. Raises WorkError DEADLINE when the time is over."""
    try:
        async with asyncio.timeout(None if until is None else max(0.0, until - time.monotonic())):
            return await anext(events, None)
    except TimeoutError:
        raise WorkError(ErrorCode.DEADLINE, "the answer took longer than its deadline") from None
