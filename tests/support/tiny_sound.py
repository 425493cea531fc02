"""A tiny random MusicGen of stock classes, with tokenizer and codec, as a folder that a checkpoint opens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers, processors
from transformers import MusicgenConfig, MusicgenForConditionalGeneration, PreTrainedTokenizerFast

VOCAB_SIZE = 32  # of a codebook; its last id plus one pads and begins
DEPTH = 4  # codebooks of a channel
RATE = 4000  # Hz
FRAME_SAMPLES = 80
FRAME_RATE = RATE // FRAME_SAMPLES
NUM_LAYERS = 3
HIDDEN_SIZE = 32
MAX_POSITIONS = 64
TEXT_TOKENS = 24  # that its tokenizer says the text encoder takes

_TEXT_ENCODER: dict[str, Any] = {
    "model_type": "t5",
    "vocab_size": 264,
    "d_model": 16,
    "d_kv": 8,
    "d_ff": 32,
    "num_layers": 2,
    "num_heads": 2,
    "decoder_start_token_id": 0,
}
_CODEC: dict[str, Any] = {
    "model_type": "encodec",
    "sampling_rate": RATE,
    "num_filters": 2,
    "upsampling_ratios": [5, 4, 4],
    "codebook_size": VOCAB_SIZE,
    "hidden_size": 8,
    "codebook_dim": 8,
    "target_bandwidths": [DEPTH * 5 * FRAME_RATE / 1000],  # kbit/s: 5 bits a code
}


def tiny_music(*, channels: int = 1, seed: int = 0, **changes: Any) -> Any:
    """A small MusicgenForConditionalGeneration with random float32 weights; `changes` are of its decoder."""
    decoder: dict[str, Any] = {
        "vocab_size": VOCAB_SIZE,
        "max_position_embeddings": MAX_POSITIONS,
        "num_hidden_layers": NUM_LAYERS,
        "ffn_dim": 48,
        "num_attention_heads": 4,
        "hidden_size": HIDDEN_SIZE,
        "num_codebooks": DEPTH * channels,
        "audio_channels": channels,
        "pad_token_id": VOCAB_SIZE,
        "bos_token_id": VOCAB_SIZE,
        "initializer_factor": 0.3,
    }
    config = MusicgenConfig(text_encoder=_TEXT_ENCODER, audio_encoder=_CODEC, decoder=decoder | changes)
    torch.manual_seed(seed)
    model: Any = MusicgenForConditionalGeneration(config)
    model.eval()
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if name.endswith((".codebook.embed", "enc_to_dec_proj.bias")):  # zeros otherwise
            tensor.data.normal_()
    own = model.generation_config
    own.pad_token_id = own.bos_token_id = own.decoder_start_token_id = VOCAB_SIZE
    own.guidance_scale, own.max_length, own.do_sample = 3.0, 24, True
    return model


def save_music(model: Any, folder: Path) -> Path:
    """Save it with a byte-level tokenizer that ends every text, as T5's does."""
    model.save_pretrained(folder)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {"<pad>": 0, "</s>": 1, "<unk>": 2} | {letter: index + 3 for index, letter in enumerate(alphabet)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in list(vocab)[:3]])
    tokenizer.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 1)])
    wrapped = PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        eos_token="</s>",
        unk_token="<unk>",
        model_max_length=TEXT_TOKENS,
    )
    wrapped.save_pretrained(str(folder))
    return folder
