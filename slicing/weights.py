"""Fills the wanted part of a weightless model from a checkpoint, and reads nothing else.

Every tensor is read straight into the memory it will live in, so loading a slice takes the slice's weights
and two small buffers. It does not know how a model is cut: the caller names the parameters it wants.
"""

from __future__ import annotations

import hashlib
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import dataclass

import torch
from torch import nn
from transformers import PreTrainedModel

from slicing.checkpoint import Checkpoint
from slicing.errors import ModelError
from slicing.model_source import open_checkpoint
from slicing.progress import Progress, no_progress
from slicing.tensor_plan import Recipe, essential, plan_tensors, tied_groups

__all__ = ["Checkpoint", "LoadedWeights", "layer_number", "load_parameters", "open_checkpoint"]

ALIGNMENT_BYTES = 64  # the widest vector register; kernels take another path (other bits) for less
LAYER_HASH_BYTES = 8

LayerOf = Callable[[str], int | None]


@dataclass(frozen=True)
class LoadedWeights:
    """What `load_parameters` did."""

    names: frozenset[str]  # the model's names that hold weights now
    size_bytes: int  # what they take in memory; a tied tensor counts once
    layer_hashes: Mapping[int, bytes]  # layer number -> first 8 bytes of SHA-256 over what was read for it
    left_out: frozenset[str]  # wanted, not in the checkpoint, and the model's class says that this is fine


def layer_number(name: str) -> int | None:
    """Return the global layer number in a parameter's name: the first number among its parts."""
    return next((int(part) for part in name.split(".") if part.isdigit()), None)


@torch.no_grad()
def load_parameters(
    checkpoint: Checkpoint,
    model: nn.Module,
    wanted: Callable[[str], bool],
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | str = "cpu",
    progress: Progress | None = None,
    layer_of: LayerOf = layer_number,
) -> LoadedWeights:
    """Fill the meta parameters and persistent buffers of `model` whose name is `wanted`; leave all else.

    `dtype` is what the model's main floating-point type becomes (default: as the model was built); what the
    class keeps in another type stays so, as in stock loading. Tied names share one tensor; a tied name
    whose partner is not wanted is filled alone. Layer hashes cover the checkpoint tensors (name, dtype,
    shape, bytes) read for a layer, so replicas agree whatever they compute in. Raises `ModelError` when a
    wanted tensor is missing, misshapen or unreadable; the model is then as it was.
    """
    state = model.state_dict(keep_vars=True)
    recipes = plan_tensors(model, [*checkpoint.tensors, *checkpoint.absent])
    aliases = tied_groups(model)
    provider_of = {
        name: next((alias for alias in (name, *aliases.get(name, ())) if alias in recipes), None)
        for name, held in state.items()
        if held.is_meta and wanted(name)
    }
    left_out = frozenset(name for name, provider in provider_of.items() if provider is None)
    if lost := essential(model, left_out):
        more = f" and {len(lost) - 1} more" if len(lost) > 1 else ""
        raise ModelError(f"{checkpoint.name} holds no tensor for {lost[0]}{more}; its files are not complete")
    needed = {id(recipes[name]): recipes[name] for name in provider_of.values() if name is not None}
    reader = _Reader(
        checkpoint, model, _target_dtypes(model, state, dtype), layer_of, progress or no_progress
    )
    made = reader.read_all(list(needed.values()), torch.device(device))
    filled = {name: made[provider] for name, provider in provider_of.items() if provider is not None}
    _share_equal(filled, aliases)
    _place(model, filled)
    size_bytes = sum({id(tensor): tensor.nbytes for tensor in filled.values()}.values())
    return LoadedWeights(frozenset(filled), size_bytes, reader.layer_hashes(), left_out)


class _Reader:
    """Reads recipes one after the other; hashes and counts as it goes."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        model: nn.Module,
        dtypes: Mapping[str, torch.dtype],
        layer_of: LayerOf,
        progress: Progress,
    ) -> None:
        self.checkpoint = checkpoint
        self.model = model
        self.model_shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
        self.file_shapes = {name: tensor.shape for name, tensor in checkpoint.tensors.items()}
        self.dtypes = dtypes
        self.layer_of = layer_of
        self.progress = progress
        self.digests: dict[int, list[bytes]] = defaultdict(list)  # of each tensor read, by layer
        self.done_bytes = self.total_bytes = 0

    def read_all(self, recipes: list[Recipe], device: torch.device) -> dict[str, torch.Tensor]:
        """Fetch what is not here yet, then make every target of `recipes`: model name -> tensor."""
        sources = [name for recipe in recipes for name in recipe.source_names]
        if lost := [name for name in sources if name in self.checkpoint.absent]:
            raise self.checkpoint.missing_shard(lost, "this slice needs it")
        self.checkpoint.fetch(sources, self.progress)
        self.total_bytes = sum(self.checkpoint.tensors[name].size_bytes for name in sources)
        made: dict[str, torch.Tensor] = {}
        with closing(self.checkpoint):
            for recipe in recipes:
                made.update({name: tensor.to(device) for name, tensor in self._read(recipe).items()})
        return made

    def layer_hashes(self) -> dict[int, bytes]:
        """Return layer number -> hash; the order of reading does not matter."""
        return {
            layer: hashlib.sha256(b"".join(sorted(digests))).digest()[:LAYER_HASH_BYTES]
            for layer, digests in sorted(self.digests.items())
        }

    def _read(self, recipe: Recipe) -> dict[str, torch.Tensor]:
        target = recipe.targets[0]
        layer = self.layer_of(target)
        out = torch.empty(self.model_shapes[target], dtype=self.dtypes[target])
        views = recipe.views(out, self.file_shapes)
        if views is not None:
            for name in recipe.source_names:
                self._read_source(name, views[name], layer)
            return {target: out}
        del out
        parts = [
            torch.empty(self.file_shapes[name], dtype=self.dtypes[target]) for name in recipe.source_names
        ]
        for name, part in zip(recipe.source_names, parts, strict=True):
            self._read_source(name, part, layer)
        made = recipe.convert(parts, self.model)
        return {
            name: self._settle(name, tensor) for name, tensor in made.items() if name in self.model_shapes
        }

    def _read_source(self, name: str, out: torch.Tensor, layer: int | None) -> None:
        hasher = self.checkpoint.start_hash(name) if layer is not None else None
        self.checkpoint.read_into(name, out, hasher)
        if layer is not None and hasher is not None:
            self.digests[layer].append(hasher.digest())
        self.done_bytes += self.checkpoint.tensors[name].size_bytes
        self.progress("load", self.done_bytes, self.total_bytes)

    def _settle(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """Give a converted tensor storage of its own: aligned, contiguous and no larger than it."""
        if tuple(tensor.shape) != self.model_shapes[name]:
            raise ModelError(
                f"{self.checkpoint.name} stores {name} with shape {tuple(tensor.shape)}, but its config.json "
                f"means {self.model_shapes[name]}; the two files do not belong together"
            )
        tensor = tensor.contiguous()
        is_view = tensor.untyped_storage().nbytes() > tensor.nbytes or tensor.data_ptr() % ALIGNMENT_BYTES
        return tensor.clone() if is_view else tensor


def _target_dtypes(
    model: nn.Module, state: Mapping[str, torch.Tensor], dtype: torch.dtype | None
) -> dict[str, torch.dtype]:
    """Return the dtype each parameter gets, by the rules of stock loading."""
    floats = Counter(tensor.dtype for tensor in state.values() if tensor.is_floating_point())
    built_in = floats.most_common(1)[0][0] if floats else torch.get_default_dtype()
    main = dtype or built_in
    kept = model._get_dtype_plan(main) if isinstance(model, PreTrainedModel) else {}
    patterns = [(re.compile(pattern.replace("*", ".*")), kept_in) for pattern, kept_in in kept.items()]
    return {
        name: next(
            (kept_in for pattern, kept_in in patterns if pattern.search(name)),
            main if tensor.dtype == built_in else tensor.dtype,
        )
        for name, tensor in state.items()
    }


def _share_equal(filled: dict[str, torch.Tensor], aliases: Mapping[str, list[str]]) -> None:
    """Let tied names share one tensor where the checkpoint stores equal ones (differing ones stay apart)."""
    for name, tensor in list(filled.items()):
        for other in aliases.get(name, ()):
            if other in filled and torch.equal(filled[other], tensor):
                filled[other] = filled[name]


def _place(model: nn.Module, filled: Mapping[str, torch.Tensor]) -> None:
    parameters: dict[int, nn.Parameter] = {}  # one for each tensor, so that tied names stay tied
    for name, tensor in filled.items():
        path, _, leaf = name.rpartition(".")
        module = model.get_submodule(path)
        if leaf in module._buffers:
            module._buffers[leaf] = tensor
        else:
            module._parameters[leaf] = parameters.setdefault(
                id(tensor), nn.Parameter(tensor, requires_grad=False)
            )
        getattr(module, leaf)._is_hf_initialized = True  # transformers must not draw it again
