"""From a model's name to a slice that can compute: opened, checked, loaded and measured.

Runs on the compute thread, so that what is measured is what will serve. Knows nothing of links.
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass

from node import events
from node.events import OnEvent
from node.form_choice import ChoiceStore, FormChoice, choose_dtype, choose_threads
from node.held_slice import HeldSlice
from node.settings import NodeSettings
from node.step_job import TORCH_DTYPES
from routing.errors import SettingsError
from routing.types import SliceOffer, SliceSpec
from slicing.cache import cache_root
from slicing.checkpoint import Checkpoint
from slicing.model_source import open_checkpoint
from slicing.progress import StoppableProgress
from slicing.runner import Parts, PlainRunner

logger = logging.getLogger(__name__)

WIRE_DTYPES = {torch_dtype: wire for wire, torch_dtype in TORCH_DTYPES.items()}


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

    def measured(self, choice: FormChoice, layer_ms: float, *, is_remembered: bool) -> None:
        """Tell which form was chosen."""
        self._tell(events.measured(choice.dtype, choice.threads, layer_ms, is_remembered=is_remembered))


def load_slice(settings: NodeSettings, report: LoadReport) -> LoadedSlice:
    """Open, check, load and measure. Raises SettingsError, ModelError (CannotCut among them) or LoadStopped."""
    started = time.perf_counter()
    checkpoint = open_checkpoint(settings.model, cache_dir=settings.cache_dir, progress=report)
    spec = checked_spec(settings.layers, checkpoint.config.num_hidden_layers)
    store = ChoiceStore(cache_root(settings.cache_dir), checkpoint.digest, spec, settings.device)
    remembered = store.load()
    dtype = choose_dtype(settings, checkpoint.dtype, remembered)
    parts = _parts(spec, checkpoint.config.num_hidden_layers, hold_ends=settings.hold_ends)
    runner = PlainRunner.load(checkpoint, parts, dtype=dtype, device=settings.device, progress=report)
    runner.widen_head()
    load_s = time.perf_counter() - started

    threads = choose_threads(settings, runner.measure_layer_ms, remembered)
    layer_ms = runner.measure_layer_ms()
    choice = FormChoice(WIRE_DTYPES[dtype].name.lower(), threads)
    if remembered is None and settings.dtype == "auto" and settings.threads is None:
        store.save(choice)
    report.measured(choice, layer_ms, is_remembered=remembered is not None)
    logger.info("layers %s: %s, %d threads, %.2f ms a layer", spec, choice.dtype, threads, layer_ms)

    offer = _offer(checkpoint, runner, spec, parts, layer_ms)
    held = HeldSlice(runner, offer, runner.cache_bytes_per_position)
    return LoadedSlice(held, threads, load_s, runner.size_bytes, checkpoint.bytes_requested)


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
    checkpoint: Checkpoint, runner: PlainRunner, spec: SliceSpec, parts: Parts, layer_ms: float
) -> SliceOffer:
    return SliceOffer(
        model_name=checkpoint.public_name,
        model_digest=checkpoint.digest,
        num_layers=runner.num_layers,
        hidden_size=runner.hidden_size,
        spec=spec,
        dtype=WIRE_DTYPES[runner.dtype],
        form=runner.form,
        has_opening=parts.opening,
        has_closing=parts.closing,
        layer_ms=layer_ms,
        layer_hashes=tuple(runner.layer_hashes[layer] for layer in range(spec.start, spec.end)),
    )
