"""The models of one gateway over one network: those it was told to serve, and those it finds.

A model is found when nodes announce it and this machine can open it under the announced name with the same digest.
Nothing is fetched because a stranger announced it, unless the gateway was told so. Knows no HTTP.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from app.engine.coverage import SHORT_DIGITS
from app.engine.local_models import is_here, is_hub_id
from app.engine.model import EndsSettings, LookedUp, look_up
from app.engine.network import JoinedNetwork
from app.engine.openable import OpenableModel, compute_thread, reason_of
from app.engine.planned import RoutePlan, planned
from app.engine.request import AnyEngine, KnownModel, ModelUnavailableError
from app.engine.route_options import RouteOptions
from routing.errors import SettingsError
from routing.types import NodeId
from slicing.diffusion.source import is_pipeline
from slicing.errors import ModelError
from slicing.progress import Progress, StoppableProgress, no_progress

if TYPE_CHECKING:  # what diffusion models need is imported with the first of them: it takes seconds
    from app.engine.diffusion.model import LookedUpPipeline
    from app.engine.diffusion.openable import OpenablePipeline

log = logging.getLogger(__name__)

MAX_NAMES = 64  # announced ones that are looked at: a swarm serves a few, a flood of them is somebody's joke
MAX_NAME_CHARS = 128
MAX_OPEN = 4  # found models whose ends are here at once
IDLE_S = 60.0  # an open model that was not asked for that long makes room for another
LOOK_AGAIN_S = 30.0  # a name that could not be opened may be installed meanwhile
PAUSE_S = 0.2  # between looks, however much news there is
POLL_S = 1.0  # suspicion and expiry change coverage without a message
BUSY_RETRY_S = 10

OnEvent = Callable[[dict[str, Any]], None]
if TYPE_CHECKING:
    AnyModel = OpenableModel | OpenablePipeline


@dataclass(frozen=True, slots=True)
class NamedModel:
    """A model to serve whether nodes announce it or not, and what clients call it."""

    model: str
    name: str | None = None


@dataclass(frozen=True, slots=True)
class LibrarySettings:
    """Which models. Without any named, those that nodes announce; with `opens_any`, also what must be fetched."""

    models: tuple[NamedModel, ...] = ()
    opens_any: bool = False
    ends: EndsSettings = field(default_factory=EndsSettings)
    excluded: frozenset[NodeId] = frozenset()  # nodes that no answer ever uses
    queue_s: float = 0.0  # how long a request may wait until it uses the engine that it asked for

    @property
    def finds(self) -> bool:
        """Whether models that were not named are served."""
        return self.opens_any or not self.models


@dataclass(frozen=True, slots=True)
class _Refusal:
    """Why an announced name is not served."""

    reason: str
    digests: frozenset[bytes]  # announced at that time
    at: float = field(default_factory=time.monotonic)


@contextlib.asynccontextmanager
async def opened_library(
    settings: LibrarySettings,
    joined: JoinedNetwork,
    *,
    progress: Progress = no_progress,
    on_event: OnEvent = lambda event: None,
) -> AsyncIterator[NetworkLibrary]:
    """An empty library, which lets go of its models on the way out."""
    library = NetworkLibrary(settings, joined, progress=progress, on_event=on_event)
    try:
        yield library
    finally:
        await library.close()


class NetworkLibrary:
    """A `Library` whose models are opened one at a time, off the loop."""

    def __init__(
        self,
        settings: LibrarySettings,
        joined: JoinedNetwork,
        *,
        progress: Progress = no_progress,
        on_event: OnEvent = lambda event: None,
    ) -> None:
        self._settings = settings
        self._joined = joined
        self._progress = StoppableProgress(progress)
        self._on_event = on_event
        self._models: dict[str, AnyModel] = {}
        self._refused: dict[str, _Refusal] = {}
        self._loader = compute_thread("loading", settings.ends.threads)
        self._news = asyncio.Event()
        self.has_looked = asyncio.Event()  # at every name that was announced by then
        self._told: tuple[str, ...] = ()
        joined.directory.on_change.append(self._news.set)
        self._follow()

    # What the API asks (request.Library) ----------------------------------------------------------------------

    def models(self) -> tuple[KnownModel, ...]:
        records = self._joined.directory.records()
        return tuple(model.known(records) for model in self._models.values())

    def find(self, name: str) -> KnownModel | None:
        model = self._models.get(name)
        return None if model is None else model.known(self._joined.directory.records())

    def unserved(self) -> dict[str, str]:
        return {name: refusal.reason for name, refusal in self._refused.items()}

    def plan(self, name: str, options: RouteOptions) -> RoutePlan:
        return planned(self._joined.switchboard, self._models[name].stacks, options)

    async def engine(self, name: str) -> AnyEngine:
        model = self._models[name]
        if model.engine is None and not model.is_opening and not model.is_named:
            await self._make_room()
        return await model.open(self._progress)

    # The life of a library ------------------------------------------------------------------------------------

    async def open_named(self) -> tuple[AnyModel, ...]:
        """Open the models that were named, in their order. Raises ModelError and SettingsError."""
        for named in self._settings.models:
            found = await self._look_up(named.model, name=named.name, may_fetch=True)
            name = found.facts.name
            if name in self._models:
                raise SettingsError(f"two models are called {name}: give one of them another --name")
            self._add(found, is_named=True)
            try:
                await self._models[name].open(self._progress)
            except ModelUnavailableError as error:
                raise error.__cause__ or error from None
        return tuple(model for model in self._models.values() if model.is_named)

    async def find_new(self) -> None:
        """Look at every announced name once; those that can be opened here are models from then on."""
        if not self._settings.finds:
            return
        announced = self._announced()
        for name in self._refused.keys() - announced.keys():
            del self._refused[name]
        for name, digests in announced.items():
            if self._is_worth_a_look(name, digests):
                refused = await self._try(name, digests)
                if refused is None:
                    self._refused.pop(name, None)
                else:
                    self._refused[name] = _Refusal(refused, digests)

    async def run(self) -> None:
        """Keep finding models, and tell when what is listed changes, until cancelled."""
        while True:
            await self.find_new()
            self.has_looked.set()
            self.tell_listed()
            await asyncio.sleep(PAUSE_S)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(POLL_S):
                    await self._news.wait()
            self._news.clear()

    def tell_listed(self) -> None:
        """Tell which models have a whole route, if those are others than last time."""
        listed = tuple(model.name for model in self.models() if model.status.state != "partial")
        if listed != self._told:
            self._told = listed
            self._on_event({"event": "models", "models": list(listed)})

    async def close(self) -> None:
        """Let go of every model; answers must be over."""
        self._progress.stop()
        for model in self._models.values():
            await model.close()
        await asyncio.to_thread(self._loader.shutdown, wait=True, cancel_futures=True)

    # Finding --------------------------------------------------------------------------------------------------

    def _announced(self) -> Mapping[str, frozenset[bytes]]:
        """The digests behind each announced name; the names of most nodes first."""
        directory = self._joined.directory
        offers = [offer for record in directory.records() for offer in record.offers]
        offers += [offer for announcement in directory.announced() for offer in announcement.offers]
        digests: dict[str, set[bytes]] = defaultdict(set)
        for offer in offers:
            if 0 < len(offer.model_name) <= MAX_NAME_CHARS and offer.model_name.isprintable():
                digests[offer.model_name].add(offer.model_digest)
        counts = Counter(offer.model_name for offer in offers)
        names = sorted(digests, key=lambda name: (-counts[name], name))[:MAX_NAMES]
        return {name: frozenset(digests[name]) for name in names}

    def _is_worth_a_look(self, name: str, digests: frozenset[bytes]) -> bool:
        served = {model.facts.digest for model in self._models.values()}
        if name in self._models or digests <= served:
            return False
        refusal = self._refused.get(name)
        return refusal is None or refusal.digests != digests or time.monotonic() - refusal.at > LOOK_AGAIN_S

    async def _try(self, name: str, digests: frozenset[bytes]) -> str | None:
        """Look an announced model up and add it; return why not."""
        may_fetch = self._settings.opens_any and is_hub_id(name)
        if not may_fetch and not await asyncio.to_thread(is_here, name):
            return "it is not on this machine: start the gateway with --model, or with --open-any"
        try:
            found = await self._look_up(name, name=name, may_fetch=may_fetch)
        except (ModelError, SettingsError, OSError) as error:
            log.warning("announced model %s cannot be opened: %s", ascii(name), error)
            return reason_of(error)
        if found.facts.digest not in digests:
            there = ", ".join(sorted(digest.hex()[:SHORT_DIGITS] for digest in digests))
            here = found.facts.digest.hex()[:SHORT_DIGITS]
            return f"nodes announce other weights under this name ({there}) than those here ({here})"
        self._add(found, is_named=False)
        return None

    async def _look_up(self, model: str, *, name: str | None, may_fetch: bool) -> LookedUp | LookedUpPipeline:
        def work() -> LookedUp | LookedUpPipeline:
            ends, tell = self._settings.ends, self._progress
            if not is_pipeline(model, may_fetch=may_fetch):
                return look_up(model, ends, name=name, may_fetch=may_fetch, progress=tell)
            from app.engine.diffusion.model import look_up_pipeline

            return look_up_pipeline(model, ends, name=name, may_fetch=may_fetch, progress=tell)

        return await asyncio.get_running_loop().run_in_executor(self._loader, work)

    def _add(self, found: LookedUp | LookedUpPipeline, *, is_named: bool) -> None:
        shared = self._settings.ends, self._joined.switchboard, self._loader
        excluded = self._settings.excluded
        if isinstance(found, LookedUp):
            model: AnyModel = OpenableModel(found, *shared, is_named=is_named, excluded=excluded)
        else:
            from app.engine.diffusion.openable import OpenablePipeline

            model = OpenablePipeline(found, *shared, is_named=is_named, excluded=excluded)
        self._models[found.facts.name] = model
        self._follow()

    def _follow(self) -> None:
        """Have the directory keep links to the nodes of our models."""
        digests = frozenset(model.facts.digest for model in self._models.values())
        self._joined.directory.interests = digests

    async def _make_room(self) -> None:
        """Close the model that was not asked for the longest, if there are as many as may be open.

        Raises ModelUnavailableError when all of them are in use.
        """
        found = [model for model in self._models.values() if not model.is_named]
        if sum(model.engine is not None or model.is_opening for model in found) < MAX_OPEN:
            return
        idle = [model for model in found if model.engine is not None and self._is_idle(model)]
        if not idle:
            message = f"{MAX_OPEN} other models are in use, the most this gateway holds at once"
            raise ModelUnavailableError("overloaded", message, BUSY_RETRY_S)
        await min(idle, key=lambda model: model.last_used).close()

    def _is_idle(self, model: AnyModel) -> bool:
        is_quiet = time.monotonic() - model.last_used > IDLE_S + self._settings.queue_s
        return is_quiet and model.engine is not None and model.engine.num_running == 0
