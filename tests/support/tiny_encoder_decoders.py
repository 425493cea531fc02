"""Stock encoder-decoder models at a small size, with weights that make their answers vary."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import (
    BartConfig,
    BartForConditionalGeneration,
    GenerationMixin,
    PreTrainedModel,
    T5Config,
    T5ForConditionalGeneration,
    WhisperConfig,
    WhisperForConditionalGeneration,
)

VOCAB_SIZE = 300
HIDDEN_SIZE = 32
MAX_POSITIONS = 64
SPREAD, EMBEDDING_SPREAD = 0.3, 0.5  # of the weights: tokens, their order and the input all matter then
PENALTY = 1.5  # of repetition: else every token of such a model is the same

_LAYERS: dict[str, Any] = {
    "d_model": HIDDEN_SIZE,
    "encoder_layers": 2,
    "decoder_layers": 4,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48,
    "vocab_size": VOCAB_SIZE,
}


@dataclass(frozen=True)
class TinyPair:
    """A model, what its decoder begins with, and an input [1, ...] of its encoder."""

    model: PreTrainedModel
    start_ids: tuple[int, ...]
    inputs: dict[str, torch.Tensor] = field(repr=False)

    @torch.inference_mode()
    def memory(self) -> torch.Tensor:
        """What the stock encoder makes of the input: [rows, hidden]."""
        states: torch.Tensor = self.model.get_encoder()(**self.inputs).last_hidden_state[0]
        return states

    def generated(self, num_tokens: int) -> list[int]:
        """What stock greedy generation gives, without what it begins with."""
        ids = GenerationMixin.generate(
            self.model,  # Whisper's own `generate` knows of windows and languages
            **self.inputs,
            decoder_input_ids=torch.tensor([self.start_ids]),
            max_new_tokens=num_tokens,
            do_sample=False,
            num_beams=1,
            repetition_penalty=PENALTY,
        )
        return ids[0, len(self.start_ids) :].tolist()  # type: ignore[index,union-attr]


def tiny_pair(family: str) -> TinyPair:
    """A T5, a Bart or a Whisper, the same at each call."""
    torch.manual_seed(11)
    ids = {"input_ids": torch.randint(3, VOCAB_SIZE, (1, 9))}
    match family:
        case "t5":
            config = T5Config(
                vocab_size=VOCAB_SIZE,
                d_model=HIDDEN_SIZE,
                d_kv=8,
                d_ff=48,
                num_layers=4,
                num_heads=4,
                decoder_start_token_id=0,
                n_positions=MAX_POSITIONS,
            )
            return TinyPair(_lively(T5ForConditionalGeneration(config)), (0,), ids)
        case "bart":
            bart = BartConfig(**_LAYERS, max_position_embeddings=MAX_POSITIONS, tie_word_embeddings=False)
            return TinyPair(_lively(BartForConditionalGeneration(bart)), (2,), ids)
        case "whisper":
            whisper = WhisperConfig(
                **_LAYERS,
                max_target_positions=MAX_POSITIONS,
                max_source_positions=20,
                num_mel_bins=8,
                pad_token_id=0,
                bos_token_id=1,
                eos_token_id=2,
                decoder_start_token_id=1,
                suppress_tokens=None,
                begin_suppress_tokens=None,
            )
            features = {"input_features": torch.randn(1, 8, 40)}
            return TinyPair(_lively(WhisperForConditionalGeneration(whisper)), (1, 7), features)
    raise ValueError(family)


@torch.no_grad()
def _lively(model: PreTrainedModel) -> PreTrainedModel:
    for name, parameter in model.named_parameters():
        if parameter.dim() > 1:
            parameter.normal_(0, EMBEDDING_SPREAD if "embed" in name or "shared" in name else SPREAD)
    stated = model.generation_config
    assert stated is not None
    stated.eos_token_id = stated.forced_eos_token_id = stated.forced_bos_token_id = None
    return model.eval()
