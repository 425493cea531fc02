"""The gateway's part of a pipeline: everything but the weights of the remote blocks.

Text encoders, autoencoder and schedulers are loaded by diffusers' own code; the transformers are built here,
weightless, and filled outside their remote stacks. Knows nothing of stand-ins.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from slicing.diffusion.pipeline_index import is_transformer
from slicing.diffusion.source import PipelineSource, Transformer, check_shape, compute_dtype, kept_dtype
from slicing.diffusion.stacks import build_weightless
from slicing.errors import ModelError
from slicing.progress import Progress, no_progress
from slicing.stacks import BUILDING
from slicing.weights import ALIGNMENT_BYTES

PICKLES = ("bin", "pt", "pth", "ckpt")


def load_pipeline(
    source: PipelineSource,
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | str = "cpu",
    progress: Progress | None = None,
) -> Any:
    """Load the stock pipeline; the blocks of its remote stacks are weightless, nothing else is.

    `dtype` None: float32 on a CPU, else as it is stored. While it loads no other thread may build models: the
    libraries change torch's defaults for the whole process meanwhile. Raises `ModelError`.
    """
    progress = progress or no_progress
    dtype = dtype or compute_dtype(source.dtype, device)
    source.fetch_outside(progress)
    _refuse_pickles(source)
    with BUILDING:
        models = {
            part.name: _load_outside(source, part, dtype, torch.device(device), progress)
            for part in source.transformers.values()
        }
        pipeline = _load_components(source, models, dtype)
    source.close()
    for component in pipeline.components.values():
        if isinstance(component, nn.Module) and component not in models.values():
            _align(component.to(device))
    _check_nothing_is_missing(source, pipeline)
    return pipeline


def _load_outside(
    source: PipelineSource, part: Transformer, dtype: torch.dtype, device: torch.device, progress: Progress
) -> nn.Module:
    """Build a transformer and fill what is in none of its remote stacks."""
    with _default_dtype(dtype):
        model = build_weightless(part.model_class, part.config)
    paths = tuple(f"{stack.path}." for stack in source.remote if stack.component == part.name)
    state = {name: tensor for name, tensor in model.state_dict().items() if not name.startswith(paths)}
    stored = {name for name in state if name in part.table.names}
    if lost := sorted(name for name, tensor in state.items() if tensor.is_meta and name not in stored):
        raise ModelError(f"{part.table.folder} holds no tensor for {lost[0]}; its files are not complete")
    part.table.fetch(stored, progress)
    total = sum(part.table.tensors[name].size_bytes for name in stored)
    done = 0
    for name in sorted(stored):
        found = part.table.tensors[name]
        check_shape(part.table, name, tuple(state[name].shape))
        fp32_names = getattr(part.model_class, "_keep_in_fp32_modules", None) or ()
        tensor = part.table.read(name, kept_dtype(name, found.dtype, dtype, fp32_names)).to(device)
        _place(model, name, tensor)
        done += found.size_bytes
        progress("load", done, total)
    for path, module in model.named_modules():
        if not (path + ".").startswith(paths):
            for name, buffer in module._buffers.items():
                module._buffers[name] = buffer.to(device) if buffer is not None else None
    return model.eval()


def _place(model: nn.Module, name: str, tensor: torch.Tensor) -> None:
    path, _, leaf = name.rpartition(".")
    module = model.get_submodule(path)
    if leaf in module._buffers:
        module._buffers[leaf] = tensor
    else:
        module._parameters[leaf] = nn.Parameter(tensor, requires_grad=False)


def _load_components(source: PipelineSource, models: dict[str, nn.Module], dtype: torch.dtype) -> Any:
    try:
        with _quiet():
            pipeline = source.pipeline_class.from_pretrained(  # type: ignore[attr-defined]  # every pipeline has it
                str(source.folder),
                dtype=dtype,
                use_safetensors=True,
                local_files_only=True,
                trust_remote_code=False,
                **models,
            )
    except ModelError:
        raise
    except Exception as error:  # the components' classes raise whatever their checks raise
        first = next(iter(str(error).splitlines()), type(error).__name__)
        raise ModelError(f"diffusers refuses {source.folder}: {first[:300]}") from error
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def _align(model: nn.Module) -> None:
    """Move weights that were mapped from a file to memory of their own, which begins where vector registers like it.

    Kernels take another path, with other last bits, for tensors that begin elsewhere: what a picture is must not hang
    on the layout of a file.
    """
    for tensor in [*model.parameters(), *model.buffers()]:
        if tensor.device.type == "cpu" and tensor.data_ptr() % ALIGNMENT_BYTES:
            tensor.data = tensor.data.clone()


def _refuse_pickles(source: PipelineSource) -> None:
    for name in source.index.components:
        folder = source.folder / name
        pickles = sorted(file.name for suffix in PICKLES for file in folder.glob(f"*.{suffix}"))
        if pickles and not any(folder.glob("*.safetensors")) and not is_transformer(name):
            raise ModelError(
                f"{folder} holds only pickled weights ({pickles[0]}), which can run code when they are read; "
                "use a safetensors copy of the model"
            )


def _check_nothing_is_missing(source: PipelineSource, pipeline: Any) -> None:
    """Refuse a pipeline that has something weightless outside its remote stacks. Raises `ModelError`."""
    for component, model in pipeline.components.items():
        if not isinstance(model, nn.Module):
            continue
        paths = tuple(f"{stack.path}." for stack in source.remote if stack.component == component)
        named = [*model.named_parameters(), *model.named_buffers()]
        if lost := [name for name, tensor in named if tensor.is_meta and not name.startswith(paths)]:
            raise ModelError(
                f"{source.folder / component} has no weights for {lost[0]}; fetch the model again"
            )


@contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """Tables that a class computes have the type that stock loading gives them."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@contextmanager
def _quiet() -> Iterator[None]:
    """Bars on standard error are the CLI's to draw, and how the libraries use each other is theirs to know."""
    from diffusers.utils import logging as diffusers_logging
    from transformers.utils import logging as transformers_logging

    was_drawing = diffusers_logging.is_progress_bar_enabled(), transformers_logging.is_progress_bar_enabled()
    diffusers_logging.disable_progress_bar()
    transformers_logging.disable_progress_bar()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # of what diffusers itself uses
            yield
    finally:
        if was_drawing[0]:
            diffusers_logging.enable_progress_bar()
        if was_drawing[1]:
            transformers_logging.enable_progress_bar()
