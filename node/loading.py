"""From a model's name to a slice that can compute: opened, checked, loaded and measured, step by step.

These functions block: `slice_loader` says on which thread each of them runs. Knows nothing of links.
"""

from __future__ import annotations

import logging
import statistics
import time
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
from transformers import PreTrainedModel

from node import events
from node.events import OnEvent
from node.form_choice import (
    ChoiceStore,
    FormChoice,
    choose_block_dtype,
    choose_dtype,
    choose_threads,
    use_threads,
)
from node.held_slice import HeldSlice
from node.settings import NodeSettings
from node.step_rows import TORCH_DTYPES
from routing.errors import SettingsError
from routing.types import SliceOffer, SliceSpec
from slicing.any_model import OpenModel
from slicing.batch import Runner, Work
from slicing.cache import cache_root
from slicing.checkpoint import Checkpoint
from slicing.diffusion.block_range import BlockRange, load_block_range
from slicing.diffusion.source import PipelineSource
from slicing.ends import Parts
from slicing.load_runner import LoadedRunner, load_runner
from slicing.model_kind import shape_of
from slicing.progress import StoppableProgress
from slicing.stacks import BUILDING
from slicing.weights import layer_number

logger = logging.getLogger(__name__)

WIRE_DTYPES = {torch_dtype: wire for wire, torch_dtype in TORCH_DTYPES.items()}
HEAD_TRIALS = 3  # a head takes as long as several layers: a median of few is steady enough


@dataclass(frozen=True, slots=True)
class ReadSlice:
    """A slice whose weights are in memory; how fast it is here is not known yet."""

    checkpoint: OpenModel
    spec: SliceSpec
    parts: Parts
    runner: LoadedRunner | BlockRange
    store: ChoiceStore
    remembered: FormChoice | None
    bytes_read: int
    load_s: float


@dataclass(frozen=True, slots=True)
class LoadedSlice:
    """A slice that is ready to serve, and what it took."""

    held: HeldSlice
    threads: int
    load_s: float
    weights_bytes: int
    bytes_read: int


class LoadReport(StoppableProgress):
    """Passes a load's events on, and ends the load when it is told to stop."""

    def __init__(self, tell: OnEvent) -> None:
        super().__init__(lambda *progress: tell(events.progress(*progress)))
        self._tell = tell

    def measured(self, choice: FormChoice, form: str, layer_ms: float, *, is_remembered: bool) -> None:
        """Tell which form was chosen."""
        told = events.measured(choice.dtype, form, choice.threads, layer_ms, is_remembered=is_remembered)
        self._tell(told)


def read_slice(
    settings: NodeSettings,
    checkpoint: Checkpoint,
    layers: SliceSpec | None,
    report: LoadReport,
    *,
    dtype: torch.dtype | None = None,
    has_ends: bool | None = None,
    weightless: PreTrainedModel | None = None,
) -> ReadSlice:
    """Check and read a slice (None: every layer). Raises SettingsError, ModelError (CannotCut too) or LoadStopped.

    The dtype is chosen here where it is not given; `has_ends` overrules the settings; for `weightless` see
    `load_runner`.
    """
    started, read_before = time.perf_counter(), checkpoint.bytes_requested
    num_layers = shape_of(checkpoint.config).num_layers
    spec = checked_spec(layers, num_layers)
    store = _store(settings, checkpoint, spec)
    remembered = store.load()
    dtype = dtype or choose_dtype(settings, checkpoint.dtype, remembered)
    hold_ends = settings.hold_ends if has_ends is None else has_ends
    parts = _parts(spec, num_layers, hold_ends=hold_ends)
    runner = load_runner(
        checkpoint,
        parts,
        runner=settings.runner,
        weights=settings.weights,
        dtype=dtype,
        device=settings.device,
        threads=1,  # until they are measured
        progress=report,
        weightless=weightless,
    )
    runner.widen_head()
    read = checkpoint.bytes_requested - read_before
    load_s = time.perf_counter() - started
    return ReadSlice(checkpoint, spec, parts, runner, store, remembered, read, load_s)


def read_blocks(
    settings: NodeSettings,
    source: PipelineSource,
    layers: SliceSpec | None,
    report: LoadReport,
    *,
    dtype: torch.dtype | None = None,
) -> ReadSlice:
    """As `read_slice`, for blocks of a pipeline's transformers; nothing else of the pipeline is opened."""
    started, read_before = time.perf_counter(), source.bytes_requested
    spec = checked_spec(layers, source.num_layers)
    store = _store(settings, source, spec)
    dtype = dtype or choose_block_dtype(settings, source.dtype)
    source.fetch(range(spec.start, spec.end), report)
    with (
        closing(source),
        BUILDING,
    ):  # a pipeline that is loaded in this process changes how modules are filled
        blocks = load_block_range(
            source, spec.start, spec.end, dtype=dtype, device=settings.device, progress=report
        )
    read = source.bytes_requested - read_before
    load_s = time.perf_counter() - started
    parts = _parts(spec, source.num_layers, hold_ends=False)
    return ReadSlice(source, spec, parts, blocks, store, store.load(), read, load_s)


def measure_slice(settings: NodeSettings, read: ReadSlice, report: LoadReport) -> LoadedSlice:
    """Choose the number of threads of the calling thread, where it will be computed, and measure a layer's time."""
    runner = read.runner
    use = partial(use_threads, runner)
    threads = choose_threads(settings, runner.measure_layer_ms, read.remembered, use)
    layer_ms = runner.measure_layer_ms()
    choice = FormChoice(WIRE_DTYPES[runner.dtype].name.lower(), threads)
    if read.remembered is None and settings.dtype == "auto" and settings.threads is None:
        read.store.save(choice)
    report.measured(choice, runner.form, layer_ms, is_remembered=read.remembered is not None)
    logger.info("layers %s: %s, %d threads, %.2f ms a layer", read.spec, runner.form, threads, layer_ms)
    return loaded_slice(read, threads, layer_ms, measure_head_ms(runner))


def loaded_slice(read: ReadSlice, threads: int, layer_ms: float, head_ms: float) -> LoadedSlice:
    """What others may be offered of a slice that was read and measured."""
    runner = read.runner
    if not isinstance(runner, BlockRange):
        runner.memory_bytes(
            1
        )  # measured now, where it is computed: asked for at an Open, it would stop all links
    offer = _offer(read.checkpoint, runner, read.spec, read.parts, layer_ms)
    held = HeldSlice(
        cast(Any, runner),  # blocks take calls, not rows: see `HeldSlice`
        offer,
        cache_bytes_per_position(runner),
        weights_bytes=runner.size_bytes,
        head_ms=head_ms,
    )
    return LoadedSlice(held, threads, read.load_s, runner.size_bytes, read.bytes_read)


def cache_bytes_per_position(runner: LoadedRunner | BlockRange) -> int:
    """What one position of one session takes in the held layers: of blocks, the keys and values that patches keep."""
    if isinstance(runner, BlockRange):
        return 2 * runner.hidden_size * runner.dtype.itemsize * (runner.end - runner.start)
    return runner.cache_bytes_per_position


def measure_head_ms(runner: Runner | BlockRange) -> float:
    """Median time of norm and head on one row, in milliseconds; 0 where they are not held."""
    if isinstance(runner, BlockRange) or not runner.parts.closing:
        return 0.0
    row = Work(runner.new_cache(), torch.zeros(1, runner.hidden_size, dtype=runner.dtype), 0)
    times = []
    with torch.inference_mode():
        for _ in range(HEAD_TRIALS):
            began = time.perf_counter()
            runner.run_closing_batch([row], start=runner.num_layers)
            times.append(time.perf_counter() - began)
    return statistics.median(times) * 1000


def layer_bytes(checkpoint: OpenModel, dtype: torch.dtype, layer: int, size_bytes: int) -> int:
    """What the largest layer's weights take in memory where `layer`, loaded alone, takes `size_bytes`.

    The rest is told by the checkpoint's tensor table; a layer of the same shapes takes the same.
    """
    if isinstance(checkpoint, PipelineSource):
        return max(checkpoint.block_bytes(number, dtype) for number in range(checkpoint.num_layers))
    sizes = _layer_sizes(checkpoint, dtype)
    return max(sizes.values(), default=0) * size_bytes // max(1, sizes.get(layer, 0)) if sizes else size_bytes


def _layer_sizes(checkpoint: Checkpoint, dtype: torch.dtype) -> dict[int, int]:
    """Bytes of each layer's tensors, as if all of them were kept in this dtype."""
    sizes: dict[int, int] = {}
    for name, tensor in checkpoint.tensors.items():
        layer = layer_number(name)
        if layer is not None:
            width = dtype.itemsize if tensor.dtype.is_floating_point else tensor.dtype.itemsize
            sizes[layer] = sizes.get(layer, 0) + tensor.size_bytes // tensor.dtype.itemsize * width
    return sizes


def _store(settings: NodeSettings, opened: OpenModel, spec: SliceSpec) -> ChoiceStore:
    asked = f"{settings.runner}/{settings.weights}"
    return ChoiceStore(cache_root(settings.cache_dir), opened.digest, spec, settings.device, asked)


def checked_spec(asked: SliceSpec | None, num_layers: int) -> SliceSpec:
    """The layers to hold. Raises SettingsError when the model has fewer."""
    if asked is None:
        return SliceSpec(0, num_layers)
    if asked.end > num_layers:
        raise SettingsError(f"layers {asked}: the model has layers 0:{num_layers}")
    return asked


def _parts(spec: SliceSpec, num_layers: int, *, hold_ends: bool) -> Parts:
    return Parts(
        layers=((spec.start, spec.end),),
        opening=hold_ends and spec.start == 0,
        closing=hold_ends and spec.end == num_layers,
    )


def _offer(
    checkpoint: OpenModel, runner: Runner | BlockRange, spec: SliceSpec, parts: Parts, layer_ms: float
) -> SliceOffer:
    return SliceOffer(
        model_name=checkpoint.public_name,
        model_digest=checkpoint.digest,
        num_layers=runner.num_layers,
        hidden_size=max(1, runner.hidden_size),  # some transformers do not say
        spec=spec,
        dtype=WIRE_DTYPES[runner.dtype],
        form=runner.form,
        has_opening=parts.opening,
        has_closing=parts.closing,
        layer_ms=layer_ms,
        layer_hashes=tuple(runner.layer_hashes[layer] for layer in range(spec.start, spec.end)),
        confirms=True,
        keeps=not isinstance(runner, BlockRange) and runner.is_invariant,
    )
