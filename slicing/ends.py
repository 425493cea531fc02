"""The client-side ends of a model: which of its tensors belong before the blocks, and which after them.

Learned by watching one run of a miniature, not read from a list; knows nothing of where weights come from.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel

from slicing.stacks import BlockStack, CannotCut, persistent_names


@dataclass(frozen=True)
class Parts:
    """What one holder has of a model: half-open ranges of global layer numbers, and the ends."""

    layers: tuple[tuple[int, int], ...] = ()
    opening: bool = False
    closing: bool = False

    @classmethod
    def whole(cls, num_layers: int) -> Parts:
        """Return all of a model."""
        return cls(((0, num_layers),), opening=True, closing=True)

    def holds(self, start: int, end: int) -> bool:
        """Tell whether every layer of [start, end) is held."""
        return all(any(low <= layer < high for low, high in self.layers) for layer in range(start, end))

    def __str__(self) -> str:
        ranges = [f"{start}:{end}" for start, end in self.layers]
        ends = [name for name in ("opening", "closing") if getattr(self, name)]
        return " + ".join([*ranges, *ends]) or "nothing"


@dataclass(frozen=True)
class EndNames:
    """The names of parameters and stored buffers that each end uses; a tied tensor has several."""

    opening: frozenset[str]
    closing: frozenset[str]


def learn_ends(model: PreTrainedModel, stack: BlockStack, run: Callable[[], object]) -> EndNames:
    """Run the model once and note which tensors it uses before the first block and after the last.

    Raises `CannotCut` when it uses one that is no block's between two blocks: every slice would need it.
    """
    phases: list[set[str]] = [set(), set(), set()]
    watch = _Watch(_names_by_identity(model, stack))
    hooks = [
        stack.blocks[0].register_forward_pre_hook(lambda *_: watch.enter(phases[1])),
        stack.blocks[-1].register_forward_hook(lambda *_: watch.enter(phases[2])),
    ]
    watch.enter(phases[0])
    try:
        with watch:
            run()
    finally:
        for hook in hooks:
            hook.remove()
    if phases[1]:
        raise CannotCut(
            f"the model uses {min(phases[1])} between the blocks of {stack.name}, outside of any of them"
        )
    return EndNames(frozenset(phases[0]), frozenset(phases[2]))


def needed_parameters(stack: BlockStack, ends: EndNames, parts: Parts) -> Callable[[str], bool]:
    """Return the test for the names of the tensors that a holder of `parts` needs."""

    def is_needed(name: str) -> bool:
        layer = stack.layer_of(name)
        if layer is not None:
            return parts.holds(layer, layer + 1)
        return (parts.opening and name in ends.opening) or (parts.closing and name in ends.closing)

    return is_needed


class _Watch(TorchFunctionMode):
    """Notes the names of the tensors that torch functions are called with."""

    def __init__(self, names: Mapping[int, Iterable[str]]) -> None:
        super().__init__()
        self.names = names
        self.seen: set[str] = set()

    def enter(self, phase: set[str]) -> None:
        """Note what follows in `phase`."""
        self.seen = phase

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if (
            getattr(func, "__name__", "") != "__get__"
        ):  # a look at a dtype or a device is no use of the values
            for value in [*args, *kwargs.values()]:
                for tensor in value if isinstance(value, list | tuple) else (value,):
                    self.seen.update(self.names.get(id(tensor), ()))
        return func(*args, **kwargs)


def _names_by_identity(model: PreTrainedModel, stack: BlockStack) -> dict[int, list[str]]:
    stored = persistent_names(model)
    tensors: list[tuple[str, torch.Tensor | nn.Parameter]] = [
        *model.named_parameters(remove_duplicate=False),
        *model.named_buffers(remove_duplicate=False),
    ]
    names: dict[int, list[str]] = {}
    for name, tensor in tensors:
        if name in stored and stack.layer_of(name) is None:
            names.setdefault(id(tensor), []).append(name)
    return names
