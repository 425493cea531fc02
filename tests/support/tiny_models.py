"""Stock model classes at a small size with random weights, and the folders that saving them makes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedModel

_SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": 64,
    "max_position_embeddings": 64,
}
_EXPERTS: dict[str, Any] = {
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
    "q_lora_rank": 8,
    "kv_lora_rank": 8,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 4,
    "v_head_dim": 8,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "gpt2": {"n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 64},
    "mixtral": _EXPERTS,
    "qwen3_moe": _EXPERTS,
    "gpt_oss": _EXPERTS,
    "deepseek_v3": _EXPERTS,
    "gemma3_text": {},
    "opt": {"ffn_dim": 48, "word_embed_proj_dim": 32},
    "bloom": {"n_layer": 3, "n_head": 4},
    "gpt_neox": {},
    "granitemoe": _EXPERTS,
    "qwen3_next": _EXPERTS,
}


def tiny_model(family: str, *, seed: int = 0, **changes: Any) -> PreTrainedModel:
    """Build a small model of `family` with random float32 weights."""
    config = AutoConfig.for_model(family, **_SIZES | FAMILIES.get(family, {}) | changes)
    torch.manual_seed(seed)
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()


@contextmanager
def small_llama(
    max_positions: int, *, vocab_size: int = 64, hidden_size: int = 32, num_layers: int = 4
) -> Iterator[LlamaForCausalLM]:
    """A random llama, and torch on one thread while it is used, as nodes of one machine choose."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        intermediate_size=48,
        num_hidden_layers=num_layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=max_positions,
    )
    try:
        yield LlamaForCausalLM(config).eval()
    finally:
        torch.set_num_threads(before)


def hollow(model: PreTrainedModel) -> PreTrainedModel:
    """Build the same model without weights."""
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(model.config, dtype=torch.float32)


def saved(model: PreTrainedModel, folder: Path, *, max_shard_size: str = "5GB") -> Path:
    """Save a model and return its folder."""
    model.save_pretrained(folder, max_shard_size=max_shard_size)
    return folder
