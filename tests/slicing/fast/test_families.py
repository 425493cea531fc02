"""Families of transformers through the fast runner, against the plain one; and why the others are not composed."""

from __future__ import annotations

import pytest
import torch

from slicing.ends import Parts
from slicing.fast import runner
from slicing.fast.check import learn_checked
from slicing.fast.loading import ModelTensors, build_runner
from slicing.fast.packed_layer import Packing
from slicing.fast.packing import Form
from slicing.fast.recipe import NotComposable
from slicing.fast.runner import FastRunner
from slicing.runner import PlainRunner
from tests.support.families import FAMILIES, NUM_LAYERS, tiny_config, tiny_model, token_ids
from tests.support.reference_executor import ReferenceExecutor

WHOLE = Parts.whole(NUM_LAYERS)
# Longer than the windows of 16; a chunk on a past, single rows, and back by some.
STEPS = ((0, 21), (21, 5), (26, 1), (27, 1), (25, 3), (28, 1))
COMPOSED = (
    "arcee", "biogpt", "cohere", "cohere2", "ernie4_5", "exaone4", "gemma", "gemma2", "gemma3_text", "glm",
    "glm4", "glm4_moe", "gpt2", "gpt_bigcode", "gpt_neox", "gpt_oss", "granite", "granitemoe", "helium",
    "llama", "llama_tied", "minimax_m2", "ministral3", "mistral", "mixtral", "nemotron", "olmo", "olmo2",
    "olmo3", "olmoe", "persimmon", "phi", "phi3", "qwen2", "qwen3", "qwen3_moe", "seed_oss", "smollm3",
    "stablelm", "starcoder2", "vaultgemma",
)  # fmt: skip
REFUSED = {
    "gptj": "how positions enter the query is not understood",
    "codegen": "how positions enter the query is not understood",
    "opt": "gives a row other bits beside others",
    "bloom": "calls transformers' attention 0 times",
    "mpt": "calls transformers' attention 0 times",
    "gpt_neo": "calls transformers' attention 0 times",
    "falcon": "calls transformers' attention 0 times",
    "falcon_alibi": "calls transformers' attention 0 times",
    "xglm": "calls transformers' attention 0 times",
    "qwen3_next": "calls transformers' attention 0 times",
    "olmo_hybrid": "calls transformers' attention 0 times",
    "lfm2": "calls transformers' attention 0 times",
    "granitemoehybrid": "calls transformers' attention 0 times",
    "llama4_text": "how positions enter the input of self_attn.qk_norm is not understood",
    "nanochat": "how positions enter the input of self_attn.q_norm is not understood",
    "qwen2_moe": "what the layer's output is made of is not understood",
    "gemma4_text": "is none of the model's settings",
    "deepseek_v2": "the input of self_attn.kv_a_layernorm",
    "deepseek_v3": "the input of self_attn.kv_a_layernorm",
    "phimoe": "how mlp.router .* chooses is not understood",
    "apertus": "mlp.act_fn .* is no operation that is known",
}


def logits_of(either: FastRunner | PlainRunner) -> torch.Tensor:
    ids, cache, made = token_ids(40), either.new_cache(), []
    for position, rows in STEPS:
        states = either.run_opening(cache, ids[position : position + rows], position, end=3)
        made.append(either.run_closing(cache, states, position, start=3, keep=range(rows)))
    return torch.cat(made)


@pytest.mark.parametrize("family", COMPOSED)
def test_a_composed_family_computes_what_the_plain_runner_does(family: str) -> None:
    model = tiny_model(tiny_config(family))
    fast = build_runner(ModelTensors(model), learn_checked(model.config), WHOLE, Packing("fp32"))
    mine, theirs = logits_of(fast), logits_of(PlainRunner.from_model(model, WHOLE))
    assert (mine - theirs).abs().max() <= 1e-4 * theirs.abs().max()
    assert torch.equal(mine.argmax(-1), theirs.argmax(-1))


@pytest.mark.parametrize("form", ["fp32", "int8"])
@pytest.mark.parametrize("family", ["gemma3_text", "glm4_moe", "gpt2", "gpt_oss", "phi"])
def test_kernels_compute_what_their_operations_mean(
    family: str, form: Form, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny_model(tiny_config(family))
    recipe = learn_checked(model.config)
    kernels = build_runner(ModelTensors(model), recipe, WHOLE, Packing(form))
    monkeypatch.setattr(runner, "Executor", ReferenceExecutor)
    reference = build_runner(ModelTensors(model), recipe, WHOLE, Packing(form))
    mine, theirs = logits_of(kernels), logits_of(reference)
    assert (mine - theirs).abs().max() <= 2e-5 * theirs.abs().max()


@pytest.mark.parametrize("family", REFUSED)
def test_what_is_not_understood_is_refused_with_the_reason(family: str) -> None:
    with pytest.raises(NotComposable, match=REFUSED[family]):
        learn_checked(tiny_config(family))


def test_every_family_of_the_tests_is_in_one_of_the_lists() -> None:
    assert sorted([*COMPOSED, *REFUSED]) == sorted(FAMILIES)
