"""The encoder of an encoder-decoder model (T5, Bart, Whisper): whole, with the stock class's own code.

It runs where its input is, and only the states that it makes travel. Found by what the class calls its encoder, not by
a list of families. Knows no tokenizer and no sessions.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel
from transformers.modeling_outputs import BaseModelOutput

from slicing.checkpoint import Checkpoint
from slicing.errors import ModelError
from slicing.forward_form import ForwardForm
from slicing.miniature import build_miniature
from slicing.progress import Progress, no_progress
from slicing.stacks import CannotCut, build_weightless, find_stack, set_tensor
from slicing.weights import load_parameters


class Encoder:
    """One stock encoder and its weights. Used by one thread at a time."""

    def __init__(self, module: nn.Module, config: PretrainedConfig, size_bytes: int) -> None:
        """`config` is that of the whole model."""
        self.module = module
        self.config = config
        self.size_bytes = size_bytes

    @torch.inference_mode()
    def run(self, **inputs: torch.Tensor) -> torch.Tensor:
        """Encode one input [1, ...], such as `input_ids` or `input_features`: its states [rows, hidden].

        They are what the decoder's blocks take. Raises ModelError where they are not finite.
        """
        device = next(self.module.parameters()).device
        made = self.module(**{name: value.to(device) for name, value in inputs.items()})
        states: torch.Tensor = made.last_hidden_state[0]
        if not bool(states.isfinite().all()):
            raise ModelError("the encoder made numbers that are not finite: its dtype overflows")
        return states


def load_home(
    checkpoint: Checkpoint, *, dtype: torch.dtype, device: str = "cpu", progress: Progress = no_progress
) -> Encoder:
    """Read the encoder of an encoder-decoder model, and nothing else of it. Raises ModelError (CannotCut too)."""
    _check_handed_on(checkpoint.config)
    model = build_weightless(checkpoint.config, dtype)
    name, module = find_encoder(model)
    weights = load_parameters(
        checkpoint,
        model,
        lambda parameter: parameter.startswith(name + "."),
        dtype=dtype,
        device=device,
        progress=progress,
        layer_of=lambda _: None,  # no replicas to compare with
    )
    for buffer_name, buffer in list(module.named_non_persistent_buffers()):
        set_tensor(module, buffer_name, buffer.to(device))
    return Encoder(module, checkpoint.config, weights.size_bytes)


def find_encoder(model: PreTrainedModel) -> tuple[str, PreTrainedModel]:
    """The encoder of a model and its name in it. Raises `CannotCut` where there is none that could run alone."""
    get_encoder: Any = model.get_encoder
    found = get_encoder()
    name = next((name for name, module in model.named_modules() if module is found), "")
    if not name or found is model.get_decoder() or not isinstance(found, PreTrainedModel):
        raise CannotCut(f"{type(model).__name__} has no encoder of its own")
    return name, found


@torch.inference_mode()
def _check_handed_on(config: PretrainedConfig) -> None:
    """See in a miniature that its decoder's blocks are given what its encoder makes. Raises `CannotCut`."""
    model = build_miniature(config)
    form = ForwardForm.of(model)
    states = torch.randn(1, 3, form.memory_width)
    seen: list[torch.Tensor] = []

    def look(_block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        seen.extend(value for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor))

    hook = find_stack(model).blocks[0].register_forward_pre_hook(look, with_kwargs=True)
    try:
        told = form.with_ids(torch.zeros(1, 2, dtype=torch.int64))
        model(**told | {"encoder_outputs": BaseModelOutput(last_hidden_state=states)})
    finally:
        hook.remove()
    if not any(torch.equal(value, states) for value in seen):
        raise CannotCut(f"{type(model).__name__} changes what its encoder makes before its decoder sees it")
