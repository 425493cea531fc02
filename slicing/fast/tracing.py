"""Records what happens inside a stock model's forward: the calls of its parts, and every call of attention.

Attention goes through transformers' attention interface, so that queries, keys and values are seen as they are used.
Knows nothing of what the recorded tensors mean.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, eager_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from slicing.stacks import BlockStack

RECORDED = "diffuse_recorded"  # the attention implementation that notes its arguments
EXPERT_DIMENSIONS = 3  # experts' weights are stacked: [experts, outputs, inputs]


@dataclass(frozen=True)
class Call:
    """One call of a part that is taken as a whole; tensors as they were."""

    name: str  # of the module, inside its block, or inside the model
    module: nn.Module = field(repr=False)
    inputs: tuple[Any, ...] = field(repr=False)
    settings: dict[str, Any] = field(repr=False)  # the arguments that were given by name
    outputs: tuple[Any, ...] = field(repr=False)

    @property
    def tensors(self) -> list[torch.Tensor]:
        """All tensors among the arguments, in order."""
        return [value for value in (*self.inputs, *self.settings.values()) if isinstance(value, torch.Tensor)]


@dataclass(frozen=True)
class AttentionCall:
    """One call of attention: queries, keys, values [batch, heads, rows, dim]; output [batch, rows, heads, dim]."""

    query: torch.Tensor = field(repr=False)
    key: torch.Tensor = field(repr=False)
    value: torch.Tensor = field(repr=False)
    mask: torch.Tensor | None = field(repr=False)
    scale: float
    window: int | None
    softcap: float | None
    sinks: torch.Tensor | None = field(repr=False)
    output: torch.Tensor = field(repr=False)


@dataclass
class LayerTape:
    """What one block did: its hidden states in and out [batch, rows, hidden], and the calls between."""

    hidden_in: torch.Tensor = field(repr=False)
    calls: list[Call | AttentionCall] = field(default_factory=list)
    hidden_out: torch.Tensor | None = field(default=None, repr=False)


@dataclass
class ModelTape:
    """What one forward did."""

    token_ids: torch.Tensor = field(repr=False)
    opening: list[Call] = field(default_factory=list)
    layers: list[LayerTape] = field(default_factory=list)
    closing: list[Call] = field(default_factory=list)
    logits: torch.Tensor | None = field(default=None, repr=False)


def call_names(tape: LayerTape) -> tuple[str, ...]:
    """Name a layer's calls in order."""
    return tuple(call.name if isinstance(call, Call) else "attention" for call in tape.calls)


def set_recorded(model: PreTrainedModel) -> None:
    """Send the model's attention through the recorder, for good."""
    for config in (model.config, model.config.get_text_config(decoder=True)):
        config._attn_implementation = RECORDED


def record(model: PreTrainedModel, stack: BlockStack, token_ids: torch.Tensor) -> ModelTape:
    """Run token ids [batch, rows] through a model whose attention is recorded, and note what it did."""
    tape = ModelTape(token_ids)
    with torch.no_grad(), _hooked(model, stack, tape) as add:
        token = _LISTENER.set(add)
        try:
            tape.logits = model(input_ids=token_ids, use_cache=False).logits
        finally:
            _LISTENER.reset(token)
    return tape


@contextmanager
def _hooked(
    model: PreTrainedModel, stack: BlockStack, tape: ModelTape
) -> Iterator[Callable[[Call | AttentionCall], None]]:
    calls: list[Any] = tape.opening
    running: list[str] = []  # a part that is taken as a whole hides what it calls
    hooks = []

    def add(call: Call | AttentionCall) -> None:
        if not running:
            calls.append(call)

    def enter_block(_module: nn.Module, args: Any, kwargs: Any) -> None:
        nonlocal calls
        hidden = args[0] if args else kwargs["hidden_states"]
        tape.layers.append(LayerTape(hidden))
        calls = tape.layers[-1].calls

    def leave_block(_module: nn.Module, _args: Any, output: Any) -> None:
        nonlocal calls
        tape.layers[-1].hidden_out = output[0] if isinstance(output, tuple) else output
        if len(tape.layers) == len(stack):
            calls = tape.closing

    def enter(name: str, _module: nn.Module, _args: Any) -> None:
        running.append(name)

    def leave(name: str, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        running.pop()
        outputs = tuple(output) if isinstance(output, tuple | list) else (output,)
        add(Call(name, module, args, dict(kwargs), outputs))

    for block in stack.blocks:
        hooks.append(block.register_forward_pre_hook(enter_block, with_kwargs=True))
        hooks.append(block.register_forward_hook(leave_block))
    for name, module in parts_taken_whole(model, stack):
        hooks.append(module.register_forward_pre_hook(partial(enter, name)))
        hooks.append(module.register_forward_hook(partial(leave, name), with_kwargs=True))
    try:
        yield add
    finally:
        for hook in hooks:
            hook.remove()


def parts_taken_whole(model: PreTrainedModel, stack: BlockStack) -> list[tuple[str, nn.Module]]:
    """Return the modules that contain no others or hold stacked experts; names inside a block are the block's."""
    found = []
    for path, module in model.named_modules():
        if any(True for _ in module.children()) and not holds_experts(module):
            continue
        layer = stack.layer_of(path) if path.startswith(stack.name + ".") else None
        found.append((path if layer is None else path.removeprefix(f"{stack.name}.{layer}."), module))
    return found


def holds_experts(module: nn.Module) -> bool:
    """Tell whether a module has stacked weights of its own."""
    return any(parameter.ndim == EXPERT_DIMENSIONS for parameter in module.parameters(recurse=False))


_LISTENER: ContextVar[Callable[[AttentionCall], None] | None] = ContextVar("listener", default=None)


def _attention(
    _module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **_others: Any,
) -> tuple[torch.Tensor, None]:
    scale = query.shape[-1] ** -0.5 if scaling is None else float(scaling)
    groups = query.shape[1] // key.shape[1]
    scores = query @ key.repeat_interleave(groups, 1).transpose(2, 3) * scale
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    if attention_mask is not None:
        scores = scores + attention_mask[..., : key.shape[-2]]
    if s_aux is not None:
        extra = s_aux.reshape(1, -1, 1, 1).expand(*scores.shape[:-1], 1)
        scores = torch.cat((scores, extra), dim=-1)
    shares = scores.softmax(-1)[..., : key.shape[-2]]
    output = (shares @ value.repeat_interleave(groups, 1)).transpose(1, 2).contiguous()
    listener = _LISTENER.get()
    if listener is not None:
        listener(
            AttentionCall(query, key, value, attention_mask, scale, sliding_window, softcap, s_aux, output)
        )
    return output, None


ALL_ATTENTION_FUNCTIONS.register(RECORDED, _attention)
ALL_MASK_ATTENTION_FUNCTIONS.register(RECORDED, eager_mask)


def visible_window(mask: torch.Tensor | None, rows: int) -> int | None:
    """Return the window that a mask [1, 1, rows, rows] (0: visible) shows; None where it hides nothing but the future.

    Raises ValueError for a mask of another kind.
    """
    if mask is None:
        raise ValueError("its attention sees no mask")
    seen = mask[0, 0, :, :rows] == 0
    place = torch.arange(rows)
    distance = place[:, None] - place[None, :]
    for window in (None, *range(1, rows)):
        if torch.equal(seen, (distance >= 0) & (distance < (window or rows))):
            return window
    raise ValueError("its attention mask is neither causal nor a window")


def rotary_calls(tape: ModelTape) -> Sequence[Call]:
    """Return the calls whose outcome is a pair of tables: cosines and sines [batch, rows, dim]."""
    calls = [call for call in tape.opening if isinstance(call, Call)]
    calls += [call for layer in tape.layers for call in layer.calls if isinstance(call, Call)]
    return [call for call in calls if _is_pair_of_tables(call.outputs)]


def _is_pair_of_tables(outputs: tuple[Any, ...]) -> bool:
    if len(outputs) != 2 or not all(isinstance(value, torch.Tensor) for value in outputs):
        return False
    cos, sin = outputs
    return bool(
        cos.shape == sin.shape
        and cos.ndim == EXPERT_DIMENSIONS
        and cos.is_floating_point()
        and torch.allclose(
            cos**2 + sin**2, (cos[:, :1] ** 2 + sin[:, :1] ** 2).expand_as(cos), rtol=1e-3, atol=1e-3
        )
    )
