"""The engine in this process as an `Embedder`: what `query --node` runs for a model that makes vectors.

Imports torch, but only once it is called.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from typing import TYPE_CHECKING

from cli.engine import ANSWER_THREADS, missing_text, settings_of
from cli.failures import CommandError
from cli.options import use_threads
from cli.runtime import heavy_imports, start_logging
from cli.survey import name_of
from cli.target import Target
from cli.vectors import Embedding

if TYPE_CHECKING:
    from app.engine.embedding_request import EmbeddingEngine


def makes_vectors(target: Target, model: str) -> bool:
    """Whether a model makes vectors; looks at its files, or fetches its configuration. Brings torch in."""
    use_threads(target.threads or ANSWER_THREADS)
    with heavy_imports():
        from slicing.any_model import kind_named
        from slicing.model_kind import ModelKind

    return kind_named(model) in (ModelKind.ENCODER, ModelKind.EMBEDDING)


@asynccontextmanager
async def open_embedding_nodes(target: Target, model: str) -> AsyncIterator[EngineEmbedder]:
    """Load the ends, link to the nodes, and check that together they serve every layer."""
    start_logging(logging.ERROR)  # what goes wrong is said once, by the command
    settings = settings_of(target, model)
    from app.engine.swarm import open_vectors

    async with open_vectors(settings) as opened:
        status = opened.engine.coverage()
        if not status.is_ready:
            errors = opened.directory.last_errors.items()
            reasons = [f"{name_of(address)}: {reason}" for address, reason in errors]
            raise CommandError("; ".join([missing_text(status), *reasons]))
        yield EngineEmbedder(opened.engine)


class EngineEmbedder:
    """Makes vectors over a chain of nodes."""

    def __init__(self, engine: EmbeddingEngine) -> None:
        self._engine = engine
        self.model = engine.model_name

    async def embed(self, text: str) -> Embedding:
        from app.engine.embedding_request import Embedded, EmbeddingFinished, EmbeddingRequest

        token_ids = await asyncio.to_thread(self._engine.encode, text)
        request = EmbeddingRequest(f"query-{secrets.token_hex(6)}", self.model, (token_ids,))
        numbers: list[float] = []
        finished = None
        async with aclosing(self._engine.embed(request)) as events:
            async for event in events:
                match event:
                    case Embedded():
                        numbers = event.vector.tolist()
                    case EmbeddingFinished():
                        finished = event
        assert finished is not None
        return Embedding(numbers, len(token_ids), finished.replays, finished.fingerprint)
