"""Block stacks are found by shape, sized and numbered; a weightless model has its computed tables for real."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from slicing.diffusion.stacks import build_weightless, find_keys, find_stacks, remote_stacks
from slicing.errors import ModelError
from tests.support.diffusers_families import FAMILIES, model_class, tiny_model

pytestmark = pytest.mark.filterwarnings("ignore")  # the stock classes warn of each other


class Attending(nn.Module):
    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.self_attention = nn.Linear(width, width, bias=False)


def stack_of(number: int, width: int = 4) -> nn.ModuleList:
    return nn.ModuleList(Attending(width) for _ in range(number))


def paths(model: nn.Module) -> list[tuple[str, int]]:
    return [(stack.path, len(stack)) for stack in find_stacks(model, "transformer")]


def test_a_list_of_modules_with_attention_is_a_stack() -> None:
    model = nn.ModuleDict(
        {
            "blocks": stack_of(3),
            "embedders": nn.ModuleList(nn.Linear(2, 2) for _ in range(3)),
            "refiner": nn.ModuleDict({"layers": stack_of(2)}),
        }
    )
    assert paths(model) == [("blocks", 3), ("refiner.layers", 2)]


def test_lists_of_lists_and_lists_in_blocks_are_no_stacks() -> None:
    outer = stack_of(2)
    for block in outer:
        block.experts = stack_of(3)
    model = nn.ModuleDict({"nested": nn.ModuleList([stack_of(2), stack_of(2)]), "outer": outer})
    assert paths(model) == [("outer", 2)]


def test_a_single_block_is_no_stack() -> None:
    assert paths(nn.ModuleDict({"blocks": stack_of(1)})) == []


def test_small_stacks_stay_and_the_others_are_numbered_through() -> None:
    model = nn.ModuleDict({"blocks": stack_of(4, 32), "refiner": stack_of(2, 4), "singles": stack_of(3, 32)})
    stacks = [stack for name in ("transformer", "transformer_2") for stack in find_stacks(model, name)]
    found = [(stack.name, stack.offset, stack.end) for stack in remote_stacks(stacks)]
    assert found == [
        ("transformer.blocks", 0, 4),
        ("transformer.singles", 4, 7),
        ("transformer_2.blocks", 7, 11),
        ("transformer_2.singles", 11, 14),
    ]


def test_a_weightless_model_has_no_weights_but_its_computed_tables() -> None:
    for name in ("WanTransformer3D", "PixArtTransformer2D", "CogVideoXTransformer3D", "SD3Transformer2D"):
        model = tiny_model(FAMILIES[name])
        weightless = build_weightless(type(model), model.config)
        assert all(parameter.is_meta for parameter in weightless.parameters())
        tables = dict(weightless.named_buffers())
        assert all(torch.equal(tables[key].to(table.dtype), table) for key, table in model.named_buffers())


def test_a_weightless_model_of_a_large_configuration_takes_no_memory() -> None:
    model = build_weightless(model_class(FAMILIES["FluxTransformer2D"]), {})
    stacks = remote_stacks(find_stacks(model, "transformer"))
    assert [(stack.path, len(stack), stack.width) for stack in stacks] == [
        ("transformer_blocks", 19, 3072),
        ("single_transformer_blocks", 38, 3072),
    ]
    assert sum(stack.size_bytes for stack in stacks) > 40e9


def test_building_touches_no_other_thread_and_no_default() -> None:
    build_weightless(model_class(FAMILIES["WanTransformer3D"]), FAMILIES["WanTransformer3D"].settings)
    assert not torch.empty(1).is_meta
    assert not nn.Linear(2, 2).weight.is_meta


def test_a_configuration_that_a_class_cannot_use_is_a_named_error() -> None:
    with pytest.raises(ModelError, match="WanTransformer3DModel takes no such configuration"):
        build_weightless(model_class(FAMILIES["WanTransformer3D"]), {"num_layers": "many"})


@pytest.mark.parametrize(
    ("name", "keys"),
    [
        ("WanTransformer3D", {"blocks": "num_layers"}),
        (
            "AuraFlowTransformer2D",
            {
                "joint_transformer_blocks": "num_mmdit_layers",
                "single_transformer_blocks": "num_single_dit_layers",
            },
        ),
        (
            "Lumina2Transformer2D",
            {
                "noise_refiner": "num_refiner_layers",
                "context_refiner": "num_refiner_layers",
                "layers": "num_layers",
            },
        ),
        (
            "Krea2Transformer2D",
            {"text_fusion.refiner_blocks": "num_refiner_text_blocks"},
        ),  # left at its default
        ("NucleusMoEImageTransformer2D", {"transformer_blocks": None}),  # a list must grow with it
    ],
)
def test_the_setting_that_governs_a_stack_is_found(name: str, keys: dict[str, Any]) -> None:
    model = tiny_model(FAMILIES[name])
    assert find_keys(type(model), model.config, list(keys)) == keys
