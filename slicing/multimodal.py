"""What a model that sees or hears keeps at home: its processor, and its encoders up to the first block.

Pictures and recordings go in, embeddings and positions come out. A model whose pictures cannot be cut is opened all
the same, and says why it takes none.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from PIL import Image
from transformers import PretrainedConfig, ProcessorMixin

from slicing.checkpoint import Checkpoint
from slicing.errors import ModelError
from slicing.merging import Merger, tensor_pattern
from slicing.model_kind import SENSE_CONFIGS
from slicing.multimodal_check import check_multimodal
from slicing.processors import load_processor, recording_part, takes_pictures, template_variables
from slicing.progress import Progress, no_progress
from slicing.stacks import build_weightless, find_stack, first_line, make_hollow, set_tensor
from slicing.weights import load_parameters

log = logging.getLogger(__name__)

Sense = Literal["image", "audio"]
SAMPLE_S = 1.0  # of a recording
SAMPLE_SIZES = ((96, 64), (56, 112))  # of pictures, width and height


@dataclass(frozen=True, slots=True)
class HomeEncoders:
    """The processor and the encoders, as far as they can be used."""

    processor: ProcessorMixin | None
    merger: Merger | None
    reasons: Mapping[str, str]  # why there is no such part; "": it works
    max_recording_s: float = math.inf  # of one: a longer one would be cut short in silence
    sanitizes: bool = True  # control tokens in messages become text; otherwise messages must hold none

    @property
    def senses(self) -> tuple[str, ...]:
        """What works."""
        return tuple(sense for sense, reason in self.reasons.items() if not reason)


def load_home(
    checkpoint: Checkpoint, *, dtype: torch.dtype, device: str = "cpu", progress: Progress | None = None
) -> HomeEncoders:
    """Build the processor, check what it makes, and load the tensors used before the first block.

    Raises `ModelError` when the checkpoint lacks one of them.
    """
    config = checkpoint.config
    try:
        processor = load_processor(checkpoint.folder, config)
    except ModelError as error:
        cause = "" if error.__cause__ is None else f": {first_line(error.__cause__)}"
        log.warning("%s takes text alone: %s%s", checkpoint.public_name, error, cause)
        return HomeEncoders(None, None, dict.fromkeys(map(str, _named_by(config)), str(error)))
    patterns: set[str] = set()
    reasons: dict[str, str] = {}
    sanitizes = can_sanitize(processor)
    for sense in _senses_of(processor):
        try:
            patterns |= check_multimodal(config, sample_inputs(processor, sense, sanitizes=sanitizes))
        except ModelError as error:
            log.warning("%s takes no %s: %s", checkpoint.public_name, sense, error)
            reasons[sense] = str(error)
        else:
            reasons[sense] = ""
    merger = (
        _load_merger(checkpoint, config, patterns, dtype, device, progress or no_progress)
        if patterns
        else None
    )
    return HomeEncoders(
        processor, merger, reasons, longest_recording_s(processor, sanitizes=sanitizes), sanitizes
    )


def sample_inputs(
    processor: ProcessorMixin, sense: Sense, *, sanitizes: bool = True
) -> dict[str, torch.Tensor]:
    """Return what a processor makes of a message with two pictures, or recordings, of noise. Raises `ModelError`."""
    parts = [{"type": sense, sense: sample} for sample in _samples(processor, sense)]
    text = {"type": "text", "text": "a"}
    messages = [{"role": "user", "content": [text, parts[0], text, parts[1], text]}]
    try:
        return dict(render(processor, messages, sanitizes=sanitizes))
    except Exception as error:
        raise ModelError(f"its processor makes nothing of a sample: {type(error).__name__}") from error


def can_sanitize(processor: ProcessorMixin) -> bool:
    """Whether its class can keep control tokens in messages from being ones; some look for what is then lost."""
    for sense in _senses_of(processor):
        try:
            sample_inputs(processor, sense)
        except ModelError:
            return False
    return True


def longest_recording_s(processor: ProcessorMixin, *, sanitizes: bool = True) -> float:
    """How much of a recording is heard: what the processor says it pads to, where twice that gives no more tokens."""
    chunk_s = getattr(recording_part(processor), "chunk_length", None)
    if not isinstance(chunk_s, int | float) or chunk_s <= 0:
        return math.inf
    rate = recording_part(processor).sampling_rate
    try:
        once, twice = (
            render(processor, [{"role": "user", "content": [{"type": "audio", "audio": silence}]}])[
                "input_ids"
            ]
            for silence in (np.zeros(int(times * chunk_s * rate), np.float32) for times in (1, 2))
        )
    except Exception:  # it takes so much only, and says so
        return float(chunk_s)
    return float(chunk_s) if once.shape == twice.shape else math.inf


def render(
    processor: ProcessorMixin,
    messages: Any,
    *,
    continue_final: bool = False,
    variables: Mapping[str, Any] | None = None,
    sanitizes: bool = True,
) -> Any:
    """Turn messages, with pictures and samples in their parts, into `input_ids` [1, rows] and what else there is.

    Where it `sanitizes`, text of a message cannot become a placeholder or another control token. Of `variables` only
    those that the template reads are passed on. Raises whatever templates and processors raise.
    """
    known = template_variables(processor)
    return processor.apply_chat_template(
        messages,
        add_generation_prompt=not continue_final,
        continue_final_message=continue_final,
        tokenize=True,
        return_dict=True,
        return_tensors="pt",
        sanitize_control_tokens=sanitizes,
        **{name: value for name, value in (variables or {}).items() if name in known},
    )


def _load_merger(
    checkpoint: Checkpoint,
    config: PretrainedConfig,
    patterns: set[str],
    dtype: torch.dtype,
    device: str,
    progress: Progress,
) -> Merger:
    model = build_weightless(config, dtype)
    stack = find_stack(model)
    load_parameters(
        checkpoint,
        model,
        lambda name: stack.layer_of(name) is None and tensor_pattern(name) in patterns,
        dtype=dtype,
        device=device,
        progress=progress,
        layer_of=stack.layer_of,
    )
    make_hollow(model, device)
    for name, buffer in list(model.named_non_persistent_buffers()):
        set_tensor(model, name, buffer.to(device))
    return Merger(model, stack)


def _senses_of(processor: ProcessorMixin) -> Iterator[Sense]:
    if takes_pictures(processor):
        yield "image"
    if recording_part(processor) is not None:
        yield "audio"


def _named_by(config: PretrainedConfig) -> Iterator[Sense]:
    """What the configuration has a part for."""
    names = [name for name in SENSE_CONFIGS if getattr(config, name, None) is not None]
    if "vision_config" in names:
        yield "image"
    if names != ["vision_config"]:
        yield "audio"


def _samples(processor: ProcessorMixin, sense: Sense) -> list[Any]:
    noise = np.random.default_rng(0)
    if sense == "image":
        sizes = [(height, width, 3) for width, height in SAMPLE_SIZES]
        return [Image.fromarray(noise.integers(0, 256, size, dtype=np.uint8)) for size in sizes]
    length = int(SAMPLE_S * recording_part(processor).sampling_rate)
    return [(noise.standard_normal(length) * 0.1).astype(np.float32) for _ in range(2)]
