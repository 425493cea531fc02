"""A diffusion model that this gateway can open, beside the text models of its library."""

from __future__ import annotations

import asyncio
from concurrent.futures import Executor

from app.engine.diffusion.backend import ChainBackend, StackCoverage
from app.engine.diffusion.generation import PipelineEngine
from app.engine.diffusion.model import LookedUpPipeline, load_opened
from app.engine.model import EndsSettings
from app.engine.openable import Openable
from app.engine.request import KnownModel
from routing.planner import RouteRequest
from routing.switchboard import Switchboard
from routing.types import NodeId, NodeRecord


class OpenablePipeline(Openable[PipelineEngine]):
    """A model that makes pictures, videos or sounds. Its ends are everything but the blocks that nodes run."""

    def __init__(
        self,
        found: LookedUpPipeline,
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
        self._coverage = StackCoverage(found.facts, found.source.remote, excluded)

    @property
    def stacks(self) -> list[tuple[str, RouteRequest]]:
        return self._coverage.requests

    def known(self, records: tuple[NodeRecord, ...]) -> KnownModel:
        covered = self._coverage.status(records)
        engine = self.engine
        return KnownModel(
            self.facts.name,
            self._status(covered),
            self.created,
            (engine.defaults.max_text or 0) if engine is not None else 0,
            is_listed=self.is_named or covered.is_ready,
            kind=self.found.source.kind.value,
        )

    async def _load(self) -> PipelineEngine:
        opened = await asyncio.get_running_loop().run_in_executor(
            self._loader, load_opened, self.found, self._settings, self._progress
        )
        backend = ChainBackend(
            self.facts,
            self.found.source.remote,
            self._switchboard,
            wire=self._settings.call_wire,
            excluded=self._excluded,
        )
        return PipelineEngine(opened, backend)

    async def _let_go(self) -> None:
        self.found.source.close()
