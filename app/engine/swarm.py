"""A text engine for one model and everything under it: network, checkpoint, ends; opened and closed as one.

What `diffuse query` runs for a single answer, and benchmarks measure. A gateway keeps a `library` instead.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Literal, cast

from app.engine.library import LibrarySettings, NamedModel, opened_library
from app.engine.model import EndsSettings
from app.engine.network import FIRST_LOOK_S, JoinedNetwork, MemberSettings, open_network
from app.engine.openable import OpenableModel
from app.engine.request import ModelStatus, TextEngine
from app.engine.text import PREFILL_CHUNK
from routing.address_policy import Scope
from routing.directory import LiveDirectory
from routing.endpoint import Endpoint
from routing.identity import Identity
from routing.network import Network
from routing.switchboard import Switchboard
from routing.tls import Tls
from routing.types import NodeAddress
from slicing.checkpoint import Checkpoint
from slicing.errors import ModelError
from slicing.model_kind import ModelKind
from slicing.progress import Progress, no_progress

if TYPE_CHECKING:
    from app.engine.diffusion.request import DiffusionEngine
    from app.engine.embedding_request import EmbeddingEngine
    from app.engine.library import AnyModel
    from app.engine.speech import SpeechEngine

FIRST_ROUTE_S = 10.0  # gossip has gone round by then, and what it named was asked


@dataclass(frozen=True, slots=True)
class SwarmSettings:
    """One model over the nodes of a list, or of the swarm behind bootstraps. See `EndsSettings`, `MemberSettings`."""

    model: str
    nodes: tuple[NodeAddress, ...]
    network_id: bytes
    name: str | None = None
    bootstraps: tuple[NodeAddress, ...] = ()
    ends: Literal["local", "remote"] = "local"
    local_layers: tuple[int, int] = (1, 0)
    wire: Literal["auto", "bf16", "int8-delta"] = "auto"
    psk: bytes | None = field(default=None, repr=False)
    accepted_psks: tuple[bytes, ...] = field(default=(), repr=False)
    scope: Scope | None = None
    identity: Identity | None = field(default=None, repr=False)
    token: bytes = field(default=b"", repr=False)
    tls: Tls | None = field(default=None, repr=False)
    pad: bool = False
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    weights: Literal["auto", "bf16", "fp32", "int8"] = "auto"
    runner: Literal["auto", "fast", "invariant", "plain"] = "auto"
    device: str = "cpu"
    threads: int = 1
    prefill_chunk: int = PREFILL_CHUNK
    max_positions: int | None = None
    cache_dir: Path | None = None
    per_block: bool = False

    @property
    def member(self) -> MemberSettings:
        return MemberSettings(
            self.network_id,
            nodes=self.nodes,
            bootstraps=self.bootstraps,
            psk=self.psk,
            accepted_psks=self.accepted_psks,
            scope=self.scope,
            identity=self.identity,
            token=self.token,
            tls=self.tls,
            pad=self.pad,
        )

    @property
    def library(self) -> LibrarySettings:
        ends = EndsSettings(
            ends=self.ends,
            local_layers=self.local_layers,
            wire=self.wire,
            dtype=self.dtype,
            weights=self.weights,
            runner=self.runner,
            device=self.device,
            threads=self.threads,
            prefill_chunk=self.prefill_chunk,
            max_positions=self.max_positions,
            cache_dir=self.cache_dir,
            per_block=self.per_block,
        )
        return LibrarySettings((NamedModel(self.model, self.name),), ends=ends)


@dataclass(frozen=True, slots=True)
class Swarm:
    """An open engine with the parts that operations look at."""

    engine: TextEngine
    checkpoint: Checkpoint
    network: Network
    switchboard: Switchboard
    load_s: float

    @property
    def endpoint(self) -> Endpoint:
        return self.network.endpoint

    @property
    def directory(self) -> LiveDirectory:
        return self.network.directory


@contextlib.asynccontextmanager
async def open_swarm(
    settings: SwarmSettings, *, progress: Progress = no_progress, wait_for_nodes: bool = True
) -> AsyncIterator[Swarm]:
    """Join, load the ends, and yield the engine; links are closed on the way out.

    With `wait_for_nodes`, every node on the list was tried, and with bootstraps a whole route was waited for, for some
    seconds. Raises ModelError (slicing) when the model cannot be opened or cut, SettingsError for settings that
    contradict it.
    """
    async with joined_model(settings, progress=progress, wait_for_nodes=wait_for_nodes) as (joined, model):
        if not (isinstance(model, OpenableModel) and model.found.answers_text):
            raise ModelError(f"{model.facts.name} does not answer a text with a text")
        engine = cast("TextEngine", await model.open())
        yield Swarm(engine, model.found.checkpoint, joined.network, joined.switchboard, model.load_s)


@dataclass(frozen=True, slots=True)
class OpenedSongs:
    """An open engine for songs made of tokens, with the parts that operations look at."""

    engine: DiffusionEngine
    directory: LiveDirectory


@contextlib.asynccontextmanager
async def open_songs(
    settings: SwarmSettings, *, progress: Progress = no_progress, wait_for_nodes: bool = True
) -> AsyncIterator[OpenedSongs]:
    """Do what `open_swarm` does, for a model that makes music of tokens."""
    async with joined_model(settings, progress=progress, wait_for_nodes=wait_for_nodes) as (joined, model):
        if not isinstance(model, OpenableModel) or model.found.kind is not ModelKind.MUSIC:
            raise ModelError(f"{model.facts.name} makes no music of tokens")
        yield OpenedSongs(cast("DiffusionEngine", await model.open()), joined.directory)


@dataclass(frozen=True, slots=True)
class OpenedVectors:
    """An open engine for vectors of texts, with the parts that operations look at."""

    engine: EmbeddingEngine
    directory: LiveDirectory


@contextlib.asynccontextmanager
async def open_vectors(
    settings: SwarmSettings, *, progress: Progress = no_progress, wait_for_nodes: bool = True
) -> AsyncIterator[OpenedVectors]:
    """Do what `open_swarm` does, for a model that makes vectors."""
    async with joined_model(settings, progress=progress, wait_for_nodes=wait_for_nodes) as (joined, model):
        if not isinstance(model, OpenableModel) or not model.found.kind.is_headless:
            raise ModelError(f"{model.facts.name} makes no vectors")
        yield OpenedVectors(cast("EmbeddingEngine", await model.open()), joined.directory)


@dataclass(frozen=True, slots=True)
class OpenedTranscripts:
    """An open engine for recordings, with the parts that operations look at."""

    engine: SpeechEngine
    directory: LiveDirectory


@contextlib.asynccontextmanager
async def open_transcripts(
    settings: SwarmSettings, *, progress: Progress = no_progress, wait_for_nodes: bool = True
) -> AsyncIterator[OpenedTranscripts]:
    """Do what `open_swarm` does, for a model that writes recordings down."""
    async with joined_model(settings, progress=progress, wait_for_nodes=wait_for_nodes) as (joined, model):
        if not isinstance(model, OpenableModel) or model.found.kind is not ModelKind.SPEECH:
            raise ModelError(f"{model.facts.name} writes no recordings down")
        yield OpenedTranscripts(cast("SpeechEngine", await model.open()), joined.directory)


@contextlib.asynccontextmanager
async def joined_model(
    settings: SwarmSettings, *, progress: Progress = no_progress, wait_for_nodes: bool = True
) -> AsyncIterator[tuple[JoinedNetwork, AnyModel]]:
    """Join, and open the model, of whatever kind; see `open_swarm`."""
    async with (
        open_network(settings.member) as joined,
        opened_library(settings.library, joined, progress=progress) as library,
    ):
        (model,) = await library.open_named()
        engine = await model.open()
        if wait_for_nodes:
            await joined.network.first_look(FIRST_LOOK_S)
        if wait_for_nodes and settings.bootstraps:
            await _covered(engine.coverage, joined.directory, FIRST_ROUTE_S)
        yield joined, model


async def _covered(coverage: Callable[[], ModelStatus], directory: LiveDirectory, within_s: float) -> None:
    """Wait until a whole route is known, or the time is over."""
    news = asyncio.Event()
    directory.on_change.append(news.set)
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(within_s):
            while not coverage().is_ready:
                news.clear()
                await news.wait()
