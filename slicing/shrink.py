"""Makes a small configuration of the same class: few layers, small widths, the same kinds of layers.

Works on names and shapes of settings, not on families, and so may fail: `small_configs` yields several attempts, and
its caller takes the first that a model can be built from.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from itertools import pairwise
from typing import Any

from transformers import PretrainedConfig

MIN_LAYERS = 3
MAX_LAYERS = 128  # a longer period of layer kinds than this was not seen; tiny layers are cheap
WINDOW = 4  # short enough that a dozen positions leave it

# Setting -> size in the miniature; a value below it is kept. Widths are multiples of the heads and of each other.
SMALL = {
    "vocab_size": 96,
    "hidden_size": 64,
    "d_model": 64,
    "n_embd": 64,
    "embedding_dim": 64,
    "word_embed_proj_dim": 32,
    "intermediate_size": 80,
    "ffn_dim": 80,
    "n_inner": 80,
    "ffn_hidden_size": 80,
    "depth": 2,
    "embed_dim": 64,
    "num_attention_heads": 4,
    "n_head": 4,
    "n_heads": 4,
    "num_heads": 4,
    "attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_attention_heads": 4,
    "num_key_value_heads": 4,
    "num_kv_heads": 4,
    "head_dim": 16,
    "rotary_dim": 8,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 16,
    "kv_lora_rank": 16,
    "q_lora_rank": 16,
    "num_experts": 8,
    "n_routed_experts": 8,
    "num_local_experts": 8,
    "moe_num_experts": 8,
    "num_experts_per_tok": 2,
    "num_experts_per_token": 2,
    "moe_topk": 2,
    "moe_k": 2,
    "top_k_experts": 2,
    "n_group": 2,
    "num_expert_group": 2,
    "topk_group": 1,
    "n_shared_experts": 1,
    "linear_num_heads": 4,
    "linear_head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "state_size": 8,
    "mamba_d_state": 8,
    "mamba_n_heads": 8,
    "mamba_d_head": 16,
    "mamba_chunk_size": 8,
}
WINDOW_KEYS = ("sliding_window", "attention_chunk_size", "window_size", "local_attention")
HEAD_KEYS = (
    "head_dim",
    "rotary_dim",
    "lora_rank",
)  # kept in the second attempt: tables may be as long as these
TOKEN_ID_SUFFIXES = ("_token_id", "_token_ids", "_token_index")


def small_configs(config: PretrainedConfig, num_layers: int) -> Iterator[Callable[[], PretrainedConfig]]:
    """Yield attempts at a miniature with the first `num_layers` layers, the smallest first.

    Calling one makes the configuration; it raises whatever the class raises over sizes that do not fit.
    """
    settings = config.to_dict()
    text_config = config.get_text_config(decoder=True)
    layer_key = text_config.attribute_map.get("num_hidden_layers", "num_hidden_layers")
    total = text_config.num_hidden_layers
    for layers in dict.fromkeys((num_layers, min(total, MAX_LAYERS))):
        for keeps_heads in (False, True):
            small = _shrink(settings, layer_key, total, layers, keeps_heads)
            yield partial(type(config).from_dict, small)


def num_layers_of_one_period(kinds: list[Any]) -> int:
    """Return the length of the shortest start of the stack in which every change of kind occurs that occurs at all."""
    changes = list(pairwise(kinds))
    missing = set(changes)
    for place, change in enumerate(changes):
        missing.discard(change)
        if not missing:
            return min(max(place + 2, MIN_LAYERS), len(kinds), MAX_LAYERS)
    return min(len(kinds), MAX_LAYERS)


def _shrink(
    settings: dict[str, Any], layer_key: str, total: int, layers: int, keeps_heads: bool
) -> dict[str, Any]:
    small: dict[str, Any] = {}
    for key, value in settings.items():
        if isinstance(value, dict):
            small[key] = _shrink(value, layer_key, total, layers, keeps_heads)
        elif isinstance(value, list | tuple):
            small[key] = _shrink_list(key, list(value), total, layers, keeps_heads)
        elif isinstance(value, int) and not isinstance(value, bool):
            small[key] = layers if key == layer_key else _shrink_number(key, value, keeps_heads)
        else:
            small[key] = value
    _mend_ratios(small, settings, keeps_heads)
    return small


def _shrink_list(key: str, values: list[Any], total: int, layers: int, keeps_heads: bool) -> list[Any]:
    if key.endswith(TOKEN_ID_SUFFIXES):
        return [_shrink_number(key, value, keeps_heads) for value in values]
    numbers = [value for value in values if isinstance(value, int) and not isinstance(value, bool)]
    if len(values) == total:
        return [
            _shrink_number(key, value, keeps_heads) if value in numbers else value
            for value in values[:layers]
        ]
    if len(numbers) == len(values) and key.endswith(("layers", "idxs", "ids")):
        return [value for value in values if value < layers]
    return values


def _shrink_number(key: str, value: int, keeps_heads: bool) -> int:
    if key.endswith(TOKEN_ID_SUFFIXES):
        return min(value, 3) if value >= 0 else value
    if key in WINDOW_KEYS:
        return min(value, WINDOW)
    if keeps_heads and any(part in key for part in HEAD_KEYS):
        return value
    if key in SMALL:
        return min(value, SMALL[key])
    for part in ("vocab_size", "intermediate_size", "ffn_dim"):
        if part in key:
            return min(value, SMALL[part])
    return value


def _mend_ratios(small: dict[str, Any], settings: dict[str, Any], keeps_heads: bool) -> None:
    """Keep what hangs together: grouped heads stay grouped, and a width is a multiple of its heads' width."""
    heads, width = settings.get("num_attention_heads"), settings.get("hidden_size")
    if not isinstance(heads, int):
        return
    for key in ("num_key_value_heads", "num_kv_heads"):
        kv_heads = settings.get(key)
        if isinstance(kv_heads, int) and kv_heads < heads:
            small[key] = 1 if kv_heads == 1 else small["num_attention_heads"] // 2
    if keeps_heads and isinstance(width, int) and settings.get("head_dim") is None:
        small["hidden_size"] = width // heads * small["num_attention_heads"]
    if small.get("mamba_d_ssm") is not None:
        small["mamba_d_ssm"] = small["mamba_n_heads"] * small["mamba_d_head"]
