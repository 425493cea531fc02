"""Writes a tiny random Whisper as CTranslate2 does, so that reading it can be compared with what went in."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import numpy as np
import torch
from transformers import WhisperConfig, WhisperForConditionalGeneration

CODES = {"float32": 0, "int8": 1, "int16": 2, "float16": 4}
SPECIAL = (
    "<|endoftext|>",
    "<|startoftranscript|>",
    "<|en|>",
    "<|translate|>",
    "<|transcribe|>",
    "<|startoflm|>",
)
SPECIAL += ("<|startofprev|>", "<|nospeech|>", "<|notimestamps|>")


def tiny_whisper(vocab_size: int = 600) -> WhisperForConditionalGeneration:
    """Weights are float16 numbers, as the files hold them."""
    torch.manual_seed(5)
    config = WhisperConfig(
        vocab_size=vocab_size,
        d_model=16,
        encoder_layers=2,
        decoder_layers=3,
        encoder_attention_heads=2,
        decoder_attention_heads=4,
        encoder_ffn_dim=24,
        decoder_ffn_dim=32,
        num_mel_bins=8,
        max_source_positions=10,
        max_target_positions=12,
        pad_token_id=0,
        suppress_tokens=None,
        begin_suppress_tokens=None,
    )
    model = WhisperForConditionalGeneration(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.half().float())
    return model


def write_ct2(
    model: WhisperForConditionalGeneration, folder: Path, *, change: dict[str, np.ndarray] | None = None
) -> Path:
    """Write model.bin, config.json and tokenizer.json; `change` puts other variables in."""
    folder.mkdir(parents=True, exist_ok=True)
    variables = variables_of(model) | (change or {})
    (folder / "model.bin").write_bytes(pack(variables))
    stated = {"suppress_ids": [1, 2, 7], "suppress_ids_begin": [3, 0], "alignment_heads": [], "lang_ids": []}
    (folder / "config.json").write_text(json.dumps(stated))
    first = model.config.vocab_size - 1501 - len(SPECIAL) if model.config.vocab_size > 2000 else 300
    plain = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    added = [{"id": first + at, "content": text, "special": True} | plain for at, text in enumerate(SPECIAL)]
    tokenizer = {
        "version": "1.0",
        "added_tokens": added,
        "pre_tokenizer": {
            "type": "ByteLevel",
            "add_prefix_space": False,
            "trim_offsets": True,
            "use_regex": True,
        },
        "decoder": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True},
        "model": {"type": "BPE", "vocab": {f"t{number}": number for number in range(first)}, "merges": []},
    }
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    return folder


def pack(variables: dict[str, np.ndarray], *, version: int = 6, specification: str = "WhisperSpec") -> bytes:
    """The file's bytes."""
    parts = [struct.pack("<I", version), _string(specification), struct.pack("<II", 3, len(variables))]
    for name, values in variables.items():
        parts += [
            _string(name),
            struct.pack("<B", values.ndim),
            struct.pack(f"<{values.ndim}I", *values.shape),
        ]
        parts += [struct.pack("<BI", CODES[values.dtype.name], values.nbytes), values.tobytes()]
    parts += [
        struct.pack("<I", 1),
        _string("decoder/projection/weight"),
        _string("decoder/embeddings/weight"),
    ]
    return b"".join(parts)


def _string(text: str) -> bytes:
    raw = text.encode() + b"\0"
    return struct.pack("<H", len(raw)) + raw


def variables_of(model: WhisperForConditionalGeneration) -> dict[str, np.ndarray]:
    """The model's weights under CTranslate2's names."""
    state = {name: value.half().numpy() for name, value in model.state_dict().items()}
    config = model.config
    made: dict[str, np.ndarray] = {
        "decoder/activation": np.array(3, np.int8),
        "encoder/num_heads": np.array(config.encoder_attention_heads, np.int16),
        "decoder/num_heads": np.array(config.decoder_attention_heads, np.int16),
        "decoder/embeddings/weight": state["model.decoder.embed_tokens.weight"],
    }
    for conv in ("conv1", "conv2"):
        made |= {
            f"encoder/{conv}/{part}": state[f"model.encoder.{conv}.{part}"] for part in ("weight", "bias")
        }
    for side, layers in (("encoder", config.encoder_layers), ("decoder", config.decoder_layers)):
        made[f"{side}/position_encodings/encodings"] = state[f"model.{side}.embed_positions.weight"]
        made |= _norm(state, f"model.{side}.layer_norm", f"{side}/layer_norm")
        for number in range(layers):
            made |= _layer(
                state, f"model.{side}.layers.{number}", f"{side}/layer_{number}", side == "decoder"
            )
    return made


def _layer(state: dict[str, np.ndarray], ours: str, theirs: str, is_decoder: bool) -> dict[str, np.ndarray]:
    own = [f"{ours}.self_attn.{name}_proj" for name in "qkv"]
    made = _linear(state, own, f"{theirs}/self_attention/linear_0")
    made |= _linear(state, [f"{ours}.self_attn.out_proj"], f"{theirs}/self_attention/linear_1")
    made |= _norm(state, f"{ours}.self_attn_layer_norm", f"{theirs}/self_attention/layer_norm")
    if is_decoder:
        cross = [f"{ours}.encoder_attn.{name}_proj" for name in "qkv"]
        made |= _linear(state, cross[:1], f"{theirs}/attention/linear_0")
        made |= _linear(state, cross[1:], f"{theirs}/attention/linear_1")
        made |= _linear(state, [f"{ours}.encoder_attn.out_proj"], f"{theirs}/attention/linear_2")
        made |= _norm(state, f"{ours}.encoder_attn_layer_norm", f"{theirs}/attention/layer_norm")
    made |= _linear(state, [f"{ours}.fc1"], f"{theirs}/ffn/linear_0")
    made |= _linear(state, [f"{ours}.fc2"], f"{theirs}/ffn/linear_1")
    return made | _norm(state, f"{ours}.final_layer_norm", f"{theirs}/ffn/layer_norm")


def _norm(state: dict[str, np.ndarray], ours: str, theirs: str) -> dict[str, np.ndarray]:
    return {f"{theirs}/gamma": state[f"{ours}.weight"], f"{theirs}/beta": state[f"{ours}.bias"]}


def _linear(state: dict[str, np.ndarray], ours: list[str], theirs: str) -> dict[str, np.ndarray]:
    """Rows stacked; a bias that the class lacks is zeros."""
    zeros = [np.zeros(len(state[f"{name}.weight"]), np.float16) for name in ours]
    biases = [state.get(f"{name}.bias", zero) for name, zero in zip(ours, zeros, strict=True)]
    weights = [state[f"{name}.weight"] for name in ours]
    return {f"{theirs}/weight": np.concatenate(weights), f"{theirs}/bias": np.concatenate(biases)}
