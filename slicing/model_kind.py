"""What a text-like model is: what it takes, what it makes, and the sizes of the stack of blocks that is cut.

Read from a configuration alone, by transformers' own tables of classes; no list of families. Builds nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from transformers import PretrainedConfig
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
    MODEL_FOR_MASKED_LM_MAPPING_NAMES,
    MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES,
    MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES,
    MODEL_FOR_TEXT_ENCODING_MAPPING_NAMES,
    MODEL_MAPPING_NAMES,
)

UNLIMITED_POSITIONS = 1 << 20  # for models without a table of positions or a trained limit
POSITION_KEYS = (
    "max_target_positions",
    "max_decoder_position_embeddings",
    "max_position_embeddings",
    "n_positions",
    "max_seq_len",
    "max_sequence_length",
)
SENSE_CONFIGS = ("vision_config", "audio_config", "audio_encoder_config", "encoder_config")


class ModelKind(StrEnum):
    """What a model is to whoever serves it."""

    TEXT = "text"
    MULTIMODAL = "multimodal"  # a text model with an encoder of pictures or sounds before it
    SEQ2SEQ = "seq2seq"  # text to text, with an encoder and a decoder (T5, Bart)
    SPEECH = "speech"  # a recording to text, likewise (Whisper)
    MUSIC = "music"  # text to the tokens of a sound codec, several streams of them (MusicGen)
    ENCODER = "encoder"  # text to vectors; every row sees every other
    EMBEDDING = "embedding"  # text to vectors; a text model without its head

    @property
    def has_memory(self) -> bool:
        """Whether its blocks attend to the states of an encoder as well."""
        return self in (ModelKind.SEQ2SEQ, ModelKind.SPEECH, ModelKind.MUSIC)

    @property
    def is_headless(self) -> bool:
        """Whether hidden states are what it makes, and no logits."""
        return self in (ModelKind.ENCODER, ModelKind.EMBEDDING)

    @property
    def makes_text(self) -> bool:
        """Whether it answers with text."""
        return self in (ModelKind.TEXT, ModelKind.MULTIMODAL, ModelKind.SEQ2SEQ, ModelKind.SPEECH)


@dataclass(frozen=True)
class ModelShape:
    """The sizes of the stack of blocks that is cut, and of the ends around it."""

    kind: ModelKind
    num_layers: int
    hidden_size: int
    vocab_size: int
    num_streams: int  # tokens of one position
    max_positions: int


def kind_of(config: PretrainedConfig) -> ModelKind:
    """Say what a model of this configuration is."""
    model_type = config.model_type
    named = next(iter(config.architectures or ()), "")
    if config.is_encoder_decoder or hasattr(config, "text_encoder"):
        return _kind_with_encoder(config)
    if model_type in _with_senses() and any(getattr(config, key, None) for key in SENSE_CONFIGS):
        return ModelKind.MULTIMODAL
    is_causal = named == MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(model_type, "-") or getattr(
        config, "is_decoder", False
    )
    sees_all = (
        model_type in MODEL_FOR_MASKED_LM_MAPPING_NAMES
        or model_type in MODEL_FOR_TEXT_ENCODING_MAPPING_NAMES
        or getattr(config, "use_bidirectional_attention", None) is True  # decoders that were made encoders
    )
    if sees_all and not is_causal:
        return ModelKind.ENCODER
    base = MODEL_MAPPING_NAMES.get(model_type)
    if named and named == base:
        return ModelKind.EMBEDDING if model_type in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES else ModelKind.ENCODER
    return ModelKind.TEXT


def shape_of(config: PretrainedConfig) -> ModelShape:
    """Return the sizes of what is cut: of the decoder, where there is an encoder before it."""
    kind = kind_of(config)
    text = config.get_text_config(decoder=True)
    return ModelShape(
        kind,
        num_layers=_num_layers(text),
        hidden_size=int(text.hidden_size),
        vocab_size=int(text.vocab_size),
        num_streams=int(getattr(text, "num_codebooks", 1)) if kind is ModelKind.MUSIC else 1,
        max_positions=max_positions(text),
    )


def headless_class(config: PretrainedConfig) -> str:
    """Return the name of the class that has all of a model but its head."""
    base = MODEL_MAPPING_NAMES.get(config.model_type)
    return base if isinstance(base, str) else next(iter(config.architectures or base or ("",)))


def max_positions(config: PretrainedConfig) -> int:
    """Return how many positions a session may have; `config` is that of the text part."""
    named = (getattr(config, key, None) for key in POSITION_KEYS)
    return next((int(value) for value in named if value), UNLIMITED_POSITIONS)


def _kind_with_encoder(config: PretrainedConfig) -> ModelKind:
    decoder = getattr(config, "decoder", None)
    if getattr(decoder, "num_codebooks", None):
        return ModelKind.MUSIC
    if config.model_type in MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES:
        return ModelKind.SPEECH
    return ModelKind.SEQ2SEQ


def _with_senses() -> frozenset[str]:
    return frozenset(MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES) | frozenset(
        MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES
    )


def _num_layers(text: PretrainedConfig) -> int:
    """The blocks of the decoder; T5 names them by themselves."""
    return int(getattr(text, "num_decoder_layers", None) or text.num_hidden_layers)
