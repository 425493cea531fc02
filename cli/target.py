"""Whom `query`, `chat` and `bench` ask: a gateway by its URL, nodes by their addresses, or a swarm by a member's.

Opens the one or the other behind the same `Answerer` interface; the engine is imported only when nodes are
named.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from cli.answer import Answerer
from cli.drawing import Drawer
from cli.options import (
    DEFAULT_MODEL,
    DEFAULT_NETWORK,
    Ends,
    Runner,
    Scope,
    Weights,
    Wire,
    parse_local_layers,
)
from routing.tls_files import TlsFiles

if TYPE_CHECKING:
    from cli.gateway import Gateway


@dataclass(frozen=True, slots=True)
class Target:
    """A gateway, or a list of nodes and how to use them."""

    url: str | None = None
    api_key: str | None = field(default=None, repr=False)
    model: str | None = None
    nodes: tuple[str, ...] = ()
    ends: Ends = Ends.LOCAL
    local_layers: str = "1:0"
    wire: Wire = Wire.AUTO
    network: str = DEFAULT_NETWORK
    psk_file: Path | None = None
    threads: int | None = None
    bootstraps: tuple[str, ...] = ()
    scope: Scope = Scope.AUTO
    key: Path | None = None
    token_file: Path | None = None
    weights: Weights = Weights.AUTO
    runner: Runner = Runner.AUTO
    per_block: bool = False
    tls: TlsFiles = field(default_factory=TlsFiles)

    def __post_init__(self) -> None:
        if self.runs_engine and self.url:
            raise typer.BadParameter(
                "give --url (ask a gateway), or --node and --bootstrap (run the engine here), not both"
            )
        if self.per_block and not self.runs_engine:
            raise typer.BadParameter(
                "a gateway decides it when it starts: give it to `diffuse serve`, or give --node or --bootstrap here",
                param_hint="'--per-block'",
            )
        parse_local_layers(self.local_layers)

    @property
    def runs_engine(self) -> bool:
        """Whether the engine runs in this process."""
        return bool(self.nodes or self.bootstraps)

    def describe(self) -> str:
        """What a reader of measurements needs to know."""
        if self.runs_engine:
            nodes = "a swarm" if self.bootstraps else f"{len(self.nodes)} nodes"
            return f"{nodes}, ends {self.ends}, engine in this process"
        from cli.gateway import DEFAULT_URL

        return self.url or DEFAULT_URL


async def chosen(target: Target, *, wants_drawing: bool, wants_words: bool = False) -> tuple[Target, str]:
    """Settle which model is asked, and what it makes: text, transcripts, embeddings, image, video or audio.

    "drawn" where no more than that is known.

    Of a gateway's models, where none is named, the first that makes what is wanted.
    """
    if not target.runs_engine:
        async with asked_gateway(replace(target, model=target.model or "")) as gateway:
            if target.model is not None:
                return target, await gateway.output_of(target.model, wants_drawing=wants_drawing)
            model, output = await gateway.first_that(draws=wants_drawing, hears=wants_words)
            return replace(target, model=model), output
    if target.model is None:
        return target, "text"  # as the model that is asked then
    from cli.engine import makes_pictures

    if makes_pictures(target, target.model):
        return target, "drawn"
    from cli.engine_transcript import makes_transcripts
    from cli.engine_vectors import makes_vectors

    if makes_transcripts(target, target.model):
        return target, "transcripts"
    return target, "embeddings" if makes_vectors(target, target.model) else "text"


@asynccontextmanager
async def open_drawer(target: Target, output: str) -> AsyncIterator[Drawer]:
    """Connect to whoever makes pictures, videos or sounds; raises as `open_answerer` does."""
    if target.runs_engine:
        from cli.engine_drawing import open_drawing_nodes

        async with open_drawing_nodes(target, target.model or DEFAULT_MODEL) as engine:
            yield engine
    else:
        from cli.gateway_drawing import GatewayDrawer

        async with asked_gateway(target) as gateway:
            yield GatewayDrawer(gateway, output)


@asynccontextmanager
async def open_answerer(target: Target) -> AsyncIterator[Answerer]:
    """Connect; raises a `DiffuseError` that says what to do when that fails."""
    if target.runs_engine:
        from cli.engine import open_nodes

        async with open_nodes(target, target.model or DEFAULT_MODEL) as engine:
            yield engine
    else:
        async with asked_gateway(target) as gateway:
            yield gateway


def asked_gateway(target: Target) -> AbstractAsyncContextManager[Gateway]:
    """Connect to the gateway that is asked; it is asked for its first model where `target` has none, but for ""."""
    from cli import gateway

    return gateway.open_gateway(
        target.url or gateway.DEFAULT_URL,
        api_key=target.api_key,
        tls_ca=target.tls.ca,
        model=target.model,
    )
