"""A diffusion engine for one model and everything under it: network, pipeline; opened and closed as one.

What `diffuse query` runs for a single picture, and benchmarks measure. The twin of `app.engine.swarm`.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass

from app.engine.diffusion.generation import PipelineEngine
from app.engine.diffusion.openable import OpenablePipeline
from app.engine.swarm import SwarmSettings, joined_model
from routing.directory import LiveDirectory
from routing.network import Network
from routing.switchboard import Switchboard
from slicing.errors import ModelError
from slicing.progress import Progress, no_progress


@dataclass(frozen=True, slots=True)
class OpenedPictures:
    """An open engine with the parts that operations look at."""

    engine: PipelineEngine
    digest: bytes
    network: Network
    switchboard: Switchboard
    load_s: float

    @property
    def directory(self) -> LiveDirectory:
        return self.network.directory


@contextlib.asynccontextmanager
async def open_pictures(
    settings: SwarmSettings, *, progress: Progress = no_progress, wait_for_nodes: bool = True
) -> AsyncIterator[OpenedPictures]:
    """Join, load the pipeline without its remote blocks, and yield the engine; see `app.engine.swarm.open_swarm`.

    Raises ModelError (slicing) for a model that cannot be opened or makes text, SettingsError for settings that
    contradict it.
    """
    async with joined_model(settings, progress=progress, wait_for_nodes=wait_for_nodes) as (joined, model):
        if not isinstance(model, OpenablePipeline):
            raise ModelError(f"{model.facts.name} makes text, no pictures")
        engine = await model.open()
        yield OpenedPictures(engine, model.facts.digest, joined.network, joined.switchboard, model.load_s)
