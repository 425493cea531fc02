"""Vectors of hidden states, as the files beside a model ask for them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from transformers import BertConfig, PretrainedConfig, Qwen3Config, RobertaConfig

from slicing.errors import ModelError
from slicing.pooling import Pooling
from slicing.sentence_files import SentenceFiles, makes_vectors, read_sentence_files

STATES = torch.tensor([[1.0, -2.0, 0.0, 4.0], [3.0, 2.0, 0.0, 0.0], [5.0, 0.0, -6.0, 2.0]])
CONFIG = BertConfig(hidden_size=4, num_attention_heads=2)


def write(folder: Path, modules: list[str], pooling: dict[str, Any], **files: Any) -> Path:
    listed = [
        {
            "idx": number,
            "path": "" if name == "Transformer" else f"{number}_{name}",
            "type": f"sentence_transformers.models.{name}",
        }
        for number, name in enumerate(modules)
    ]
    (folder / "modules.json").write_text(json.dumps(listed))
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    return folder


def read(folder: Path, config: PretrainedConfig = CONFIG) -> SentenceFiles:
    return read_sentence_files(folder, config)


@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        ("pooling_mode_mean_tokens", [3.0, 0.0, -2.0, 2.0]),
        ("pooling_mode_cls_token", [1.0, -2.0, 0.0, 4.0]),
        ("pooling_mode_lasttoken", [5.0, 0.0, -6.0, 2.0]),
        ("pooling_mode_max_tokens", [5.0, 2.0, 0.0, 4.0]),
    ],
)
def test_a_vector_is_pooled_as_the_folder_says(tmp_path: Path, mode: str, expected: list[float]) -> None:
    modes = {"word_embedding_dimension": 4, "pooling_mode_mean_tokens": False, mode: True}
    recipe = read(write(tmp_path, ["Transformer", "Pooling"], modes)).recipe
    assert recipe.vector(STATES[list(recipe.pooling.rows_of(3))]).tolist() == expected


def test_without_files_vectors_have_the_length_one(tmp_path: Path) -> None:
    vector = read(tmp_path).recipe.vector(STATES)
    torch.testing.assert_close(vector, STATES.mean(0) / STATES.mean(0).norm())


def test_without_files_the_last_row_of_a_decoder_counts(tmp_path: Path) -> None:
    config = Qwen3Config(hidden_size=4, architectures=["Qwen3Model"])
    torch.testing.assert_close(read(tmp_path, config).recipe.vector(STATES[2:]), STATES[2] / STATES[2].norm())
    assert read(tmp_path, config).recipe.pooling is Pooling.LAST


def test_half_precision_states_are_pooled_in_float32(tmp_path: Path) -> None:
    assert read(tmp_path).recipe.vector(STATES.bfloat16()).dtype == torch.float32


def test_a_dense_layer_follows_the_pooling(tmp_path: Path) -> None:
    folder = write(tmp_path, ["Transformer", "Pooling", "Dense", "Normalize"], {"pooling_mode": "mean"})
    (folder / "2_Dense").mkdir()
    (folder / "2_Dense" / "config.json").write_text(
        json.dumps({"activation_function": "torch.nn.modules.activation.Tanh"})
    )
    layer = torch.nn.Linear(4, 3)
    save_file(
        {f"linear.{name}": value.detach() for name, value in layer.named_parameters()},
        folder / "2_Dense" / "model.safetensors",
    )
    recipe = read(folder).recipe
    expected = torch.tanh(layer(STATES.mean(0)))
    assert recipe.size == 3
    torch.testing.assert_close(recipe.vector(STATES), (expected / expected.norm()).detach())


def test_fewer_dimensions_have_the_length_one_again(tmp_path: Path) -> None:
    config = BertConfig(hidden_size=4, num_attention_heads=2, matryoshka_dims=[2, 4, 8])
    recipe = read(tmp_path, config).recipe
    assert recipe.cuts == {2, 4}
    shorter = recipe.vector(STATES, 2)
    assert shorter.shape == (2,)
    assert shorter.norm().item() == pytest.approx(1)


def test_how_texts_are_prepared_is_read_too(tmp_path: Path) -> None:
    told = {"prompts": {"query": "query: "}, "default_prompt_name": "query"}
    limits = {"max_seq_length": 256, "do_lower_case": True}
    files = {"config_sentence_transformers": told, "sentence_bert_config": limits}
    read_files = read(write(tmp_path, ["Transformer", "Pooling"], {"pooling_mode": "cls"}, **files))
    assert (read_files.max_tokens, read_files.lower_case, read_files.prompt) == (256, True, "query: ")


@pytest.mark.parametrize(("config", "expected"), [(BertConfig(), 512), (RobertaConfig(), 510)])
def test_rows_of_a_table_that_padding_takes_do_not_count(
    tmp_path: Path, config: PretrainedConfig, expected: int
) -> None:
    assert read(tmp_path, config).max_tokens == expected


def test_a_folder_says_by_its_pooling_that_it_makes_vectors(tmp_path: Path) -> None:
    assert not makes_vectors(tmp_path)
    assert makes_vectors(write(tmp_path, ["Transformer", "Pooling"], {"pooling_mode": "mean"}))


@pytest.mark.parametrize(
    ("modules", "pooling", "text"),
    [
        (["Transformer", "Pooling", "LayerNorm"], {"pooling_mode": "mean"}, "LayerNorm"),
        (["Transformer", "Pooling", "Dense"], {"pooling_mode": "mean"}, "2_Dense"),
        (["Transformer", "Normalize", "Pooling"], {"pooling_mode": "mean"}, "Normalize"),
        (["Transformer"], {"pooling_mode": "mean"}, "no pooling"),
        (["Transformer", "Pooling"], {"pooling_mode_weightedmean_tokens": True}, "weightedmean"),
        (["Transformer", "Pooling"], {"pooling_mode": "mean", "include_prompt": False}, "prompt"),
        (
            ["Transformer", "Pooling"],
            {"pooling_mode_mean_tokens": True, "pooling_mode_max_tokens": True},
            "max",
        ),
        (["Transformer", "Pooling"], {}, "nothing"),
    ],
)
def test_what_is_not_understood_is_refused_by_name(
    tmp_path: Path, modules: list[str], pooling: dict[str, Any], text: str
) -> None:
    with pytest.raises(ModelError, match=text):
        read(write(tmp_path, modules, pooling))


@pytest.mark.parametrize("content", ["{", "{}", "[1]", "[" * 100_000, json.dumps([{"type": "Pooling"}] * 99)])
def test_a_damaged_list_of_modules_is_refused(tmp_path: Path, content: str) -> None:
    (tmp_path / "modules.json").write_text(content)
    with pytest.raises(ModelError, match="damaged"):
        read(tmp_path)


@pytest.mark.parametrize("path", ["../other", "/etc", "", "."])
def test_a_module_elsewhere_is_refused(tmp_path: Path, path: str) -> None:
    (tmp_path / "modules.json").write_text(json.dumps([{"type": "a.Pooling", "path": path}]))
    with pytest.raises(ModelError, match="no folder beside it"):
        read(tmp_path)
