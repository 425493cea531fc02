"""Looks at the numbers with which blocks index, before they do: a GPU ends the whole process for one out of range.

Only for calls that bring whole numbers, or blocks with an embedding; few families do. Knows no families.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn
from torch.overrides import TorchFunctionMode

from slicing.errors import ModelError

INTEGERS = frozenset({torch.int64, torch.int32, torch.int16, torch.int8})  # a byte is a mask, as a truth is
# (tensor, dimension, index, ...) as methods and functions of torch, with a _ behind where they write.
_ALONG_DIMENSION = ("index_select", "gather", "scatter", "scatter_add", "scatter_reduce")
_BY_SUBSCRIPT = ("__getitem__", "__setitem__")
_NOT_LOOKED_AT = (
    *("take", "take_along_dim", "put", "index_put", "index_add", "index_copy", "index_fill"),
    *("one_hot", "embedding_bag", "bincount"),
)


class IndexOutOfRange(ModelError):
    """A call brings a number that indexes beyond what there is."""

    def __init__(self) -> None:
        super().__init__("a call brings a number that is out of the range of what it counts")


class IndexGuard(TorchFunctionMode):
    """Refuses, on this thread, indices out of range; the text tells no number. Costs a look at each index tensor."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        named = kwargs or {}
        name = getattr(func, "__name__", "")
        name = name if name in _BY_SUBSCRIPT else name.rstrip("_")
        if func is F.embedding:
            _look(_argument(args, named, 0, "input"), len(_argument(args, named, 1, "weight")))
        elif name in _ALONG_DIMENSION:
            whole, dimension = _argument(args, named, 0, "input"), _argument(args, named, 1, "dim")
            _look(_argument(args, named, 2, "index"), whole.shape[dimension])
        elif name in _BY_SUBSCRIPT:
            _look_at_subscript(args[0], args[1])
        elif name in _NOT_LOOKED_AT:
            raise ModelError(f"a block calls {name} with numbers of the call, which is not looked at before")
        return func(*args, **named)


def needs_guard(block: nn.Module, tensors: Iterable[torch.Tensor]) -> bool:
    """Whether a call could index out of range."""
    brings_numbers = any(tensor.dtype in INTEGERS for tensor in tensors)
    return brings_numbers or any(isinstance(module, nn.Embedding) for module in block.modules())


def _argument(args: tuple[Any, ...], named: dict[str, Any], place: int, name: str) -> Any:
    return args[place] if place < len(args) else named[name]


def _look(index: Any, size: int, *, lowest: int = 0) -> None:
    if isinstance(index, torch.Tensor) and index.dtype in INTEGERS and index.numel():
        low, high = torch.aminmax(index)
        if int(low) < lowest or int(high) >= size:
            raise IndexOutOfRange


def _look_at_subscript(whole: torch.Tensor, subscript: Any) -> None:
    """Tensors among a subscript, each against the dimension that it stands for; counted from the end where it must."""
    items = subscript if isinstance(subscript, tuple) else (subscript,)
    dimension = 0
    for place, item in enumerate(items):
        if item is Ellipsis:
            dimension = whole.dim() - sum(map(_taken, items[place + 1 :]))
            continue
        if isinstance(item, torch.Tensor) and item.dtype in INTEGERS:
            size = whole.shape[dimension]
            _look(item, size, lowest=-size)
        dimension += _taken(item)


def _taken(item: Any) -> int:
    """How many dimensions one part of a subscript stands for."""
    if item is None or item is Ellipsis or isinstance(item, bool):
        return 0
    is_mask = isinstance(item, torch.Tensor) and item.dtype in (torch.bool, torch.uint8)
    return item.dim() if is_mask else 1
