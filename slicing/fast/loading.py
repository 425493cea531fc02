"""Builds a fast runner: recipe, packed weights layer by layer, checks against the plain runner.

Where the tensors come from is a `TensorSource`: a checkpoint, or a stock model in memory.
"""

from __future__ import annotations

import ctypes
import gc
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Protocol

import torch
from transformers import PretrainedConfig, PreTrainedModel

from slicing.checkpoint import Checkpoint
from slicing.ends import Parts, needed_parameters
from slicing.fast.composition import Composition, Plans
from slicing.fast.packed_layer import PackedLayer, Packing, pack_layer
from slicing.fast.packing import Form, PackedWeight
from slicing.fast.recipe import ModelRecipe, NotComposable
from slicing.fast.runner import FastRunner, ModelSizes, Opening
from slicing.fast.skeleton import Skeleton
from slicing.kv_cache import KVCache
from slicing.miniature import check_cut
from slicing.model_kind import ModelKind, kind_of
from slicing.progress import Progress, no_progress
from slicing.runner import PlainRunner, max_positions
from slicing.stacks import BlockStack, build_weightless, embedding_weight, find_stack, set_tensor
from slicing.weights import load_parameters

PROBED_TOKENS = 5


class TensorSource(Protocol):
    """Gives a model's tensors, part by part; each part is dropped before the next is asked for."""

    config: PretrainedConfig

    @property
    def layer_hashes(self) -> Mapping[int, bytes]:
        """Return layer number -> hash of what was read for it."""

    def layer(self, number: int) -> dict[str, torch.Tensor]:
        """Return a layer's tensors by their names in the block."""

    def ends(self, parts: Parts) -> tuple[torch.Tensor | None, dict[str, torch.Tensor]]:
        """Return the table of tokens, where the opening is held, and the closing's tensors by their full names."""

    def plain(self, parts: Parts) -> PlainRunner:
        """Return the plain runner of some parts, in float32."""


def load_fast(
    checkpoint: Checkpoint,
    parts: Parts,
    *,
    weights: str = "auto",
    threads: int | None = 1,
    progress: Progress | None = None,
) -> FastRunner:
    """Read and pack the tensors of `parts`; compare a layer of each kind with the plain runner's.

    `weights`: "bf16", "fp32", "int8", or "auto": whichever loses nothing and takes less. Raises `NotComposable`, or
    `ModelError` when the checkpoint lacks something.
    """
    from slicing.fast.check import check_layers, learn_checked

    _refuse_kind(checkpoint.config)
    recipe = learn_checked(checkpoint.config)
    is_bfloat16 = (
        checkpoint.dtype == torch.bfloat16
    )  # mostly: what is stored in another type stays exact, too
    form: Form = ("bf16" if is_bfloat16 else "fp32") if weights == "auto" else weights  # type: ignore[assignment]
    packing = Packing(form, is_lossless=is_bfloat16)
    source = CheckpointTensors(checkpoint, progress or no_progress, parts)
    skeleton = Skeleton.of(source.config, max_positions(source.config.get_text_config(decoder=True)))
    fast = build_runner(source, recipe, parts, packing, skeleton=skeleton, threads=threads)
    check_layers(fast, source, skeleton, form, form == "fp32" or is_bfloat16)
    gc.collect()  # stock models hold themselves: a layer in float32 for each kind that was looked at
    give_back_freed_memory()
    return fast


def _refuse_kind(config: PretrainedConfig) -> None:
    """Refuse a kind of model that the kernels are not for. Raises `NotComposable`."""
    kind = kind_of(config)
    if kind not in (ModelKind.TEXT, ModelKind.MULTIMODAL):
        raise NotComposable(f"its kernels are for text models, this is one of kind {kind}")


def build_runner(
    source: TensorSource,
    recipe: ModelRecipe,
    parts: Parts,
    packing: Packing,
    *,
    skeleton: Skeleton | None = None,
    threads: int | None = 1,
) -> FastRunner:
    """Pack the tensors of `parts` and compose the runner. Raises `NotComposable`."""
    config = source.config.get_text_config(decoder=True)
    limit = max_positions(config)
    plans = Plans(recipe, skeleton or Skeleton.of(source.config, limit))
    layers = plans.held_layers(parts)
    for number in layers:
        plans.layer(number)  # what cannot be composed is found before anything is read
    opening, closing, ends_bytes = _ends(source, plans, parts, packing)
    packed: dict[int, PackedLayer] = {}
    for number in layers:
        packed[number] = pack_layer(plans.layer(number), source.layer(number), packing)
        give_back_freed_memory()
    composition = Composition(plans, packed, closing)
    sizes = ModelSizes(plans.num_layers, plans.skeleton.hidden_size, int(config.vocab_size), limit)
    size_bytes = ends_bytes + sum(layer.nbytes for layer in packed.values())
    return FastRunner(
        composition,
        parts,
        sizes,
        opening,
        form=packing.form,
        size_bytes=size_bytes,
        layer_hashes=source.layer_hashes,
        threads=threads,
    )


def _ends(
    source: TensorSource, plans: Plans, parts: Parts, packing: Packing
) -> tuple[Opening, PackedLayer | None, int]:
    """Pack the ends; a tied table is packed once. Return also what they take."""
    if not (parts.opening or parts.closing):
        return Opening(), None, 0
    is_plain = plans.recipe.is_plain_opening
    table, tensors = source.ends(Parts(opening=parts.opening and is_plain, closing=parts.closing))
    opening, size_bytes, ready = Opening(), 0, None
    if parts.opening and not is_plain:
        opening, size_bytes = _own_prelude(source)
    elif table is not None:
        packed_table: PackedWeight = packing.pack(table)
        opening = Opening(packed_table, plans.skeleton.opening_factor)
        size_bytes, ready = packed_table.nbytes, (table, packed_table)
    if not parts.closing:
        return opening, None, size_bytes
    closing = pack_layer(plans.closing, tensors, packing, ready)
    is_shared = any(ready is not None and weight is ready[1] for weight, _ in closing.products.values())
    own_bytes = closing.nbytes - (ready[1].nbytes if is_shared and ready is not None else 0)
    return opening, closing, size_bytes + own_bytes


def _own_prelude(source: TensorSource) -> tuple[Opening, int]:
    """Let the model's own code do the opening. Raises `NotComposable` where rows depend on their neighbours."""
    plain = source.plain(Parts(opening=True))
    cache: KVCache = plain.new_cache()

    def embed(token_ids: torch.Tensor, position: int) -> torch.Tensor:
        cache.length = position
        return plain.run_opening(cache, token_ids, position, end=0)

    token_ids = torch.arange(PROBED_TOKENS) * 7 % plain.vocab_size
    whole = embed(token_ids, 0)
    alone = [embed(token_ids[row : row + 1], row) for row in range(PROBED_TOKENS)]
    if not torch.equal(whole, torch.cat(alone)):
        raise NotComposable("what precedes its layers gives a row other bits beside others")
    return Opening(prelude=embed), plain.size_bytes


@dataclass
class ModelTensors:
    """The tensors of a whole stock model in memory."""

    model: PreTrainedModel
    layer_hashes: Mapping[int, bytes] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.config: PretrainedConfig = self.model.config
        self._stack = find_stack(self.model)

    def layer(self, number: int) -> dict[str, torch.Tensor]:
        """Return a layer's tensors by their names in the block."""
        return _tensors(self._stack.blocks[number])

    def ends(self, parts: Parts) -> tuple[torch.Tensor | None, dict[str, torch.Tensor]]:
        """Return the table of tokens and the closing's tensors."""
        table = embedding_weight(self.model) if parts.opening else None
        return table, _outside(self.model, self._stack) if parts.closing else {}

    def plain(self, parts: Parts) -> PlainRunner:
        """Return the plain runner of some parts."""
        return PlainRunner.from_model(self.model, parts)


class CheckpointTensors:
    """The tensors of a checkpoint, read when asked for and dropped with the next reading."""

    def __init__(self, checkpoint: Checkpoint, progress: Progress, parts: Parts) -> None:
        self.config: PretrainedConfig = checkpoint.config
        self.layer_hashes: dict[int, bytes] = {}
        self._checkpoint = checkpoint
        self._ends = check_cut(checkpoint.config).ends
        self._model = build_weightless(checkpoint.config, torch.float32)
        self._stack = find_stack(self._model)
        self._meta = dict(self._model.state_dict(keep_vars=True))
        self._is_bfloat16 = stores_only(checkpoint, torch.bfloat16)
        self._progress = _PartsProgress(progress, _share_of(checkpoint, self._stack, parts))

    def layer(self, number: int) -> dict[str, torch.Tensor]:
        """Read a layer."""
        self._read(lambda name: self._stack.layer_of(name) == number)
        tensors = _tensors(self._stack.blocks[number])
        self._drop()
        return tensors

    def ends(self, parts: Parts) -> tuple[torch.Tensor | None, dict[str, torch.Tensor]]:
        """Read the table of tokens and the closing's tensors."""
        self._read(needed_parameters(self._stack, self._ends, parts))
        table = embedding_weight(self._model) if parts.opening else None
        tensors = _outside(self._model, self._stack)
        self._drop()
        return table, tensors

    def plain(self, parts: Parts) -> PlainRunner:
        """Read some parts once more, in stock form."""
        return PlainRunner.load(self._checkpoint, parts, dtype=torch.float32)

    def _read(self, wanted: Callable[[str], bool]) -> None:
        loaded = load_parameters(
            self._checkpoint,
            self._model,
            wanted,
            dtype=torch.bfloat16 if self._is_bfloat16 else torch.float32,
            progress=self._progress,
            layer_of=self._stack.layer_of,
        )
        self.layer_hashes.update(loaded.layer_hashes)
        self._progress.finish()

    def _drop(self) -> None:
        """Put the tensors without memory back, so that nothing here holds what was read."""
        for name, tensor in self._meta.items():
            set_tensor(self._model, name, tensor)


class _PartsProgress:
    """Adds the progress of several readings up."""

    def __init__(self, progress: Progress, total: int) -> None:
        self._progress = progress
        self._total = total
        self._done = self._latest = 0

    def __call__(self, stage: str, done_bytes: int, total_bytes: int) -> None:
        if stage != "load":
            self._progress(stage, done_bytes, total_bytes)
            return
        self._latest = done_bytes
        self._progress(stage, self._done + done_bytes, max(self._total, self._done + total_bytes))

    def finish(self) -> None:
        """Count what was read as done."""
        self._done += self._latest
        self._latest = 0


def give_back_freed_memory() -> None:
    """Return what was freed to the system: glibc keeps blocks of a layer's size, and loading would seem to grow."""
    if sys.platform == "linux":
        with suppress(OSError, AttributeError):  # another C library
            ctypes.CDLL("libc.so.6").malloc_trim(0)


def stores_only(checkpoint: Checkpoint, dtype: torch.dtype) -> bool:
    """Tell whether every floating-point tensor of a checkpoint is stored in this type."""
    floats = [t.dtype for t in checkpoint.tensors.values() if t.dtype.is_floating_point]
    return bool(floats) and all(kind == dtype for kind in floats)


def _share_of(checkpoint: Checkpoint, stack: BlockStack, parts: Parts) -> int:
    """Estimate the bytes that will be read: the held layers' share of everything."""
    held = sum(end - start for start, end in parts.layers)
    return sum(tensor.size_bytes for tensor in checkpoint.tensors.values()) * held // len(stack)


def _tensors(block: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: tensor.detach() for name, tensor in [*block.named_parameters(), *block.named_buffers()]}


def _outside(model: PreTrainedModel, stack: BlockStack) -> dict[str, torch.Tensor]:
    """Return the tensors outside the blocks by every name they have."""
    named = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    return {name: tensor for name, tensor in named if stack.layer_of(name) is None and not tensor.is_meta}
