"""A model folder's own processor: what turns pictures and recordings into what the model's encoders take.

transformers' classes, with Pillow and numpy alone: the video part of a processor, which needs torchvision, is left
out. Knows no weights.
"""

from __future__ import annotations

import functools
import inspect
from pathlib import Path
from typing import Any

from transformers import AutoProcessor, PretrainedConfig, ProcessorMixin
from transformers.models.auto.processing_auto import PROCESSOR_MAPPING
from transformers.utils.chat_template_utils import _get_template_variables

from slicing.errors import ModelError

VIDEO = "video_processor"


class NoVideos:
    """Stands where a processor class insists on a video processor. Takes nothing."""

    model_input_names = ()


def load_processor(folder: Path, config: PretrainedConfig) -> ProcessorMixin:
    """Build the processor of a model folder; runs no code from it.

    Raises `ModelError`, which says why it cannot, in words that name nothing of this machine; its cause may.
    """
    own: dict[str, Any] = {"local_files_only": True, "trust_remote_code": False}
    try:
        cls = _class_for(config)
        if cls is not None and VIDEO in cls.get_attributes():
            cls = without_videos(cls)
            processor = cls.from_pretrained(str(folder), **own)
        else:
            processor = AutoProcessor.from_pretrained(str(folder), config=config, **own)
    except Exception as error:  # foreign classes over files of any kind: whatever they raise is a refusal
        raise ModelError(f"its processor cannot be built ({type(error).__name__})") from error
    if not isinstance(processor, ProcessorMixin):
        raise ModelError(f"it has no processor of pictures or sounds, only a {type(processor).__name__}")
    if not _has_template(processor):
        raise ModelError("neither its processor nor its tokenizer has a chat template")
    return processor


@functools.cache
def without_videos(cls: type[ProcessorMixin]) -> type[ProcessorMixin]:
    """Return the class with `NoVideos` for its video processor."""

    class Others(cls):  # type: ignore[misc, valid-type]
        @classmethod
        def get_attributes(cls) -> list[str]:
            return [name for name in super().get_attributes() if name != VIDEO]

    class WithoutVideos(cls):  # type: ignore[misc, valid-type]
        def __repr__(self) -> str:  # the stock one writes JSON, which a stand-in has none of
            return cls.__name__

        def check_argument_for_proper_class(self, argument_name: str, argument: Any) -> Any:
            if isinstance(argument, NoVideos):
                return NoVideos
            return super().check_argument_for_proper_class(argument_name, argument)

        @classmethod
        def _get_arguments_from_pretrained(cls, *args: Any, **kwargs: Any) -> list[Any]:
            found = iter(Others._get_arguments_from_pretrained(*args, **kwargs))
            return [NoVideos() if name == VIDEO else next(found) for name in cls.get_attributes()]

    WithoutVideos.__name__ = WithoutVideos.__qualname__ = cls.__name__
    return WithoutVideos


def takes_pictures(processor: ProcessorMixin) -> bool:
    """Whether there is a picture processor in it."""
    return getattr(processor, "image_processor", None) is not None


def recording_part(processor: ProcessorMixin) -> Any:
    """Return what takes samples, or None. It has a `sampling_rate`, in Hz."""
    part = getattr(processor, "feature_extractor", None)
    return part if part is not None else getattr(processor, "audio_processor", None)


def template_variables(processor: ProcessorMixin) -> frozenset[str]:
    """Return what the chat template reads from whoever renders it, but for names of stock arguments.

    The stock call takes every other name for a setting of its processors.
    """
    own = inspect.signature(processor.apply_chat_template).parameters
    read: frozenset[str] = _get_template_variables(processor._resolve_chat_template(None))
    return read - own.keys()


def _class_for(config: PretrainedConfig) -> Any:
    try:
        return PROCESSOR_MAPPING[type(config)]
    except KeyError:
        return None


def _has_template(processor: ProcessorMixin) -> bool:
    """Find the chat template, which older folders keep with the tokenizer alone."""
    if processor.chat_template is None:
        processor.chat_template = getattr(processor.tokenizer, "chat_template", None)
    return bool(processor.chat_template)
