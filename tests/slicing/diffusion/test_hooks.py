"""What can be put around a model's modules and a node would not have is refused, before the cut and after."""

from __future__ import annotations

from typing import Any

import pytest
from diffusers import FirstBlockCacheConfig
from diffusers.hooks.hooks import HookRegistry, ModelHook
from torch import nn

from slicing.diffusion.thread import replace_blocks
from slicing.errors import ModelError
from tests.support.cut_transformer import SINK, CutTransformer
from tests.support.diffusers_families import FAMILIES, call, tiny_model


def _cache(model: Any) -> None:
    model.enable_cache(FirstBlockCacheConfig(threshold=0.1))  # type: ignore[no-untyped-call]


def _adapter(model: Any) -> None:
    model.peft_config = {"default": object()}


def _lora_layer(model: Any) -> None:
    model.blocks[0].add_module("lora_A", nn.Linear(2, 2))


def _compile(model: Any) -> None:
    model.blocks[0].compile(backend="eager")


def _offload(model: Any) -> None:
    model.blocks[1]._hf_hook = object()


def _group_offload(model: Any) -> None:
    HookRegistry.check_if_exists_or_initialize(model.blocks[1]).register_hook(ModelHook(), "group_offloading")  # type: ignore[no-untyped-call]


HOOKS = [
    (_cache, "has a cache on"),
    (_adapter, "has an adapter"),
    (_lora_layer, "has an adapter"),
    (_compile, "is compiled"),
    (_offload, "has an offload hook"),
    (_group_offload, "has the hook 'group_offloading' on"),
]


@pytest.mark.parametrize(("wrap", "told"), HOOKS)
def test_a_model_with_something_around_its_blocks_is_not_cut(wrap: Any, told: str) -> None:
    model = tiny_model(FAMILIES["WanTransformer3D"])
    wrap(model)
    cut = CutTransformer(tiny_model(FAMILIES["WanTransformer3D"]))
    with pytest.raises(ModelError, match=told):
        replace_blocks(model, cut.stacks, SINK, lambda *_: nn.Identity())


@pytest.mark.parametrize(
    ("wrap", "told"), HOOKS[1:]
)  # a cache knows stock block classes only, and refuses itself
def test_something_put_around_a_cut_model_later_is_refused_at_the_next_call(wrap: Any, told: str) -> None:
    family = FAMILIES["WanTransformer3D"]
    cut = CutTransformer(tiny_model(family))
    SINK.set(cut.run)
    wrap(cut.model)
    with pytest.raises(ModelError, match=told):
        call(cut.model, family)
