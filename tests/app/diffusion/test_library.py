"""Both kinds of models stand in one library; each endpoint is told which kind it has."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from app.api.errors import ApiError
from app.engine.diffusion.generation import PipelineEngine
from app.engine.library import LibrarySettings, NamedModel, NetworkLibrary, opened_library
from app.engine.model import EndsSettings, look_up
from app.gateway import Gateway
from app.keys import ANYONE
from app.metrics import GatewayMetrics
from app.settings import GatewaySettings
from routing.errors import SettingsError
from slicing.diffusion.kinds import Kind
from slicing.diffusion.source import open_pipeline
from tests.app.fake_network import FakeDirectory, joined, node, offer
from tests.support.tiny_pipelines import TinyPipelines


@contextlib.asynccontextmanager
async def library(**settings: Any) -> AsyncIterator[tuple[NetworkLibrary, FakeDirectory]]:
    network, directory = joined()
    async with opened_library(LibrarySettings(**settings), network) as opened:
        yield opened, directory


def serving(pipelines: TinyPipelines, name: str, *spans: tuple[int, int]) -> list[Any]:
    """Nodes that announce these blocks of a tiny pipeline."""
    digest = open_pipeline(str(pipelines.folder(name))).digest
    return [node(n, offer(digest, *span, name=name)) for n, span in enumerate(spans, 1)]


async def test_a_named_pipeline_is_opened_beside_others(tiny_pipelines: TinyPipelines) -> None:
    folders = [str(tiny_pipelines.folder(name)) for name in ("pixart", "wan")]
    async with library(models=tuple(NamedModel(folder) for folder in folders)) as (models, _):
        named = await models.open_named()
        assert [model.facts.name for model in named] == ["pixart", "wan"]
        assert [model.kind for model in models.models()] == [Kind.PICTURE, Kind.VIDEO]
        known = models.find("pixart")
        assert known is not None
        assert (known.status.state, known.status.missing) == ("partial", ((0, 4),))
        assert known.status.reason == "blocks 0:4 of transformer.transformer_blocks"
        assert isinstance(await models.engine("wan"), PipelineEngine)


async def test_an_announced_pipeline_is_found_and_opened_at_first_use(
    tiny_pipelines: TinyPipelines, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tiny_pipelines.folder("pixart")
    monkeypatch.chdir(folder.parent)
    async with library() as (models, directory):
        directory.now_holds(*serving(tiny_pipelines, "pixart", (0, 2), (2, 4)))
        await models.find_new()
        known = models.find("pixart")
        assert known is not None
        assert (known.status.state, known.kind) == ("available", Kind.PICTURE)
        assert isinstance(await models.engine("pixart"), PipelineEngine)
        known = models.find("pixart")
        assert known is not None
        assert known.status.state == "ready"


def test_a_text_model_refuses_the_wire_of_pictures(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="int8-delta is for models that make pictures"):
        look_up(str(tmp_path), EndsSettings(wire="int8-delta"))


async def test_a_model_of_another_kind_is_refused_with_the_endpoint_that_has_it(
    tiny_pipelines: TinyPipelines,
) -> None:
    folder = str(tiny_pipelines.folder("pixart"))
    async with library(models=(NamedModel(folder),)) as (models, directory):
        await models.open_named()
        directory.now_holds(*serving(tiny_pipelines, "pixart", (0, 4)))
        gateway = Gateway(GatewaySettings(), models, GatewayMetrics())
        wrong = "the model `pixart` makes pictures; POST /v1/images/generations asks it"
        for asking in (
            gateway.ready_engine("pixart", ANYONE),
            gateway.ready_diffusion("pixart", Kind.VIDEO, ANYONE),
        ):
            with pytest.raises(ApiError, match=wrong) as caught:
                await asking
            assert (caught.value.status, caught.value.param) == (400, "model")
        assert (await gateway.ready_diffusion(None, Kind.PICTURE, ANYONE)).model_name == "pixart"
        with pytest.raises(ApiError, match="No model here makes sounds") as nothing:
            await gateway.ready_diffusion(None, Kind.AUDIO, ANYONE)
        assert (nothing.value.status, nothing.value.code) == (404, "model_not_found")
