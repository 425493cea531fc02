"""A pipeline on a hub: a node fetches its own blocks and nothing of the rest, a gateway the rest and no block."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import huggingface_hub
import pytest
import torch
from huggingface_hub import constants

from slicing.any_model import open_model
from slicing.diffusion.hub_pipeline import is_hub_pipeline
from slicing.diffusion.outside import load_pipeline
from slicing.diffusion.source import is_pipeline, open_pipeline
from slicing.errors import ModelError
from tests.slicing.diffusion.test_source import put_blocks_in
from tests.support.http_stub import HubStub
from tests.support.tiny_pipelines import TinyPipelines, draw

REPO = "org/tiny-wan"


@pytest.fixture
def hub(tiny_pipelines: TinyPipelines, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[HubStub]:
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub-cache"))
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    monkeypatch.setattr("slicing.hub.FIRST_WAIT_S", 0.001)
    monkeypatch.setenv("DIFFUSE_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.delenv("HF_TOKEN", raising=False)
    with HubStub(REPO, tiny_pipelines.folder("wan")) as stub:
        monkeypatch.setattr(constants, "ENDPOINT", stub.url)
        monkeypatch.setattr(
            constants, "HUGGINGFACE_CO_URL_TEMPLATE", stub.url + "/{repo_id}/resolve/{revision}/{filename}"
        )
        yield stub
    huggingface_hub.close_session()


def test_a_node_fetches_its_own_blocks_bytes(hub: HubStub) -> None:
    source = open_pipeline(REPO)
    headers = hub.weight_bytes
    source.fetch([1, 2])
    assert hub.weight_bytes - headers == sum(source.block_bytes(number, torch.float32) for number in (1, 2))
    source.read_block(source.remote[0], 1)
    assert hub.weight_bytes - headers == 2 * source.block_bytes(1, torch.float32)
    assert not [asked for asked in hub.requests if "text_encoder" in asked or "tokenizer" in asked]
    assert "GET vae/diffusion_pytorch_model.safetensors" not in hub.requests


def test_a_gateway_fetches_the_rest_and_no_block(hub: HubStub, tiny_pipelines: TinyPipelines) -> None:
    source = open_pipeline(REPO)
    pipeline = load_pipeline(source)
    blocks = sum(source.block_bytes(number, torch.float32) for number in range(4))
    stored = sum(file.stat().st_size for file in hub.files() if file.suffix == ".safetensors")
    assert hub.weight_bytes == stored - blocks
    put_blocks_in(pipeline, source)
    assert torch.equal(draw(pipeline, "wan"), draw(tiny_pipelines.whole("wan"), "wan"))


def test_hub_and_folder_have_one_digest(hub: HubStub, tiny_pipelines: TinyPipelines) -> None:
    opened = open_model(REPO)
    assert opened.digest == open_model(str(tiny_pipelines.folder("wan"))).digest
    assert opened.public_name == REPO


def test_what_was_opened_once_opens_without_the_hub(hub: HubStub) -> None:
    source = open_pipeline(REPO)
    source.fetch([0])
    asked = sum(hub.requests.values())
    assert is_pipeline(REPO, may_fetch=False)
    again = open_pipeline(REPO, may_fetch=False)
    again.read_block(again.remote[0], 0)
    assert sum(hub.requests.values()) == asked
    with pytest.raises(ModelError, match="not fully here"):
        again.read_block(again.remote[0], 1)


def test_a_model_without_an_index_is_no_pipeline(
    hub: HubStub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert is_hub_pipeline(REPO)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "another"))
    monkeypatch.setattr(hub, "folder", hub.folder / "text_encoder")
    assert not is_hub_pipeline(REPO)
    with pytest.raises(ModelError, match="has no model org/other"):
        is_hub_pipeline("org/other")
