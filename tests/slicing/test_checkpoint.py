"""Opening a model: what its digest covers, and what is refused with what text."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from slicing.checkpoint import open_folder
from slicing.errors import ModelError
from slicing.model_source import open_checkpoint
from tests.support.tiny_models import saved, tiny_model


def change_config(folder: Path, **changes: Any) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def test_the_digest_is_the_same_for_any_sharding(tmp_path: Path) -> None:
    model = tiny_model("llama")
    one = open_folder(saved(model, tmp_path / "one"))
    many = open_folder(saved(model, tmp_path / "many", max_shard_size="20KB"))
    assert len({place.file for place in many.tensors.values()}) > 3
    assert one.digest == many.digest
    assert len(one.digest) == 32


def test_others_are_not_told_where_a_model_lies_here(tmp_path: Path) -> None:
    folder = saved(tiny_model("llama"), tmp_path / "small-llama")
    checkpoint = open_checkpoint(str(folder))
    assert checkpoint.public_name == "small-llama"
    assert str(tmp_path) not in checkpoint.public_name


def test_the_digest_leaves_out_who_saved_the_files(tmp_path: Path) -> None:
    digest = open_folder(saved(tiny_model("llama"), tmp_path)).digest
    change_config(
        tmp_path,
        transformers_version="4.0",
        _name_or_path="elsewhere",
        torch_dtype="float16",
        use_cache=False,
    )
    assert open_folder(tmp_path).digest == digest


@pytest.mark.parametrize("changes", [{"rope_theta": 5.0}, {"rms_norm_eps": 0.1}, {"hidden_act": "gelu"}])
def test_the_digest_follows_the_configuration(changes: dict[str, object], tmp_path: Path) -> None:
    digest = open_folder(saved(tiny_model("llama"), tmp_path)).digest
    change_config(tmp_path, **changes)
    assert open_folder(tmp_path).digest != digest


def test_the_digest_follows_shapes_and_dtypes(tmp_path: Path) -> None:
    models = [tiny_model("llama"), tiny_model("llama").half(), tiny_model("llama", vocab_size=65)]
    digests = {open_folder(saved(model, tmp_path / str(i))).digest for i, model in enumerate(models)}
    assert len(digests) == 3


def test_a_checkpoint_knows_its_dtype_and_configuration(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(str(saved(tiny_model("gpt2").bfloat16(), tmp_path)))
    assert checkpoint.dtype == torch.bfloat16
    assert checkpoint.config.num_hidden_layers == 3
    assert checkpoint.folder == tmp_path
    assert checkpoint.name == str(tmp_path)
    assert checkpoint.bytes_requested == 0


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"quantization_config": {"quant_method": "fp8"}}, "quantised with fp8, which is not supported yet"),
        ({"quantization_config": {"quant_method": "mxfp4"}}, "quantised with mxfp4.*in bfloat16"),
        (
            {"model_type": "secret", "auto_map": {"AutoConfig": "x.Y"}},
            "brings its own code, which is never run",
        ),
        ({"model_type": "secret"}, "unknown to transformers"),
        ({"model_type": None}, "unknown to transformers"),
        ({"num_attention_heads": "many"}, "transformers refuses"),
    ],
)
def test_a_configuration_that_cannot_be_run_is_refused(
    changes: dict[str, Any], text: str, tmp_path: Path
) -> None:
    saved(tiny_model("llama"), tmp_path)
    change_config(tmp_path, **changes)
    with pytest.raises(ModelError, match=text):
        open_checkpoint(str(tmp_path))


def test_pickled_weights_are_refused(tmp_path: Path) -> None:
    (saved(tiny_model("llama"), tmp_path) / "model.safetensors").rename(tmp_path / "pytorch_model.bin")
    with pytest.raises(ModelError, match=r"only pickled weights \(pytorch_model.bin\)"):
        open_checkpoint(str(tmp_path))


@pytest.mark.parametrize(
    ("name", "content", "text"),
    [
        ("config.json", "{", r"config\.json is damaged"),
        ("config.json", "[]", r"config\.json is damaged"),
        ("model.safetensors.index.json", "{}", "holds no weight_map"),
        (
            "model.safetensors.index.json",
            '{"weight_map": {"a": "../b.safetensors"}}',
            "not a safetensors file of its own",
        ),
        (
            "model.safetensors.index.json",
            '{"weight_map": {"a": "b.bin"}}',
            "not a safetensors file of its own",
        ),
        ("model.safetensors.index.json", '{"weight_map": {"a": "model.safetensors"}}', "does not hold a"),
    ],
)
def test_a_damaged_file_is_named(name: str, content: str, text: str, tmp_path: Path) -> None:
    (saved(tiny_model("llama"), tmp_path) / name).write_text(content)
    with pytest.raises(ModelError, match=text):
        open_checkpoint(str(tmp_path))


def test_shards_without_an_index_are_refused(tmp_path: Path) -> None:
    (saved(tiny_model("llama"), tmp_path, max_shard_size="20KB") / "model.safetensors.index.json").unlink()
    with pytest.raises(ModelError, match="copy the index"):
        open_checkpoint(str(tmp_path))


def test_a_folder_without_weights_or_configuration_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"no config\.json"):
        open_checkpoint(str(tmp_path))
    (saved(tiny_model("llama"), tmp_path) / "model.safetensors").unlink()
    with pytest.raises(ModelError, match=r"no \*\.safetensors"):
        open_checkpoint(str(tmp_path))


@pytest.mark.parametrize("name", ["no-such-model", "/no/such/folder", "./here", "a b/c", ""])
def test_an_unknown_model_is_refused_with_what_could_be_named(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ModelError, match=r"hub id like org/name|no config\.json"):
        open_checkpoint(name)


def test_a_single_safetensors_file_is_refused_with_advice(tmp_path: Path) -> None:
    saved(tiny_model("llama"), tmp_path)
    with pytest.raises(ModelError, match="name the folder"):
        open_checkpoint(str(tmp_path / "model.safetensors"))
