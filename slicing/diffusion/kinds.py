"""What a pipeline makes: a picture, a video or a sound, told by its own parts.

A sound decoder has a sampling rate; a pipeline that makes a video asks for a number of frames. No list of families.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from enum import StrEnum
from typing import Any

from slicing.errors import ModelError

RATES = ("sampling_rate", "sample_rate")
FRAMES = frozenset({"num_frames", "video_length", "frames"})  # how the pipelines' calls spell it


class Kind(StrEnum):
    """What a pipeline's answer is."""

    PICTURE = "picture"
    VIDEO = "video"
    AUDIO = "audio"


def kind_of(pipeline_class: type, decoder_config: Mapping[str, Any]) -> Kind:
    """The kind of a pipeline of this class whose decoder (its "vae") has this configuration.

    Raises `ModelError` for a pipeline that cannot be asked with a prompt alone.
    """
    asked = inspect.signature(pipeline_class.__call__).parameters
    _check_prompt_is_enough(pipeline_class, asked)
    if any(decoder_config.get(key) for key in RATES):
        return Kind.AUDIO
    return Kind.VIDEO if FRAMES & asked.keys() else Kind.PICTURE


def _check_prompt_is_enough(pipeline_class: type, asked: Mapping[str, inspect.Parameter]) -> None:
    if "prompt" not in asked:
        raise ModelError(f"{pipeline_class.__name__} takes no prompt: it cannot be asked with a text")
    kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    for name, parameter in asked.items():
        is_needed = parameter.default is inspect.Parameter.empty and parameter.kind in kinds
        if is_needed and name not in ("self", "prompt"):
            raise ModelError(
                f"{pipeline_class.__name__} needs {name!r} beside a prompt, which cannot be sent"
            )
