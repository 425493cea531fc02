"""Chooses how some parts of a model are run, and loads them: fast, else invariant, else plain.

Says in the log what was taken and why nothing faster was. Knows nothing of who asks.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Protocol

import torch
from transformers import PreTrainedModel

from slicing.batch import Runner
from slicing.checkpoint import Checkpoint
from slicing.ends import Parts
from slicing.errors import ModelError
from slicing.invariant import InvariantRunner, NotInvariant
from slicing.miniature import check_cut
from slicing.progress import Progress
from slicing.runner import PlainRunner

logger = logging.getLogger(__name__)

RunnerName = Literal["auto", "fast", "invariant", "plain"]
WeightsName = Literal["auto", "bf16", "fp32", "int8"]


class LoadedRunner(Runner, Protocol):
    """A runner as it is loaded: it can say how fast it is and what its sessions take."""

    @property
    def cache_bytes_per_position(self) -> int:
        """What one position of one session takes in the held layers, in the long run."""

    def measure_layer_ms(self, rows: int = 1) -> float:
        """What one step of `rows` rows takes in one of the held layers: median, in milliseconds."""

    def widen_head(self, num_threads: int | None = None) -> bool:
        """Share single rows of the head among threads, where that keeps the bits; tells whether it was done."""


class CannotRun(ModelError):
    """The model cannot be run in the way that was asked for; the text says why, and what to ask for instead."""


@dataclass(frozen=True)
class _Wish:
    checkpoint: Checkpoint
    parts: Parts
    weights: WeightsName
    dtype: torch.dtype | None
    device: torch.device
    threads: int | None
    progress: Progress | None
    weightless: PreTrainedModel | None = field(repr=False)


def load_runner(
    checkpoint: Checkpoint,
    parts: Parts,
    *,
    runner: RunnerName = "auto",
    weights: WeightsName = "auto",
    dtype: torch.dtype | None = None,
    device: torch.device | str = "cpu",
    threads: int | None = 1,
    progress: Progress | None = None,
    weightless: PreTrainedModel | None = None,
) -> LoadedRunner:
    """Load `parts` of a model for the fastest runner that computes it, or for the one that is asked for.

    `weights` auto holds the checkpoint's own numbers: bf16 where it is a bfloat16 checkpoint, else fp32. `dtype` is
    that of the stock layers (None: float32 on a CPU, else the checkpoint's); one other than float32 rules out the fast
    runner. `threads` are the fast runner's (None: as many as torch uses in the calling thread). `weightless`: see
    `PlainRunner.load`. Raises `CannotRun` where what is asked for is not possible, `CannotCut`, or `ModelError` when
    the checkpoint lacks something.
    """
    check_cut(checkpoint.config)
    wish = _Wish(checkpoint, parts, weights, dtype, torch.device(device), threads, progress, weightless)
    ways: dict[RunnerName, Callable[[_Wish], Any]] = {
        "fast": _load_fast,
        "invariant": _load_invariant,
        "plain": _load_plain,
    }
    reasons: list[str] = []
    for name in [runner] if runner != "auto" else list(ways):
        try:
            loaded = ways[name](wish)
        except CannotRun as error:
            reasons.append(str(error))
        else:
            logger.info("%s of %s: %s", parts, checkpoint.public_name, _told(loaded.form, reasons))
            return loaded
    raise CannotRun(f"{checkpoint.public_name} cannot be run as asked: {'; '.join(reasons)}")


def _load_fast(wish: _Wish) -> LoadedRunner:
    from slicing.fast.compiling import KernelsUnusable, load_kernels  # numba takes a second to import
    from slicing.fast.loading import load_fast
    from slicing.fast.recipe import NotComposable

    if wish.device.type != "cpu":
        raise CannotRun("not fast: its kernels are for CPUs")
    if wish.dtype not in (None, torch.float32):
        raise CannotRun(f"not fast: it computes in float32, not in {str(wish.dtype).removeprefix('torch.')}")
    try:
        load_kernels()
        return load_fast(
            wish.checkpoint, wish.parts, weights=wish.weights, threads=wish.threads, progress=wish.progress
        )
    except (KernelsUnusable, NotComposable) as error:
        raise CannotRun(f"not fast: {error}") from error


def _load_invariant(wish: _Wish) -> LoadedRunner:
    try:
        return _load_stock(InvariantRunner, wish)
    except NotInvariant as error:
        raise CannotRun(f"not invariant: {error}") from error


def _load_plain(wish: _Wish) -> LoadedRunner:
    return _load_stock(PlainRunner, replace(wish, weightless=_unless_filled(wish.weightless)))


def _load_stock(cls: type[PlainRunner], wish: _Wish) -> PlainRunner:
    if wish.weights == "int8":
        raise CannotRun("int8 weights need the fast runner: ask for bf16 or fp32 ones")
    return cls.load(
        wish.checkpoint,
        wish.parts,
        dtype=_stock_dtype(wish),
        device=wish.device,
        progress=wish.progress,
        weightless=wish.weightless,
    )


def _stock_dtype(wish: _Wish) -> torch.dtype:
    """Return what stock layers compute in: on a CPU float32, whatever the weights are stored in."""
    if wish.dtype is not None:
        return wish.dtype
    if wish.device.type == "cpu" or wish.weights == "fp32":
        return torch.float32
    return torch.bfloat16 if wish.weights == "bf16" else wish.checkpoint.dtype


def _unless_filled(weightless: PreTrainedModel | None) -> PreTrainedModel | None:
    """Return a weightless model unless another runner has begun to fill it."""
    if weightless is None or not all(parameter.is_meta for parameter in weightless.parameters()):
        return None
    return weightless


def _told(form: str, reasons: list[str]) -> str:
    return f"{form} ({'; '.join(reasons)})" if reasons else form
