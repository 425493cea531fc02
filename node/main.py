"""A node from start to stop: identity and weights here, then its life as a member of a swarm.

What it begins with is built here and passed down. Knows nothing of flags and terminals (see `cli`): it tells an event
callback how far it is.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections.abc import AsyncIterator
from pathlib import Path
from typing import TYPE_CHECKING

from node import events
from node.budget import free_memory_bytes
from node.device import check_device
from node.events import OnEvent
from node.exporter import exporting
from node.loading import LoadedSlice
from node.member import Node, Parts
from node.memory import Memory
from node.metrics import MemberMetrics
from node.placing import PlacingTimes
from node.scheduler import Scheduler
from node.settings import NodeSettings
from node.slice_loader import ModelFacts, SliceLoader
from routing.errors import SettingsError
from routing.identity import Identity
from routing.trace_export import open_traces

if TYPE_CHECKING:
    from node.tracing import NodeTraces

logger = logging.getLogger(__name__)


async def run_node(settings: NodeSettings, *, on_event: OnEvent, times: PlacingTimes | None = None) -> None:
    """Load, measure, listen and serve until cancelled; then leave: running sessions may go on for `drain_s`.

    Cancelled a second time, it ends at once. Raises SettingsError when a file, a layer range or the address to bind
    is wrong, and ModelError when a model cannot be read, or cannot be cut exactly.
    """
    check_device(settings.device)
    identity = load_identity(settings.key_path)
    scheduler = Scheduler()
    loader = SliceLoader(settings, scheduler, on_event)
    metrics = MemberMetrics("node")
    try:
        async with _exported(settings, metrics, on_event), _traced(settings, identity) as traces:
            allowed_bytes = settings.memory_bytes or int(
                free_memory_bytes(settings.device) * settings.overhead
            )
            loaded, facts = await _prepare(settings, loader)
            memory = Memory(settings, allowed_bytes, sum(slice_.weights_bytes for slice_ in loaded))
            memory.check()
            parts = Parts(memory, scheduler, loader, loaded, facts, metrics, traces)
            public = await _public_place(settings)
            node = Node(identity, settings, parts, on_event, public=public, times=times or PlacingTimes())
            await node.run()
    finally:
        await loader.close()
        await scheduler.close()
        on_event(events.stopped(scheduler.counts))


def load_identity(key_path: Path | None) -> Identity:
    """The identity at `key_path`, made there at the first start; one for this process alone without a path."""
    if key_path is None:
        return Identity.generate()
    if key_path.exists():
        return Identity.load(key_path)
    identity = Identity.generate()
    identity.save(key_path)
    return identity


@contextlib.asynccontextmanager
async def _exported(settings: NodeSettings, metrics: MemberMetrics, on_event: OnEvent) -> AsyncIterator[None]:
    """Serve metrics from the first second until the last, where that was asked for."""
    if settings.metrics is None:
        yield
        return
    async with exporting(settings.metrics, metrics) as bound:
        on_event(events.metrics(bound))
        yield


@contextlib.asynccontextmanager
async def _traced(settings: NodeSettings, identity: Identity) -> AsyncIterator[NodeTraces | None]:
    """Export what gateways trace, where that was asked for."""
    export = open_traces(settings.traces, "diffuse-node", identity.node_id.hex()[:8])
    if export is None:
        yield None
        return
    from node.tracing import NodeTraces

    try:
        yield NodeTraces(export.tracer)
    finally:
        await export.close()


async def _prepare(settings: NodeSettings, loader: SliceLoader) -> tuple[list[LoadedSlice], list[ModelFacts]]:
    """Load the slices that were named, and examine the models whose layers placement decides."""
    loaded: list[LoadedSlice] = []
    facts: dict[bytes, ModelFacts] = {}
    for wanted in settings.wanted:
        if wanted.layers is None and settings.is_placed:
            examined = await loader.examine(wanted.model)
            facts.setdefault(examined.digest, examined)
        else:
            loaded.append(await loader.load(wanted.model, wanted.layers))
    for slice_ in loaded:
        if slice_.held.offer.model_digest in facts:
            name = slice_.held.offer.model_name
            raise SettingsError(
                f"{name} is listed with layers and without: its place is named, or it is found"
            )
    return loaded, list(facts.values())


async def _public_place(settings: NodeSettings) -> tuple[str, int] | None:
    """What others may be told. A name that this machine does not know is one for a list made by hand only."""
    public = settings.public_addr
    if public is None or settings.is_placed:
        return None if public is None else (public.host, public.port)
    try:
        await asyncio.get_running_loop().getaddrinfo(public.host, public.port, type=socket.SOCK_STREAM)
    except OSError:
        logger.info("%s is not known here: nobody is told of it", public)
        return None
    return public.host, public.port
