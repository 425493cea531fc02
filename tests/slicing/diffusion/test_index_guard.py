"""Indices of a call are looked at where one out of range would end a node's process, and change nothing otherwise."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from slicing.diffusion.calls import Pass
from slicing.diffusion.index_guard import INTEGERS, IndexGuard, IndexOutOfRange, needs_guard
from slicing.errors import ModelError
from tests.support.cut_transformer import SINK, CutTransformer
from tests.support.diffusers_families import FAMILIES, call, tiny_model

pytestmark = pytest.mark.filterwarnings("ignore")  # the stock classes warn of each other
INDEXED = ["DiTTransformer2D", "LuminaNextDiT2D", "AllegroTransformer3D", "MiniMaxH3Transformer3D"]


def cut_model(name: str) -> CutTransformer:
    """As on a GPU; its ranges are on this machine's processor."""
    cut = CutTransformer(tiny_model(FAMILIES[name]))
    for held in cut.ranges:
        held.looks_at_indices = True
    SINK.set(cut.run)
    return cut


@pytest.mark.parametrize("name", INDEXED)
def test_families_that_index_give_the_same_bits(name: str) -> None:
    family = FAMILIES[name]
    cut, whole = call(cut_model(name).model, family), call(tiny_model(family), family)
    assert all(map(torch.equal, cut, whole))


@pytest.mark.parametrize(
    "name", [name for name in INDEXED if name != "LuminaNextDiT2D"]
)  # there it is a mask
@pytest.mark.parametrize("value", [-1, 1 << 30])
def test_a_number_out_of_range_is_refused_before_it_indexes(name: str, value: int) -> None:
    cut = cut_model(name)
    call(cut.model, FAMILIES[name])
    made = next(made for made in cut.passes if any(slot.dtype in INTEGERS for slot in made.slots))
    slots = [slot.clone().fill_(value) if slot.dtype in INTEGERS else slot for slot in made.slots]
    start = next(stack.offset for stack in cut.stacks if stack.name == made.plan.stack)
    held = next(held for held in cut.ranges if held.start == start)
    with pytest.raises(IndexOutOfRange) as caught:
        held.run(Pass(made.plan, made.streams, slots), start=start, end=held.end)
    assert str(value) not in str(caught.value)


TABLE, NUMBERS = torch.arange(12.0).view(3, 4), torch.tensor([0, 2])
GOOD: dict[str, Any] = {
    "plain": lambda index: TABLE[index],
    "after a slice": lambda index: TABLE.T[1:, index],
    "after dots": lambda index: TABLE.T[..., None, index],
    "before dots": lambda index: TABLE[index, ..., 0],
    "gather": lambda index: torch.gather(TABLE, dim=0, index=index[:, None]),
    "scatter": lambda index: TABLE.clone().scatter_add_(0, index[None], torch.ones(1, 2)),
    "embedding": lambda index: nn.functional.embedding(index, TABLE),
    "with a mask before": lambda index: TABLE.expand(2, 3, 4)[torch.tensor([True, False]), index[:1]],
}


@pytest.mark.parametrize("name", GOOD)
def test_every_way_of_indexing_is_looked_at(name: str) -> None:
    index = GOOD[name]
    with IndexGuard():
        inside = index(NUMBERS)
        with pytest.raises(IndexOutOfRange):
            index(torch.tensor([3, 0]))
        with pytest.raises(IndexOutOfRange):
            index(torch.tensor([-4, 0]))
    assert torch.equal(inside, index(NUMBERS))


def test_what_is_not_known_is_refused() -> None:
    with IndexGuard(), pytest.raises(ModelError, match="take"):
        TABLE.take(NUMBERS)


def test_only_calls_with_numbers_and_blocks_with_tables_are_looked_at() -> None:
    assert not needs_guard(nn.Linear(1, 1), [TABLE, TABLE > 1])
    assert needs_guard(nn.Linear(1, 1), [TABLE, NUMBERS])
    assert needs_guard(nn.Sequential(nn.Embedding(2, 2)), [TABLE])
