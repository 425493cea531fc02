"""Block calls taken apart."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from slicing.call_plan import (
    BlockCall,
    BlockForm,
    first_difference,
    learn_form,
    name_arguments,
    recorded_calls,
    take_apart,
)
from slicing.stacks import BlockStack, CannotCut, find_stack
from tests.support.families import NUM_LAYERS, tiny_config, tiny_model, token_ids


class Block(nn.Module):
    def forward(self, hidden_states: torch.Tensor, scale: float = 1.0, tables: object = None) -> torch.Tensor:
        return hidden_states * scale


def stack_of(*blocks: nn.Module) -> BlockStack:
    return BlockStack("blocks", blocks)


def calls_of(family: str) -> tuple[BlockStack, list[BlockCall]]:
    model = tiny_model(tiny_config(family))
    stack = find_stack(model)
    with recorded_calls(stack) as calls:
        model(input_ids=token_ids(3).unsqueeze(0), use_cache=False)
    return stack, calls


@pytest.mark.parametrize(("family", "length"), [("llama", None), ("bloom", 2), ("falcon", 2)])
def test_the_form_is_learned_from_what_one_block_returns_and_the_next_takes(
    family: str, length: int | None
) -> None:
    assert learn_form(*calls_of(family)) == BlockForm(0, length)


def test_tensors_and_constants_are_told_apart_and_nested_ones_named() -> None:
    stack, calls = calls_of("llama")
    plan = take_apart(stack.blocks[0], calls[0], learn_form(stack, calls))
    assert {"position_embeddings[0]", "position_embeddings[1]", "position_ids"} <= set(plan.tensors)
    assert plan.constants["use_cache"] is False
    assert "hidden_states" not in plan.tensors


def test_positional_arguments_have_the_names_of_the_signature() -> None:
    assert name_arguments(Block(), (1, 2.0), {"tables": 3}) == {"hidden_states": 1, "scale": 2.0, "tables": 3}


def test_hidden_states_are_replaced_by_place_or_by_name() -> None:
    old, new = torch.zeros(1), torch.ones(1)
    assert BlockForm(0, None).replace_hidden((old, 2), {}, new) == ((new, 2), {})
    assert BlockForm("x", None).replace_hidden((2,), {"x": old, "y": 3}, new) == ((2,), {"x": new, "y": 3})


def test_wrapping_gives_a_block_s_own_form_back() -> None:
    states = torch.ones(2)
    assert BlockForm(0, None).wrap(states) is states
    assert BlockForm(0, 3).wrap(states) == (states, None, None)
    assert BlockForm(0, 3).unwrap((states, None, None)) is states


def test_the_first_argument_that_differs_is_named() -> None:
    block, form, states = Block(), BlockForm(0, None), torch.zeros(1)
    mine = take_apart(block, BlockCall(0, (states,), {"tables": {"a": (torch.zeros(2), 1)}}), form)
    other_tensor = take_apart(block, BlockCall(0, (states,), {"tables": {"a": (torch.ones(2), 1)}}), form)
    other_number = take_apart(block, BlockCall(0, (states,), {"tables": {"a": (torch.zeros(2), 2)}}), form)
    more = take_apart(block, BlockCall(0, (states,), {"tables": {"a": (torch.zeros(2), 1, states)}}), form)
    assert first_difference(mine, mine) is None
    assert first_difference(mine, other_tensor) == "tables[a][0]"
    assert first_difference(mine, other_number) == "tables[a][1]"
    assert first_difference(mine, more) == first_difference(more, mine) == "tables[a][2]"


def test_containers_are_recorded_as_they_were_at_the_start() -> None:
    class Filling(Block):
        def forward(
            self, hidden_states: torch.Tensor, scale: float = 1.0, tables: object = None
        ) -> torch.Tensor:
            tables["filled"] = hidden_states  # type: ignore[index]
            return hidden_states + 1

    stack, shared = stack_of(Filling()), {}
    with recorded_calls(stack) as calls:
        stack.blocks[0](torch.zeros(1), tables=shared)
    assert calls[0].kwargs["tables"] == {}
    assert shared


def test_a_model_that_computes_between_blocks_is_refused() -> None:
    stack = stack_of(Block(), Block())
    with recorded_calls(stack) as calls:
        stack.blocks[1](stack.blocks[0](torch.ones(1)) + 1)
    with pytest.raises(CannotCut, match="between blocks 0 and 1 of blocks"):
        learn_form(stack, calls)


def test_blocks_that_run_twice_are_refused() -> None:
    stack = stack_of(Block(), Block())
    with recorded_calls(stack) as calls:
        stack.blocks[1](stack.blocks[0](stack.blocks[0](torch.ones(1))))
    with pytest.raises(CannotCut, match=r"ran 0, 0, 1"):
        learn_form(stack, calls)


def test_prompts_never_stand_in_a_representation() -> None:
    _, calls = calls_of("llama")
    assert len(calls) == NUM_LAYERS
    assert "tensor" not in repr(calls[0])
