"""A model that this gateway can open: its ends are loaded once, by whoever asks first, while the others wait.

A load that failed is remembered with its reason for a while. Knows the network only through the records it is shown
and the switchboard it gives its engine.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from abc import ABC, abstractmethod
from concurrent.futures import Executor, ThreadPoolExecutor
from contextvars import Context
from dataclasses import dataclass, replace
from typing import Any, Generic, TypeVar

import torch

from app.engine.coverage import Coverage, ModelFacts, route_request
from app.engine.ends_queue import EndsQueue
from app.engine.model import EndsSettings, LoadedEnds, LookedUp, load_ends
from app.engine.opened import Opened, OpenEngine, new_engine
from app.engine.prefix import PrefixCache
from app.engine.request import KnownModel, ModelStatus, ModelUnavailableError
from routing.errors import SettingsError
from routing.planner import RouteRequest
from routing.switchboard import Switchboard
from routing.types import NodeId, NodeRecord, SliceSpec
from slicing.errors import ModelError
from slicing.miniature import CannotCut
from slicing.progress import Progress, StoppableProgress, no_progress

log = logging.getLogger(__name__)

FAILED_S = 60.0  # before a load that failed is tried again: files are mended by hand, not within seconds


Engine = TypeVar("Engine", bound=OpenEngine)


@dataclass(frozen=True, slots=True)
class _Failure:
    """Why the ends could not be loaded, in words for clients."""

    reason: str
    until: float  # on time.monotonic


class Openable(ABC, Generic[Engine]):
    """One model: closed, being opened, open, or failed. Use `close` at the end, and before it is opened again.

    What kinds of models differ in is how they are loaded, and when their nodes cover them.
    """

    def __init__(self, facts: ModelFacts, created: int, loader: Executor, *, is_named: bool) -> None:
        self.facts = facts
        self.created = created
        self.is_named = (
            is_named  # by --model: listed whether it has a route or not, and never closed to make room
        )
        self.engine: Engine | None = None
        self.load_s = 0.0
        self.last_used = 0.0  # on time.monotonic
        self._loader = loader
        self._opening: asyncio.Task[Engine] | None = None
        self._progress = StoppableProgress(no_progress)
        self._failure: _Failure | None = None

    @property
    def is_opening(self) -> bool:
        return self._opening is not None

    @property
    @abstractmethod
    def stacks(self) -> list[tuple[str, RouteRequest]]:
        """What any route of it must do, by the name of the stack of blocks; "" where there is only one."""

    @abstractmethod
    def known(self, records: tuple[NodeRecord, ...]) -> KnownModel:
        """Say how the model stands, with these nodes."""

    @abstractmethod
    async def _load(self) -> Engine:
        """Load it; blocking work goes to `self._loader`, and reports to `self._progress`."""

    @abstractmethod
    async def _let_go(self) -> None:
        """Free what was loaded."""

    async def open(self, progress: Progress = no_progress) -> Engine:
        """Return the engine, loading the ends first if they are not here. Cancelling the caller stops nothing.

        Raises ModelUnavailableError, with the error below as its cause where it was this load that failed.
        """
        self.last_used = time.monotonic()
        if self.engine is not None:
            return self.engine
        if (failure := self._recent_failure()) is not None:
            raise _failed(self.facts.name, failure.reason)
        if self._opening is None:
            self._progress = StoppableProgress(progress)
            self._opening = asyncio.create_task(self._open(), context=Context())  # for all who wait
            self._opening.add_done_callback(_retrieve)  # every waiter may have left
        return await asyncio.shield(self._opening)

    async def close(self) -> None:
        """End a load, and let go of the ends. Answers must be over."""
        self._progress.stop()
        if self._opening is not None:
            await asyncio.gather(self._opening, return_exceptions=True)
        self.engine = None
        await self._let_go()

    async def _open(self) -> Engine:
        loop = asyncio.get_running_loop()
        begun = loop.time()
        try:
            engine = await self._load()
        except Exception as error:
            raise self._note_failure(error) from error
        finally:
            self._opening = None
        self.load_s = loop.time() - begun
        self.engine = engine
        return engine

    def _status(self, covered: ModelStatus) -> ModelStatus:
        """The status of a model whose nodes cover so much of it."""
        if self.engine is not None or not covered.is_ready:
            return covered
        if self.is_opening:
            return replace(covered, state="loading")
        if (failure := self._recent_failure()) is not None:
            return replace(covered, state="failed", reason=failure.reason)
        return replace(covered, state="available")

    def _recent_failure(self) -> _Failure | None:
        failure = self._failure
        return failure if failure is not None and time.monotonic() < failure.until else None

    def _note_failure(self, error: Exception) -> ModelUnavailableError:
        name = self.facts.name
        reason = reason_of(error)
        self._failure = _Failure(reason, time.monotonic() + FAILED_S)
        log.warning("model %s cannot be opened: %s", name, error)
        return _failed(name, reason)


class OpenableModel(Openable[OpenEngine]):
    """A model of tokens: its engine depends on its kind (`opened`)."""

    def __init__(
        self,
        found: LookedUp,
        settings: EndsSettings,
        switchboard: Switchboard,
        loader: Executor,
        *,
        is_named: bool = False,
        excluded: frozenset[NodeId] = frozenset(),
    ) -> None:
        super().__init__(found.facts, found.created, loader, is_named=is_named)
        self.found = found
        self._settings = settings
        self._switchboard = switchboard
        self._excluded = excluded
        self._coverage = Coverage(
            route_request(found.facts, found.middle, is_thin=settings.is_thin, excluded=excluded)
        )
        self._ends: EndsQueue | None = None
        self._prefixes: PrefixCache | None = None
        self._encoding: ThreadPoolExecutor | None = None

    @property
    def stacks(self) -> list[tuple[str, RouteRequest]]:
        return [("", self._coverage.request)]

    def known(self, records: tuple[NodeRecord, ...]) -> KnownModel:
        covered = self._coverage.status(records)
        return KnownModel(
            self.facts.name,
            self._status(covered),
            self.created,
            getattr(self.engine, "max_positions", self.facts.max_positions),
            is_listed=self.is_named or covered.is_ready,
            ends=None if self._ends is None else self._ends.counts,
            prefixes=None if self._prefixes is None else self._prefixes.counts,
            kind=self.found.kind.value,
            takes=self.found.takes,
        )

    async def _load(self) -> OpenEngine:
        loaded = await asyncio.get_running_loop().run_in_executor(
            self._loader, load_ends, self.found, self._settings, self._progress
        )
        try:
            return await self._engine_of(loaded)
        except BaseException:
            await self._let_go()
            raise

    async def _engine_of(self, loaded: LoadedEnds) -> OpenEngine:
        if loaded.runner is not None:
            self._ends = EndsQueue(loaded.runner, self.found.middle)
            await self._ends.use_threads(self._settings.threads)
        self._encoding = compute_thread("encoding", self._settings.threads)
        opened = Opened(
            self.found,
            self._settings,
            self._switchboard,
            loaded.tokenizer,
            self._ends,
            self._encoding,
            home=loaded.home,
            excluded=self._excluded,
            prefixes=self._new_prefixes(),
        )
        return new_engine(opened)

    async def _let_go(self) -> None:
        if (encoding := self._encoding) is not None:
            self._encoding = None
            await asyncio.to_thread(encoding.shutdown, wait=True, cancel_futures=True)
        if (ends := self._ends) is not None:
            self._ends = None
            await ends.close()
        if self._prefixes is not None:
            self._prefixes.close()
            self._prefixes = None

    def _new_prefixes(self) -> PrefixCache:
        """What earlier answers left; an empty one for each time that the ends are opened."""
        secret = self._settings.prefix_secret
        self._prefixes = PrefixCache(
            secret or secrets.token_bytes(32),
            self.facts.digest,
            has_ends=self.found.middle != SliceSpec(0, self.facts.num_layers),
            guesses=bool(secret),
        )
        return self._prefixes


def compute_thread(name: str, num_threads: int) -> ThreadPoolExecutor:
    """A thread of its own, in which torch uses `num_threads`."""
    return ThreadPoolExecutor(
        1, thread_name_prefix=name, initializer=torch.set_num_threads, initargs=(num_threads,)
    )


def reason_of(error: Exception) -> str:
    """Say why a model cannot be opened in words that name nothing of this machine."""
    if isinstance(error, CannotCut | SettingsError):
        return str(error)
    kind = "" if isinstance(error, ModelError) else f" ({type(error).__name__})"
    return f"it cannot be opened here{kind}, the gateway's log says why"


def _failed(name: str, reason: str) -> ModelUnavailableError:
    return ModelUnavailableError("model_failed", f"the model `{name}`: {reason}", int(FAILED_S))


def _retrieve(task: asyncio.Task[Any]) -> None:
    if not task.cancelled():
        task.exception()
