"""Every transformer of the table, cut over two nodes' worth of block ranges: the same bits, or a named refusal."""

from __future__ import annotations

from pathlib import Path

import pytest

from slicing.diffusion.calls import memory_order
from tests.support.cut_transformer import SINK, CutTransformer
from tests.support.diffusers_families import FAMILIES, call, tiny_model
from tests.support.family_table import EQUAL, outcome, table

pytestmark = pytest.mark.filterwarnings("ignore")  # the stock classes warn of each other
PAGE = Path(__file__).parents[3] / "docs" / "diffusion-families.md"
EQUALS = [name for name, family in FAMILIES.items() if family.refused is None]
REFUSED = [name for name, family in FAMILIES.items() if family.refused is not None]
UNSENDABLE = {"AnyFlowFARTransformer3D", "WanAnimate2Transformer3D"}  # caches and masks as objects


@pytest.mark.parametrize("name", EQUALS)
def test_a_plain_thread_gives_the_same_bits_over_two_ranges(name: str) -> None:
    found = outcome(name)
    assert found.told == EQUAL
    assert found.passes


@pytest.mark.parametrize("name", REFUSED)
def test_a_broken_thread_is_refused_by_stack_block_and_argument(name: str) -> None:
    assert str(FAMILIES[name].refused) in outcome(name).told


@pytest.mark.parametrize("name", [name for name in REFUSED if name not in UNSENDABLE])
def test_a_broken_thread_gives_the_same_bits_block_by_block(name: str) -> None:
    found = outcome(name, per_block=True)
    assert found.told == EQUAL
    assert all(len(made.plan.blocks) == 1 for made in found.passes)


def test_at_least_the_promised_families_are_cut() -> None:
    assert len(EQUALS) >= 49


def test_the_page_of_families_is_up_to_date() -> None:
    assert PAGE.read_text() == table(), "python -m tests.support.family_table > docs/diffusion-families.md"


def test_a_description_of_a_call_stays_small() -> None:
    sizes = [len(made.plan.to_json()) for name in EQUALS for made in outcome(name).passes]
    assert max(sizes) < 2048


def test_a_stream_that_lies_transposed_in_memory_is_told_from_a_plain_one() -> None:
    # What AceStep's convolution gives; sent as a plain tensor it gives other bits.
    family = FAMILIES["AceStepTransformer1D"]
    model = tiny_model(family)
    cut = CutTransformer(model)
    SINK.set(cut.run)
    call(cut.model, family)
    assert memory_order(cut.passes[0].streams[0]) == (0, 2, 1)
