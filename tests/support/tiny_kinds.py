"""Tiny random models of every kind that is not a plain text model."""

from __future__ import annotations

import torch
from transformers import (
    BartConfig,
    BertConfig,
    EncodecConfig,
    MusicgenConfig,
    PretrainedConfig,
    PreTrainedModel,
    Qwen3Config,
    T5Config,
    WhisperConfig,
)
from transformers.models.musicgen.configuration_musicgen import MusicgenDecoderConfig

from slicing.stacks import new_model

WIDTH = 32
NUM_LAYERS = 4
CODEBOOK = 64

_SPEECH = {
    "d_model": WIDTH,
    "encoder_layers": 2,
    "decoder_layers": NUM_LAYERS,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 64,
    "decoder_ffn_dim": 64,
}


def tiny_config(name: str) -> PretrainedConfig:
    """The configuration of a tiny model by its family's name."""
    return _CONFIGS[name]()


def tiny_model(name: str, seed: int = 0) -> PreTrainedModel:
    """A tiny stock model with random weights, float32."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return new_model(tiny_config(name), torch.float32).eval().requires_grad_(False)


def _musicgen() -> PretrainedConfig:
    decoder = MusicgenDecoderConfig(
        vocab_size=CODEBOOK,
        hidden_size=WIDTH,
        num_hidden_layers=NUM_LAYERS,
        ffn_dim=64,
        num_attention_heads=4,
        num_codebooks=4,
        max_position_embeddings=64,
        pad_token_id=CODEBOOK,
        bos_token_id=CODEBOOK,
    )
    text = T5Config(vocab_size=50, d_model=16, d_kv=8, d_ff=32, num_layers=1, num_heads=2)
    codec = EncodecConfig(codebook_size=CODEBOOK, num_filters=4, hidden_size=16, codebook_dim=16)
    return MusicgenConfig(
        text_encoder=text.to_dict(), audio_encoder=codec.to_dict(), decoder=decoder.to_dict()
    )


_CONFIGS = {
    "t5": lambda: T5Config(
        vocab_size=100,
        d_model=WIDTH,
        d_kv=8,
        d_ff=64,
        num_layers=2,
        num_decoder_layers=NUM_LAYERS,
        num_heads=4,
        decoder_start_token_id=0,
    ),
    "bart": lambda: BartConfig(vocab_size=100, max_position_embeddings=64, **_SPEECH),
    "whisper": lambda: WhisperConfig(
        vocab_size=100,
        max_source_positions=20,
        max_target_positions=40,
        num_mel_bins=8,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        decoder_start_token_id=1,
        **_SPEECH,
    ),
    "musicgen": _musicgen,
    "bert": lambda: BertConfig(
        vocab_size=100,
        hidden_size=WIDTH,
        num_hidden_layers=NUM_LAYERS,
        num_attention_heads=4,
        intermediate_size=64,
        architectures=["BertModel"],
    ),
    "qwen3": lambda: Qwen3Config(
        vocab_size=100,
        hidden_size=WIDTH,
        num_hidden_layers=NUM_LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        intermediate_size=64,
        architectures=["Qwen3Model"],
    ),
}
