"""A pipeline folder is cut by its blocks: what a node reads, what a gateway loads, and what is refused."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from slicing.any_model import kind_of_model, num_layers_of, open_model
from slicing.diffusion.block_range import fill_block
from slicing.diffusion.outside import load_pipeline
from slicing.diffusion.pipeline_index import is_transformer
from slicing.diffusion.source import PipelineSource, compute_dtype, is_pipeline, open_pipeline
from slicing.diffusion.tensor_table import SINGLE_NAME
from slicing.errors import ModelError
from tests.support.tiny_pipelines import PIPELINES, TinyPipelines, draw, quiet

Change = Callable[[Path], object]


def put_blocks_in(pipeline: Any, source: PipelineSource, dtype: torch.dtype = torch.float32) -> None:
    """Fill a gateway's pipeline with the blocks that nodes would hold."""
    for stack in source.remote:
        blocks = getattr(pipeline, stack.component).get_submodule(stack.path)
        for number in range(len(stack)):
            blocks[number] = fill_block(stack, number, source.read_block(stack, number), dtype=dtype)


@pytest.fixture
def wan(tiny_pipelines: TinyPipelines, tmp_path: Path) -> Path:
    """A copy of the Wan folder that a test may change."""
    return Path(shutil.copytree(tiny_pipelines.folder("wan"), tmp_path / "wan"))


def write_json(file: Path, **changes: object) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def shard(folder: Path) -> None:
    """Split a transformer's weights into one file for each block and one for the rest."""
    file = folder / "transformer" / SINGLE_NAME
    tensors = load_file(file)
    file.unlink()
    groups: dict[str, dict[str, torch.Tensor]] = {}
    for name, tensor in tensors.items():
        part = name.split(".")[1] if name.startswith("blocks.") else "rest"
        groups.setdefault(f"diffusion_pytorch_model-{part}.safetensors", {})[name] = tensor.clone()
    for shard_name, group in groups.items():
        save_file(group, folder / "transformer" / shard_name)
    weight_map = {name: shard_name for shard_name, group in groups.items() for name in group}
    (folder / "transformer" / f"{SINGLE_NAME}.index.json").write_text(json.dumps({"weight_map": weight_map}))


# --- what is read


@pytest.mark.parametrize("name", PIPELINES)
def test_the_gateways_part_and_the_blocks_make_the_whole_pipeline(
    name: str, tiny_pipelines: TinyPipelines
) -> None:
    source = open_pipeline(str(tiny_pipelines.folder(name)))
    pipeline = load_pipeline(source)
    assert source.num_layers == PIPELINES[name].num_layers
    put_blocks_in(pipeline, source)
    assert torch.equal(draw(pipeline, name), draw(tiny_pipelines.whole(name), name))


@pytest.mark.parametrize("name", PIPELINES)
def test_a_gateway_reads_no_byte_of_a_remote_block(name: str, tiny_pipelines: TinyPipelines) -> None:
    source = open_pipeline(str(tiny_pipelines.folder(name)))
    pipeline = source.load_pipeline()
    remote = {stack.name: len(stack) for stack in source.remote}
    blocks_bytes = sum(source.block_bytes(number, torch.float32) for number in range(source.num_layers))
    stored = sum(
        tensor.size_bytes for part in source.transformers.values() for tensor in part.table.tensors.values()
    )
    assert source.bytes_requested == stored - blocks_bytes
    weightless = {
        f"{component}.{parameter.split('.')[0]}"
        for component, model in pipeline.components.items()
        if isinstance(model, torch.nn.Module)
        for parameter, tensor in model.named_parameters()
        if tensor.is_meta
    }
    assert weightless == set(remote)


def test_blocks_of_two_transformers_are_numbered_through(tiny_pipelines: TinyPipelines) -> None:
    source = open_pipeline(str(tiny_pipelines.folder("wan-two")))
    assert [(stack.name, stack.offset, stack.end) for stack in source.remote] == [
        ("transformer.blocks", 0, 4),
        ("transformer_2.blocks", 4, 8),
    ]
    stack, number = source.locate(5)
    assert (stack.component, number) == ("transformer_2", 1)
    with pytest.raises(ModelError, match="has blocks 0:8, not 8"):
        source.locate(8)


def test_what_stock_keeps_in_float32_stays_so(wan: Path) -> None:
    from diffusers import WanTransformer3DModel

    source = open_pipeline(str(wan))
    pipeline = load_pipeline(source, dtype=torch.bfloat16)
    put_blocks_in(pipeline, source, torch.bfloat16)
    with quiet():
        stock = WanTransformer3DModel.from_pretrained(wan, subfolder="transformer", dtype=torch.bfloat16)
    ours = pipeline.transformer.state_dict()
    assert {tensor.dtype for tensor in ours.values()} == {torch.bfloat16, torch.float32}
    for name, tensor in stock.state_dict().items():
        assert ours[name].dtype == tensor.dtype
        assert torch.equal(ours[name], tensor)


def test_half_precision_is_computed_in_float32_on_a_cpu() -> None:
    assert compute_dtype(torch.float16) == torch.float32
    assert compute_dtype(torch.bfloat16, "cuda") == torch.bfloat16


def test_sharding_changes_neither_digest_nor_picture(wan: Path, tiny_pipelines: TinyPipelines) -> None:
    whole = open_pipeline(str(tiny_pipelines.folder("wan")))
    shard(wan)
    sharded = open_pipeline(str(wan))
    assert sharded.digest == whole.digest
    pipeline = load_pipeline(sharded)
    put_blocks_in(pipeline, sharded)
    assert torch.equal(draw(pipeline, "wan"), draw(tiny_pipelines.whole("wan"), "wan"))


@pytest.mark.parametrize(("key", "value"), [("cross_attn_norm", False), ("_diffusers_version", "9.9")])
def test_the_digest_is_of_what_is_computed(wan: Path, key: str, value: object) -> None:
    before = open_pipeline(str(wan)).digest
    write_json(wan / "transformer" / "config.json", **{key: value})
    assert (open_pipeline(str(wan)).digest == before) is key.startswith("_")


def test_a_block_whose_shard_is_here_can_be_read_without_the_others(wan: Path) -> None:
    shard(wan)
    (wan / "transformer" / "diffusion_pytorch_model-0.safetensors").unlink()
    source = open_pipeline(str(wan))
    (stack,) = source.remote
    assert source.read_block(stack, 1).keys() == stack.blocks[1].state_dict().keys()
    with pytest.raises(ModelError, match=r"lacks diffusion_pytorch_model-0\.safetensors"):
        source.read_block(stack, 0)
    with pytest.raises(ModelError, match=r"lacks diffusion_pytorch_model-0\.safetensors"):
        _ = source.digest


def test_pipelines_and_text_models_are_told_apart(wan: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    assert is_pipeline(str(wan))
    assert not is_pipeline(str(tmp_path))
    assert not is_pipeline("smollm2")
    opened = open_model(str(wan))
    assert (num_layers_of(opened), kind_of_model(opened), opened.public_name) == (4, "video", "wan")


@pytest.mark.parametrize(
    ("name", "expected"),
    [("transformer", True), ("transformer_2", True), ("transformer_x", False), ("unet", False)],
)
def test_transformers_are_told_by_their_name(name: str, expected: bool) -> None:
    assert is_transformer(name) is expected


# --- what is refused


def without_index(folder: Path) -> None:
    (folder / "model_index.json").unlink()


def with_index(**changes: object) -> Change:
    return lambda folder: write_json(folder / "model_index.json", **changes)


def with_config(**changes: object) -> Change:
    return lambda folder: write_json(folder / "transformer" / "config.json", **changes)


def with_damaged_index(folder: Path) -> None:
    (folder / "model_index.json").write_text("{")


def with_damaged_weights(folder: Path) -> None:
    (folder / "transformer" / SINGLE_NAME).write_bytes(b"\xff" * 100)


def with_pickles_only(folder: Path) -> None:
    (folder / "transformer" / SINGLE_NAME).rename(folder / "transformer" / "diffusion_pytorch_model.bin")


def with_a_variant_only(folder: Path) -> None:
    file = folder / "transformer" / SINGLE_NAME
    file.rename(file.with_name("diffusion_pytorch_model.fp16.safetensors"))


def without_config(folder: Path) -> None:
    (folder / "transformer" / "config.json").unlink()


def without_transformer(folder: Path) -> None:
    index = json.loads((folder / "model_index.json").read_text())
    index["unet"] = index.pop("transformer")
    (folder / "model_index.json").write_text(json.dumps(index))


def with_an_autoencoder_for_a_transformer(folder: Path) -> None:
    write_json(folder / "model_index.json", transformer=["diffusers", "AutoencoderKLWan"])
    shutil.rmtree(folder / "transformer")
    shutil.copytree(folder / "vae", folder / "transformer")


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (without_index, "holds no model_index.json"),
        (with_damaged_index, "not valid JSON"),
        (with_index(_class_name="NewPipeline"), "NewPipeline, unknown to diffusers"),
        (with_index(_class_name="AutoencoderKL"), "AutoencoderKL, unknown to diffusers"),
        (with_index(_class_name=["pipeline", "Mine"]), "never run"),
        (with_index(transformer=["my_transformer", "Mine"]), "'my_transformer'.*never run"),
        (with_index(transformer=["diffusers", "NewTransformer"]), "NewTransformer, unknown to diffusers"),
        (with_index(transformer=["transformers", "T5EncoderModel"]), "T5EncoderModel, unknown to diffusers"),
        (without_transformer, r"without a transformer \(a U-Net\)"),
        (with_an_autoencoder_for_a_transformer, "no list of attention blocks"),
        (without_config, "holds no config.json"),
        (with_config(quantization_config={"quant_method": "nf4"}), "quantised with nf4"),
        (with_config(num_attention_heads="two"), "takes no such configuration"),
        (with_damaged_weights, "is damaged"),
        (with_pickles_only, "only pickled weights"),
        (with_a_variant_only, "without a variant"),
    ],
)
def test_what_cannot_be_opened_is_refused_with_the_reason(wan: Path, change: Change, reason: str) -> None:
    change(wan)
    with pytest.raises(ModelError, match=reason):
        open_pipeline(str(wan))


def test_weights_of_another_model_are_refused(wan: Path) -> None:
    write_json(wan / "transformer" / "config.json", ffn_dim=64)
    source = open_pipeline(str(wan))
    with pytest.raises(ModelError, match="do not belong together"):
        source.read_block(source.remote[0], 0)


def test_a_tensor_that_no_file_holds_is_named(wan: Path) -> None:
    file = wan / "transformer" / SINGLE_NAME
    tensors = load_file(file)
    lost = ("blocks.1.ffn.net.2.bias", "proj_out.weight")
    save_file({name: tensor for name, tensor in tensors.items() if name not in lost}, file)
    source = open_pipeline(str(wan))
    with pytest.raises(ModelError, match=lost[0]):
        source.fetch([1])
    with pytest.raises(ModelError, match=lost[1]):
        load_pipeline(source)


def test_a_pickled_text_encoder_is_never_opened(wan: Path) -> None:
    file = wan / "text_encoder" / "model.safetensors"
    file.rename(file.with_name("pytorch_model.bin"))
    with pytest.raises(ModelError, match=r"only pickled weights \(pytorch_model\.bin\)"):
        load_pipeline(open_pipeline(str(wan)))


def test_a_missing_component_is_refused(wan: Path) -> None:
    shutil.rmtree(wan / "vae")
    with pytest.raises(ModelError, match="diffusers refuses"):
        load_pipeline(open_pipeline(str(wan)))
