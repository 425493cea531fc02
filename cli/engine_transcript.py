"""The engine in this process as a `Scribe`: what `query --node` runs for a model that writes recordings down.

Imports torch, but only once it is called.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing, asynccontextmanager
from typing import TYPE_CHECKING

from cli.engine import ANSWER_THREADS, missing_text, settings_of
from cli.failures import CommandError
from cli.options import use_threads
from cli.runtime import heavy_imports, start_logging
from cli.survey import name_of
from cli.target import Target
from cli.transcript import Heard, Listening, Spoken

if TYPE_CHECKING:
    from app.engine.speech import SpeechEngine


def makes_transcripts(target: Target, model: str) -> bool:
    """Whether a model writes recordings down; looks at its files, or fetches its configuration. Brings torch in."""
    use_threads(target.threads or ANSWER_THREADS)
    with heavy_imports():
        from slicing.any_model import kind_named
        from slicing.model_kind import ModelKind

    return kind_named(model) == ModelKind.SPEECH


@asynccontextmanager
async def open_hearing_nodes(target: Target, model: str) -> AsyncIterator[EngineScribe]:
    """Load encoder and ends, link to the nodes, and check that together they serve every layer."""
    start_logging(logging.ERROR)  # what goes wrong is said once, by the command
    settings = settings_of(target, model)
    from app.engine.swarm import open_transcripts

    async with open_transcripts(settings) as opened:
        status = opened.engine.coverage()
        if not status.is_ready:
            errors = opened.directory.last_errors.items()
            reasons = [f"{name_of(address)}: {reason}" for address, reason in errors]
            raise CommandError("; ".join([missing_text(status), *reasons]))
        yield EngineScribe(opened.engine)


class EngineScribe:
    """Writes recordings down over a chain of nodes."""

    def __init__(self, engine: SpeechEngine) -> None:
        self._engine = engine
        self.model = engine.model_name

    async def hear(self, asked: Listening) -> AsyncGenerator[Heard, None]:
        from functools import partial

        from app.engine.speech import TranscriptionRequest, WindowDone
        from app.media.errors import UnusableMediaError
        from app.media.recording import decode_recording

        decode = partial(decode_recording, asked.content, rate=self._engine.rate)
        try:
            samples = await asyncio.to_thread(decode)
        except UnusableMediaError as error:
            raise CommandError(f"{asked.name}: {error}") from error
        request = TranscriptionRequest(
            f"query-{secrets.token_hex(6)}",
            self.model,
            samples,
            prompt=asked.prompt,
            temperature=asked.temperature or 0.0,
            seed=asked.seed or 0,
        )
        async with aclosing(self._engine.transcribe(request)) as events:
            async for event in events:
                if isinstance(event, WindowDone):
                    spoken = tuple(Spoken(one.start_s, one.end_s, one.text) for one in event.segments)
                    yield Heard(spoken, event.done_s, event.total_s)
