"""Which rows of a call belong to a patch: where its tokens lie in attention, and which arguments are cut.

Nothing here is known of a family: every way of cutting that could be right is offered, and `replay.py` finds the one
that is. Knows nothing of attention itself.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from slicing.diffusion.calls import Pass, Plan
from slicing.diffusion.patches import Cut, PatchesRefused


@dataclass(frozen=True, eq=False)
class Rows:
    """Where the tokens of one patch lie in the sequence that attention sees.

    Of `total` tokens in attention `num_tokens` are the picture's. `picture` int64 [n]: the patch's own among the
    picture's. `rows`: the number in attention of each token of the patch's call. `written`: the places in `rows` whose
    keys and values are new; None is all of them.
    """

    num_tokens: int
    total: int
    picture: torch.Tensor
    rows: torch.Tensor
    written: torch.Tensor | None = None

    def index_of(self, length: int) -> torch.Tensor | None:
        """Which rows of a dimension so long belong to the patch; None: it is no dimension of tokens."""
        if length == self.num_tokens:
            return self.picture
        return self.rows if length == self.total else None

    def at(self, length: int) -> Rows:
        """The same patch in an attention over `length` tokens: all, or only the picture's."""
        if length == self.total:
            return self
        return Rows(self.num_tokens, self.num_tokens, self.picture, self.picture)


@dataclass(frozen=True)
class Layout:
    """How the streams of a pass lie in attention: the picture's tokens alone, or text before or behind them.

    With a text stream there is one right answer for the text, yet each patch would make another. Patch 0 decides: the
    keys and values of its text, block by block, hold for the whole step. So nothing depends on where the stack is cut.
    """

    picture: int  # which stream is the picture's
    num_tokens: int
    text: int | None = None
    num_text: int = 0
    text_first: bool = False

    @property
    def total(self) -> int:
        """Tokens in attention."""
        return self.num_tokens + self.num_text

    @property
    def lengths(self) -> frozenset[int]:
        """How many tokens an attention may have of which keys must be kept: all, or only the picture's (SD3.5)."""
        return frozenset({self.num_tokens, self.total})

    def rows(self, cut: Cut, *, keeps_text: bool = False) -> Rows:
        """The rows of a patch. `keeps_text`: text keeps the keys that an earlier patch gave it."""
        picture = cut.rows()
        if self.text is None:
            return Rows(self.num_tokens, self.num_tokens, picture, picture)
        text = torch.arange(self.num_text) + (0 if self.text_first else self.num_tokens)
        parts = (text, picture + self.num_text) if self.text_first else (picture, text)
        first = self.num_text if self.text_first else 0
        written = torch.arange(first, first + len(picture)) if keeps_text else None
        return Rows(self.num_tokens, self.total, picture, torch.cat(parts), written)

    def take(self, streams: list[torch.Tensor], cut: Cut) -> list[torch.Tensor]:
        """The streams of a patch: its rows of the picture, copies of all others."""
        return [
            cut.take(stream) if number == self.picture else stream.clone()
            for number, stream in enumerate(streams)
        ]


def find_layouts(streams: list[torch.Tensor], cut: Cut) -> list[Layout]:
    """The ways in which whole streams [B, tokens, width] may lie in attention.

    Raises `PatchesRefused` where patches of such streams are not known.
    """
    if len(streams) not in (1, 2) or not all(
        stream.dim() == 3 and stream.is_floating_point() for stream in streams
    ):
        raise PatchesRefused("patches are known for one stream of tokens, or for one with text beside it")
    pictures = [number for number, stream in enumerate(streams) if stream.shape[1] == cut.num_tokens]
    if len(pictures) != 1:
        lengths = " and ".join(str(stream.shape[1]) for stream in streams)
        grid = "x".join(map(str, cut.grid))
        raise PatchesRefused(
            f"a grid of {grid} tokens does not multiply to the model's {lengths}"
            if not pictures
            else f"text and picture are both {lengths.partition(' ')[0]} tokens long and cannot be told apart"
        )
    layout = Layout(pictures[0], cut.num_tokens)
    if len(streams) == 1:
        return [layout]
    text = 1 - pictures[0]
    layout = replace(layout, text=text, num_text=streams[text].shape[1])
    return [replace(layout, text_first=True), layout]


class SliceMode(enum.Enum):
    """Which of a call's own tensors are cut to a patch's rows. The replay check takes the first that is right."""

    ALL = "slice all"
    KEEP_MASKS = "keep masks"
    HIDDEN_ONLY = "slice hidden only"


@dataclass(frozen=True)
class SliceRule:
    """`mode`, but for the slots in `whole`, which the rule would cut and must not."""

    mode: SliceMode
    whole: frozenset[int] = field(default_factory=frozenset)


def slice_arguments(made: Pass, rows: Rows, rule: SliceRule) -> list[torch.Tensor]:
    """The slots of a pass as a patch needs them: those that the rule names hold the patch's rows only.

    A slot that several blocks share stays one tensor. Of a tensor with two dimensions of tokens (a mask of queries by
    keys) the first is cut: keys are always all there.
    """
    cut = sliced_slots(made, rows, rule)
    return [
        _take(slot, rows, cut[number]) if number in cut else slot for number, slot in enumerate(made.slots)
    ]


def sliced_slots(made: Pass, rows: Rows, rule: SliceRule) -> dict[int, int]:
    """Slots that the rule cuts, with the dimension along which it does."""
    if rule.mode is SliceMode.HIDDEN_ONLY:
        return {}
    masks = _slots_named(made.plan, "mask") if rule.mode is SliceMode.KEEP_MASKS else set()
    found = {}
    for number, slot in enumerate(made.slots):
        dimensions = [d for d, length in enumerate(slot.shape) if rows.index_of(length) is not None]
        if not dimensions or number in rule.whole:
            continue
        if rule.mode is SliceMode.KEEP_MASKS and (number in masks or _looks_like_mask(slot, dimensions)):
            continue
        found[number] = dimensions[0]
    return found


def _take(slot: torch.Tensor, rows: Rows, dimension: int) -> torch.Tensor:
    index = rows.index_of(slot.shape[dimension])
    assert index is not None
    return slot.index_select(dimension, index.to(slot.device))


def _looks_like_mask(slot: torch.Tensor, dimensions: list[int]) -> bool:
    """Whether this may say which *keys* count: yes or no, or nothing behind the tokens (or a width that equals S)."""
    return slot.dtype is torch.bool or dimensions == [slot.dim() - 1]


def _slots_named(plan: Plan, word: str) -> set[int]:
    """Slots that some block takes under a name with `word` in it."""
    found: set[int] = set()
    for call in plan.blocks:
        for name, value in plan.shapes[call.shape].get("kwargs", {}).items():
            if word in name:
                found |= {call.slots[leaf] for leaf in _leaves(value) if leaf < len(call.slots)}
    return found


def _leaves(value: Any) -> Iterator[int]:
    if isinstance(value, dict):
        if isinstance(value.get("slot"), int):
            yield value["slot"]
            return
        value = list(value.values())
    if isinstance(value, list | tuple):
        for part in value:
            yield from _leaves(part)
