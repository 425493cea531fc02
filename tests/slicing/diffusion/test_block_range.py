"""Block ranges: they read their own blocks only, give the same bits wherever they are cut, and refuse what misfits."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch

from slicing.diffusion.block_range import BlockRange, Cancelled, load_block_range
from slicing.diffusion.calls import Pass
from slicing.diffusion.stacks import Stack
from slicing.errors import ModelError
from tests.support.cut_transformer import SINK, CutTransformer, ModelSource
from tests.support.diffusers_families import FAMILIES, Inputs, call, tiny_model
from tests.support.toy_transformer import WIDTH, ToyTransformer

pytestmark = pytest.mark.filterwarnings("ignore")  # the stock classes warn of each other
SIX = [
    "PixArtTransformer2D",
    "WanTransformer3D",
    "FluxTransformer2D",
    "SD3Transformer2D",
    "CogVideoXTransformer3D",
    "StableAudioDiT",
]


@cache
def caught(name: str) -> tuple[ModelSource, Pass, list[torch.Tensor]]:
    """A family's blocks, the pass over its first stack, and the streams after it."""
    cut = CutTransformer(tiny_model(FAMILIES[name]))
    SINK.set(cut.run)
    call(cut.model, FAMILIES[name])
    made = cut.passes[0]
    stack = cut.stacks[0]
    streams = load_block_range(cut.source, 0, stack.end).run(made, start=0, end=stack.end)
    return cut.source, made, streams


@pytest.mark.parametrize("name", SIX)
def test_every_place_to_cut_gives_the_same_bits(name: str) -> None:
    family = FAMILIES[name]
    model = tiny_model(family)
    whole = call(model, family)
    num_blocks = CutTransformer(model, []).ranges[-1].num_layers
    ways: list[list[int]] = [[place] for place in range(num_blocks)] + [[1, 2], [1, 2, 3]]
    for cuts in ways:
        cut = CutTransformer(model, cuts)
        SINK.set(cut.run)
        assert all(torch.equal(*pair) for pair in zip(call(cut.model, family), whole, strict=True)), cuts


@pytest.mark.parametrize("name", ["WanTransformer3D", "SD3Transformer2D"])
def test_bfloat16_keeps_what_stock_loading_keeps_in_float32(name: str) -> None:
    family = FAMILIES[name]
    model = tiny_model(family).to(torch.bfloat16)
    cut = CutTransformer(model, dtype=torch.bfloat16)
    SINK.set(cut.run)
    changes: dict[str, Any] = {
        key: value.bfloat16()
        for key, value in family.inputs(Inputs()).items()
        if isinstance(value, torch.Tensor) and value.is_floating_point() and key != "timestep"
    }
    assert torch.equal(call(cut.model, family, **changes)[0], call(model, family, **changes)[0])
    kept = {tensor.dtype for tensor in cut.ranges[0]._blocks[0].parameters()}
    assert kept == ({torch.bfloat16, torch.float32} if name.startswith("Wan") else {torch.bfloat16})
    assert cut.ranges[0].form == "stock/bf16"


def test_only_the_blocks_of_the_range_are_read() -> None:
    source = ModelSource(tiny_model(FAMILIES["FluxTransformer2D"]))
    told: list[tuple[str, int, int]] = []
    held = load_block_range(source, 3, 6, progress=lambda *progress: told.append(progress))
    assert source.num_read == 3
    assert (held.start, held.end, held.num_layers, held.hidden_size) == (3, 6, 8, 32)
    assert held.offset_of("transformer.single_transformer_blocks") == 4
    assert not any(tensor.is_meta for block in held._blocks.values() for tensor in block.parameters())
    assert held.size_bytes == sum(t.nbytes for block in held._blocks.values() for t in block.parameters())
    assert [done == total for _stage, done, total in told] == [False, False, True]
    assert held.measure_layer_ms(8) > 0


def test_replicas_agree_on_the_hash_of_every_layer() -> None:
    model = tiny_model(FAMILIES["WanTransformer3D"])
    one = load_block_range(ModelSource(model), 0, 3).layer_hashes
    other = load_block_range(ModelSource(model), 1, 4, dtype=torch.bfloat16).layer_hashes
    assert {len(digest) for digest in one.values()} == {8}
    assert [one[1], one[2]] == [other[1], other[2]]
    assert len({*one.values(), *other.values()}) == 4


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda t: dict(list(t.items())[1:]), "holds no tensor"),
        (lambda t: {**t, "more": torch.zeros(1)}, "holds more, which the block does not have"),
        (lambda t: {name: tensor[:1] for name, tensor in t.items()}, "have other shapes"),
    ],
)
def test_stored_tensors_that_do_not_fit_are_refused(change: Any, told: str) -> None:
    class Spoiled(ModelSource):
        def read_block(self, stack: Stack, number: int) -> Mapping[str, torch.Tensor]:
            spoiled: Mapping[str, torch.Tensor] = change(super().read_block(stack, number))
            return spoiled

    with pytest.raises(ModelError, match=f"block 2 of transformer.blocks.*{told}|of block 2 .*{told}"):
        load_block_range(Spoiled(tiny_model(FAMILIES["WanTransformer3D"])), 2, 3)


@pytest.mark.parametrize("span", [(0, 0), (2, 1), (-1, 2), (0, 5)])
def test_a_range_that_the_model_does_not_have_is_refused(span: tuple[int, int]) -> None:
    with pytest.raises(ModelError, match="cannot be held: the model has 4"):
        load_block_range(caught("WanTransformer3D")[0], *span)


def test_the_source_stays_weightless() -> None:
    source = caught("WanTransformer3D")[0]
    load_block_range(source, 0, 4)
    assert all(tensor.is_meta for block in source.remote[0].blocks for tensor in block.parameters())


def test_slots_of_other_blocks_are_not_looked_at() -> None:
    source, made, _ = caught("ChromaTransformer2D")  # every block has a slot of its own
    held = load_block_range(source, 0, 2)
    streams = held.run(made, start=0, end=2)
    used = made.slots_between(0, 2)
    lacking = [slot if number in used else torch.empty(0) for number, slot in enumerate(made.slots)]
    again = held.run(Pass(made.plan, made.streams, lacking), start=0, end=2)
    assert len(used) < len(made.slots)
    assert all(torch.equal(*pair) for pair in zip(streams, again, strict=True))


def test_tensors_at_odd_addresses_give_the_same_bits() -> None:
    source, made, streams = caught("PixArtTransformer2D")
    odd = [_at_odd_address(stream) for stream in made.streams]
    again = load_block_range(source, 0, 4).run(Pass(made.plan, odd, made.slots), start=0, end=4)
    assert all(torch.equal(*pair) for pair in zip(streams, again, strict=True))


def test_no_blocks_give_the_streams_back() -> None:
    source, made, _ = caught("WanTransformer3D")
    assert load_block_range(source, 1, 3).run(made, start=2, end=2)[0] is made.streams[0]


@pytest.mark.parametrize("span", [(0, 2), (1, 4), (2, 1), (4, 4)])
def test_blocks_that_are_not_held_are_not_run(span: tuple[int, int]) -> None:
    source, made, _ = caught("WanTransformer3D")
    with pytest.raises(ModelError, match="are not held here"):
        load_block_range(source, 1, 3).run(made, start=span[0], end=span[1])


def test_a_plan_for_another_model_is_refused() -> None:
    source, made, _ = caught("WanTransformer3D")
    held = load_block_range(source, 0, 4)
    with pytest.raises(ModelError, match="this model has no stack"):
        held.run(replace(made, plan=replace(made.plan, stack="transformer.layers")), start=0, end=4)
    with pytest.raises(ModelError, match="for blocks up to 7"):
        held.run(replace(made, plan=replace(made.plan, first=3)), start=0, end=4)


def test_arguments_that_do_not_fit_a_block_are_a_named_error_without_their_numbers() -> None:
    source, made, _ = caught("WanTransformer3D")
    held = load_block_range(source, 0, 4)
    narrow = Pass(made.plan, [made.streams[0][..., :7]], made.slots)
    with pytest.raises(
        ModelError, match=r"^block 0 of transformer.blocks cannot run this call \(\w+Error\)$"
    ):
        held.run(narrow, start=0, end=4)


@pytest.mark.parametrize(
    ("outputs", "told"),
    [((0, None), "another number of outputs"), ((0, None, None), "another number of outputs")],
)
def test_outputs_that_the_plan_does_not_know_are_refused(outputs: Any, told: str) -> None:
    source, made, _ = caught("WanTransformer3D")
    held = load_block_range(source, 0, 4)
    with pytest.raises(ModelError, match=told):
        held.run(replace(made, plan=replace(made.plan, outputs=outputs)), start=0, end=4)


def test_a_stop_comes_between_two_blocks() -> None:
    source, made, _ = caught("WanTransformer3D")
    held, asked = load_block_range(source, 0, 4), iter([False, False, True])
    with pytest.raises(Cancelled):
        held.run(made, start=0, end=4, is_cancelled=lambda: next(asked))


def test_a_block_that_writes_into_an_argument_is_refused() -> None:
    def loop(model: ToyTransformer, hidden: torch.Tensor, text: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError

    stack = ToyTransformer(loop).stack()
    held = BlockRange([stack], dict(enumerate(stack.blocks)))
    _, made, _ = caught("FluxTransformer2D")
    shape = {"args": [{"stream": 0}, {"stream": 1}], "kwargs": {"cache": []}}
    plan = replace(made.plan, stack=stack.name, shapes=(shape,), outputs=(1, 0))
    calls = tuple(replace(one, slots=()) for one in plan.blocks)
    streams = [torch.randn(1, 6, WIDTH), torch.randn(1, 3, WIDTH)]
    with pytest.raises(ModelError, match=r"block 0 .* writes into its arguments"):
        held.run(Pass(replace(plan, blocks=calls), streams, []), start=0, end=4)


def test_a_keeper_sees_every_block_by_its_global_number() -> None:
    cut = CutTransformer(tiny_model(FAMILIES["FluxTransformer2D"]))
    SINK.set(cut.run)
    call(cut.model, FAMILIES["FluxTransformer2D"])
    seen: list[Any] = []

    class Onlooker:
        @contextmanager
        def block(self, number: int) -> Any:
            seen.append(("runs", number))
            yield

        def arguments(self, number: int, args: Any, kwargs: Any) -> Any:
            seen.append(sorted(kwargs))
            return args, kwargs

    held = load_block_range(cut.source, 4, 6)
    held.run(cut.passes[1], start=4, end=6, keeper=Onlooker())
    assert [entry for entry in seen if isinstance(entry, tuple)] == [("runs", 4), ("runs", 5)]
    assert "hidden_states" in seen[0]


def _at_odd_address(tensor: torch.Tensor) -> torch.Tensor:
    room = torch.empty(tensor.numel() + 1, dtype=tensor.dtype)
    return room[1:].view(tensor.shape).copy_(tensor)
