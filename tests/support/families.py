"""Tiny configurations of many transformers families: the real classes at small sizes, shared by tests and bench.

A table of settings and a way to make a model of each with random weights; knows nothing of slicing.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

NUM_LAYERS = 6
VOCAB_SIZE = 96
NOISE = 0.1  # added to every weight: what starts at 0 or 1 (norms, gates, biases) must count as well

_IDS: dict[str, Any] = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
_PLAIN: dict[str, Any] = {
    "num_hidden_layers": NUM_LAYERS,
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "max_position_embeddings": 256,
}
_LLAMA = _PLAIN | {"num_key_value_heads": 2, "head_dim": 16}
_GPT = {"n_layer": NUM_LAYERS, "vocab_size": VOCAB_SIZE, "n_embd": 64, "n_head": 4, "n_positions": 256}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48}
_LATENT = {
    "kv_lora_rank": 16,
    "q_lora_rank": 24,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
}
_ROUTED = {
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "n_group": 2,
    "topk_group": 1,
    "moe_intermediate_size": 32,
}
_LINEAR = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}
_SLIDING = ["sliding_attention", "full_attention"] * (NUM_LAYERS // 2)
_HYBRID = ["linear_attention", "linear_attention", "full_attention"] * (NUM_LAYERS // 3)

# name -> (transformers' model type, settings)
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2": ("gpt2", _GPT),
    "gpt_bigcode": ("gpt_bigcode", _GPT),
    "gpt_neo": (
        "gpt_neo",
        {
            "num_layers": NUM_LAYERS,
            "vocab_size": VOCAB_SIZE,
            "hidden_size": 64,
            "num_heads": 4,
            "intermediate_size": 96,
            "max_position_embeddings": 256,
            "attention_types": [[["global", "local"], NUM_LAYERS // 2]],
            "window_size": 8,
        },
    ),
    "gpt_neox": ("gpt_neox", _PLAIN),
    "gptj": ("gptj", _GPT | {"rotary_dim": 8}),
    "codegen": ("codegen", _GPT | {"rotary_dim": 8}),
    "opt": (
        "opt",
        {
            "num_hidden_layers": NUM_LAYERS,
            "vocab_size": VOCAB_SIZE,
            "hidden_size": 64,
            "ffn_dim": 96,
            "num_attention_heads": 4,
            "max_position_embeddings": 256,
            "word_embed_proj_dim": 32,
        },
    ),
    "bloom": ("bloom", {"n_layer": NUM_LAYERS, "vocab_size": VOCAB_SIZE, "hidden_size": 64, "n_head": 4}),
    "mpt": (
        "mpt",
        {"n_layers": NUM_LAYERS, "vocab_size": VOCAB_SIZE, "d_model": 64, "n_heads": 4, "max_seq_len": 256},
    ),
    "falcon": ("falcon", _PLAIN | {"num_kv_heads": 1, "ffn_hidden_size": 96}),
    "falcon_alibi": ("falcon", _PLAIN | {"alibi": True, "new_decoder_architecture": True, "num_kv_heads": 2}),
    "xglm": (
        "xglm",
        {
            "num_layers": NUM_LAYERS,
            "vocab_size": VOCAB_SIZE,
            "d_model": 64,
            "ffn_dim": 96,
            "attention_heads": 4,
            "max_position_embeddings": 256,
        },
    ),
    "biogpt": ("biogpt", _PLAIN),
    "llama": ("llama", _LLAMA),
    "llama_tied": ("llama", _LLAMA | {"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True}),
    "llama4_text": (
        "llama4_text",
        _LLAMA
        | {
            "intermediate_size_mlp": 96,
            "num_local_experts": 4,
            "interleave_moe_layer_step": 2,
            "attention_chunk_size": 16,
            "no_rope_layers": [1, 1, 1, 0, 1, 1],
        },
    ),
    "mistral": ("mistral", _LLAMA | {"sliding_window": 16}),
    "ministral3": ("ministral3", _LLAMA),
    "mixtral": ("mixtral", _LLAMA | {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "qwen2": (
        "qwen2",
        _PLAIN
        | {
            "num_key_value_heads": 2,
            "use_sliding_window": True,
            "sliding_window": 16,
            "max_window_layers": 3,
        },
    ),
    "qwen2_moe": (
        "qwen2_moe",
        _PLAIN
        | _EXPERTS
        | {"num_key_value_heads": 2, "shared_expert_intermediate_size": 48, "mlp_only_layers": [1]},
    ),
    "qwen3": ("qwen3", _LLAMA),
    "qwen3_moe": ("qwen3_moe", _LLAMA | _EXPERTS | {"decoder_sparse_step": 2, "mlp_only_layers": [3]}),
    "qwen3_next": (
        "qwen3_next",
        _LLAMA | _EXPERTS | _LINEAR | {"shared_expert_intermediate_size": 48, "layer_types": _HYBRID},
    ),
    "olmo_hybrid": ("olmo_hybrid", _PLAIN | _LINEAR | {"num_key_value_heads": 2, "layer_types": _HYBRID}),
    "gemma": ("gemma", _LLAMA),
    "gemma2": (
        "gemma2",
        _LLAMA | {"sliding_window": 16, "query_pre_attn_scalar": 16, "final_logit_softcapping": 5.0},
    ),
    "gemma3_text": (
        "gemma3_text",
        _LLAMA
        | {
            "sliding_window": 16,
            "query_pre_attn_scalar": 16,
            "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * (NUM_LAYERS // 3),
        },
    ),
    "gemma4_text": (
        "gemma4_text",
        _LLAMA
        | {
            "sliding_window": 16,
            "global_head_dim": 16,
            "hidden_size_per_layer_input": 0,
            "num_kv_shared_layers": 0,
            "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * (NUM_LAYERS // 3),
        },
    ),
    "vaultgemma": ("vaultgemma", _LLAMA | {"sliding_window": 16, "query_pre_attn_scalar": 16}),
    "cohere": ("cohere", _LLAMA | {"logit_scale": 0.25}),
    "cohere2": ("cohere2", _LLAMA | {"logit_scale": 0.25, "sliding_window": 16}),
    "gpt_oss": (
        "gpt_oss",
        _LLAMA
        | {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 16, "layer_types": _SLIDING},
    ),
    "deepseek_v2": (
        "deepseek_v2",
        _PLAIN
        | _LATENT
        | _ROUTED
        | {"num_key_value_heads": 4, "first_k_dense_replace": 1, "n_shared_experts": 1},
    ),
    "deepseek_v3": (
        "deepseek_v3",
        _PLAIN
        | _LATENT
        | _ROUTED
        | {"num_key_value_heads": 4, "first_k_dense_replace": 2, "n_shared_experts": 1},
    ),
    "phi": ("phi", _PLAIN),
    "phi3": ("phi3", _PLAIN | {"num_key_value_heads": 2, "sliding_window": 16}),
    "phimoe": (
        "phimoe",
        _PLAIN | {"num_key_value_heads": 2, "num_local_experts": 4, "num_experts_per_tok": 2},
    ),
    "olmo": ("olmo", _LLAMA),
    "olmo2": ("olmo2", _LLAMA),
    "olmo3": ("olmo3", _LLAMA | {"sliding_window": 16}),
    "olmoe": ("olmoe", _PLAIN | {"num_key_value_heads": 2, "num_experts": 4, "num_experts_per_tok": 2}),
    "stablelm": ("stablelm", _PLAIN | {"num_key_value_heads": 2, "use_qkv_bias": True}),
    "starcoder2": ("starcoder2", _PLAIN | {"num_key_value_heads": 2, "sliding_window": 16}),
    "glm": ("glm", _LLAMA),
    "glm4": ("glm4", _LLAMA),
    "glm4_moe": (
        "glm4_moe",
        _LLAMA | _ROUTED | {"first_k_dense_replace": 2, "n_shared_experts": 1},
    ),
    "smollm3": ("smollm3", _PLAIN | {"num_key_value_heads": 2}),
    "granite": (
        "granite",
        _LLAMA | {"logits_scaling": 4.0, "embedding_multiplier": 2.0, "residual_multiplier": 0.5},
    ),
    "granitemoe": (
        "granitemoe",
        _PLAIN | {"num_key_value_heads": 2, "num_local_experts": 4, "num_experts_per_tok": 2},
    ),
    "nemotron": ("nemotron", _LLAMA),
    "persimmon": ("persimmon", _PLAIN),
    "exaone4": ("exaone4", _LLAMA | {"sliding_window": 16, "layer_types": _SLIDING}),
    "ernie4_5": ("ernie4_5", _LLAMA),
    "seed_oss": ("seed_oss", _LLAMA),
    "arcee": ("arcee", _LLAMA),
    "apertus": ("apertus", _LLAMA),
    "helium": ("helium", _LLAMA),
    "lfm2": (
        "lfm2",
        _PLAIN
        | {
            "num_key_value_heads": 2,
            "block_multiple_of": 8,
            "layer_types": ["conv", "full_attention", "conv"] * (NUM_LAYERS // 3),
        },
    ),
    "granitemoehybrid": (
        "granitemoehybrid",
        _PLAIN
        | {
            "num_key_value_heads": 2,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "shared_intermediate_size": 48,
            "mamba_n_heads": 8,
            "mamba_d_head": 16,
            "mamba_d_state": 8,
            "mamba_chunk_size": 8,
            "layer_types": ["mamba", "attention", "mamba"] * (NUM_LAYERS // 3),
        },
    ),
    "minimax_m2": (
        "minimax_m2",
        _LLAMA | {"num_local_experts": 4, "num_experts_per_tok": 2, "rotary_dim": 8},
    ),
    "nanochat": ("nanochat", _PLAIN | {"num_key_value_heads": 2}),
}


def tiny_config(name: str, **changes: Any) -> PretrainedConfig:
    """Return the tiny configuration of a family, with settings changed at will."""
    model_type, settings = FAMILIES[name]
    return AutoConfig.for_model(model_type, **_IDS | settings | changes)


def tiny_model(config: PretrainedConfig, seed: int = 0) -> PreTrainedModel:
    """Return the stock class in float32 with random weights, none of them at its initial 0 or 1."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval().requires_grad_(False)
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * NOISE)
    return model


def token_ids(count: int, seed: int = 0) -> torch.Tensor:
    """Return random token ids [count], none of them special."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(4, VOCAB_SIZE, (count,), generator=generator)
