"""The miniature: what it lets pass, what it refuses, and that it names why."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from transformers import AutoConfig

from slicing import miniature
from slicing.block_slice import BlockSlice
from slicing.kv_cache import KVCache, SlabLayer
from slicing.miniature import CannotCut, check_cut
from tests.support.families import tiny_config

# Families that stock classes exist for and that cannot be cut, with what the refusal has to name.
REFUSED = {
    "gemma4_text": "block 0 of model.layers takes per_layer_input",
    "gemma3n_text": r"hidden states of model.layers have shape \(4, 1, 2, 64\)",
    "deepseek_v4": "hidden states of model.layers have shape",
    "glm_moe_dsa": "block 1 of model.layers takes prev_topk_indices",
    "zaya": "block 1 of model.layers takes prev_router_hidden_states",
    "openai-gpt": "between blocks 0 and 1 of transformer.h",
    "inkling2_loop_text": "between the blocks of model.layers",
    "mllama": "blocks of model.language_model.layers do not run once each",
    "mamba": "MambaForCausalLM gives other logits when a prompt comes in chunks",
    "rwkv": "RwkvForCausalLM takes no key/value cache",
    "minimax": "MiniMax uses cache of its own",
    "hrm_text": "HrmTextForCausalLM has no list of 128 blocks",
    "musicgen_melody": "0 arguments that could be an encoder's states",
    "mpnet": "block 0 of encoder.layer takes position_bias",
    "paligemma": "PaliGemmaForConditionalGeneration gives other logits when a prompt comes in chunks",
}

# Configurations at their real sizes: the miniature has to shrink them by itself.
REAL_SIZES = [
    "llama",
    "gpt2",
    "opt",
    "bloom",
    "gemma3_text",
    "qwen3_next",
    "deepseek_v3",
    "gpt_oss",
    "llama4_text",
    "hy_v3",
]


@pytest.fixture(autouse=True)
def forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(miniature, "_FOUND", {})


@pytest.mark.parametrize("model_type", REFUSED)
def test_a_family_that_cannot_be_cut_is_refused_by_name(model_type: str) -> None:
    with pytest.raises(CannotCut, match=REFUSED[model_type]):
        check_cut(AutoConfig.for_model(model_type))


def test_notes_between_layers_are_refused_when_they_are_read_and_let_pass_when_they_are_not() -> None:
    check_cut(
        tiny_config("gemma4_text")
    )  # the last layers of each kind leave their keys and values for nobody
    with pytest.raises(CannotCut, match=r"between blocks 19 and 20 of model.layers"):
        check_cut(AutoConfig.for_model("gemma4_unified_text", num_kv_shared_layers=10))


@pytest.mark.parametrize("model_type", REAL_SIZES)
def test_a_model_of_real_size_is_checked_small_and_soon(model_type: str) -> None:
    config = AutoConfig.for_model(model_type)
    began = time.process_time()
    report = check_cut(config)
    assert time.process_time() - began < 4  # about 0.3 s when nothing is imported for the first time
    assert report.num_layers == config.get_text_config().num_hidden_layers
    assert report.miniature_layers <= 8


def test_the_miniature_has_one_period_of_the_kinds_of_layers() -> None:
    report = check_cut(AutoConfig.for_model("gemma3_text"))  # five sliding layers, then one that sees all
    assert (report.num_kinds, report.miniature_layers) == (2, 7)


def test_the_ends_own_what_runs_before_and_after_the_blocks() -> None:
    ends = check_cut(tiny_config("opt")).ends
    assert "model.decoder.project_in.weight" in ends.opening - ends.closing
    assert "model.decoder.project_out.weight" in ends.closing - ends.opening
    assert {"lm_head.weight", "model.decoder.embed_tokens.weight"} <= ends.opening & ends.closing


def test_a_result_is_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    report = check_cut(tiny_config("llama"))
    monkeypatch.setattr(miniature, "_check", lambda _config: pytest.fail("checked twice"))
    assert check_cut(tiny_config("llama")) is report
    with pytest.raises(pytest.fail.Exception):
        check_cut(tiny_config("llama", rms_norm_eps=1e-3))


def test_the_random_state_of_the_process_is_left_alone() -> None:
    before = torch.random.get_rng_state()
    check_cut(tiny_config("llama"))
    assert torch.equal(torch.random.get_rng_state(), before)


def run_blocks_elsewhere(
    self: BlockSlice, cache: KVCache, states: torch.Tensor, position: int, start: int, end: int
) -> torch.Tensor:
    """Run blocks as a slice would that adds one to every position."""
    cache.length = max(cache.length, position + 1)
    for layer in cache.layers:
        layer.length = max(layer.length, position + 1)
    return RUN_BLOCKS(self, cache, states, position + 1, start, end)


RUN_BLOCKS = BlockSlice.run_blocks


def test_an_argument_that_a_slice_derives_wrongly_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(BlockSlice, "run_blocks", run_blocks_elsewhere)
    with pytest.raises(CannotCut, match=r"block 0 of model.layers takes position_embeddings"):
        check_cut(tiny_config("llama"))


def test_a_block_that_computes_something_else_in_a_slice_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def run_blocks(self: BlockSlice, *args: Any) -> torch.Tensor:
        states = RUN_BLOCKS(self, *args)
        return states.nextafter(states + 1) if args[3] == 2 else states

    monkeypatch.setattr(BlockSlice, "run_blocks", run_blocks)
    with pytest.raises(CannotCut, match=r"block 2 of model.layers gives other hidden states"):
        check_cut(tiny_config("llama"))


def test_a_storage_that_forgets_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    update = SlabLayer.update

    def forgetful(self: SlabLayer, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor]:
        keys, values = update(self, *args, **kwargs)
        return torch.cat([torch.zeros_like(keys[:, :, :1]), keys[:, :, 1:]], dim=2), values

    monkeypatch.setattr(SlabLayer, "update", forgetful)
    with pytest.raises(CannotCut, match="key/value storage"):
        check_cut(tiny_config("llama"))


def test_a_head_that_is_left_out_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    def run_to_logits(self: BlockSlice, _cache: KVCache, states: torch.Tensor, *_: Any) -> torch.Tensor:
        return self.model.lm_head(self.model.model.norm(states))  # what a hand-written end would do

    monkeypatch.setattr(BlockSlice, "run_to_logits", run_to_logits)
    check_cut(tiny_config("llama"))
    with pytest.raises(CannotCut, match="norm and head"):
        check_cut(tiny_config("gemma2"))
