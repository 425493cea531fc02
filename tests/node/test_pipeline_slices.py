"""A node holds blocks of a diffusion model as it holds layers of a text model, and opens no other part of it."""

from __future__ import annotations

import shutil
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
import torch

from node.loading import LoadReport, read_blocks
from node.main import run_node
from node.placing import PlacingTimes
from node.pool import max_layers
from node.scheduler import Scheduler
from node.slice_loader import SliceLoader
from routing.addresses import parse_address
from routing.errors import SettingsError
from routing.network_status import BLOCKS_FORM
from routing.types import SliceSpec, WireDtype
from slicing.diffusion.source import open_pipeline
from slicing.errors import ModelError
from slicing.progress import LoadStopped
from tests.node.rig import node_settings
from tests.node.test_main import Running, described, gateway, running
from tests.support.tiny_pipelines import TinyPipelines

AT_ONCE = PlacingTimes(first_look=0.0, settle=0.01, confirm=0.01, delay=0.01, debounce=0.01)


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DIFFUSE_CACHE_DIR", str(tmp_path / "cache"))


@pytest.fixture
def poisoned(tiny_pipelines: TinyPipelines, tmp_path: Path) -> Path:
    """A Wan folder in which only the index and the transformer can be read."""
    folder = Path(shutil.copytree(tiny_pipelines.folder("wan"), tmp_path / "wan"))
    for file in folder.rglob("*.*"):
        if "transformer" not in file.parts and file.name != "model_index.json":
            file.write_bytes(b"\xff" * 64)
    return folder


@pytest_asyncio.fixture
async def loader(tmp_path: Path) -> AsyncIterator[SliceLoader]:
    scheduler: Scheduler = Scheduler()
    made = SliceLoader(node_settings(cache_dir=tmp_path, threads=1), scheduler, lambda _: None)
    yield made
    await made.close()
    await scheduler.close()


async def test_a_node_serves_blocks_and_opens_no_other_part_of_the_pipeline(poisoned: Path) -> None:
    async with running(model=str(poisoned), layers="1:3", threads=1) as node, gateway() as client:
        ready = await node.ready()
        assert (ready["layers"], ready["dtype"], ready["form"]) == ("1:3", "float32", "stock/fp32")
        assert 0 < ready["weights_bytes"] == ready["bytes_read"]
        (offer,) = (await described(client, parse_address(ready["address"]))).slices
        assert (str(offer.spec), offer.num_layers, len(offer.layer_hashes)) == ("1:3", 4, 2)
        assert (offer.model_name, offer.model_digest) == ("wan", open_pipeline(str(poisoned)).digest)
        assert (offer.hidden_size, offer.has_opening, offer.has_closing) == (24, False, False)
        assert offer.layer_ms > 0
        assert offer.form.startswith(BLOCKS_FORM)


async def test_the_held_blocks_are_those_of_the_stock_model(
    tiny_pipelines: TinyPipelines, loader: SliceLoader
) -> None:
    loaded = await loader.load(str(tiny_pipelines.folder("wan-two")), SliceSpec(3, 6))
    whole = tiny_pipelines.whole("wan-two")
    stock = [*whole.transformer.blocks, *whole.transformer_2.blocks]
    held: Any = loaded.held.runner
    assert (held.start, held.end, held.num_layers) == (3, 6, 8)
    for number in range(3, 6):
        ours = held._blocks[number].state_dict()
        assert all(torch.equal(ours[name], tensor) for name, tensor in stock[number].state_dict().items())


async def test_replicas_agree_whatever_they_hold_beside_a_block(
    tiny_pipelines: TinyPipelines, loader: SliceLoader
) -> None:
    folder = str(tiny_pipelines.folder("flux"))
    first = await loader.load(folder, SliceSpec(1, 4))
    later = await loader.load(folder, SliceSpec(2, 5))
    assert first.held.offer.layer_hashes[1:] == later.held.offer.layer_hashes[:2]
    assert len(set(first.held.offer.layer_hashes)) == 3
    assert later.held.offer.layer_ms > 0


async def test_placement_knows_what_a_block_takes(tiny_pipelines: TinyPipelines, loader: SliceLoader) -> None:
    folder = str(tiny_pipelines.folder("flux"))
    facts = await loader.examine(folder)
    source = open_pipeline(folder)
    sizes = [source.block_bytes(number, torch.float32) for number in range(5)]
    assert (facts.num_layers, facts.digest, facts.public_name) == (5, source.digest, "flux")
    assert facts.layer_bytes == max(sizes) > min(sizes)
    assert facts.cache_bytes == 2 * 32 * 4  # a key and a value of width 32 for each token
    assert max_layers(3 * (facts.layer_bytes + 4096 * facts.cache_bytes), facts) == 3
    assert 0 < facts.layer_ms < 1000


async def test_a_node_without_layers_finds_its_place_in_a_swarm(poisoned: Path) -> None:
    settings = node_settings(model=str(poisoned), threads=1, is_sentinel=True)
    node = Running(settings, times=AT_ONCE)
    try:
        assert (await node.ready())["layers"] == "0:4"  # nobody else is there
    finally:
        await node.stop()


@pytest.mark.parametrize(
    ("changes", "dtype", "form"),
    [
        ({}, WireDtype.FLOAT32, "stock/fp32"),
        ({"weights": "bf16"}, WireDtype.BFLOAT16, "stock/bf16"),
        ({"dtype": "bfloat16"}, WireDtype.BFLOAT16, "stock/bf16"),
        ({"runner": "auto"}, WireDtype.FLOAT32, "stock/fp32"),
    ],
)
async def test_blocks_compute_in_float32_unless_another_type_is_asked_for(
    tiny_pipelines: TinyPipelines, changes: dict[str, str], dtype: WireDtype, form: str
) -> None:
    async with running(model=str(tiny_pipelines.folder("pixart")), threads=1, **changes) as node:
        ready = await node.ready()
        assert (ready["dtype"], ready["form"]) == (dtype.name.lower(), form)


@pytest.mark.parametrize(
    ("changes", "error", "text"),
    [
        ({"layers": "2:5"}, SettingsError, "the model has layers 0:4"),
        ({"runner": "fast"}, SettingsError, "leave --runner out"),
        ({"weights": "int8"}, SettingsError, "not as int8"),
        ({"model": "/nowhere/at/all"}, ModelError, "nowhere"),
    ],
)
async def test_what_cannot_be_served_is_said_at_once(
    tiny_pipelines: TinyPipelines, changes: dict[str, str], error: type[Exception], text: str
) -> None:
    settings = {"model": str(tiny_pipelines.folder("wan")), "threads": 1}
    with pytest.raises(error, match=text):
        await run_node(node_settings(**settings | changes), on_event=lambda _: None)


def test_a_load_can_be_stopped(tiny_pipelines: TinyPipelines) -> None:
    report = LoadReport(lambda _: None)
    report.stop()
    with pytest.raises(LoadStopped):
        read_blocks(node_settings(), open_pipeline(str(tiny_pipelines.folder("wan"))), None, report)
