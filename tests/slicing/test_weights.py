"""Partial loading: only what is wanted, equal to what was saved, and not a byte of anything else."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from slicing.checkpoint import Checkpoint, open_folder
from slicing.errors import ModelError
from slicing.weights import LoadedWeights, layer_number, load_parameters
from tests.support.tiny_models import FAMILIES, hollow, saved, tiny_model


def load_layers(checkpoint: Checkpoint, model: torch.nn.Module, *layers: int) -> LoadedWeights:
    return load_parameters(checkpoint, model, lambda name: layer_number(name) in layers)


def assert_filled(model: torch.nn.Module, original: torch.nn.Module, names: set[str]) -> None:
    """Exactly `names` hold weights, bit for bit the original's, aligned for the widest registers."""
    expected, state = original.state_dict(), model.state_dict()
    assert {name for name, tensor in state.items() if not tensor.is_meta} == names
    assert all(torch.equal(state[name], expected[name]) for name in names)
    assert all(state[name].data_ptr() % 64 == 0 for name in names)


@pytest.mark.parametrize("part", ["whole", "base"])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_slice_of_each_family_is_what_was_saved(family: str, part: str, tmp_path: Path) -> None:
    original = tiny_model(family)
    saved(original if part == "whole" else original.base_model, tmp_path, max_shard_size="20KB")
    model = hollow(original)
    loaded = load_layers(open_folder(tmp_path), model, 1, 2)
    wanted = {name for name in original.state_dict() if layer_number(name) in (1, 2)}
    assert_filled(model, original, wanted)
    assert loaded.names == wanted
    assert loaded.size_bytes == sum(original.state_dict()[name].nbytes for name in wanted)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_whole_model_is_what_was_saved(family: str, tmp_path: Path) -> None:
    original = tiny_model(family)
    model = hollow(original)
    load_parameters(open_folder(saved(original, tmp_path)), model, lambda name: True)
    assert_filled(model, original, set(original.state_dict()))


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe", "deepseek_v3"])
def test_experts_are_stored_one_by_one_and_joined(family: str, tmp_path: Path) -> None:
    checkpoint = open_folder(saved(tiny_model(family), tmp_path))
    assert sum("experts.3." in name for name in checkpoint.tensors) >= 6


def test_a_tied_head_is_read_from_the_embedding_alone(tmp_path: Path) -> None:
    original = tiny_model("llama", tie_word_embeddings=True)
    checkpoint = open_folder(saved(original, tmp_path))
    assert "lm_head.weight" not in checkpoint.tensors
    model = hollow(original)
    load_parameters(checkpoint, model, lambda name: name in ("lm_head.weight", "model.norm.weight"))
    assert_filled(model, original, {"lm_head.weight", "model.norm.weight"})


def test_tied_names_share_one_tensor(tmp_path: Path) -> None:
    original = tiny_model("llama", tie_word_embeddings=True)
    model = hollow(original)
    loaded = load_parameters(open_folder(saved(original, tmp_path)), model, lambda name: "layers" not in name)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert loaded.size_bytes == original.lm_head.weight.nbytes + original.model.norm.weight.nbytes


def test_a_tied_embedding_is_found_under_the_heads_name(tmp_path: Path) -> None:
    original = tiny_model("llama", tie_word_embeddings=True)
    tensors = load_file(saved(original, tmp_path) / "model.safetensors")
    tensors["lm_head.weight"] = tensors.pop("model.embed_tokens.weight")
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    model = hollow(original)
    load_parameters(open_folder(tmp_path), model, lambda name: "embed" in name)
    assert_filled(model, original, {"model.embed_tokens.weight"})


@pytest.mark.parametrize("is_equal", [True, False])
def test_a_tied_pair_that_is_stored_twice_is_shared_only_when_equal(is_equal: bool, tmp_path: Path) -> None:
    original = tiny_model("llama", tie_word_embeddings=True)
    tensors = load_file(saved(original, tmp_path) / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"] + (0 if is_equal else 1)
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    model = hollow(original)
    load_parameters(open_folder(tmp_path), model, lambda name: "layers" not in name)
    assert (model.lm_head.weight is model.model.embed_tokens.weight) == is_equal
    assert torch.equal(model.lm_head.weight, tensors["lm_head.weight"])


def test_weights_are_converted_to_the_compute_dtype(tmp_path: Path) -> None:
    original = tiny_model("llama").to(torch.bfloat16)
    model = hollow(tiny_model("llama"))
    checkpoint = open_folder(saved(original, tmp_path))
    loaded = load_parameters(checkpoint, model, lambda name: True, dtype=torch.float32)
    assert checkpoint.dtype == torch.bfloat16
    assert all(
        torch.equal(held, original.state_dict()[name].float()) for name, held in model.state_dict().items()
    )
    assert loaded.size_bytes == 2 * checkpoint.bytes_requested


def test_tensors_larger_than_a_chunk_are_converted_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("slicing.tensor_reader.CHUNK_BYTES", 64)
    original = tiny_model("qwen3_moe").to(torch.bfloat16)
    checkpoint = open_folder(saved(original, tmp_path))
    hashes = []
    for dtype in (torch.float32, torch.bfloat16):
        model = hollow(tiny_model("qwen3_moe"))
        hashes.append(load_parameters(checkpoint, model, lambda name: True, dtype=dtype).layer_hashes)
        state = model.state_dict()
        assert all(torch.equal(state[name], held.to(dtype)) for name, held in original.state_dict().items())
    assert hashes[0] == hashes[1]


@pytest.mark.parametrize("family", ["deepseek_v3", "gpt_oss", "mixtral", "gemma3_text"])
def test_each_parameter_gets_the_dtype_that_stock_loading_gives_it(family: str, tmp_path: Path) -> None:
    original = tiny_model(family)
    stock = AutoModelForCausalLM.from_pretrained(saved(original, tmp_path), dtype=torch.bfloat16).state_dict()
    model = hollow(original)
    load_parameters(open_folder(tmp_path), model, lambda name: True, dtype=torch.bfloat16)
    assert {name: held.dtype for name, held in model.state_dict().items()} == {
        n: t.dtype for n, t in stock.items()
    }
    assert all(torch.equal(held, stock[name]) for name, held in model.state_dict().items())
    assert family != "deepseek_v3" or torch.float32 in {held.dtype for held in stock.values()}


@pytest.mark.parametrize("family", ["llama", "mixtral", "gpt2"])
def test_only_the_ranges_of_the_slice_are_asked_for(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every other tensor is poisoned, and every read is checked against the ranges of the slice."""
    original = tiny_model(family)
    checkpoint = open_folder(saved(original, tmp_path, max_shard_size="20KB"))
    mine = {name: place for name, place in checkpoint.tensors.items() if layer_number(name) == 1}
    for name, place in checkpoint.tensors.items():
        if name not in mine:
            with place.file.open("rb+") as stream:
                stream.seek(place.begin)
                stream.write(b"\xff" * place.size_bytes)  # NaN in every float type
    asked: list[tuple[int, int]] = []
    real = os.preadv

    def preadv(file: int, buffers: list[memoryview], offset: int) -> int:
        asked.append((offset, offset + len(buffers[0])))
        return real(file, buffers, offset)

    monkeypatch.setattr(os, "preadv", preadv)
    model = hollow(original)
    load_layers(checkpoint, model, 1)
    assert_filled(model, original, {name for name in original.state_dict() if layer_number(name) == 1})
    slice_bytes = sum(place.size_bytes for place in mine.values())
    assert checkpoint.bytes_requested == slice_bytes == sum(end - begin for begin, end in asked)
    own = {(place.begin, place.end) for place in mine.values()}
    assert all(any(begin >= low and end <= high for low, high in own) for begin, end in asked)


def test_a_shard_that_this_slice_does_not_need_may_be_missing(tmp_path: Path) -> None:
    original = tiny_model("llama")
    saved(original, tmp_path, max_shard_size="20KB")
    shard_of = json.loads((tmp_path / "model.safetensors.index.json").read_text())["weight_map"]
    lost = shard_of["model.layers.2.mlp.up_proj.weight"]
    needed = {shard for name, shard in shard_of.items() if layer_number(name) == 0}
    assert lost not in needed
    (tmp_path / lost).unlink()
    checkpoint = open_folder(tmp_path)
    model = hollow(original)
    load_layers(checkpoint, model, 0)
    assert_filled(model, original, {name for name in original.state_dict() if layer_number(name) == 0})
    with pytest.raises(ModelError, match=f"lacks {lost} .*copy it there"):
        load_layers(checkpoint, hollow(original), 2)
    with pytest.raises(ModelError, match=lost):
        _ = checkpoint.digest


def test_a_layer_may_span_shards_and_the_first_may_hold_none_of_it(tmp_path: Path) -> None:
    original = tiny_model("llama")
    saved(original, tmp_path, max_shard_size="20KB")
    checkpoint = open_folder(tmp_path)
    files = {place.file for name, place in checkpoint.tensors.items() if layer_number(name) == 1}
    assert len(files) > 1
    assert min(place.file for place in checkpoint.tensors.values()) not in files
    load_layers(checkpoint, hollow(original), 1)


def test_a_tensor_that_is_not_in_the_checkpoint_is_named(tmp_path: Path) -> None:
    original = tiny_model("llama")
    tensors = load_file(saved(original, tmp_path) / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match=r"no tensor for model\.layers\.1\.mlp\.up_proj\.weight"):
        load_layers(open_folder(tmp_path), hollow(original), 1)


def test_a_configuration_of_another_size_is_refused_and_nothing_is_filled(tmp_path: Path) -> None:
    checkpoint = open_folder(saved(tiny_model("llama"), tmp_path))
    model = hollow(tiny_model("llama", intermediate_size=64))
    with pytest.raises(ModelError, match=r"with shape \(48, 32\).*do not belong together"):
        load_layers(checkpoint, model, 1)
    assert all(tensor.is_meta for tensor in model.state_dict().values())


def test_a_file_that_became_shorter_is_named(tmp_path: Path) -> None:
    original = tiny_model("llama")
    checkpoint = open_folder(saved(original, tmp_path))
    with (tmp_path / "model.safetensors").open("rb+") as stream:
        stream.truncate(5000)
    with pytest.raises(ModelError, match=r"model\.safetensors is damaged: it ends at byte"):
        load_parameters(checkpoint, hollow(original), lambda name: True)


def test_layer_hashes_are_the_same_for_any_cut_and_follow_the_bytes(tmp_path: Path) -> None:
    original = tiny_model("mixtral")
    checkpoint = open_folder(saved(original, tmp_path / "a"))
    whole = load_parameters(checkpoint, hollow(original), lambda name: True).layer_hashes
    cut = load_layers(
        open_folder(saved(original, tmp_path / "b", max_shard_size="20KB")), hollow(original), 1
    )
    assert list(whole) == [0, 1, 2]
    assert all(len(value) == 8 for value in whole.values())
    assert cut.layer_hashes == {1: whole[1]}
    with torch.no_grad():
        original.model.layers[1].input_layernorm.weight[0] += 1
    changed = load_layers(open_folder(saved(original, tmp_path / "c")), hollow(original), 0, 1)
    assert changed.layer_hashes[0] == whole[0]
    assert changed.layer_hashes[1] != whole[1]


def test_progress_ends_with_everything_done(tmp_path: Path) -> None:
    told: list[tuple[str, int, int]] = []
    checkpoint = open_folder(saved(tiny_model("llama"), tmp_path))
    model = hollow(tiny_model("llama"))
    load_parameters(checkpoint, model, lambda name: True, progress=lambda *args: told.append(args))
    total = sum(place.size_bytes for place in checkpoint.tensors.values())
    assert told[-1] == ("load", total, total)
    assert [done for _, done, _ in told] == sorted(done for _, done, _ in told)


MEASURE = """
import sys, torch
from transformers import AutoModelForCausalLM
from slicing.checkpoint import open_folder
from slicing.weights import layer_number, load_parameters
def peak():
    return int(next(line for line in open("/proc/self/status") if line.startswith("VmHWM")).split()[1]) * 1024
from pathlib import Path
checkpoint = open_folder(Path(sys.argv[1]))
with torch.device("meta"):
    model = AutoModelForCausalLM.from_config(checkpoint.config, dtype=torch.float32)
before = peak()
dtype = getattr(torch, sys.argv[2])
loaded = load_parameters(checkpoint, model, lambda name: layer_number(name) in (1, 2), dtype=dtype)
print(loaded.size_bytes, peak() - before)
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs /proc")
@pytest.mark.parametrize(
    ("family", "width", "dtype"), [("llama", 4096, "bfloat16"), ("mixtral", 1024, "float32")]
)
def test_loading_takes_no_more_memory_than_the_slice(
    family: str, width: int, dtype: str, tmp_path: Path
) -> None:
    wide = tiny_model(family, hidden_size=512, intermediate_size=width, head_dim=128)
    command = [sys.executable, "-c", MEASURE, str(saved(wide, tmp_path)), dtype]
    told = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    size_bytes, grown_bytes = map(int, told.split())
    assert size_bytes > 25_000_000
    assert grown_bytes <= 1.2 * size_bytes
