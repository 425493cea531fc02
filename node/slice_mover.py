"""Changes what a node holds while it serves: the new slice is loaded beside the old one, which then drains.

Where memory holds only one of them, the old one goes first. Decides nothing: it is told what to hold. Knows nothing
of links or of other nodes.
"""

from __future__ import annotations

import asyncio
import gc
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from node import events
from node.events import OnEvent
from node.held_slice import HeldSlice
from node.loading import LoadedSlice
from node.slice_table import SliceTable
from node.stats import NodeStats
from routing.errors import DiffuseError, SettingsError
from routing.placement import Placed
from routing.types import SliceSpec
from slicing.errors import ModelError

logger = logging.getLogger(__name__)


class Loader(Protocol):
    """What moving needs of a `SliceLoader`."""

    async def load(self, model: str, layers: SliceSpec | None) -> LoadedSlice:
        """A slice ready to serve."""


class LoadFailed(Exception):
    """A slice could not be loaded; what was held before is held still. An event has told why."""


class SliceMover:
    """Brings the slice table to what it is told, without a failed request.

    `names` gives the name under which the owner listed a model, by its digest: nothing else is ever loaded.
    `announce` is called whenever what is offered has changed; `on_loaded` with each new slice.
    """

    def __init__(
        self,
        slices: SliceTable,
        loader: Loader,
        names: Mapping[bytes, str],
        *,
        drain_s: float,
        stats: NodeStats,
        announce: Callable[[], None],
        on_loaded: Callable[[LoadedSlice], None],
        on_event: OnEvent,
    ) -> None:
        self._slices = slices
        self._loader = loader
        self._names = names
        self._drain_s = drain_s
        self._stats = stats
        self._announce = announce
        self._on_loaded = on_loaded
        self._on_event = on_event

    @property
    def placed(self) -> tuple[Placed, ...]:
        """What is held and offered of the models that placement decides about."""
        return tuple(placed_at(held) for held in self._movable())

    async def move(
        self, wanted: Sequence[Placed], *, fits_beside: bool, on_held: Callable[[], None] = lambda: None
    ) -> None:
        """Hold `wanted` and nothing else of these models; `on_held` is called once nothing is left to load.

        Returns when nothing drains any more. Raises LoadFailed. Cancelled, it ends the load that is under way.
        """
        leaving = [held for held in self._movable() if placed_at(held) not in wanted]
        coming = [placed for placed in wanted if placed not in self.placed]
        if not fits_beside:
            await self._move_apart(leaving, coming)
            on_held()
        else:
            for placed in coming:
                self._take_in(await self._load(placed))
            on_held()
            await self._drain(leaving)
        self._stats.slices_moved += 1

    async def _move_apart(self, leaving: list[HeldSlice], coming: list[Placed]) -> None:
        """Old slices go before new ones come; one that cannot be loaded brings the old ones back."""
        before = [placed_at(held) for held in leaving]
        await self._drain(leaving)
        try:
            for placed in coming:
                self._take_in(await self._load(placed))
        except LoadFailed:
            for placed in before:
                self._take_in(await self._load(placed))
            raise

    async def _load(self, placed: Placed) -> LoadedSlice:
        model = self._names[placed.digest]
        try:
            loaded = await self._loader.load(model, placed.spec)
        except (
            Exception
        ) as error:  # the disk, the hub, memory, torch: whatever it is, the old slice serves on
            self._stats.loads_failed += 1
            code, text = _explain(error)
            logger.warning("layers %s were not loaded: %s, %s", placed.spec, code, text)
            self._on_event(events.load_failed(model, placed.spec, code, text))
            raise LoadFailed from error
        if loaded.held.offer.model_digest != placed.digest:  # the files were changed under our feet
            self._stats.loads_failed += 1
            text = "the model's files are not those of before"
            self._on_event(events.load_failed(model, placed.spec, "DIGEST", text))
            raise LoadFailed
        return loaded

    def _take_in(self, loaded: LoadedSlice) -> None:
        self._slices.add(loaded.held)
        self._stats.slices_loaded += 1
        self.note()
        self._on_loaded(loaded)
        self._announce()

    async def _drain(self, leaving: list[HeldSlice]) -> None:
        if not leaving:
            return
        for held in leaving:
            self._slices.drain(held)
        self.note()
        self._announce()
        try:
            async with asyncio.timeout(self._drain_s):
                for held in leaving:
                    await self._slices.wait_empty(held)
        except TimeoutError:
            logger.info("sessions have not ended within %.0f s: they go on elsewhere", self._drain_s)
        for held in leaving:
            self._stats.sessions_cut += self._slices.num_sessions(held)
            self._slices.remove(held)
            self._stats.slices_drained += 1
        leaving.clear()
        self.note()
        gc.collect()  # a model is a knot of references: its memory is wanted now

    def _movable(self) -> list[HeldSlice]:
        return [held for held in self._slices.serving if held.offer.model_digest in self._names]

    def note(self) -> None:
        """Bring the figures about slices up to date."""
        self._stats.num_slices = len(self._slices)
        self._stats.num_draining = self._slices.num_draining
        self._stats.weights_bytes = self._slices.weights_bytes


def placed_at(held: HeldSlice) -> Placed:
    """Which model and layers a held slice is."""
    return Placed(held.offer.model_digest, held.offer.spec)


def _explain(error: Exception) -> tuple[str, str]:
    """A name and a text that may be told; a foreign error's own text may hold paths or values, and is not."""
    if isinstance(error, MemoryError):
        return "MEMORY", "there is not enough memory"
    if isinstance(error, OSError):
        return "DISK", error.strerror or type(error).__name__
    if isinstance(error, ModelError | SettingsError | DiffuseError):
        return "MODEL", str(error)
    return "LOAD", type(error).__name__
