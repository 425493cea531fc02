"""Loads slices on a thread of its own, one at a time, while the compute thread goes on with sessions.

Only what has to be measured where the computing is done runs there: in short turns, between the sessions' steps.
Knows nothing of links or of who wants a slice.
"""

from __future__ import annotations

import asyncio
import logging
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import torch
from transformers import PreTrainedModel

from node.events import NodeEvent, OnEvent
from node.form_choice import use_threads
from node.loading import (
    LoadedSlice,
    LoadReport,
    ReadSlice,
    layer_bytes,
    loaded_slice,
    measure_head_ms,
    measure_slice,
    read_blocks,
    read_slice,
)
from node.scheduler import Scheduler
from node.settings import NodeSettings
from node.thread_watch import ThreadWatch
from routing.types import WIDTHS, SliceSpec
from slicing.any_model import OpenModel, num_layers_of, open_model
from slicing.batch import MEASURED_STEPS, Runner, Work
from slicing.diffusion.block_range import BlockRange
from slicing.diffusion.source import PipelineSource
from slicing.stacks import build_weightless

logger = logging.getLogger(__name__)
Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """What placement has to know of a model that this node may serve."""

    model: str  # as the user named it
    public_name: str
    digest: bytes
    num_layers: int
    layer_ms: float  # one decode row through one layer, here
    layer_bytes: int  # weights of the largest layer
    cache_bytes: int  # keys and values of one position of one session, in one layer
    row_bytes: int = 0  # hidden states of one position on the way between nodes; 0: not known


class SliceLoader:
    """Opens, measures and loads models by the names that the user gave. Belongs to the event loop."""

    def __init__(self, settings: NodeSettings, scheduler: Scheduler, on_event: OnEvent) -> None:
        self._settings = settings
        self._scheduler = scheduler
        self._on_event = on_event
        self._loop = asyncio.get_running_loop()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="load")
        self._opened: dict[str, OpenModel] = {}
        self._dtypes: dict[str, torch.dtype] = {}  # of each model: all its slices here compute in the same
        self._threads: int | None = None  # of the compute thread, once they are chosen

    async def load(self, model: str, layers: SliceSpec | None) -> LoadedSlice:
        """A slice ready to serve (None: every layer). Cancelled, it ends the load and waits for the thread.

        Raises SettingsError, ModelError (CannotCut among them), and what memory and disk may raise.
        """
        report = self._report()
        weightless = await self._built(model)
        read = await self._stoppable(report, self._read, model, layers, weightless)
        return await self._measured(model, read, report)

    async def examine(self, model: str) -> ModelFacts:
        """Open a model, load one layer of its middle and measure it. Raises as `load` does."""
        report = self._report()
        read = await self._stoppable(report, self._read_one, model)
        loaded = await self._measured(model, read, report)
        offer, checkpoint = loaded.held.offer, read.checkpoint
        return ModelFacts(
            model,
            offer.model_name,
            offer.model_digest,
            offer.num_layers,
            offer.layer_ms,
            layer_bytes(checkpoint, read.runner.dtype, read.spec.start, read.runner.size_bytes),
            loaded.held.cache_bytes_per_position,
            offer.hidden_size * WIDTHS[offer.dtype],
        )

    async def close(self) -> None:
        """Wait for the thread to end; nothing may be under way."""
        await asyncio.to_thread(self._thread.shutdown)

    def _report(self) -> LoadReport:
        def tell(event: NodeEvent) -> None:
            self._loop.call_soon_threadsafe(self._on_event, event)

        return LoadReport(tell)

    async def _stoppable(self, report: LoadReport, work: Callable[..., Result], *args: object) -> Result:
        future = self._loop.run_in_executor(self._thread, work, report, *args)
        try:
            return await asyncio.shield(future)
        except asyncio.CancelledError:
            report.stop()
            await asyncio.wait({future})
            future.exception()  # LoadStopped, or whatever came first: nobody waits for it
            raise

    async def _built(self, model: str) -> PreTrainedModel | None:
        """The model without weights, built between steps: in another type than float32 nothing may compute meanwhile.

        None where it may be built on the loading thread: nothing computes yet, or the type is float32.
        """
        dtype, opened = self._dtypes.get(model, torch.float32), self._opened.get(model)
        if self._threads is None or dtype == torch.float32 or isinstance(opened, PipelineSource | None):
            return None
        config = opened.config
        return await self._scheduler.call(lambda: build_weightless(config, dtype))

    def _read(
        self, report: LoadReport, model: str, layers: SliceSpec | None, weightless: PreTrainedModel | None
    ) -> ReadSlice:
        dtype, opened = self._dtypes.get(model), self._open(model, report)
        if isinstance(opened, PipelineSource):
            read = read_blocks(self._settings, opened, layers, report, dtype=dtype)
        else:
            read = read_slice(self._settings, opened, layers, report, dtype=dtype, weightless=weightless)
        self._dtypes[model] = read.runner.dtype
        return read

    def _read_one(self, report: LoadReport, model: str) -> ReadSlice:
        opened = self._open(model, report)
        middle = num_layers_of(opened) // 2  # the first ones may differ (dense before experts)
        layers = SliceSpec(middle, middle + 1)
        if isinstance(opened, PipelineSource):
            read = read_blocks(self._settings, opened, layers, report)
        else:
            read = read_slice(self._settings, opened, layers, report, has_ends=False)
        self._dtypes[model] = read.runner.dtype
        return read

    def _open(self, model: str, report: LoadReport) -> OpenModel:
        if model not in self._opened:
            self._opened[model] = open_model(model, cache_dir=self._settings.cache_dir, progress=report)
        return self._opened[model]

    async def _measured(self, model: str, read: ReadSlice, report: LoadReport) -> LoadedSlice:
        if self._threads is None:
            loaded = await self._scheduler.call(lambda: measure_slice(self._settings, read, report))
            self._threads = loaded.threads
            if loaded.threads > 1 and not hasattr(read.runner, "set_threads"):  # a fast runner has its own
                self._scheduler.threads = ThreadWatch(loaded.threads)
                self._scheduler.short_ms = 0.0  # two threads that compute would have a pool of torch's each
            torch.set_num_threads(loaded.threads)  # of this thread too: it computes short batches
            return loaded
        await self._scheduler.call(partial(use_threads, read.runner, self._threads))
        layer_ms = await self._layer_ms(read.runner, read.spec)
        head_ms = await self._scheduler.call(lambda: measure_head_ms(read.runner))
        return await self._stoppable(report, _finish, read, self._threads, layer_ms, head_ms)

    async def _layer_ms(self, runner: Runner | BlockRange, spec: SliceSpec) -> float:
        """As a runner's `measure_layer_ms`, but step by step, so that sessions wait for one step at most."""
        if isinstance(runner, BlockRange):
            return await self._scheduler.call(runner.measure_layer_ms)
        cache = runner.new_cache()
        row = torch.randn(1, runner.hidden_size, dtype=runner.dtype)

        def step(position: int) -> float:
            began = time.perf_counter()
            with torch.inference_mode():
                runner.run_layers_batch([Work(cache, row, position)], start=spec.start, end=spec.end)
            return time.perf_counter() - began

        times = [
            await self._scheduler.call(partial(step, position)) for position in range(MEASURED_STEPS + 1)
        ]
        cache.close()
        return statistics.median(times[1:]) * 1000 / (spec.end - spec.start)


def _finish(
    report: LoadReport, read: ReadSlice, threads: int, layer_ms: float, head_ms: float
) -> LoadedSlice:
    """Runs on the loading thread: finding out what a position takes is one more step through the slice."""
    logger.info("layers %s: %.2f ms a layer", read.spec, layer_ms)
    return loaded_slice(read, threads, layer_ms, head_ms)
