"""One node as a member of its swarm: its parts, and its life from the first link to the last.

It serves, tells others what it has, finds its place where that is left to it, and leaves without a failed request.
What is loaded before that is prepared in `main`. Knows nothing of how a step is computed.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from node import events
from node.budget import MemoryBudget, peak_memory_bytes
from node.events import OnEvent
from node.exporter import SERVING
from node.held_slice import SPOKEN_DTYPES
from node.loading import LoadedSlice
from node.memory import Memory
from node.metrics import LOADING, MemberMetrics
from node.placing import Placer, PlacingTimes
from node.scheduler import Scheduler
from node.server import NodeServer
from node.settings import WILDCARDS, NodeSettings
from node.slice_loader import ModelFacts, SliceLoader
from node.slice_mover import SliceMover
from node.slice_table import SliceTable
from node.stats import NodeStats
from node.work_metrics import WorkMetrics
from routing.address_policy import Scope
from routing.errors import RemoteError, SettingsError
from routing.identity import Identity
from routing.network import Network, NetworkSettings, Offering
from routing.types import (
    Answer,
    Attach,
    Cancel,
    Describe,
    Failure,
    Inquire,
    Keep,
    NodeAddress,
    Open,
    Opened,
    Resumed,
    Step,
)
from routing.wire import SealKey

if TYPE_CHECKING:
    from node.tracing import NodeTraces

logger = logging.getLogger(__name__)

SERVED_KINDS = (Step, Answer, Failure, Open, Opened, Cancel, Keep, Attach, Describe, Resumed, Inquire)
TEND_S = 1.0  # how often speeds, sessions and ways to us are compared with what others know
DRAIN_POLL_S = 0.05


@dataclass(frozen=True, slots=True)
class Parts:
    """What a node begins with."""

    memory: Memory
    scheduler: Scheduler
    loader: SliceLoader
    loaded: Sequence[LoadedSlice]  # slices that were named: they stay
    facts: Sequence[ModelFacts]  # models whose layers placement decides
    metrics: MemberMetrics
    traces: NodeTraces | None = None


class Node:
    """A node's parts, and its life from the first link to the last."""

    def __init__(
        self,
        identity: Identity,
        settings: NodeSettings,
        parts: Parts,
        on_event: OnEvent,
        *,
        public: tuple[str, int] | None,
        times: PlacingTimes,
    ) -> None:
        """`public` is the address to tell others, where it is not the bound one."""
        facts, memory = parts.facts, parts.memory
        self._identity = identity
        self._settings = settings
        self._memory = memory
        self._scheduler = parts.scheduler
        self._traces = parts.traces
        self._fixed = parts.loaded
        self._facts = facts
        self._on_event = on_event
        self._stats = NodeStats()
        self._slices = SliceTable(slice_.held for slice_ in parts.loaded)
        self._budget = MemoryBudget(memory.budget_bytes(self._slices, is_placed=bool(facts)), self._stats)
        self._seal_key = SealKey.generate()
        self._network = Network(
            identity,
            _network_settings(settings, public),
            seal_key=self._seal_key.public,
            dtypes=SPOKEN_DTYPES,
            offering=self._offering,
        )
        mover = SliceMover(
            self._slices,
            parts.loader,
            {model.digest: model.model for model in facts},
            drain_s=settings.drain_s,
            stats=self._stats,
            announce=self._on_offers,
            on_loaded=self._on_loaded,
            on_event=on_event,
        )
        self._placer = Placer(
            identity.node_id,
            facts,
            mover,
            self._network.directory,
            first_look=self._network.first_look,
            layer_ms=self._layer_ms,
            room=lambda: memory.room(self._slices),
            announce=self._network.announce,
            on_event=on_event,
            lines=lambda: self._network.lines,
            times=times,
        )
        self._bound = ("", 0)
        self._is_ready = False
        self._is_leaving = False
        self._way_in: NodeAddress | None = None  # last told
        mover.note()
        self._export(parts.metrics)

    async def run(self) -> None:
        """Serve until cancelled, then leave. Raises SettingsError where the address cannot be bound."""
        trouble: SettingsError | None = None  # a task group would wrap what is raised inside it
        async with asyncio.TaskGroup() as tasks:
            server = NodeServer(
                self._slices,
                self._seal_key,
                self._settings,
                scheduler=self._scheduler,
                budget=self._budget,
                stats=self._stats,
                tasks=tasks,
                may_dial=self._may_dial,
                traces=self._traces,
            )
            self._network.dispatcher.add(server, SERVED_KINDS)
            server.connect(self._network.endpoint)
            background: list[asyncio.Task[None]] = []
            try:
                bound = await self._network.start()
                assert bound is not None
                background = [
                    tasks.create_task(work) for work in (self._network.run(), server.sweep_for_ever())
                ]
                await self._serve(bound, tasks)
            except SettingsError as error:
                trouble = error
            except RemoteError as error:
                trouble = SettingsError(error.text)
            finally:
                server.close()
                for task in background:
                    task.cancel()
                await self._network.close()
        if trouble is not None:
            raise trouble

    async def _serve(self, bound: tuple[str, int], tasks: asyncio.TaskGroup) -> None:
        self._bound = bound
        for loaded in self._fixed:
            self._on_loaded(loaded)
        placing = tasks.create_task(self._placer.run()) if self._facts else None
        try:
            await self._tend()
        except asyncio.CancelledError:
            if placing is not None:
                placing.cancel()  # a load under way ends at its next sign of progress; nobody waits for it here
            await self._leave()
            raise

    async def _tend(self) -> None:
        """Compare what others know of us with what is, until cancelled."""
        num_told = 0
        while True:
            self._tell_way_in()
            if self._slices.tell_speeds() or num_told != self._stats.num_sessions:
                num_told = self._stats.num_sessions
                self._network.announce()
            await asyncio.sleep(TEND_S)

    async def _leave(self) -> None:
        """Take no new session, tell everybody, and let those that run end or go elsewhere."""
        self._is_leaving = True
        self._slices.close_doors()
        await self._network.leave()
        deadline, num_told = time.monotonic() + self._settings.drain_s, 0
        while self._stats.num_sessions and (left_s := deadline - time.monotonic()) > 0:
            if num_told != self._stats.num_sessions:
                num_told = self._stats.num_sessions
                self._on_event(events.draining(num_told, left_s))
            await asyncio.sleep(min(DRAIN_POLL_S, left_s))
        for held in self._slices.held:
            self._slices.remove(held)  # whoever has not ended is told to go on elsewhere

    # What others know -----------------------------------------------------------------------------------------

    def _offering(self) -> Offering:
        free_bytes = self._budget.available_bytes
        if not self._slices.held and self._facts:  # it tells what it may take: others leave room for it
            free_bytes = self._memory.room(self._slices).allowed
        return Offering(
            self._slices.offers(),
            self._stats.num_sessions,
            self._settings.max_sessions,
            max(0, free_bytes),
            self._placer.intentions,
        )

    def _on_offers(self) -> None:
        """What is offered has changed, and with it what is left for sessions."""
        self._budget.limit_bytes = self._memory.budget_bytes(self._slices, is_placed=bool(self._facts))
        self._network.announce()

    def _layer_ms(self, digest: bytes) -> float | None:
        held = [held for held in self._slices.serving if held.offer.model_digest == digest]
        return self._slices.layer_ms(held[0]) if held else None

    def _may_dial(self, address: NodeAddress) -> bool:
        """Whether a gateway may send us there: any place of a swarm without bounds, else those that records allow."""
        if not self._settings.is_placed and self._network.policy.scope is not Scope.PUBLIC:
            return True  # lists made by hand may hold host names
        is_known = address in self._network.directory.addresses_of(address.node_id)
        return is_known or self._network.policy.check(address.host, address.port) is None

    # What the owner is told -----------------------------------------------------------------------------------

    def _on_loaded(self, loaded: LoadedSlice) -> None:
        """Say once that the node serves."""
        if self._is_ready:
            return
        self._is_ready = True
        offer = loaded.held.offer
        self._way_in = self._address()
        logger.info("serving layers %s at %s:%d", offer.spec, *self._bound)
        self._on_event(
            events.ready(
                self._way_in,
                self._bound,
                offer,
                threads=loaded.threads,
                load_s=loaded.load_s,
                weights_bytes=loaded.weights_bytes,
                bytes_read=loaded.bytes_read,
                peak_memory_bytes=peak_memory_bytes(),
            )
        )

    def _address(self) -> NodeAddress | None:
        """Where others reach us: as we were told, as was proved, as is bound; None where nothing of it says so."""
        public, node_id = self._settings.public_addr, self._identity.node_id
        if public is not None:
            return NodeAddress(node_id, public.host, public.port or self._bound[1])
        if contacts := self._network.status().contacts:
            return contacts[0]
        return None if self._settings.listen.host in WILDCARDS else NodeAddress(node_id, *self._bound)

    def _export(self, metrics: MemberMetrics) -> None:
        """Let metrics read what we count."""
        limit = self._settings.max_sessions
        metrics.watch_network(self._network)
        metrics.watch(WorkMetrics(self._stats, self._budget, self._slices, self._scheduler, limit))
        metrics.know_state(self._state)

    def _state(self) -> str:
        if self._is_leaving:
            return "leaving"
        if self._network.bound is None:
            return LOADING
        return SERVING if self._slices.serving else "waiting"

    def _tell_way_in(self) -> None:
        """Tell of the first way to us that was proved, and whenever it becomes another."""
        if not self._settings.bootstraps:
            return
        contacts = self._network.status().contacts
        if self._is_ready and contacts and contacts[0] != self._way_in:
            self._way_in = contacts[0]
            self._on_event(events.reachable(contacts[0]))


def _network_settings(settings: NodeSettings, public: tuple[str, int] | None) -> NetworkSettings:
    listen = settings.listen
    return NetworkSettings(
        settings.network_id,
        psk=settings.psk,
        accepted_psks=settings.accepted_psks,
        bootstraps=settings.bootstraps,
        scope=settings.scope,
        listen=(listen.host, listen.port),
        public_addr=public,
        state_dir=settings.state_dir,
        is_sentinel=settings.is_sentinel,
        owner=settings.owner,
        pad=settings.pad,
        allow=settings.allow,
        token=settings.token,
        moved=settings.moved,
        tls=settings.tls,
    )
