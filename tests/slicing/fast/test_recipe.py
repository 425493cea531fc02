"""What the recipes of some families say, learned from nothing but values."""

from __future__ import annotations

from typing import Any

import pytest

from slicing.fast.check import learn_checked
from slicing.fast.composition import refuse_hidden_differences
from slicing.fast.recipe import (
    Activate,
    Attention,
    Experts,
    Factor,
    Gate,
    LayerRecipe,
    Linear,
    ModelRecipe,
    Norm,
    NotComposable,
    Route,
    Sum,
)
from slicing.fast.skeleton import Skeleton
from tests.support.families import tiny_config, tiny_model


def recipe_of(family: str, **changes: Any) -> ModelRecipe:
    return learn_checked(tiny_config(family, **changes))


def layers_of(family: str, **changes: Any) -> list[LayerRecipe]:
    return list(recipe_of(family, **changes).layers.values())


def steps_of(layer: LayerRecipe, kind: type) -> list[Any]:
    return [step for step in layer.steps if isinstance(step, kind)]


def test_a_llama_layer_is_two_norms_seven_products_a_gate_and_two_sums() -> None:
    (layer,) = layers_of("llama")
    counts = [len(steps_of(layer, kind)) for kind in (Norm, Linear, Attention, Gate, Sum)]
    assert counts == [2, 7, 1, 1, 2]
    (gate,) = steps_of(layer, Gate)
    assert gate.activation == "silu"
    assert {norm.form.kind for norm in steps_of(layer, Norm)} == {"rms"}


def test_norms_of_gemma_add_one_to_their_weight() -> None:
    (layer,) = layers_of("gemma")
    assert {norm.form.offset for norm in steps_of(layer, Norm)} == {1.0}
    assert {norm.form.offset for norm in steps_of(layers_of("llama")[0], Norm)} == {0.0}


def test_gemma2_has_a_capped_head_and_windows_in_half_of_its_layers() -> None:
    recipe = recipe_of("gemma2")
    assert recipe.closing.softcap == Factor("final_logit_softcapping")
    assert {steps_of(layer, Attention)[0].window for layer in recipe.layers.values()} == {None, "argument"}


def test_layers_of_gemma3_turn_by_the_tables_of_their_own_kind() -> None:
    layers = layers_of("gemma3_text")
    rotaries = {steps_of(layer, Attention)[0].query.rotary.arguments for layer in layers}
    assert len(rotaries) == 2


def test_some_layers_of_smollm3_have_no_positions() -> None:
    turns = {steps_of(layer, Attention)[0].query.rotary is not None for layer in layers_of("smollm3")}
    assert turns == {True, False}


def test_part_of_a_head_is_turned_in_pairs_by_glm() -> None:
    (attention,) = steps_of(layers_of("glm")[0], Attention)
    assert attention.query.rotary.form.style == "interleaved"


def test_gpt_oss_has_sinks_and_experts_that_clamp() -> None:
    layer = layers_of("gpt_oss")[0]
    assert steps_of(layer, Attention)[0].sinks == "self_attn.sinks"
    (experts,) = steps_of(layer, Experts)
    assert (experts.form.activation, experts.form.layout, experts.is_transposed) == (
        "oss_swiglu",
        "alternating",
        True,
    )
    assert steps_of(layer, Route)[0].form.mode.startswith(("topk", "softmax"))


def test_experts_of_mixtral_share_weights_that_add_up_to_one() -> None:
    (route,) = steps_of(layers_of("mixtral")[0], Route)
    assert (route.form.mode, route.form.is_normalised) == ("softmax_then_topk", True)


def test_factors_of_granite_are_settings() -> None:
    recipe = recipe_of("granite", residual_multiplier=0.37)
    (layer,) = recipe.layers.values()
    factors = {factor.setting for step in steps_of(layer, Sum) for _, factor in step.terms}
    assert factors == {None, "residual_multiplier"}


def test_queries_keys_and_values_of_neox_are_joined_head_by_head() -> None:
    (attention,) = steps_of(layers_of("gpt_neox")[0], Attention)
    parts = [attention.query.source.part, attention.key.source.part, attention.value.part]
    assert [part.name for part in parts] == ["query", "key", "value"]
    assert all(part.is_grouped for part in parts)


def test_an_mlp_without_a_gate_is_an_activation() -> None:
    (layer,) = layers_of("starcoder2")
    assert [step.activation for step in steps_of(layer, Activate)] == ["gelu_tanh"]


def test_a_table_that_follows_the_length_of_the_run_is_refused() -> None:
    rope = {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "short_factor": [1.0] * 8,
        "long_factor": [4.0] * 8,
        "original_max_position_embeddings": 64,
    }
    with pytest.raises(NotComposable, match="depends on the length of the run"):
        recipe_of("llama", rope_parameters=rope)


def test_yarn_scales_the_tables_and_is_composed() -> None:
    rope = {
        "rope_type": "yarn",
        "factor": 4.0,
        "rope_theta": 10000.0,
        "original_max_position_embeddings": 64,
    }
    assert recipe_of("llama", rope_parameters=rope).is_plain_opening


def test_layers_that_differ_in_a_number_that_no_call_shows_are_refused() -> None:
    skeleton = Skeleton(tiny_model(tiny_config("llama")), 256)
    for number, block in enumerate(skeleton.stack.blocks):
        block.mlp.twist = 9 if number == 2 else 5
    with pytest.raises(NotComposable, match=r"layers 0 and 2 differ in mlp\.twist"):
        refuse_hidden_differences(skeleton)
