"""Real node processes over a diffusion model and an engine in this process, as `diffuse up` would place them.

The same blocks may be there several times, as groups of nodes. Every node keeps to one torch thread.
"""

from __future__ import annotations

import contextlib
import hashlib
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from PIL.Image import Image

from app.engine.diffusion.backend import ChainBackend
from app.engine.diffusion.generation import PipelineEngine
from app.engine.diffusion.request import DiffusionRequest, DiffusionTimings, Made, StepDone
from app.engine.diffusion.swarm import OpenedPictures, open_pictures
from app.engine.swarm import SwarmSettings
from cli.children import Children, thread_environment
from cli.layout import plan_nodes
from cli.membership import read_membership
from cli.options import DEFAULT_NETWORK
from routing.addresses import parse_address
from routing.types import NodeAddress


@dataclass(frozen=True)
class LocalPictures:
    """An engine over running nodes; each group holds all blocks."""

    opened: OpenedPictures
    groups: tuple[tuple[NodeAddress, ...], ...]

    def engine(self, *, num_groups: int = 1, prefetches: bool = True) -> PipelineEngine:
        """An engine that knows the first groups only, with the other guidance branch begun early or not."""
        pipeline = self.opened.engine.opened
        others = [address.node_id for group in self.groups[num_groups:] for address in group]
        backend = ChainBackend(
            pipeline.facts, pipeline.source.remote, self.opened.switchboard, excluded=frozenset(others)
        )
        return PipelineEngine(pipeline, backend, prefetches=prefetches)


@dataclass(frozen=True)
class Run:
    """One answer: seconds of each step, where its time went, and what stands for all its pixels."""

    step_s: tuple[float, ...]
    timings: DiffusionTimings
    pixels: str = field(repr=False)


@contextlib.asynccontextmanager
async def local_pictures(
    model: Path, num_layers: int, *, num_nodes: int = 2, num_groups: int = 1
) -> AsyncIterator[LocalPictures]:
    """Start groups of nodes over a pipeline's folder, link an engine to them, stop everything on the way out."""
    async with Children() as children:
        started = []
        for group in range(num_groups):
            for plan in plan_nodes(num_layers, num_nodes):
                arguments = ["host", "--model", str(model), "--layers", plan.layers]
                arguments += ["--listen", "127.0.0.1:0", "--events", "json", "--until-eof", "--threads", "1"]
                name = f"{plan.name} of group {group + 1}"
                started.append(
                    await children.start(
                        name, arguments, on_event=lambda _: None, environment=thread_environment(1)
                    )
                )
        ready = [await child.wait_for("ready") for child in started]
        addresses = [parse_address(event["address"]) for event in ready]
        settings = SwarmSettings(
            model=str(model),
            nodes=tuple(addresses),
            network_id=read_membership(DEFAULT_NETWORK, None).network_id,
            local_layers=(0, 0),
        )
        async with open_pictures(settings) as opened:
            groups = [addresses[first : first + num_nodes] for first in range(0, len(addresses), num_nodes)]
            yield LocalPictures(opened, tuple(map(tuple, groups)))


async def run(engine: PipelineEngine, request: DiffusionRequest) -> Run:
    """Make one picture or video. Raises what the engine raises."""
    step_s: list[float] = []
    async for event in engine.generate(request):
        if isinstance(event, StepDone):
            step_s.append(event.seconds)
        elif isinstance(event, Made):
            images = [image for image in (event.image, *event.frames) if image is not None]
            return Run(tuple(step_s), event.timings, pixels_of(images))
    raise RuntimeError("the answer has no end")


def pixels_of(images: Sequence[Image]) -> str:
    """What stands for all pixels of some pictures: equal only where every bit is."""
    return hashlib.sha256(b"".join(image.tobytes() for image in images)).hexdigest()


def request_id() -> str:
    """One for each request of a bench."""
    return f"bench-{time.monotonic_ns()}"
