"""Takes a block call apart: which arguments there are, which are tensors, where the hidden states stand.

Knows Python calls and tensors only; a stack of blocks is learned from one run over it (`learn_form`). Diffusion block
calls are taken apart by the same code.
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from slicing.stacks import BlockStack, CannotCut

Arguments = tuple[tuple[Any, ...], dict[str, Any]]


@dataclass(frozen=True)
class BlockForm:
    """How the blocks of one stack take and return hidden states."""

    argument: int | str  # place (positional) or name (keyword) of the hidden states in a block call
    output_length: int | None  # None: a block returns the tensor itself; else a tuple with it in front
    takes_embeds: bool = True  # the model's forward runs on made-up input embeddings; otherwise on token ids
    memory: int | str | None = None  # place or name of an encoder's states; None: blocks take none

    def hidden_of(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> torch.Tensor:
        """Return the hidden states among the arguments of a call."""
        return args[self.argument] if isinstance(self.argument, int) else kwargs[self.argument]

    def replace_hidden(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], hidden_states: torch.Tensor
    ) -> Arguments:
        """Return the arguments of a call with other hidden states."""
        return _replaced(self.argument, args, kwargs, hidden_states)

    def replace_memory(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], states: torch.Tensor
    ) -> Arguments:
        """Return the arguments of a call with other encoder states."""
        assert self.memory is not None
        return _replaced(self.memory, args, kwargs, states)

    def unwrap(self, output: Any) -> torch.Tensor:
        """Return the hidden states that a block's output holds."""
        return output if self.output_length is None else output[0]

    def wrap(self, hidden_states: torch.Tensor) -> Any:
        """Return hidden states as a block would return them; what else it returns is None."""
        if self.output_length is None:
            return hidden_states
        return (hidden_states, *[None] * (self.output_length - 1))


@dataclass
class BlockCall:
    """One call of one block, as it happened; `output` is None while it runs, or when it was left early."""

    number: int
    args: tuple[Any, ...] = field(repr=False)
    kwargs: dict[str, Any] = field(repr=False)
    output: Any = field(default=None, repr=False)


@dataclass(frozen=True)
class CallPlan:
    """A block call taken apart: every leaf of its arguments by name, nested ones as "position_embeddings[0]"."""

    tensors: Mapping[str, torch.Tensor] = field(repr=False)
    constants: Mapping[str, object]  # numbers, strings, flags, None
    objects: Mapping[str, object] = field(repr=False)  # what is none of these, such as the cache


def take_apart(block: nn.Module, call: BlockCall, form: BlockForm) -> CallPlan:
    """Take a call apart; the hidden states, and an encoder's, are left out."""
    blank = torch.empty(0)
    args, kwargs = form.replace_hidden(call.args, call.kwargs, blank)
    if form.memory is not None:
        args, kwargs = form.replace_memory(args, kwargs, blank)
    bound = name_arguments(block, args, kwargs)
    leaves = [leaf for name, value in bound.items() if value is not blank for leaf in _leaves(name, value)]
    constant = (bool, int, float, str, type(None), torch.dtype, torch.device)
    return CallPlan(
        tensors={name: value for name, value in leaves if isinstance(value, torch.Tensor)},
        constants={name: value for name, value in leaves if isinstance(value, constant)},
        objects={name: value for name, value in leaves if not isinstance(value, (torch.Tensor, *constant))},
    )


def name_arguments(block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Give every argument of a block call its name in the signature of the block's class."""
    parameters = list(inspect.signature(type(block).forward).parameters.values())[1:]  # without self
    positional = [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    names = [*positional, *(f"args[{place}]" for place in range(len(positional), len(args)))]
    return {**dict(zip(names, args, strict=False)), **kwargs}


def first_difference(mine: CallPlan, theirs: CallPlan) -> str | None:
    """Return the name of the first argument in which two calls differ, and None when they are equal bit for bit.

    Objects are not compared: each side has its own cache.
    """
    for name in [*mine.tensors, *theirs.tensors]:
        left, right = mine.tensors.get(name), theirs.tensors.get(name)
        if left is None or right is None or left.dtype != right.dtype or not torch.equal(left, right):
            return name
    for name in [*mine.constants, *theirs.constants]:
        if mine.constants.get(name, _NOTHING) != theirs.constants.get(name, _NOTHING):
            return name
    return None


@contextmanager
def recorded_calls(stack: BlockStack) -> Iterator[list[BlockCall]]:
    """Record the block calls made inside the `with`, in order; arguments are kept as they were at the start."""
    calls: list[BlockCall] = []

    def before(number: int) -> Callable[..., None]:
        return lambda _block, args, kwargs: calls.append(
            BlockCall(number, _copy_containers(args), _copy_containers(kwargs))
        )

    def after(_block: nn.Module, _args: Any, output: Any) -> None:
        calls[-1].output = output  # blocks do not nest

    hooks = [
        block.register_forward_pre_hook(before(n), with_kwargs=True) for n, block in enumerate(stack.blocks)
    ]
    hooks += [block.register_forward_hook(after) for block in stack.blocks]
    try:
        yield calls
    finally:
        for hook in hooks:
            hook.remove()


def learn_form(stack: BlockStack, calls: Sequence[BlockCall]) -> BlockForm:
    """Learn from one run of the whole stack how hidden states pass from block to block.

    They are the tensor that one block returns and the next takes, the same object. Raises `CannotCut` when the blocks
    do not run once each in order, or the model computes something between two of them.
    """
    order = [call.number for call in calls]
    if order != list(range(len(stack))):
        raise CannotCut(
            f"the blocks of {stack.name} do not run once each, in order (they ran {_runs(order)})"
        )
    forms = {_form_between(stack, calls[n], calls[n + 1]) for n in range(len(calls) - 1)}
    if len(forms) > 1:
        raise CannotCut(f"the blocks of {stack.name} take or return hidden states in {len(forms)} ways")
    form = forms.pop()
    for call in calls:
        if form.output_length != (len(call.output) if isinstance(call.output, tuple) else None):
            raise CannotCut(f"block {call.number} of {stack.name} returns something else than its neighbours")
    return form


def find_memory(call: BlockCall, form: BlockForm, rows: int) -> tuple[int | str, torch.Tensor]:
    """Find the encoder's states [1, rows, width] among a call's arguments: their place or name, and they themselves.

    Raises `CannotCut` when there are none of that shape, or several.
    """
    found = [
        (place, value)
        for place, value in itertools.chain[tuple[int | str, Any]](enumerate(call.args), call.kwargs.items())
        if place != form.argument
        and isinstance(value, torch.Tensor)
        and value.is_floating_point()
        and value.dim() == 3
        and tuple(value.shape[:2]) == (1, rows)
    ]
    if len(found) != 1:
        raise CannotCut(f"blocks are called with {len(found)} arguments that could be an encoder's states")
    return found[0]


def _replaced(
    place: int | str, args: tuple[Any, ...], kwargs: dict[str, Any], value: torch.Tensor
) -> Arguments:
    if isinstance(place, int):
        return (*args[:place], value, *args[place + 1 :]), kwargs
    return args, {**kwargs, place: value}


def _form_between(stack: BlockStack, call: BlockCall, following: BlockCall) -> BlockForm:
    output = call.output
    hidden_states = output[0] if isinstance(output, tuple) and output else output
    places: list[int | str] = [
        place
        for place, value in itertools.chain[tuple[int | str, Any]](
            enumerate(following.args), following.kwargs.items()
        )
        if value is hidden_states and isinstance(value, torch.Tensor)
    ]
    if not places:
        raise CannotCut(
            f"between blocks {call.number} and {following.number} of {stack.name} the model computes on the hidden "
            "states"
        )
    return BlockForm(places[0], len(output) if isinstance(output, tuple) else None)


def _leaves(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from _leaves(f"{name}[{key}]", item)
    elif isinstance(value, list | tuple):
        for place, item in enumerate(value):
            yield from _leaves(f"{name}[{place}]", item)
    else:
        yield name, value


def _copy_containers(value: Any) -> Any:
    """Copy dictionaries, lists and tuples, all the way down, but nothing that they hold."""
    if isinstance(value, Mapping):
        return {key: _copy_containers(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return tuple(_copy_containers(item) for item in value)
    return value


def _runs(order: Sequence[int]) -> str:
    shown = ", ".join(str(number) for number in order[:12])
    return f"{shown}, …" if len(order) > 12 else shown or "never"


_NOTHING = object()
