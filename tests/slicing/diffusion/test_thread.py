"""Stand-ins: what they collect, what they refuse, and what of a block the model may still ask for."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from contextvars import ContextVar, copy_context
from typing import Any

import pytest
import torch
from torch import nn

from slicing.diffusion import thread
from slicing.diffusion.block_range import BlockRange
from slicing.diffusion.calls import Pass
from slicing.diffusion.stacks import Stack
from slicing.diffusion.thread import PassSink, ThreadBroken, replace_blocks
from slicing.errors import ModelError
from tests.support.cut_transformer import SINK, CutTransformer
from tests.support.diffusers_families import FAMILIES, Inputs, call, tiny_model
from tests.support.toy_transformer import WIDTH, ToyTransformer

pytestmark = pytest.mark.filterwarnings("ignore")  # the stock classes warn of each other
SINK_OF: ContextVar[PassSink] = ContextVar("sink_of")


class Toy:
    """A toy whose blocks run in a block range beside it."""

    def __init__(self, loop: Any, *, per_block: bool = False) -> None:
        self.model = ToyTransformer(loop)
        self.uncut = copy.deepcopy(self.model)
        self.stack = self.model.stack()
        self.range = BlockRange([self.stack], dict(enumerate(self.stack.blocks)))
        self.passes: list[Pass] = []
        self.answer: Callable[[list[torch.Tensor]], list[torch.Tensor]] = lambda streams: streams
        self.resize(6, 3)
        replace_blocks(
            self.model,
            [self.stack],
            SINK_OF,
            lambda _stack, number: self.stack.blocks[number],
            per_block=per_block,
        )
        SINK_OF.set(self.sink)

    @torch.no_grad()
    def resize(self, *lengths: int) -> None:
        generator = torch.Generator().manual_seed(0)
        self.inputs = tuple(torch.randn(1, length, WIDTH, generator=generator) for length in lengths)
        self.whole = self.uncut(*self.inputs)

    def sink(self, stack: Stack, made: Pass) -> list[torch.Tensor]:
        self.passes.append(made)
        return self.answer(self.range.run(made, start=0, end=len(stack)))

    @torch.no_grad()
    def run(self) -> torch.Tensor:
        answer: torch.Tensor = self.model(*self.inputs)
        return answer


def plain(model: ToyTransformer, hidden: torch.Tensor, text: torch.Tensor) -> torch.Tensor:
    temb = torch.ones(WIDTH)
    for block in model.blocks:
        text, hidden = block(hidden, text, temb=temb)
    return hidden + text.sum()


def test_a_pass_is_collected_and_its_streams_come_back() -> None:
    toy = Toy(plain)
    assert torch.equal(toy.run(), toy.whole)
    assert toy.passes[0].plan.outputs == (1, 0)
    assert [len(toy.passes), toy.passes[0].plan.num_streams, len(toy.passes[0].slots)] == [1, 2, 1]


def test_no_tensor_is_copied_on_the_way_to_the_sink() -> None:
    toy = Toy(plain)
    toy.run()
    assert all(stream is given for stream, given in zip(toy.passes[0].streams, toy.inputs, strict=True))


def test_every_step_has_the_same_plan() -> None:
    toy = Toy(plain)
    toy.run()
    toy.run()
    assert toy.passes[0].plan.digest == toy.passes[1].plan.digest


def test_views_of_the_same_memory_are_one_slot() -> None:
    def loop(model: ToyTransformer, hidden: torch.Tensor, text: torch.Tensor) -> torch.Tensor:
        table = torch.ones(2, WIDTH)
        for block in model.blocks:
            text, hidden = block(hidden, text, temb=table[1])
        return hidden

    toy = Toy(loop)
    assert torch.equal(toy.run(), toy.whole)
    assert len(toy.passes[0].slots) == 1


def test_what_needs_no_numbers_may_be_asked_between_blocks() -> None:
    def loop(model: ToyTransformer, hidden: torch.Tensor, text: torch.Tensor) -> torch.Tensor:
        for block in model.blocks:
            text, hidden = block(hidden, text)
            assert hidden.shape[1:] == (6, WIDTH)
            assert (hidden.size(1), len(text), hidden.dim(), hidden.dtype) == (6, 1, 3, torch.float32)
            assert hidden.device == torch.device("cpu")
            hidden = hidden.to(torch.float32).contiguous().type_as(text)  # nothing to do
        return hidden

    toy = Toy(loop)
    assert torch.equal(toy.run(), toy.whole)


def drops_the_text(model: ToyTransformer, hidden: torch.Tensor, text: torch.Tensor) -> torch.Tensor:
    for block in model.blocks:
        _, hidden = block(hidden, text)
    return hidden


@pytest.mark.parametrize("loop", [plain, drops_the_text])
@pytest.mark.parametrize("per_block", [False, True])
def test_a_picture_of_another_size_needs_no_new_stand_ins(loop: Any, per_block: bool) -> None:
    for size, other in [((6, 3), (9, 2)), ((9, 2), (6, 3))]:
        toy = Toy(loop, per_block=per_block)
        for lengths in (size, other, size):
            toy.resize(*lengths)
            assert torch.equal(toy.run(), toy.whole)


def computes(model: ToyTransformer, hidden: torch.Tensor, text: torch.Tensor) -> torch.Tensor:
    for block in model.blocks:
        text, hidden = block(hidden, text)
        hidden = hidden * 2
    return hidden


def converts(model: ToyTransformer, hidden: torch.Tensor, text: torch.Tensor) -> torch.Tensor:
    for block in model.blocks:
        text, hidden = block(hidden, text)
        hidden = hidden.to(torch.float64).to(torch.float32)
    return hidden


def harvests(model: ToyTransformer, hidden: torch.Tensor, text: torch.Tensor) -> torch.Tensor:
    kept = []
    for block in model.blocks:
        text, hidden = block(hidden, text)
        kept.append(text)
    return hidden + torch.cat(kept, 1).sum()


def skips(model: ToyTransformer, hidden: torch.Tensor, text: torch.Tensor) -> torch.Tensor:
    for number, block in enumerate(model.blocks):
        if number != 2:
            text, hidden = block(hidden, text)
    return hidden


def repeats(model: ToyTransformer, hidden: torch.Tensor, text: torch.Tensor) -> torch.Tensor:
    for block in [model.blocks[0], *model.blocks]:
        text, hidden = block(hidden, text)
    return hidden


def swaps(model: ToyTransformer, hidden: torch.Tensor, text: torch.Tensor) -> torch.Tensor:
    text = hidden.clone()
    for number, block in enumerate(model.blocks):
        text, hidden = block(hidden, text) if number != 2 else block(text, hidden)
    return hidden


def holds_back(model: ToyTransformer, hidden: torch.Tensor, text: torch.Tensor) -> torch.Tensor:
    first = hidden
    for number, block in enumerate(model.blocks):
        text, hidden = block(first if number == 3 else hidden, text)
        first = hidden if number == 1 else first
    return hidden


def replaces(model: ToyTransformer, hidden: torch.Tensor, text: torch.Tensor) -> torch.Tensor:
    for number, block in enumerate(model.blocks):
        text, hidden = block(torch.zeros(1, 6, WIDTH) if number == 2 else hidden, text)
    return hidden


def reuses_a_buffer(model: ToyTransformer, hidden: torch.Tensor, text: torch.Tensor) -> torch.Tensor:
    temb = torch.zeros(WIDTH)
    for block in model.blocks:
        temb += 1
        text, hidden = block(hidden, text, temb=temb)
    return hidden


def writes_to_a_stream(model: ToyTransformer, hidden: torch.Tensor, text: torch.Tensor) -> torch.Tensor:
    given = hidden
    for block in model.blocks:
        text, hidden = block(hidden, text)
        given += 1
    return hidden


def passes_a_cache(model: ToyTransformer, hidden: torch.Tensor, text: torch.Tensor) -> torch.Tensor:
    cache: list[int] = []
    for block in model.blocks:
        text, hidden = block(hidden, text, cache=cache)
    return hidden


def passes_an_object(model: ToyTransformer, hidden: torch.Tensor, text: torch.Tensor) -> torch.Tensor:
    for block in model.blocks:
        text, hidden = block(hidden, text, cache={"keys": (1, object())})
    return hidden


def starts_late(model: ToyTransformer, hidden: torch.Tensor, text: torch.Tensor) -> torch.Tensor:
    for block in model.blocks[1:]:
        text, hidden = block(hidden, text)
    return hidden


def takes_nothing(model: ToyTransformer, hidden: torch.Tensor, text: torch.Tensor) -> torch.Tensor:
    for block in model.blocks:
        block(hidden, text)
    return hidden


@pytest.mark.parametrize(
    ("loop", "told"),
    [
        (computes, "block 0 of transformer.blocks, output 1, is used by the model itself (mul)"),
        (converts, "block 0 of transformer.blocks, output 1, is used by the model itself (to)"),
        (harvests, "block 0 of transformer.blocks, output 0, is used by the model itself (cat)"),
        (skips, "block 3 of transformer.blocks is called where block 2 should be"),
        (swaps, "block 2 of transformer.blocks, argument args[0], is output 0 of block 1"),
        (holds_back, "block 3 of transformer.blocks, argument args[0], is output 1 of block 1"),
        (replaces, "block 2 of transformer.blocks, argument args[0], is not what block 1 returned"),
        (
            reuses_a_buffer,
            "block 3 of transformer.blocks is called after an earlier block's tensor was written to",
        ),
        (
            writes_to_a_stream,
            "block 3 of transformer.blocks is called after an earlier block's tensor was written to",
        ),
        (passes_a_cache, "block 0 of transformer.blocks writes into its arguments"),
        (passes_an_object, "block 0 of transformer.blocks, argument cache[keys][1], is a builtins.object"),
        (starts_late, "block 1 of transformer.blocks is called where block 0 should be"),
        (takes_nothing, "block 1 of transformer.blocks takes no output of block 0"),
        (repeats, "block 0 of transformer.blocks, argument args[0], is an output of block 0"),
    ],
)
def test_a_broken_thread_is_refused(loop: Any, told: str) -> None:
    toy = Toy(loop)
    with pytest.raises(ThreadBroken) as caught:
        toy.run()
    assert str(caught.value).startswith(told)
    assert caught.value.stack == "transformer.blocks"


def test_after_a_refusal_the_next_call_begins_anew() -> None:
    toy = Toy(plain)
    toy.model.loop = computes
    with pytest.raises(ThreadBroken):
        toy.run()
    toy.model.loop = plain
    assert torch.equal(toy.run(), toy.whole)


def test_what_the_sink_raises_ends_the_call_and_the_next_one_begins_anew() -> None:
    toy = Toy(plain)

    class Cancel(Exception):
        pass

    def cancel(_streams: list[torch.Tensor]) -> list[torch.Tensor]:
        raise Cancel

    toy.answer = cancel
    with pytest.raises(Cancel):
        toy.run()
    toy.answer = lambda streams: streams
    assert torch.equal(toy.run(), toy.whole)


@pytest.mark.parametrize(
    "change",
    [
        lambda streams: streams[:1],
        lambda streams: [stream.double() for stream in streams],
        lambda streams: [stream[:, 1:] for stream in streams],
    ],
)
def test_an_answer_of_another_shape_is_refused(change: Any) -> None:
    toy = Toy(plain)
    toy.answer = change
    with pytest.raises(ModelError, match="came back in other shapes or types"):
        toy.run()


def test_without_a_sink_nothing_runs() -> None:
    toy = Toy(plain)
    failures: list[Exception] = []

    def run() -> None:  # a new thread has a context of its own
        try:
            toy.run()
        except ModelError as error:
            failures.append(error)

    runner = threading.Thread(target=run)
    runner.start()
    runner.join()
    assert "nobody runs the blocks of transformer.blocks" in str(failures[0])


def test_a_call_under_autocast_is_refused() -> None:
    toy = Toy(plain)
    with torch.autocast("cpu", dtype=torch.bfloat16), pytest.raises(ThreadBroken, match="under autocast"):
        toy.run()


def test_two_threads_use_the_same_stand_ins_at_once() -> None:
    family = FAMILIES["FluxTransformer2D"]
    model = tiny_model(family)
    cut = CutTransformer(model)
    wanted = [call(model, family, seed) for seed in range(2)]
    meeting = threading.Barrier(2)
    answers: dict[int, list[list[torch.Tensor]]] = {0: [], 1: []}

    def sink(stack: Stack, made: Pass) -> list[torch.Tensor]:
        meeting.wait(timeout=30)  # both are in the middle of a forward
        return cut.run(stack, made)

    def run(seed: int) -> None:
        SINK.set(sink)
        for _ in range(2):
            answers[seed].append(call(cut.model, family, seed))

    runners = [threading.Thread(target=copy_context().run, args=(run, seed)) for seed in range(2)]
    for runner in runners:
        runner.start()
    for runner in runners:
        runner.join()
    for seed in range(2):
        assert [torch.equal(answer[0], wanted[seed][0]) for answer in answers[seed]] == [True, True]


def test_a_part_that_the_model_computes_with_is_loaded_when_called() -> None:
    family = FAMILIES["DiTTransformer2D"]
    model = tiny_model(family)
    cut = CutTransformer(model)
    SINK.set(cut.run)
    call(cut.model, family)
    call(cut.model, family)
    assert set(cut.loaded) == {("transformer_blocks", 0)}
    assert all(
        parameter.is_meta
        for stack in cut.stacks
        for block in stack.blocks
        for parameter in block.parameters()
    )


@pytest.mark.parametrize("around", [torch.inference_mode, torch.no_grad, torch.enable_grad])
def test_however_gradients_are_switched_the_bits_are_the_same(around: Any) -> None:
    family = FAMILIES["PixArtTransformer2D"]
    model = tiny_model(family)
    cut = CutTransformer(model)
    SINK.set(cut.run)
    with around():
        answer, whole = (one(**family.inputs(Inputs()), return_dict=False)[0] for one in (cut.model, model))
    assert torch.equal(answer, whole)


def test_a_named_cache_context_does_no_harm() -> None:  # what pipelines open around every guidance branch
    family = FAMILIES["WanTransformer3D"]
    model = tiny_model(family)
    cut = CutTransformer(model)
    SINK.set(cut.run)
    with cut.model.cache_context("cond"):
        assert torch.equal(call(cut.model, family)[0], call(model, family)[0])


def test_attributes_come_from_a_weightless_block() -> None:
    cut = CutTransformer(tiny_model(FAMILIES["SD3Transformer2D"]))
    blocks = cut.model.transformer_blocks
    assert len(blocks) == 4
    assert [block.context_pre_only for block in blocks] == [False, False, False, True]
    assert isinstance(blocks[0].attn, nn.Module)
    assert not hasattr(blocks[0], "_diffusers_hook")  # what every stock pipeline asks
    assert cut.loaded == []


def test_a_tensor_of_a_block_is_loaded_when_read() -> None:
    model = tiny_model(FAMILIES["WanTransformer3D"])
    cut = CutTransformer(model)
    assert torch.equal(cut.model.blocks[1].scale_shift_table, model.blocks[1].scale_shift_table)
    assert cut.loaded == [("blocks", 1)]


def test_an_unknown_attribute_fails_by_name() -> None:
    cut = CutTransformer(tiny_model(FAMILIES["WanTransformer3D"]))
    with pytest.raises(ThreadBroken, match=r"block 2 .* attribute gate, does not exist"):
        _ = cut.model.blocks[2].gate


def test_the_last_block_of_another_shape_gives_the_same_bits() -> None:
    family = FAMILIES["SD3Transformer2D"]
    model = tiny_model(family)
    cut = CutTransformer(model, cuts=[3])
    SINK.set(cut.run)
    assert torch.equal(call(cut.model, family)[0], call(model, family)[0])
    assert model.transformer_blocks[3].context_pre_only


def test_a_layer_that_is_left_out_is_refused() -> None:
    family = FAMILIES["SD3Transformer2D"]
    cut = CutTransformer(tiny_model(family))
    SINK.set(cut.run)
    with pytest.raises(ThreadBroken, match=r"block 2 .* is called where block 1"):
        call(cut.model, family, skip_layers=[1])


def test_the_state_of_a_pass_is_gone_afterwards() -> None:
    toy = Toy(plain)
    toy.run()
    assert not any(key.stack is toy.stack for key in thread._collecting.get())
