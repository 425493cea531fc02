"""Learns what a block returns by trying one: on the meta device, else with random weights, else with its own.

Only the kind of answer is looked at (one tensor, or a tuple of tensors and Nones), never its numbers.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from slicing.diffusion.calls import map_tensors, snapshot, tensor_leaves
from slicing.diffusion.collecting import BlockOutputs
from slicing.diffusion.placeholder import ThreadBroken
from slicing.diffusion.stacks import Stack

SMALL_WEIGHT = 0.02  # what transformers are commonly initialised with: no number grows too large for its type


@torch.no_grad()
def learn_outputs(
    stack: Stack,
    number: int,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    load_block: Callable[[int], nn.Module],
    dtype: torch.dtype,
) -> BlockOutputs:
    """Try a block with this call and return what it gives, where weights are of type `dtype`.

    Raises `ThreadBroken` when it cannot be tried at all, gives something else than tensors, or writes into its
    arguments: what it leaves there would stay at the node.
    """
    error: Exception | None = None
    for block, tried_args, tried_kwargs in _ways(stack, number, args, kwargs, load_block, dtype):
        before = snapshot(tried_args, tried_kwargs)
        try:
            answer = block(*tried_args, **tried_kwargs)
        except Exception as failure:  # blocks raise all sorts on the meta device
            error = failure
            continue
        if snapshot(tried_args, tried_kwargs) != before:
            raise ThreadBroken(stack, number, None, "writes into its arguments")
        return _described(stack, number, answer)
    raise ThreadBroken(stack, number, None, f"cannot be tried ({type(error).__name__})") from error


def _ways(
    stack: Stack,
    number: int,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    load_block: Callable[[int], nn.Module],
    dtype: torch.dtype,
) -> Iterator[tuple[nn.Module, tuple[Any, ...], dict[str, Any]]]:
    def on_meta(tensor: torch.Tensor) -> torch.Tensor:
        return torch.empty_like(tensor, device="meta")

    def on(change: Callable[[torch.Tensor], torch.Tensor]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return map_tensors(tuple(args), change), map_tensors(dict(kwargs), change)

    yield _with_weights(stack, number, dtype, torch.device("meta")), *on(on_meta)
    # Some classes ask for numbers, which the meta device has not.
    device = next((tensor.device for _, tensor in tensor_leaves(args, kwargs)), torch.device("cpu"))
    yield _with_weights(stack, number, dtype, device), *on(torch.clone)
    yield load_block(number), *on(torch.clone)


def _with_weights(stack: Stack, number: int, dtype: torch.dtype, device: torch.device) -> nn.Module:
    """Return a copy of a block with random weights in the types that its own would have."""
    block = copy.deepcopy(stack.blocks[number]).to(device="meta")
    generator = torch.Generator().manual_seed(0)
    for name, parameter in block.named_parameters():
        module, _, leaf = name.rpartition(".")
        kept = stack.dtype_of(name, dtype) if parameter.is_floating_point() else parameter.dtype
        weights = torch.empty_like(parameter, dtype=kept)
        if device.type != "meta":
            weights = torch.randn(parameter.shape, generator=generator).mul_(SMALL_WEIGHT).to(device, kept)
        block.get_submodule(module)._parameters[leaf] = nn.Parameter(weights, requires_grad=False)
    for module_with_tables, table in zip(block.modules(), stack.blocks[number].modules(), strict=True):
        for leaf, buffer in table._buffers.items():
            module_with_tables._buffers[leaf] = None if buffer is None else buffer.to(device)
    return block


def _described(stack: Stack, number: int, answer: Any) -> BlockOutputs:
    is_tuple = isinstance(answer, tuple | list)
    items = tuple(answer) if is_tuple else (answer,)
    for output, item in enumerate(items):
        if item is not None and not isinstance(item, torch.Tensor):
            raise ThreadBroken(stack, number, f"output {output}", f"is a {type(item).__name__}, not a tensor")
    if not any(isinstance(item, torch.Tensor) for item in items):
        raise ThreadBroken(stack, number, None, "returns no tensor")
    return BlockOutputs(is_tuple, tuple(None if item is None else (item.shape, item.dtype) for item in items))
