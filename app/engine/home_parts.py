"""What of a model never leaves the gateway, besides the ends: encoders, projectors, codecs, the making of vectors.

Only looks up who loads them for a kind of model; imported with the first model of that kind.
"""

from __future__ import annotations

from typing import Any

import torch

from slicing.checkpoint import Checkpoint
from slicing.model_kind import ModelKind
from slicing.progress import Progress, no_progress


def load_home(
    kind: ModelKind,
    checkpoint: Checkpoint,
    *,
    dtype: torch.dtype,
    device: str = "cpu",
    progress: Progress = no_progress,
) -> Any:
    """Load them, in the caller's thread; None where a model of this kind has none. Raises ModelError, LoadStopped."""
    match kind:
        case ModelKind.SEQ2SEQ | ModelKind.SPEECH:
            from slicing import encoder

            return encoder.load_home(checkpoint, dtype=dtype, device=device, progress=progress)
        case ModelKind.MULTIMODAL:
            from slicing import multimodal

            return multimodal.load_home(checkpoint, dtype=dtype, device=device, progress=progress)
        case ModelKind.MUSIC:
            from slicing import music

            return music.load_home(checkpoint, dtype=dtype, device=device, progress=progress)
        case ModelKind.ENCODER | ModelKind.EMBEDDING:
            from slicing.sentence_files import read_sentence_files

            return read_sentence_files(checkpoint.folder, checkpoint.config)
        case _:
            return None
