"""Models of every kind behind one gateway: what is told of them, who is asked for what, and how they are opened."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from app.api.errors import ApiError
from app.api.models import describe_model
from app.engine.library import LibrarySettings, NamedModel, NetworkLibrary, opened_library
from app.engine.model import EndsSettings, look_up
from app.engine.request import KnownModel, ModelStatus, ModelUnavailableError
from app.engine.seq2seq import Seq2SeqEngine
from app.gateway import MAKES, Gateway
from app.keys import ANYONE
from app.metrics import GatewayMetrics
from app.settings import GatewaySettings
from slicing.diffusion.kinds import Kind
from slicing.errors import ModelError
from slicing.model_kind import ModelKind
from tests.app.fake_network import FakeDirectory, joined, node, offer
from tests.support.tiny_encoder_decoders import tiny_pair
from tests.support.tiny_tokenizer import write_tiny_tokenizer


class FixedLibrary:
    """Models that are known, none of which is ever opened."""

    def __init__(self, *kinds: str) -> None:
        self._models = tuple(
            KnownModel(f"a-{kind}", ModelStatus("available", 4), 1_700_000_000, 64, kind=kind)
            for kind in kinds
        )

    def models(self) -> tuple[KnownModel, ...]:
        return self._models

    def find(self, name: str) -> KnownModel | None:
        return next((model for model in self._models if model.name == name), None)

    def unserved(self) -> dict[str, str]:
        return {}

    def plan(self, name: str, options: Any) -> Any:
        raise NotImplementedError

    async def engine(self, name: str) -> Any:
        return name


def gateway_of(*kinds: str) -> Gateway:
    return Gateway(GatewaySettings(), FixedLibrary(*kinds), GatewayMetrics())


def test_every_kind_has_an_endpoint_and_a_modality() -> None:
    assert set(MAKES) == {*ModelKind, *Kind}
    makes = {kind: describe_model("m", model_of(kind)).architecture.output_modalities for kind in MAKES}
    assert makes["seq2seq"] == makes["speech"] == makes["multimodal"] == ("text",)
    assert makes["music"] == makes["audio"] == ("audio",)
    assert makes["encoder"] == makes["embedding"] == ("embeddings",)
    assert makes["picture"] == ("image",)


def model_of(kind: str) -> KnownModel:
    return KnownModel("m", ModelStatus("ready", 4), 0, 64, kind=kind)


@pytest.mark.parametrize(
    ("kind", "told"),
    [
        ("music", "makes music; POST /v1/audio/speech asks it"),
        ("speech", "makes text of recordings; POST /v1/audio/transcriptions asks it"),
        ("encoder", "makes embeddings; POST /v1/embeddings asks it"),
        ("picture", "makes pictures; POST /v1/images/generations asks it"),
    ],
)
async def test_a_chat_is_refused_by_what_makes_no_chat(kind: str, told: str) -> None:
    with pytest.raises(ApiError, match=told) as refused:
        await gateway_of(kind).ready_engine(f"a-{kind}", ANYONE)
    assert (refused.value.status, refused.value.param) == (400, "model")


async def test_music_and_sounds_are_asked_for_at_one_endpoint() -> None:
    gateway = gateway_of("text", "music")
    with pytest.raises(ApiError, match="the model `a-text` makes text"):
        await gateway.ready_diffusion("a-text", Kind.AUDIO, ANYONE)
    with pytest.raises(ApiError, match="No model here makes embeddings"):
        await gateway.ready(None, frozenset({"encoder", "embedding"}), ANYONE)
    with pytest.raises(ApiError, match="No model here makes sounds or music"):
        await gateway_of("text").ready_diffusion(None, Kind.AUDIO, ANYONE)


# Opening -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def t5(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_tiny_tokenizer(tmp_path_factory.mktemp("kinds") / "tiny", template=None)
    tiny_pair("t5").model.save_pretrained(folder)
    return folder


@contextlib.asynccontextmanager
async def library(folder: Path, ends: EndsSettings) -> AsyncIterator[tuple[NetworkLibrary, FakeDirectory]]:
    network, directory = joined()
    settings = LibrarySettings((NamedModel(str(folder)),), ends=ends)
    async with opened_library(settings, network) as opened:
        yield opened, directory


@pytest.mark.parametrize("ends", ["local", "remote"])
async def test_the_encoder_is_at_home_wherever_the_ends_are(t5: Path, ends: Any) -> None:
    settings = EndsSettings(ends=ends)
    digest = look_up(str(t5), settings).facts.digest
    async with library(t5, settings) as (models, directory):
        (opened,) = await models.open_named()
        directory.now_holds(node(1, offer(digest, 0, 4, holds_ends=True)))
        engine = await models.engine("tiny")
        assert isinstance(engine, Seq2SeqEngine)
        (known,) = models.models()
        assert (known.kind, known.takes, known.makes) == ("seq2seq", ("text",), "text")
        assert known.status.state == "ready"
        assert (opened.facts.num_layers, opened.facts.max_positions) == (4, 64)
        assert engine._encoder.size_bytes > 0


async def test_a_model_whose_engine_cannot_be_made_leaves_no_thread(
    t5: Path, monkeypatch: pytest.MonkeyPatch
) -> None:

    def refuse(*_: Any) -> Any:
        raise ModelError("it does not say how an answer begins")

    monkeypatch.setattr("app.engine.seq2seq.start_ids_of", refuse)
    before = set(threading.enumerate())
    async with library(t5, EndsSettings()) as (models, _):
        with pytest.raises(ModelError):
            await models.open_named()
        with pytest.raises(ModelUnavailableError):
            await models.engine("tiny")
        left = [thread.name for thread in threading.enumerate() if thread not in before]
        assert not any(name.startswith(("encoding", "ends")) for name in left)
