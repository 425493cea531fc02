"""A node from start to stop: identity, weights, links, service.

Every object is built here and passed down. Knows nothing of flags and terminals (see `cli`): it tells an event
callback how far it is.
"""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path

from node import events
from node.budget import MemoryBudget, default_budget_bytes, peak_memory_bytes
from node.events import NodeEvent, OnEvent
from node.held_slice import SPOKEN_DTYPES
from node.loading import LoadedSlice, LoadReport, load_slice
from node.scheduler import Scheduler
from node.server import NodeServer
from node.settings import NodeSettings
from node.stats import NodeStats
from node.step_job import StepJob
from routing.endpoint import Endpoint
from routing.errors import LinkError, SettingsError
from routing.identity import Identity
from routing.types import Capabilities, NodeAddress, SliceOffer
from routing.wire import SealKey

logger = logging.getLogger(__name__)

DIGEST_PREFIX = 8  # of a model's digest in capabilities: enough to tell models apart


async def run_node(settings: NodeSettings, *, on_event: OnEvent) -> None:
    """Load, measure, listen and serve until cancelled; then free every session and close every link.

    Raises SettingsError when a file, a layer range or the address to bind is wrong, and ModelError when the model
    cannot be read, or cannot be cut exactly.
    """
    identity = load_identity(settings.key_path)
    scheduler: Scheduler[StepJob] = Scheduler()
    try:
        loaded = await _load(settings, scheduler, on_event)
        await _serve(settings, identity, scheduler, loaded, on_event)
    finally:
        await scheduler.close()
        on_event(events.stopped())


def load_identity(key_path: Path | None) -> Identity:
    """The identity at `key_path`, made there at the first start; one for this process alone without a path."""
    if key_path is None:
        return Identity.generate()
    if key_path.exists():
        return Identity.load(key_path)
    identity = Identity.generate()
    identity.save(key_path)
    return identity


async def _load(settings: NodeSettings, scheduler: Scheduler[StepJob], on_event: OnEvent) -> LoadedSlice:
    loop = asyncio.get_running_loop()

    def tell(event: NodeEvent) -> None:
        loop.call_soon_threadsafe(on_event, event)

    report = LoadReport(tell)
    try:
        return await scheduler.call(lambda: load_slice(settings, report))
    finally:
        report.stop()  # where we are cancelled while it loads


async def _serve(
    settings: NodeSettings,
    identity: Identity,
    scheduler: Scheduler[StepJob],
    loaded: LoadedSlice,
    on_event: OnEvent,
) -> None:
    stats = NodeStats()
    limit_bytes = settings.kv_budget_bytes
    budget = MemoryBudget(default_budget_bytes() if limit_bytes is None else limit_bytes, stats)
    seal_key = SealKey.generate()
    capabilities = _capabilities(seal_key, loaded.held.offer)
    trouble: SettingsError | None = None  # a task group would wrap what is raised inside it
    async with asyncio.TaskGroup() as tasks:
        server = NodeServer(
            loaded.held, seal_key, settings, scheduler=scheduler, budget=budget, stats=stats, tasks=tasks
        )
        endpoint = Endpoint(
            identity, settings.network_id, lambda: capabilities, server, psk=settings.psk, pad=settings.pad
        )
        server.connect(endpoint)
        try:
            bound = await endpoint.listen(settings.listen.host, settings.listen.port)
            on_event(_ready(settings, identity, bound, loaded))
            await server.sweep_for_ever()
        except LinkError as error:
            trouble = SettingsError(error.text)
        finally:
            server.close()
            await endpoint.close()
    if trouble is not None:
        raise trouble


def _capabilities(seal_key: SealKey, offer: SliceOffer) -> Capabilities:
    return Capabilities(
        dtypes=SPOKEN_DTYPES,
        seal_key=seal_key.public,
        slices=((offer.model_digest[:DIGEST_PREFIX], offer.spec.start, offer.spec.end),),
    )


def _ready(
    settings: NodeSettings, identity: Identity, bound: tuple[str, int], loaded: LoadedSlice
) -> NodeEvent:
    public = settings.public_addr
    host, port = bound if public is None else (public.host, public.port or bound[1])
    logger.info("serving layers %s at %s:%d, told as %s:%d", loaded.held.offer.spec, *bound, host, port)
    return events.ready(
        NodeAddress(identity.node_id, host, port),
        bound,
        loaded.held.offer,
        threads=loaded.threads,
        load_s=loaded.load_s,
        weights_bytes=loaded.weights_bytes,
        bytes_read=loaded.bytes_read,
        peak_memory_bytes=peak_memory_bytes(),
    )
