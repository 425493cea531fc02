"""A model that this gateway can open: its ends are loaded once, by whoever asks first, while the others wait.

A load that failed is remembered with its reason for a while. Knows the network only through the records it is shown
and the switchboard it gives its engine.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass, replace

import torch

from app.engine.coverage import Coverage, route_request
from app.engine.ends_queue import EndsQueue
from app.engine.model import EndsSettings, LookedUp, load_ends
from app.engine.prefix import PrefixCache
from app.engine.request import KnownModel, ModelStatus, ModelUnavailableError
from app.engine.text import ChainTextEngine
from routing.errors import SettingsError
from routing.switchboard import Switchboard
from routing.types import NodeId, NodeRecord, SliceSpec
from slicing.errors import ModelError
from slicing.miniature import CannotCut
from slicing.progress import Progress, StoppableProgress, no_progress

log = logging.getLogger(__name__)

FAILED_S = 60.0  # before a load that failed is tried again: files are mended by hand, not within seconds


@dataclass(frozen=True, slots=True)
class _Failure:
    """Why the ends could not be loaded, in words for clients."""

    reason: str
    until: float  # on time.monotonic


class OpenableModel:
    """One model: closed, being opened, open, or failed. Use `close` at the end, and before it is opened again."""

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
        self.found = found
        self.is_named = (
            is_named  # by --model: listed whether it has a route or not, and never closed to make room
        )
        self.engine: ChainTextEngine | None = None
        self.load_s = 0.0
        self.last_used = 0.0  # on time.monotonic
        self._settings = settings
        self._switchboard = switchboard
        self._loader = loader
        self._excluded = excluded
        self._coverage = Coverage(
            route_request(found.facts, found.middle, is_thin=settings.is_thin, excluded=excluded)
        )
        self._opening: asyncio.Task[ChainTextEngine] | None = None
        self._progress = StoppableProgress(no_progress)
        self._ends: EndsQueue | None = None
        self._failure: _Failure | None = None
        self._prefixes: PrefixCache | None = None

    @property
    def is_opening(self) -> bool:
        return self._opening is not None

    def known(self, records: tuple[NodeRecord, ...]) -> KnownModel:
        """Say how the model stands, with these nodes."""
        covered = self._coverage.status(records)
        facts = self.found.facts
        return KnownModel(
            facts.name,
            self._status(covered) if covered.is_ready else covered,
            self.found.created,
            facts.max_positions,
            is_listed=self.is_named or covered.is_ready,
            ends=None if self._ends is None else self._ends.counts,
            prefixes=None if self._prefixes is None else self._prefixes.counts,
        )

    async def open(self, progress: Progress = no_progress) -> ChainTextEngine:
        """Return the engine, loading the ends first if they are not here. Cancelling the caller stops nothing.

        Raises ModelUnavailableError, with the error below as its cause where it was this load that failed.
        """
        self.last_used = time.monotonic()
        if self.engine is not None:
            return self.engine
        if (failure := self._recent_failure()) is not None:
            raise _failed(self.found.facts.name, failure.reason)
        if self._opening is None:
            self._progress = StoppableProgress(progress)
            self._opening = asyncio.create_task(self._open())
            self._opening.add_done_callback(_retrieve)  # every waiter may have left
        return await asyncio.shield(self._opening)

    async def close(self) -> None:
        """End a load, and let go of the ends. Answers must be over."""
        self._progress.stop()
        if self._opening is not None:
            await asyncio.gather(self._opening, return_exceptions=True)
        self.engine = None
        if (ends := self._ends) is not None:
            self._ends = None
            await ends.close()
        if self._prefixes is not None:
            self._prefixes.close()
            self._prefixes = None

    async def _open(self) -> ChainTextEngine:
        loop = asyncio.get_running_loop()
        begun = loop.time()
        try:
            runner, tokenizer = await loop.run_in_executor(
                self._loader, load_ends, self.found, self._settings, self._progress
            )
        except Exception as error:
            raise self._note_failure(error) from error
        finally:
            self._opening = None
        self.load_s = loop.time() - begun
        if runner is not None:
            self._ends = EndsQueue(runner, self.found.middle)
            await self._ends.use_threads(self._settings.threads)
        self.engine = ChainTextEngine(
            self.found.facts,
            tokenizer,
            self._switchboard,
            self._ends,
            self.found.middle,
            wire=self._settings.wire_dtype,
            prefill_chunk=self._settings.prefill_chunk,
            excluded=self._excluded,
            prefixes=self._new_prefixes(),
        )
        return self.engine

    def _new_prefixes(self) -> PrefixCache:
        """What earlier answers left; an empty one for each time that the ends are opened."""
        secret = self._settings.prefix_secret
        self._prefixes = PrefixCache(
            secret or secrets.token_bytes(32),
            self.found.facts.digest,
            has_ends=self.found.middle != SliceSpec(0, self.found.facts.num_layers),
            guesses=bool(secret),
        )
        return self._prefixes

    def _status(self, whole: ModelStatus) -> ModelStatus:
        """The status of a model that has a whole route."""
        if self.engine is not None:
            return whole
        if self.is_opening:
            return replace(whole, state="loading")
        if (failure := self._recent_failure()) is not None:
            return replace(whole, state="failed", reason=failure.reason)
        return replace(whole, state="available")

    def _recent_failure(self) -> _Failure | None:
        failure = self._failure
        return failure if failure is not None and time.monotonic() < failure.until else None

    def _note_failure(self, error: Exception) -> ModelUnavailableError:
        name = self.found.facts.name
        reason = reason_of(error)
        self._failure = _Failure(reason, time.monotonic() + FAILED_S)
        log.warning("model %s cannot be opened: %s", name, error)
        return _failed(name, reason)


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


def _retrieve(task: asyncio.Task[ChainTextEngine]) -> None:
    if not task.cancelled():
        task.exception()
