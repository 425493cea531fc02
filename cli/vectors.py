"""`diffuse query` for a model that makes vectors: the first numbers for people, all of them as JSON.

Light on purpose: asking a gateway must not import torch to print a few numbers.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

from cli import show
from cli.drawing import EMBEDDINGS
from cli.gateway import Gateway, GatewayError
from cli.options import DEFAULT_MODEL
from cli.target import Target, asked_gateway

NUM_SHOWN: Final = 6


@dataclass(frozen=True, slots=True)
class Embedding:
    """The vector of one text."""

    numbers: list[float] = field(repr=False)
    num_tokens: int
    replays: int = 0
    fingerprint: str = ""


class Embedder(Protocol):
    """Whoever makes vectors: a gateway, or our own engine."""

    model: str

    async def embed(self, text: str) -> Embedding:
        """Make the vector of a text. Raises CommandError, or what the engine raises."""


async def show_vector(target: Target, text: str, *, as_json: bool) -> None:
    """Make one vector and print it."""
    began = time.perf_counter()
    async with open_embedder(target) as embedder:
        made = await embedder.embed(text)
        total_s = time.perf_counter() - began
        if as_json:
            show.print_json(_as_object(embedder.model, made, total_s))
            return
    first = ", ".join(f"{number:.6f}" for number in made.numbers[:NUM_SHOWN])
    show.out(f"[{first}{', ...' if len(made.numbers) > NUM_SHOWN else ''}]")
    show.note(f"{len(made.numbers)} dimensions of {made.num_tokens} tokens in {show.seconds(total_s)}")


@asynccontextmanager
async def open_embedder(target: Target) -> AsyncIterator[Embedder]:
    """Connect to whoever makes vectors; raises as `open_answerer` does."""
    if target.runs_engine:
        from cli.engine_vectors import open_embedding_nodes

        async with open_embedding_nodes(target, target.model or DEFAULT_MODEL) as engine:
            yield engine
    else:
        async with asked_gateway(target) as gateway:
            yield GatewayEmbedder(gateway)


class GatewayEmbedder:
    """An `Embedder` over HTTP."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        self.model = gateway.model

    async def embed(self, text: str) -> Embedding:
        reply = await self._gateway.post(EMBEDDINGS, {"model": self.model, "input": text})
        try:
            numbers = [float(number) for number in reply["data"][0]["embedding"]]
            num_tokens = int(reply["usage"]["prompt_tokens"])
        except (KeyError, IndexError, TypeError, ValueError):
            raise GatewayError("the gateway's answer holds no vector") from None
        fingerprint = str(reply.get("system_fingerprint") or "")
        return Embedding(numbers, num_tokens, int(reply.get("replays") or 0), fingerprint)


def _as_object(model: str, made: Embedding, total_s: float) -> dict[str, Any]:
    return {
        "model": model,
        "embedding": made.numbers,
        "dimensions": len(made.numbers),
        "usage": {"prompt_tokens": made.num_tokens, "total_tokens": made.num_tokens},
        "total_s": total_s,
        "replays": made.replays,
        "system_fingerprint": made.fingerprint,
    }
