"""What a user named: a text model, cut by its layers, or a pipeline of a diffusion model, cut by its blocks.

Opens either; whoever asks says what it does with it.
"""

from __future__ import annotations

from pathlib import Path

from slicing.checkpoint import Checkpoint
from slicing.diffusion.source import PipelineSource, is_pipeline, open_pipeline
from slicing.errors import ModelError
from slicing.gguf import PACKAGED
from slicing.model_kind import ModelKind, kind_of, shape_of
from slicing.model_source import open_checkpoint
from slicing.progress import Progress

OpenModel = Checkpoint | PipelineSource


def open_model(
    model: str,
    *,
    cache_dir: Path | None = None,
    progress: Progress | None = None,
    may_fetch: bool = True,
) -> OpenModel:
    """Open what `open_checkpoint` or `open_pipeline` opens. Reads no weights. Raises `ModelError`."""
    opens = open_pipeline if is_pipeline(model, may_fetch=may_fetch) else open_checkpoint
    return opens(model, cache_dir=cache_dir, progress=progress, may_fetch=may_fetch)


def kind_named(model: str) -> str:
    """What a model is that the user named, as `kind_of_model` says; text where it cannot be told.

    May fetch its configuration.
    """
    if model in PACKAGED:
        return ModelKind.TEXT
    try:
        return kind_of_model(open_model(model))
    except (ModelError, AttributeError, TypeError):
        return ModelKind.TEXT


def num_layers_of(opened: OpenModel) -> int:
    """How many layers a node can be asked to hold: those of the text model, or the pipeline's remote blocks."""
    return opened.num_layers if isinstance(opened, PipelineSource) else shape_of(opened.config).num_layers


def kind_of_model(opened: OpenModel) -> str:
    """What it is: a `ModelKind`, or a pipeline's `Kind`. Raises `ModelError` for one that needs more than a prompt."""
    return opened.kind.value if isinstance(opened, PipelineSource) else kind_of(opened.config).value
