"""How the arguments of a block call become JSON-able values, and back: tensors stay beside them.

What comes from elsewhere is checked here, value by value. Knows nothing of plans or of who calls what.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from slicing.errors import ModelError

MAX_SLOTS = 8192  # the most seen is 130, one for each block and argument that is not shared
MAX_DEPTH = 8  # of containers in an argument
MAX_INTEGER = 1 << 24  # sizes and counts; a block told of more would only run out of memory

DTYPES: dict[str, torch.dtype] = {
    name: getattr(torch, name)
    for name in (
        *("float64", "float32", "float16", "bfloat16", "complex64", "complex128"),
        *("int64", "int32", "int16", "int8", "uint8", "bool"),
    )
}
_DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_CONSTANTS = (bool, int, float, str, type(None))
_MOST: dict[type, float] = {int: MAX_INTEGER, float: sys.float_info.max}
_ODD_FLOATS = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}
_TUPLE, _SIZE, _DICT, _FLOAT, _DTYPE, _SLOT, _STREAM = (
    "tuple",
    "size",
    "dict",
    "float",
    "dtype",
    "slot",
    "stream",
)

Path = tuple[str | int, ...]  # ("args", 0) or ("kwargs", "temb"), then the way into containers


class UnsupportedArgument(ModelError):
    """An argument of a block call is of a type that does not travel; names the type and the argument."""

    def __init__(self, path: Path, value: object) -> None:
        kind = type(value)
        self.path = path
        self.reason = f"is a {kind.__module__}.{kind.__qualname__}, which cannot be sent"
        super().__init__(f"argument {path_name(path)} {self.reason}")


def pack_call(
    args: Sequence[Any], kwargs: Mapping[str, Any], leaf_of: Callable[[Path, torch.Tensor], dict[str, int]]
) -> dict[str, Any]:
    """Return a call as JSON-able values; `leaf_of` says what stands for a tensor ({"slot": i} or {"stream": j}).

    None, booleans, numbers and texts stand for themselves; tuples, sizes, dictionaries, types and odd floats become
    objects of one entry, so that nothing is mistaken for something else. Raises `UnsupportedArgument`.
    """
    return {
        "args": [_pack(("args", place), value, leaf_of, 0) for place, value in enumerate(args)],
        "kwargs": {name: _pack(("kwargs", name), value, leaf_of, 0) for name, value in kwargs.items()},
    }


def unpack_call(
    shape: Mapping[str, Any], slots: Sequence[torch.Tensor], streams: Sequence[torch.Tensor]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return positional and named arguments for a packed call, with the tensors in their places."""
    args = tuple(_unpack(value, slots, streams) for value in shape["args"])
    return args, {name: _unpack(value, slots, streams) for name, value in shape["kwargs"].items()}


def tensor_leaves(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[tuple[Path, torch.Tensor]]:
    """Yield the tensors of a call with their paths, in the order in which `pack_call` meets them."""
    for place, value in enumerate(args):
        yield from _leaves(("args", place), value)
    for name, value in kwargs.items():
        yield from _leaves(("kwargs", name), value)


def snapshot(args: Sequence[Any], kwargs: Mapping[str, Any]) -> object:
    """Return what tells whether a call's arguments were changed in the meantime, containers and tensors alike."""
    seen: list[tuple[Path, int, int]] = []

    def leaf_of(path: Path, tensor: torch.Tensor) -> dict[str, int]:
        seen.append((path, id(tensor), version_of(tensor)))
        return {}

    return pack_call(args, kwargs, leaf_of), seen


def version_of(tensor: torch.Tensor) -> int:
    """Return a number that grows whenever a tensor is written to; tensors of inference mode do not count."""
    return 0 if tensor.is_inference() else tensor._version


def map_tensors(value: Any, change: Callable[[torch.Tensor], Any]) -> Any:
    """Return arguments with every tensor in them changed; containers are rebuilt, all else stays the same object."""
    if isinstance(value, torch.Tensor):
        return change(value)
    if type(value) in (list, tuple):
        return type(value)(map_tensors(item, change) for item in value)
    if type(value) is dict:
        return {key: map_tensors(item, change) for key, item in value.items()}
    return value


def memory_order(tensor: torch.Tensor) -> tuple[int, ...]:
    """Return the dimensions of a tensor from slowest to fastest in memory; for one with gaps or overlaps, as they are.

    Kernels choose their way by it, and other ways give other bits: it must travel with the tensor.
    `tensor.permute(order).contiguous()` is what travels, without a copy where the tensor is dense.
    """
    plain = tuple(range(tensor.dim()))
    strides: tuple[int, ...] = tensor.stride()
    if tensor.is_contiguous():
        return plain
    order = tuple(sorted(plain, key=lambda dim: (-strides[dim], dim)))
    return order if tensor.permute(order).is_contiguous() else plain


def restore_order(tensor: torch.Tensor, order: Sequence[int]) -> torch.Tensor:
    """Return the tensor that `tensor.permute(order)` was, in the memory of the permuted one."""
    return tensor.permute([order.index(dim) for dim in range(len(order))])


def path_name(path: Path) -> str:
    """Return the name of an argument as an error shows it: "temb", "args[0][1]"."""
    first, place, *rest = path
    head = str(place) if first == "kwargs" else f"args[{place}]"
    return head + "".join(f"[{step}]" for step in rest)


def _pack(path: Path, value: Any, leaf_of: Callable[[Path, torch.Tensor], dict[str, int]], depth: int) -> Any:
    kind = type(value)
    if isinstance(value, torch.Tensor):
        return leaf_of(path, value)
    if kind is float and not math.isfinite(value):
        return {_FLOAT: str(value)}
    if kind is torch.dtype and value in _DTYPE_NAMES:
        return {_DTYPE: _DTYPE_NAMES[value]}
    if kind is int and abs(value) > MAX_INTEGER:
        raise UnsupportedArgument(path, value)
    if kind in _CONSTANTS:
        return value
    if kind is torch.Size:
        return {_SIZE: list(value)}
    if depth < MAX_DEPTH:
        if kind in (list, tuple):
            items = [_pack((*path, place), item, leaf_of, depth + 1) for place, item in enumerate(value)]
            return items if kind is list else {_TUPLE: items}
        if kind is dict and all(type(key) is str for key in value):
            return {
                _DICT: {key: _pack((*path, key), item, leaf_of, depth + 1) for key, item in value.items()}
            }
    raise UnsupportedArgument(path, value)


def _unpack(value: Any, slots: Sequence[torch.Tensor], streams: Sequence[torch.Tensor]) -> Any:
    if isinstance(value, list):
        return [_unpack(item, slots, streams) for item in value]
    if not isinstance(value, dict):
        return value
    ((kind, content),) = value.items()
    if kind == _SLOT:
        return slots[content]
    if kind == _STREAM:
        return streams[content]
    if kind == _TUPLE:
        return tuple(_unpack(item, slots, streams) for item in content)
    if kind == _SIZE:
        return torch.Size(content)
    if kind == _DICT:
        return {key: _unpack(item, slots, streams) for key, item in content.items()}
    return DTYPES[content] if kind == _DTYPE else _ODD_FLOATS[content]


def _leaves(path: Path, value: Any) -> Iterator[tuple[Path, torch.Tensor]]:
    if isinstance(value, torch.Tensor):
        yield path, value
    elif type(value) in (list, tuple):
        for place, item in enumerate(value):
            yield from _leaves((*path, place), item)
    elif type(value) is dict:
        for key, item in value.items():
            yield from _leaves((*path, key), item)


def count_slots(shape: Any, num_streams: int) -> int:
    """Return how many slots a call's shape has; they must be numbered in order."""
    if not isinstance(shape, dict) or list(shape) != ["args", "kwargs"]:
        raise ModelError("a plan's call has no arguments")
    if not is_list(shape["args"], MAX_SLOTS) or not isinstance(shape["kwargs"], dict):
        raise ModelError("a plan's call has no arguments")
    seen = 0
    for value in (*shape["args"], *shape["kwargs"].values()):
        seen = _check_value(value, seen, num_streams, 0)
    return seen


def _check_value(value: Any, seen: int, num_streams: int, depth: int) -> int:
    if type(value) in _CONSTANTS and not (
        type(value) in (int, float) and not abs(value) <= _MOST[type(value)]
    ):
        return seen
    kind, content = (
        next(iter(value.items())) if isinstance(value, dict) and len(value) == 1 else (None, value)
    )
    if kind == _SLOT and type(content) is int and content == seen:
        return seen + 1
    if kind == _STREAM and is_count(content, num_streams):
        return seen
    if kind == _DTYPE and type(content) is str and content in DTYPES:
        return seen
    if kind == _FLOAT and type(content) is str and content in _ODD_FLOATS:
        return seen
    if kind == _SIZE and isinstance(content, list) and all(is_count(item, MAX_INTEGER) for item in content):
        return seen
    if depth < MAX_DEPTH:
        items = content.values() if kind == _DICT and isinstance(content, dict) else content
        if (kind == _DICT and items is not content) or (kind in (None, _TUPLE) and isinstance(items, list)):
            for item in items:
                seen = _check_value(item, seen, num_streams, depth + 1)
            return seen
    raise ModelError("a plan holds an argument of no known kind")


def is_list(value: Any, longest: int) -> bool:
    return isinstance(value, list) and len(value) <= longest


def is_count(value: Any, end: int) -> bool:
    return type(value) is int and 0 <= value < end
