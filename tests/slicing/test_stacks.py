"""The block stack and the weightless copy, found by shape."""

from __future__ import annotations

import pytest
import torch
from transformers import BartConfig, T5Config, ViTConfig

from slicing.shrink import num_layers_of_one_period
from slicing.stacks import (
    CannotCut,
    block_kinds,
    build_weightless,
    find_stack,
    make_hollow,
    persistent_names,
    share_tensors,
)
from tests.support.families import FAMILIES, NUM_LAYERS, tiny_config, tiny_model


@pytest.mark.parametrize(
    ("family", "name"),
    [
        ("llama", "model.layers"),
        ("gpt2", "transformer.h"),
        ("mpt", "transformer.blocks"),
        ("opt", "model.decoder.layers"),
    ],
)
def test_the_stack_is_the_list_of_blocks(family: str, name: str) -> None:
    stack = find_stack(build_weightless(tiny_config(family), torch.float32))
    assert (stack.name, len(stack)) == (name, NUM_LAYERS)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_weightless_model_has_no_weights_and_the_stock_model_s_computed_buffers(family: str) -> None:
    config = tiny_config(family)
    weightless, stock = build_weightless(config, torch.float32), tiny_model(config)
    assert all(parameter.is_meta for parameter in weightless.parameters())
    expected = dict(stock.named_non_persistent_buffers())
    for name, buffer in weightless.named_non_persistent_buffers():
        assert torch.equal(buffer, expected[name]), name


def test_a_parameter_name_tells_its_layer() -> None:
    stack = find_stack(build_weightless(tiny_config("llama"), torch.float32))
    assert stack.layer_of("model.layers.12.mlp.up_proj.weight") == 12
    assert stack.layer_of("model.norm.weight") is None


def test_hollow_tensors_take_the_memory_of_one_zero() -> None:
    model = build_weightless(tiny_config("llama"), torch.float32)
    make_hollow(model, "cpu")
    sizes = {parameter.untyped_storage().nbytes() for parameter in model.parameters()}
    assert sizes == {4}


def test_shared_tensors_are_not_copied_and_stay_tied() -> None:
    whole = tiny_model(tiny_config("llama_tied"))
    part = build_weightless(whole.config, torch.float32)
    share_tensors(part, whole, lambda name: not name.startswith("model.layers."))
    assert part.lm_head.weight is part.model.embed_tokens.weight
    assert part.lm_head.weight.data_ptr() == whole.lm_head.weight.data_ptr()
    assert part.model.layers[0].mlp.up_proj.weight.is_meta


def test_tied_names_are_all_persistent() -> None:
    names = persistent_names(build_weightless(tiny_config("llama_tied"), torch.float32))
    assert {"lm_head.weight", "model.embed_tokens.weight"} <= names
    assert "model.rotary_emb.inv_freq" not in names


def test_layers_of_different_kinds_are_told_apart() -> None:
    kinds = block_kinds(find_stack(build_weightless(tiny_config("deepseek_v3"), torch.float32)))
    assert [kind == kinds[-1] for kind in kinds] == [False, False, True, True, True, True]


def test_one_period_holds_every_change_of_kind() -> None:
    assert num_layers_of_one_period(list("aaabaaab")) == 5
    assert num_layers_of_one_period(list("abbbbbbb")) == 3
    assert num_layers_of_one_period(list("aaaaaaac")) == 8


def test_a_config_that_no_class_answers_for_is_refused() -> None:
    with pytest.raises(CannotCut, match="no causal language model from a ViTConfig"):
        build_weightless(ViTConfig(), torch.float32)


def test_of_an_encoder_decoder_the_decoder_is_cut_though_the_encoder_is_longer() -> None:
    config = T5Config(
        d_model=16, d_kv=8, d_ff=16, num_heads=2, num_layers=6, num_decoder_layers=3, vocab_size=32
    )
    stack = find_stack(build_weightless(config, torch.float32))
    assert (stack.name, len(stack)) == ("decoder.block", 3)


def test_a_model_without_a_list_of_that_length_is_refused() -> None:
    config = BartConfig(
        d_model=16, decoder_layers=1, decoder_ffn_dim=16, decoder_attention_heads=2, vocab_size=32
    )
    with pytest.raises(CannotCut, match="no list of"):
        find_stack(build_weightless(config, torch.float32))
