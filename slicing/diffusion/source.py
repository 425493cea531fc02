"""A diffusers pipeline on disk or on a hub: its transformers' blocks, numbered through, and where their weights lie.

Reads no weights until asked. What a node needs is here; the gateway's part, everything else, is in `outside`.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import nn

from slicing.checkpoint import prevailing_dtype
from slicing.diffusion.kinds import Kind, kind_of
from slicing.diffusion.packaged import packaged_pipeline
from slicing.diffusion.pipeline_index import (
    INDEX_NAME,
    Component,
    PipelineIndex,
    pipeline_class,
    read_pipeline_index,
    transformer_class,
)
from slicing.diffusion.stacks import Stack, build_weightless, find_stacks, remote_stacks
from slicing.diffusion.tensor_table import TensorTable, open_table
from slicing.errors import ModelError
from slicing.progress import Progress, no_progress

# Written by whoever saved the files: they do not change what is computed.
UNDIGESTED_KEYS = frozenset({"_diffusers_version", "_name_or_path", "_commit_hash"})


@dataclass(frozen=True)
class Transformer:
    """One transformer of a pipeline: its class, its configuration, and the table of its tensors."""

    name: str  # of the component
    model_class: type[nn.Module]
    config: Mapping[str, Any]
    model: nn.Module  # weightless
    table: TensorTable


class PipelineSource:
    """An openable pipeline. `fetch_outside` brings all that is not in a transformer, for one that lies on a hub."""

    def __init__(
        self,
        name: str,
        index: PipelineIndex,
        transformers: Sequence[Transformer],
        *,
        fetch_outside: Callable[[Progress], None] = lambda _: None,
    ) -> None:
        self.name = name
        self.fetch_outside = fetch_outside
        self.index = index
        self.folder = index.folder
        self.transformers = {transformer.name: transformer for transformer in transformers}
        self.pipeline_class = pipeline_class(index)
        self.stacks: tuple[Stack, ...] = tuple(
            stack for part in transformers for stack in find_stacks(part.model, part.name)
        )
        self.remote: tuple[Stack, ...] = tuple(remote_stacks(self.stacks))
        if not self.remote:
            classes = ", ".join(part.model_class.__name__ for part in transformers)
            raise ModelError(f"{self.folder} cannot be cut: its {classes} has no list of attention blocks")

    @property
    def public_name(self) -> str:
        """What peers and clients are told: a model given by path goes by its last part, not by where it lies here."""
        path = Path(self.name).expanduser()
        return path.resolve().name if path.exists() else self.name

    @property
    def num_layers(self) -> int:
        """Blocks of all remote stacks."""
        return self.remote[-1].end

    @cached_property
    def kind(self) -> Kind:
        """What the pipeline makes. Raises `ModelError` for one that needs more than a prompt."""
        return kind_of(self.pipeline_class, self.index.config("vae"))

    @property
    def dtype(self) -> torch.dtype:
        """The floating-point type that most of the transformers' bytes are stored in."""
        return prevailing_dtype(
            tensor for part in self.transformers.values() for tensor in part.table.tensors.values()
        )

    @property
    def bytes_requested(self) -> int:
        """How many bytes of the transformers' tensors have been read so far."""
        return sum(part.table.bytes_requested for part in self.transformers.values())

    @cached_property
    def digest(self) -> bytes:
        """SHA-256 (32 bytes) over the transformers' configurations and every tensor's name, type and shape.

        It is the same for a hub id, a local folder and any sharding. Raises `ModelError` when a shard is missing.
        """
        digest = hashlib.sha256(b"diffuse-pipeline-1\n")
        for name, part in sorted(self.transformers.items()):
            config = {key: value for key, value in part.config.items() if key not in UNDIGESTED_KEYS}
            digest.update(name.encode() + b"\n" + json.dumps(config, sort_keys=True).encode() + b"\n")
            digest.update(part.table.digest())
        return digest.digest()

    def locate(self, number: int) -> tuple[Stack, int]:
        """The remote stack that holds a global block number, and the block's number in it. Raises `ModelError`."""
        for stack in self.remote:
            if stack.offset <= number < stack.end:
                return stack, number - stack.offset
        raise ModelError(f"{self.public_name} has blocks 0:{self.num_layers}, not {number}")

    def block_bytes(self, number: int, dtype: torch.dtype) -> int:
        """What a block's weights take in memory when it is computed in `dtype`."""
        stack, index = self.locate(number)
        return sum(
            tensor.numel()
            * kept_dtype(f"{stack.path}.0.{name}", tensor.dtype, dtype, stack.fp32_names).itemsize
            for name, tensor in stack.blocks[index].state_dict().items()
        )

    def fetch(self, numbers: Iterable[int], progress: Progress | None = None) -> None:
        """Make sure that these blocks can be read, bringing what is missing in one go. Raises `ModelError`."""
        wanted: dict[str, list[str]] = {}
        for number in numbers:
            stack, index = self.locate(number)
            wanted.setdefault(stack.component, []).extend(self._block_names(stack, index).values())
        for component, names in wanted.items():
            self.transformers[component].table.fetch(names, progress or no_progress)

    def read_block(self, stack: Stack, number: int) -> dict[str, torch.Tensor]:
        """Read block `number` of `stack` as it is stored, fetching it first if need be: tensors by the block's names.

        Raises `ModelError`.
        """
        table = self.transformers[stack.component].table
        names = self._block_names(stack, number)
        table.fetch(names.values(), no_progress)
        for name, tensor in stack.blocks[number].state_dict().items():
            check_shape(table, names[name], tuple(tensor.shape))
        return {name: table.read(stored, table.tensors[stored].dtype) for name, stored in names.items()}

    def load_pipeline(
        self,
        *,
        dtype: torch.dtype | None = None,
        device: torch.device | str = "cpu",
        progress: Progress | None = None,
    ) -> Any:
        """Load the stock pipeline without the weights of its remote blocks, see `outside`. Raises `ModelError`."""
        from slicing.diffusion.outside import load_pipeline

        return load_pipeline(self, dtype=dtype, device=device, progress=progress)

    def close(self) -> None:
        """Close the files that reading opened; the next read opens them again."""
        for part in self.transformers.values():
            part.table.close()

    def _block_names(self, stack: Stack, number: int) -> dict[str, str]:
        """A block's own name of each of its tensors -> the file's name. Raises `ModelError`."""
        table = self.transformers[stack.component].table
        known = table.names
        names = {name: stack.parameter_name(number, name) for name in stack.blocks[number].state_dict()}
        if lost := sorted(stored for stored in names.values() if stored not in known):
            raise ModelError(f"{table.folder} holds no tensor for {lost[0]}; its files are not complete")
        return names


def check_shape(table: TensorTable, stored: str, shape: tuple[int, ...]) -> None:
    """Refuse a stored tensor that has another shape than the class made of the configuration. Raises `ModelError`."""
    if table.tensors[stored].shape != shape:
        raise ModelError(
            f"{table.folder} stores {stored} with shape {table.tensors[stored].shape}, but its config.json means "
            f"{shape}; the two files do not belong together"
        )


def kept_dtype(name: str, stored: torch.dtype, dtype: torch.dtype, fp32_names: Iterable[str]) -> torch.dtype:
    """The type in which stock loading keeps a tensor: whole numbers as they are, some parts in float32 always."""
    if not stored.is_floating_point:
        return stored
    return torch.float32 if set(name.split(".")) & set(fp32_names) else dtype


def compute_dtype(stored: torch.dtype, device: torch.device | str = "cpu") -> torch.dtype:
    """What a pipeline is computed in unless it is told: float32 on a CPU, else the type it is stored in."""
    return torch.float32 if torch.device(device).type == "cpu" else stored


def open_transformer(index: PipelineIndex, component: Component, table: TensorTable) -> Transformer:
    """Build a transformer without weights beside the table of its tensors. Raises `ModelError`."""
    config = index.config(component.name)
    if not config:
        raise ModelError(
            f"{index.folder / component.name} holds no config.json; the pipeline is not complete"
        )
    if quantization := config.get("quantization_config"):
        method = quantization.get("quant_method", "unknown") if isinstance(quantization, dict) else "unknown"
        raise ModelError(
            f"{index.folder / component.name} holds weights quantised with {method}, which is not supported yet; "
            "use the same model in bfloat16, float16 or float32"
        )
    model_class = transformer_class(index, component)
    return Transformer(component.name, model_class, config, build_weightless(model_class, config), table)


def checked_transformers(index: PipelineIndex) -> tuple[Component, ...]:
    """The pipeline's transformers. Raises `ModelError` where it has none."""
    if not index.transformers:
        others = "a U-Net" if "unet" in index.components else "none of its parts has blocks"
        raise ModelError(
            f"{index.folder} is a {index.class_name} without a transformer ({others}): it cannot be cut"
        )
    return index.transformers


def open_pipeline_folder(folder: Path, name: str | None = None) -> PipelineSource:
    """Open a local pipeline folder. Reads configurations and headers, no weights. Raises `ModelError`."""
    index = read_pipeline_index(folder)
    pipeline_class(index)
    parts = [
        open_transformer(index, component, open_table(folder / component.name))
        for component in checked_transformers(index)
    ]
    return PipelineSource(name or str(folder), index, parts)


def open_pipeline(
    model: str,
    *,
    cache_dir: Path | None = None,
    progress: Progress | None = None,
    may_fetch: bool = True,
) -> PipelineSource:
    """Open a pipeline folder, one that comes with this package, or "org/name[@revision]" on the hub.

    Reads no weights. Without `may_fetch` no hub is asked. Raises `ModelError`.
    """
    folder = packaged_pipeline(model) or Path(model).expanduser()
    if folder.is_dir():
        return open_pipeline_folder(folder, model)
    from slicing.diffusion.hub_pipeline import open_hub_pipeline

    return open_hub_pipeline(model, cache_dir, progress or no_progress, may_fetch=may_fetch)


def is_pipeline(model: str, *, may_fetch: bool = True) -> bool:
    """Whether what the user named is a diffusers pipeline, not a text model. Looks at names only.

    For a hub id the hub is asked once, unless it is known here or `may_fetch` is off. Raises `ModelError` as hubs do.
    """
    folder = packaged_pipeline(model) or Path(model).expanduser()
    if folder.exists():
        return (folder / INDEX_NAME).is_file()
    from slicing.diffusion.hub_pipeline import is_hub_pipeline

    return is_hub_pipeline(model, may_fetch=may_fetch)
