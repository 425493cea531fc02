"""Pictures and recordings of a prompt, merged into its embeddings by the model's own encoders.

The stock model runs up to the module that owns its block stack; what it hands over is taken, and the forward is left
there. By shape, no list of families. Whether blocks that are given nothing else make the same of it is not assumed but
tried (`multimodal_check`).
"""

from __future__ import annotations

import hashlib
import inspect
import re
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from slicing.block_slice import Cancelled
from slicing.stacks import BlockStack, CannotCut

CACHES = ("cache", "past_key_values", "cache_position")
OWN_AXES = 4  # where a model hands over so many, the first one is the plain position, for masks alone


@dataclass(frozen=True, slots=True, eq=False)
class Merged:
    """A prompt as the blocks take it.

    `places` [axes, rows] (int64) are its rotary positions, None where they are 0 .. rows - 1. The first token drawn
    stands at `next_place` on every axis.
    """

    embeds: torch.Tensor = field(repr=False)  # [rows, hidden]
    places: torch.Tensor | None = field(repr=False)
    next_place: int
    runs: tuple[tuple[int, int], ...] = ()  # rows [start, end) that are no token's embedding: what was put in
    own_mask: bool = False  # the model also made a mask of its own; used by nobody

    def digests(self) -> tuple[tuple[int, bytes], ...]:
        """Return where each run begins, and SHA-256 over all that blocks are given for its rows.

        Two prompts of equal tokens and digests are the same to every block, bit for bit.
        """
        return tuple((start, self._digest(start, end)) for start, end in self.runs)

    def _digest(self, start: int, end: int) -> bytes:
        digest = hashlib.sha256(_bytes_of(self.embeds[start:end]))
        if self.places is not None:
            digest.update(_bytes_of(self.places[:, start:end]))
        return digest.digest()


class Merger:
    """A stock model with the weights that it uses before its first block. Threads take turns."""

    def __init__(self, model: PreTrainedModel, stack: BlockStack) -> None:
        self._model = model
        self._stack = stack
        self._owner = model.get_submodule(stack.name.rpartition(".")[0])
        self._lock = threading.Lock()
        self._is_cancelled: Callable[[], bool] | None = None
        for block in _encoder_blocks(model, stack):
            block.register_forward_pre_hook(self._look_up)

    def merge(self, inputs: Mapping[str, Any], is_cancelled: Callable[[], bool] | None = None) -> Merged:
        """Take what the blocks would be given for a processor's output: `input_ids` [1, rows], `pixel_values`, ...

        Raises `CannotCut` where they would be given more than embeddings and positions, which then is named, and
        `Cancelled` between two blocks of an encoder once `is_cancelled` turns true.
        """
        with self._lock, torch.no_grad(), _Caught(self._owner, self._stack.blocks[0]) as caught:
            self._is_cancelled = is_cancelled
            try:
                self._model(**dict(inputs), use_cache=False)
            except _Reached:
                pass
            else:
                raise CannotCut(f"{self._stack.name} was not reached by the model's forward")
            finally:
                self._is_cancelled = None
            return _merged(caught, self._stack, self._own_rows(inputs["input_ids"]))

    def _own_rows(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Return the embeddings of the tokens themselves [rows, width]; placeholders may be outside of the table."""
        table: Any = self._model.get_input_embeddings()
        rows: torch.Tensor = table(token_ids.clamp(max=table.weight.shape[0] - 1))[0]
        return rows

    def _look_up(self, *_: object) -> None:
        if self._is_cancelled is not None and self._is_cancelled():
            raise Cancelled


class _Reached(Exception):
    """Carries nothing, so that no traceback holds what was caught."""


class _Caught:
    """Catches what a stack's owner is given or, where it merges by itself, the first block, and leaves the forward."""

    def __init__(self, owner: nn.Module, block: nn.Module) -> None:
        self._hooks = [
            owner.register_forward_pre_hook(self._at_owner, with_kwargs=True),
            block.register_forward_pre_hook(self._at_block, with_kwargs=True),
        ]
        self.given: dict[str, Any] = {}
        self.embeds: torch.Tensor | None = None

    def __enter__(self) -> _Caught:
        return self

    def __exit__(self, *_: object) -> None:
        for hook in self._hooks:
            hook.remove()

    def _at_owner(self, owner: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        given = _named(owner, args, kwargs)
        embeds = given.pop("inputs_embeds", None)
        if embeds is not None:
            self.given, self.embeds = given, embeds
            raise _Reached

    def _at_block(self, block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.embeds = args[0] if args else kwargs["hidden_states"]
        raise _Reached


def tensor_pattern(name: str) -> str:
    """Return what the names of one tensor of all layers of an encoder have in common."""
    return re.sub(r"\d+", "#", name)


def _merged(caught: _Caught, stack: BlockStack, own_rows: torch.Tensor) -> Merged:
    embeds, given = caught.embeds, caught.given
    assert embeds is not None
    if embeds.ndim != 3 or embeds.shape[0] != 1:
        raise CannotCut(
            f"{stack.name} is given embeddings of shape {tuple(embeds.shape)}, not of one sequence"
        )
    rows = embeds.shape[1]
    positions = given.pop("position_ids", None)
    mask = given.pop("attention_mask", None)
    if extras := sorted(set(_tensors_in({k: v for k, v in given.items() if k not in CACHES}))):
        raise CannotCut(f"its blocks are also given {', '.join(extras)}, made of what was seen or heard")
    places = None if positions is None else _places(positions, rows)
    next_place = rows if places is None else int(places.max()) + 1
    runs = tuple(_runs((embeds[0] != own_rows).any(dim=-1).tolist()))
    return Merged(embeds[0].clone(), places, next_place, runs, own_mask=not _is_plain(mask))


def _runs(is_foreign: list[bool]) -> Iterator[tuple[int, int]]:
    """Yield the stretches [start, end) of true values."""
    start = None
    for row, value in enumerate([*is_foreign, False]):
        if value and start is None:
            start = row
        elif not value and start is not None:
            yield start, row
            start = None


def _encoder_blocks(model: PreTrainedModel, stack: BlockStack) -> Iterator[nn.Module]:
    """Yield the members of all lists of modules outside of the stack: the encoders' layers among them."""
    within = set(stack.blocks) | {part for block in stack.blocks for part in block.modules()}
    for module in model.modules():
        if isinstance(module, nn.ModuleList) and module not in within:
            yield from (block for block in module if block not in within)


def _bytes_of(tensor: torch.Tensor) -> bytes:
    return tensor.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes()


def _places(positions: torch.Tensor, rows: int) -> torch.Tensor | None:
    """Return [axes, rows] of positions [rows], [1, rows] or [axes, 1, rows]; None for plain ones."""
    places = positions.reshape(-1, rows).to("cpu", torch.int64)
    if positions.shape[-1] != rows or (positions.ndim == 3 and positions.shape[1] != 1):
        raise CannotCut(f"its positions have shape {tuple(positions.shape)}, not [axes, 1, rows]")
    plain = torch.arange(rows)
    if len(places) == OWN_AXES and torch.equal(places[0], plain):
        places = places[1:]
    return None if bool((places == plain).all()) else places.clone()


def _is_plain(mask: Any) -> bool:
    return mask is None or (isinstance(mask, torch.Tensor) and mask.ndim == 2 and bool(mask.all()))


def _named(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of a call by name, those of a collecting `**kwargs` among them."""
    bound = inspect.signature(type(module).forward).bind_partial(module, *args, **kwargs)
    named: dict[str, Any] = {}
    for name, value in bound.arguments.items():
        kind = bound.signature.parameters[name].kind
        named.update(value if kind is inspect.Parameter.VAR_KEYWORD else {name: value})
    return {name: value for name, value in named.items() if value is not module}


def _tensors_in(given: Mapping[str, Any]) -> Iterator[str]:
    """Yield the names of the arguments that hold a tensor."""
    for name, value in given.items():
        within = [value]
        while within:
            item = within.pop()
            if isinstance(item, torch.Tensor):
                yield name
            elif isinstance(item, Mapping):
                within.extend(item.values())
            elif isinstance(item, list | tuple):
                within.extend(item)
