"""How a stock model's forward is fed and what it returns, by what the model is.

Ids, embeddings and dummies in, logits or hidden states out, always as [1, rows, ...]. Knows nothing of cuts.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.modeling_outputs import BaseModelOutput

from slicing.model_kind import ModelKind, ModelShape, shape_of

CACHE_ARGUMENTS = ("cache", "past_key_values")  # transformers 5.24 and later, and before


@dataclass(frozen=True)
class ForwardForm:
    """The arguments of one class's forward."""

    shape: ModelShape
    cache_argument: str | None
    position_argument: str | None
    dtype: torch.dtype
    memory_width: int  # of what the encoder hands on, before anything projects it; 0: there is no encoder

    @classmethod
    def of(cls, model: PreTrainedModel) -> ForwardForm:
        """Read it from a model's class and configuration."""
        shape = shape_of(model.config)
        accepted = inspect.signature(type(model).forward).parameters
        position = "decoder_position_ids" if shape.kind.has_memory else "position_ids"
        return cls(
            shape,
            next((name for name in CACHE_ARGUMENTS if name in accepted), None),
            position if position in accepted and shape.kind is not ModelKind.ENCODER else None,
            model.dtype,
            _memory_width(model) if shape.kind.has_memory else 0,
        )

    @property
    def kind(self) -> ModelKind:
        """What the model is."""
        return self.shape.kind

    @property
    def is_causal(self) -> bool:
        """Whether a row sees only what is before it, so that a text can come in steps."""
        return self.kind is not ModelKind.ENCODER

    def with_ids(self, token_ids: torch.Tensor, encoded: torch.Tensor | None = None) -> dict[str, Any]:
        """The arguments for token ids [1, rows], or [1, rows, streams].

        `encoded` is what an encoder made [1, rows, width]; None: a row of zeros, for blocks that are given the
        session's own in its place.
        """
        if self.shape.num_streams > 1:  # [streams, rows], as a batch of sequences
            token_ids = token_ids[0].T.contiguous()
        if self.kind.has_memory:
            return {"decoder_input_ids": token_ids} | self._after_encoder(token_ids.device, encoded)
        return {"input_ids": token_ids}

    def with_embeds(self, embeds: torch.Tensor) -> dict[str, Any]:
        """The arguments for input embeddings [1, rows, width]."""
        if self.kind.has_memory:
            return {"decoder_inputs_embeds": embeds} | self._after_encoder(embeds.device, None)
        return {"inputs_embeds": embeds}

    def dummy_ids(self, rows: int, device: torch.device) -> dict[str, Any]:
        """The arguments for `rows` rows that only give the forward its shapes."""
        streams = (self.shape.num_streams,) if self.shape.num_streams > 1 else ()
        return self.with_ids(torch.zeros(1, rows, *streams, dtype=torch.int64, device=device))

    def made(self, output: Any) -> torch.Tensor:
        """What a forward returned: logits [1, rows, vocab] or [1, rows, streams, vocab], or hidden states."""
        if self.kind.is_headless:
            return output[0] if isinstance(output, tuple) else output.last_hidden_state
        logits = output[0] if isinstance(output, tuple) else output.logits
        return logits.transpose(0, 1).unsqueeze(0) if self.shape.num_streams > 1 else logits

    def _after_encoder(self, device: torch.device, encoded: torch.Tensor | None) -> dict[str, Any]:
        if encoded is None:
            encoded = torch.zeros(1, 1, self.memory_width, dtype=self.dtype, device=device)
        return {"encoder_outputs": BaseModelOutput(last_hidden_state=encoded)}


def _memory_width(model: PreTrainedModel) -> int:
    config = model.config
    encoder = getattr(config, "text_encoder", None) or getattr(config, "encoder", None) or config
    return int(encoder.hidden_size)
