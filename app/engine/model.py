"""One model as the gateway opens it: first looked up (configuration, digest, no weights), then its ends loaded.

Computes in the caller's thread. Knows no network and no other model.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch

from app.engine.coverage import ModelFacts
from app.engine.home_parts import load_home
from app.engine.request import Modality
from app.engine.text import PREFILL_CHUNK
from app.engine.tokenizer import ChatTokenizer, age_of
from routing.errors import SettingsError
from routing.types import SliceSpec, WireDtype
from slicing.batch import Runner
from slicing.buffers import DTYPES
from slicing.checkpoint import Checkpoint
from slicing.ends import Parts
from slicing.errors import ModelError
from slicing.load_runner import load_runner
from slicing.miniature import check_cut
from slicing.model_kind import ModelKind, ModelShape, shape_of
from slicing.model_source import open_checkpoint
from slicing.progress import Progress, no_progress

AUDIO_CONFIGS = ("audio_config", "audio_encoder_config", "encoder_config")


@dataclass(frozen=True, slots=True)
class EndsSettings:
    """Where and how the ends of every model run. `local_layers` are the first K and last J layers kept at home."""

    ends: Literal["local", "remote"] = "local"
    local_layers: tuple[int, int] = (1, 0)
    wire: Literal["auto", "bf16", "int8-delta"] = "auto"  # the last: for diffusion models only
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    weights: Literal["auto", "bf16", "fp32", "int8"] = "auto"  # see `slicing.load_runner`
    runner: Literal["auto", "fast", "invariant", "plain"] = "auto"
    device: str = "cpu"
    threads: int = 1
    prefill_chunk: int = PREFILL_CHUNK
    max_positions: int | None = None
    cache_dir: Path | None = None
    per_block: bool = (
        False  # of diffusion models: every block a pass of its own, for those that are no plain thread
    )
    prefix_secret: bytes = field(
        default=b"", repr=False
    )  # of a fleet; b"": this gateway's own, made at each start

    @property
    def is_thin(self) -> bool:
        """No weights here: the first node embeds, the last one draws."""
        return self.ends == "remote"

    @property
    def wire_dtype(self) -> WireDtype | None:
        return WireDtype.BFLOAT16 if self.wire == "bf16" else None

    @property
    def call_wire(self) -> Literal["compute", "bf16", "int8-delta"]:
        """How the hidden states of diffusion models travel."""
        return "compute" if self.wire == "auto" else self.wire


@dataclass(frozen=True, slots=True)
class LookedUp:
    """A model without its weights."""

    checkpoint: Checkpoint
    facts: ModelFacts
    middle: SliceSpec  # the layers that nodes run
    created: int  # Unix seconds
    shape: ModelShape

    @property
    def kind(self) -> ModelKind:
        """What it is to whoever serves it."""
        return self.shape.kind

    @property
    def answers_text(self) -> bool:
        """Whether it answers a text with a text."""
        return self.kind.makes_text and "text" in self.takes

    @property
    def takes(self) -> tuple[Modality, ...]:
        """What goes in, by its configuration."""
        if self.kind is ModelKind.SPEECH:
            return ("audio",)
        sees = getattr(self.checkpoint.config, "vision_config", None) is not None
        hears = any(getattr(self.checkpoint.config, name, None) is not None for name in AUDIO_CONFIGS)
        if self.kind is not ModelKind.MULTIMODAL:
            return ("text",)
        senses: list[Modality] = ["text"]
        senses += ["image"] if sees else []
        senses += ["audio"] if hears else []
        return tuple(senses)


@dataclass(frozen=True, slots=True)
class LoadedEnds:
    """What of a model is in this process."""

    runner: Runner | None  # None: thin
    tokenizer: ChatTokenizer | None  # None: a music model's belongs to `home`
    home: Any = None  # what `load_home` returned: the parts that never leave the gateway


def look_up(
    model: str,
    settings: EndsSettings,
    *,
    name: str | None = None,
    may_fetch: bool = True,
    progress: Progress = no_progress,
) -> LookedUp:
    """Read what there is to know without weights. Raises ModelError, SettingsError, LoadStopped."""
    if settings.wire == "int8-delta":
        raise SettingsError(f"--wire int8-delta is for models that make pictures; {name or model} makes text")
    checkpoint = open_checkpoint(model, cache_dir=settings.cache_dir, progress=progress, may_fetch=may_fetch)
    shape = _shape_of(checkpoint)
    limit = shape.max_positions
    facts = ModelFacts(
        name=name or checkpoint.public_name,
        digest=checkpoint.digest,
        num_layers=shape.num_layers,
        hidden_size=shape.hidden_size,
        vocab_size=shape.vocab_size,
        max_positions=min(limit, settings.max_positions or limit),
    )
    middle = middle_layers(settings, facts.num_layers)
    return LookedUp(checkpoint, facts, middle, age_of(checkpoint.folder), shape)


def load_ends(found: LookedUp, settings: EndsSettings, progress: Progress = no_progress) -> LoadedEnds:
    """Load the tokenizer, the parts that never leave home and, unless thin, the weights of the ends.

    Raises ModelError (CannotCut too), LoadStopped.
    """
    check_cut(found.checkpoint.config)
    tokenizer = _tokenizer_of(found)
    dtype = compute_dtype(settings, found.checkpoint)
    home = load_home(found.kind, found.checkpoint, dtype=dtype, device=settings.device, progress=progress)
    if settings.is_thin:
        return LoadedEnds(None, tokenizer, home)
    middle, num_layers = found.middle, found.facts.num_layers
    held = tuple(part for part in ((0, middle.start), (middle.end, num_layers)) if part[0] < part[1])
    parts = Parts(layers=held, opening=True, closing=True)
    runner = load_runner(
        found.checkpoint,
        parts,
        runner=settings.runner,
        weights=settings.weights,
        dtype=dtype,
        device=settings.device,
        threads=settings.threads,
        progress=progress,
    )
    runner.widen_head()
    return LoadedEnds(runner, tokenizer, home)


def _tokenizer_of(found: LookedUp) -> ChatTokenizer | None:
    if found.kind is ModelKind.MUSIC:  # a text encoder's, which belongs to the home parts
        return None
    return ChatTokenizer.load(found.checkpoint.folder, takes_plain_text=found.kind is ModelKind.SEQ2SEQ)


def middle_layers(settings: EndsSettings, num_layers: int) -> SliceSpec:
    """The layers that nodes run. Raises SettingsError when home would hold more layers than there are."""
    if settings.is_thin:
        return SliceSpec(0, num_layers)
    first, last = settings.local_layers
    if first < 0 or last < 0 or first + last > num_layers:
        raise SettingsError(f"local layers {first}:{last} do not fit a model of {num_layers} layers")
    if first + last == num_layers:
        raise SettingsError(f"local layers {first}:{last} leave none of {num_layers} layers for a node")
    return SliceSpec(first, num_layers - last)


def compute_dtype(settings: EndsSettings, checkpoint: Checkpoint) -> torch.dtype:
    """What is computed in at home: float32 on a CPU (exact, and its fastest), else the checkpoint's own."""
    if settings.dtype == "auto":
        return torch.float32 if settings.device == "cpu" else checkpoint.dtype
    return DTYPES[settings.dtype]


def _shape_of(checkpoint: Checkpoint) -> ModelShape:
    try:
        return shape_of(checkpoint.config)
    except (AttributeError, TypeError) as error:  # what has no layers, no width or no vocabulary
        raise ModelError(f"{checkpoint.name} is no model that answers with tokens or vectors") from error
