"""Puts products whose rows do not depend on each other in the place of a stock model's own. Knows no sessions."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from slicing.row_linear import RowKernels, RowLinear, RowMatmuls
from slicing.stacks import set_tensor


def use_row_products(model: PreTrainedModel, kernels: RowKernels) -> int:
    """Put products whose rows do not depend on each other in the place of the held layers' own.

    Returns the bytes that this takes more: a packed head that is tied to the embeddings is there twice.
    """
    uses = Counter(id(tensor) for _, tensor in model.named_parameters(remove_duplicate=False))
    more = 0
    for name, module in list(model.named_modules()):
        held = [tensor for tensor in module.parameters(recurse=False) if not _is_hollow(tensor)]
        if type(module).forward is nn.Linear.forward and held:
            assert isinstance(module, nn.Linear)
            product = RowLinear(module, kernels)
            module.forward = product  # type: ignore[method-assign, assignment]
            if product.is_packed:  # hollow from here on, as `stacks.make_hollow` leaves it
                weight, zero = module.weight, torch.zeros((), dtype=module.weight.dtype)
                set_tensor(model, f"{name}.weight", zero.expand(weight.shape))
                more += weight.nbytes if uses[id(weight)] > 1 else 0
        elif any(tensor.dim() > 1 for tensor in held) and not isinstance(module, nn.Embedding):
            module.forward = _inside(kernels, module.forward)
    return more


def _inside(kernels: RowKernels, forward: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(forward)
    def run(*args: Any, **kwargs: Any) -> Any:
        with RowMatmuls(kernels):
            return forward(*args, **kwargs)

    return run


def _is_hollow(tensor: torch.Tensor) -> bool:
    return tensor.numel() > 1 and all(step == 0 for step in tensor.stride())
