"""Finds the block stacks of a diffusion transformer by their shape, and builds a transformer without weights.

No list of families: a stack is a list of modules with attention in them. Knows nothing of calls or of weight files.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from slicing.errors import ModelError

MIN_BLOCKS = 2  # how a block's outputs reach the next is seen only where there is a next
REMOTE_SHARE = 0.05  # stacks with less of all block weights stay at the gateway
_LEFT_AT_DEFAULTS = (
    "_use_default_values"  # settings whose value diffusers would not take from a configuration
)
MAX_NUDGED = 4096  # larger settings are widths, vocabularies and tables, not numbers of blocks
SMALL_ELEMENTS = 1 << 20  # tensors up to this size may be made for real while a weightless model is built


@dataclass(frozen=True, eq=False)
class Stack:
    """A list of blocks of one transformer, and its place among the blocks of all remote stacks."""

    component: str  # "transformer", "transformer_2"
    path: str  # of the list in the transformer: "transformer_blocks"
    blocks: tuple[nn.Module, ...]  # weightless
    size_bytes: int  # of all weights, in the types in which the blocks were built
    width: int = 0  # inner dimension of the transformer; 0: unknown
    fp32_names: tuple[str, ...] = ()  # what stays in float32 when the rest does not, as stock loading has it
    key: str | None = None  # the setting that says how many blocks there are, where it was looked for
    offset: int = 0  # global number of the first block

    @property
    def name(self) -> str:
        """The component and the path: "transformer.transformer_blocks"."""
        return f"{self.component}.{self.path}"

    @property
    def end(self) -> int:
        """Global number after the last block."""
        return self.offset + len(self.blocks)

    def __len__(self) -> int:
        return len(self.blocks)

    def dtype_of(self, name: str, dtype: torch.dtype) -> torch.dtype:
        """Return the type in which a block's floating-point tensor of this name is kept, where the rest is `dtype`."""
        parts = self.parameter_name(0, name).split(".")
        return torch.float32 if any(kept in parts for kept in self.fp32_names) else dtype

    def parameter_name(self, number: int, name: str) -> str:
        """Return the transformer's name for a tensor of block `number` of this stack."""
        return f"{self.path}.{number}.{name}"


def find_stacks(model: nn.Module, component: str) -> list[Stack]:
    """Return the stacks of at least two blocks, in the order of the model's modules.

    A stack is a list of modules, in no other such list, whose first item has an attention module in it.
    """
    names = tuple(getattr(model, "_keep_in_fp32_modules", None) or ())
    return [
        Stack(component, path, tuple(blocks), _size_bytes(blocks), _width(model), names)
        for path, blocks in _lists(model)
        if len(blocks) >= MIN_BLOCKS
    ]


def remote_stacks(stacks: Iterable[Stack]) -> list[Stack]:
    """Return the stacks that hold at least 5 % of all block weights, numbered through from 0."""
    stacks = list(stacks)
    total = sum(stack.size_bytes for stack in stacks)
    numbered, offset = [], 0
    for stack in stacks:
        if stack.size_bytes >= REMOTE_SHARE * total:
            numbered.append(replace(stack, offset=offset))
            offset += len(stack)
    return numbered


def build_weightless(model_class: type[nn.Module], config: Mapping[str, Any]) -> nn.Module:
    """Build a transformer whose parameters are on the meta device; what its class computes (tables) is real.

    Raises `ModelError` when the class does not take this configuration.
    """
    try:
        with _EmptyOnMeta():
            model = model_class.from_config(dict(config))  # type: ignore[attr-defined]
    except Exception as error:  # the classes raise all sorts for a configuration they cannot use
        raise ModelError(
            f"{model_class.__name__} takes no such configuration ({type(error).__name__}: {_first_line(error)})"
        ) from error
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None and not parameter.is_meta:
                module._parameters[name] = nn.Parameter(torch.empty_like(parameter, device="meta"), False)
    return model.eval().requires_grad_(False)


def find_keys(
    model_class: type[nn.Module], config: Mapping[str, Any], paths: Sequence[str]
) -> dict[str, str | None]:
    """Return the setting that governs the length of each stack, found by raising one whole number after the other.

    Settings that equal the stack's length are tried first; None where no setting does it alone.
    """
    lengths = _lengths(model_class, config)
    found: dict[str, str | None] = dict.fromkeys(paths)
    numbers = [key for key, value in config.items() if type(value) is int and 0 < value <= MAX_NUDGED]
    for key in sorted(numbers, key=lambda key: config[key] not in lengths.values()):
        if all(found.values()):
            break
        try:
            raised = _lengths(model_class, {**config, key: config[key] + 1})
        except Exception:  # noqa: S112 - any error means that this setting alone is no number of blocks
            continue
        for path in paths:
            if found[path] is None and raised.get(path) == lengths[path] + 1:
                found[path] = key
    return found


class _EmptyOnMeta(TorchFunctionMode):
    """Makes uninitialised memory, and whatever is large, on the meta device; computed tables stay real.

    Only in its own thread, and no other module is touched.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func in _MAKERS and kwargs.get("device") is None and (func is torch.empty or _is_large(args)):
            kwargs["device"] = "meta"
        return func(*args, **kwargs)


_MAKERS = {torch.empty, torch.zeros, torch.ones, torch.randn, torch.rand}


def _is_large(args: Sequence[Any]) -> bool:
    sizes = args[0] if args and isinstance(args[0], list | tuple) else args
    return all(isinstance(size, int) for size in sizes) and torch.Size(sizes).numel() > SMALL_ELEMENTS


def _lengths(model_class: type[nn.Module], config: Mapping[str, Any]) -> dict[str, int]:
    given = {key: value for key, value in config.items() if key != _LEFT_AT_DEFAULTS}
    with torch.device("meta"):
        model = model_class.from_config(given)  # type: ignore[attr-defined]
    return {path: len(blocks) for path, blocks in _lists(model)}


def _lists(model: nn.Module) -> Iterator[tuple[str, nn.ModuleList]]:
    inside: list[str] = []
    for path, module in model.named_modules():
        if not isinstance(module, nn.ModuleList) or any(path.startswith(outer) for outer in inside):
            continue
        inside.append(path + ".")
        if len(module) and not isinstance(module[0], nn.ModuleList) and _has_attention(module[0]):
            yield path, module


def _has_attention(block: nn.Module) -> bool:
    from diffusers.hooks._common import _ATTENTION_CLASSES

    return any(
        isinstance(module, _ATTENTION_CLASSES) or "attn" in name.lower() or "attention" in name.lower()
        for name, module in block.named_modules()
    )


def _width(model: nn.Module) -> int:
    config = getattr(model, "config", {})
    width = getattr(model, "inner_dim", None) or config.get("hidden_size") or config.get("dim")
    if not isinstance(width, int):
        heads, size = config.get("num_attention_heads"), config.get("attention_head_dim")
        width = heads * size if isinstance(heads, int) and isinstance(size, int) else 0
    return width


def _size_bytes(module: nn.Module) -> int:
    return sum(parameter.nbytes for parameter in module.parameters())


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0][:200]
