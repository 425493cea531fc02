"""What stands for a block's output on its way through the model's own loop.

It has a shape, a type and a device, and no numbers: model code that wants those ends with `ThreadBroken`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from slicing.diffusion.calls import Path, path_name
from slicing.diffusion.stacks import Stack
from slicing.errors import ModelError

Like = tuple[torch.Size, torch.dtype]  # shape and type of a tensor


class ThreadBroken(ModelError):
    """The blocks of a stack are no plain thread; the text names the stack, the block and the argument."""

    def __init__(self, stack: Stack, number: int, argument: Path | str | None, reason: str) -> None:
        self.stack = stack.name
        self.block = number
        self.argument = path_name(argument) if isinstance(argument, tuple) else argument
        where = f"block {number} of {stack.name}" + (f", {self._told(argument)}," if argument else "")
        super().__init__(f"{where} {reason}; these blocks cannot run on other nodes")

    def _told(self, argument: Path | str | None) -> str:
        return f"argument {self.argument}" if isinstance(argument, tuple) else str(argument)


@dataclass(frozen=True)
class Origin:
    """Which output of which block of which pass a placeholder stands for."""

    stack: Stack
    number: int
    output: int
    collecting: object  # the pass; compared by identity


class Placeholder(torch.Tensor):
    """Stands for a block's output; can be asked for its shape, type and device."""

    origin: Origin
    real_device: torch.device

    @classmethod
    def make(cls, origin: Origin, like: Like, device: torch.device) -> Placeholder:
        """Return a placeholder that says it is of this shape, type and device."""
        made = torch.empty(like[0], dtype=like[1], device="meta").as_subclass(cls)
        made.origin, made.real_device = origin, device
        return made

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Answer what can be known without numbers. Anything else means that the model computes between blocks."""
        if func == _DEVICE:
            return args[0].real_device
        with torch._C.DisableTorchFunctionSubclass():
            if func in _KNOWABLE:
                return func(*args, **(kwargs or {}))
            if func in _CONVERSIONS and isinstance(args[0], cls) and _does_nothing(func, args, kwargs or {}):
                return args[0]
        origin = next(value.origin for value in _flat([args, kwargs or {}]) if isinstance(value, cls))
        name = getattr(func, "__name__", "an operation")
        raise ThreadBroken(
            origin.stack, origin.number, f"output {origin.output}", f"is used by the model itself ({name})"
        )


def _does_nothing(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Tell whether a conversion would return the first argument itself: the same type, on the same device."""
    stand, *others = (_empty_like(value) if isinstance(value, torch.Tensor) else value for value in args)
    return func(stand, *others, **kwargs) is stand


def _empty_like(tensor: torch.Tensor) -> torch.Tensor:
    device = tensor.real_device if isinstance(tensor, Placeholder) else tensor.device
    return torch.empty(0, dtype=tensor.dtype, device=device)


def _flat(value: Any) -> list[Any]:
    if isinstance(value, Mapping):
        value = list(value.values())
    if isinstance(value, list | tuple):
        return [leaf for item in value for leaf in _flat(item)]
    return [value]


_DEVICE = torch.Tensor.device.__get__  # a new wrapper at every look, equal to the others
_KNOWABLE = {
    *(getattr(torch.Tensor, name).__get__ for name in ("shape", "dtype", "ndim", "layout", "requires_grad")),
    *(
        getattr(torch.Tensor, name)
        for name in ("size", "dim", "numel", "is_floating_point", "is_complex", "__len__")
    ),
}
_CONVERSIONS = {
    getattr(torch.Tensor, name) for name in ("to", "contiguous", "type_as", "float", "half", "bfloat16")
}
