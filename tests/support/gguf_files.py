"""Writes tiny GGUF files the way llama.cpp's converter does, from a stock model; independent of how they are read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from transformers import PreTrainedModel
from transformers.convert_slow_tokenizer import bytes_to_unicode

ARCHITECTURES = {
    "llama": gguf.MODEL_ARCH.LLAMA,
    "gemma3_text": gguf.MODEL_ARCH.GEMMA3,
    "lfm2": gguf.MODEL_ARCH.LFM2,
}
CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
)


def write_gguf(model: PreTrainedModel, file: Path) -> dict[str, torch.Tensor]:
    """Write `model` and a byte-level tokenizer; matrices whose rows fit become Q8_0.

    Returns what the file's weights are worth: the model's names and float32 values after quantisation.
    """
    config = model.config
    architecture = ARCHITECTURES[config.model_type]
    writer = gguf.GGUFWriter(file, gguf.MODEL_ARCH_NAMES[architecture])
    _add_metadata(writer, config)
    names = gguf.get_tensor_name_map(architecture, config.num_hidden_layers)
    worth: dict[str, torch.Tensor] = {}
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        stored = _to_gguf(name, tensor, config)
        module, _, suffix = name.rpartition(".")
        is_matrix = stored.ndim == 2 and stored.shape[-1] % 32 == 0
        kind = gguf.GGMLQuantizationType.Q8_0 if is_matrix else gguf.GGMLQuantizationType.F32
        packed = gguf.quantize(stored, kind)
        writer.add_tensor(f"{names.get_name(module)}.{suffix}", packed, raw_dtype=kind)
        worth[name] = _from_gguf(name, gguf.dequantize(packed, kind), tensor, config)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return worth


def _add_metadata(writer: gguf.GGUFWriter, config: Any) -> None:
    layers = getattr(config, "layer_types", None) or []
    kv_heads = [0 if kind == "conv" else config.num_key_value_heads for kind in layers]
    writer.add_name("tiny")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(kv_heads if config.model_type == "lfm2" else config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10_000.0)
    writer.add_vocab_size(config.vocab_size)
    if config.model_type == "gemma3_text":
        writer.add_key_length(config.head_dim)
        writer.add_value_length(config.head_dim)
        writer.add_sliding_window(config.sliding_window)
    if config.model_type == "lfm2":
        writer.add_shortconv_l_cache(config.conv_L_cache)
    specials = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    tokens = [*specials, *bytes_to_unicode().values(), "he", "ll"]
    padding = [f"<unused{number}>" for number in range(config.vocab_size - len(tokens))]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list([*tokens, *padding])
    writer.add_token_types([3] * 3 + [1] * (len(tokens) - 3) + [5] * len(padding))
    writer.add_token_merges(["h e", "l l"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_chat_template(CHAT_TEMPLATE)


def _to_gguf(name: str, tensor: torch.Tensor, config: Any) -> np.ndarray:
    """Change a tensor as llama.cpp's converter does: rotary rows paired for llama, gemma's norms stored as w + 1."""
    values = tensor.float().numpy()
    if (heads := _rotary_heads(name, config)) is not None:
        values = values.reshape(heads, 2, -1, values.shape[-1]).swapaxes(1, 2).reshape(values.shape)
    if config.model_type == "gemma3_text" and "norm" in name:
        values = values + 1
    return np.ascontiguousarray(values.squeeze(1) if values.ndim == 3 else values)


def _from_gguf(name: str, values: np.ndarray, original: torch.Tensor, config: Any) -> torch.Tensor:
    if (heads := _rotary_heads(name, config)) is not None:
        values = values.reshape(heads, -1, 2, values.shape[-1]).swapaxes(1, 2).reshape(values.shape)
    if config.model_type == "gemma3_text" and "norm" in name:
        values = values - 1
    return torch.from_numpy(np.ascontiguousarray(values)).reshape(original.shape)


def _rotary_heads(name: str, config: Any) -> int | None:
    if config.model_type != "llama":
        return None
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    return next((number for part, number in heads.items() if part in name), None)
