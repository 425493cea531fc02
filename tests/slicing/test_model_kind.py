"""What a model is, and the sizes of the stack that is cut, read from its configuration."""

from __future__ import annotations

import pytest
from transformers import CONFIG_MAPPING

from slicing.model_kind import ModelKind, kind_of, shape_of

KINDS = {
    "llama": ModelKind.TEXT,
    "gpt2": ModelKind.TEXT,
    "gemma3_text": ModelKind.TEXT,
    "gemma3": ModelKind.MULTIMODAL,
    "qwen2_vl": ModelKind.MULTIMODAL,
    "llava": ModelKind.MULTIMODAL,
    "qwen2_audio": ModelKind.MULTIMODAL,
    "voxtral": ModelKind.MULTIMODAL,
    "t5": ModelKind.SEQ2SEQ,
    "bart": ModelKind.SEQ2SEQ,
    "marian": ModelKind.SEQ2SEQ,
    "whisper": ModelKind.SPEECH,
    "moonshine": ModelKind.SPEECH,
    "musicgen": ModelKind.MUSIC,
    "bert": ModelKind.ENCODER,
    "roberta": ModelKind.ENCODER,
    "modernbert": ModelKind.ENCODER,
}


@pytest.mark.parametrize(("model_type", "kind"), KINDS.items())
def test_a_kind_is_read_from_the_configuration(model_type: str, kind: ModelKind) -> None:
    assert kind_of(CONFIG_MAPPING[model_type]()) is kind


@pytest.mark.parametrize(
    ("model_type", "architecture", "kind"),
    [
        ("qwen3", "Qwen3ForCausalLM", ModelKind.TEXT),
        ("qwen3", "Qwen3Model", ModelKind.EMBEDDING),
        ("bert", "BertModel", ModelKind.ENCODER),
        ("bert", "BertForMaskedLM", ModelKind.ENCODER),
        ("bert", "BertLMHeadModel", ModelKind.TEXT),
    ],
)
def test_the_class_that_was_saved_decides_between_kinds(
    model_type: str, architecture: str, kind: ModelKind
) -> None:
    assert kind_of(CONFIG_MAPPING[model_type](architectures=[architecture])) is kind


def test_the_decoder_is_what_is_cut() -> None:
    whisper = shape_of(CONFIG_MAPPING["whisper"](encoder_layers=3, decoder_layers=7))
    t5 = shape_of(CONFIG_MAPPING["t5"](num_layers=3, num_decoder_layers=7))
    assert (whisper.num_layers, t5.num_layers) == (7, 7)
    assert whisper.max_positions == 448  # of text, not of sound


def test_a_music_model_has_a_token_of_each_codebook_at_a_position() -> None:
    shape = shape_of(CONFIG_MAPPING["musicgen"]())
    assert (shape.num_streams, shape.vocab_size) == (4, 2048)
