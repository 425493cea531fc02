"""Models found in a swarm: opened only where they are the announced ones, one at a time, and never for long waits."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from transformers import LlamaForCausalLM

from app.engine import library as library_module
from app.engine import local_models, openable
from app.engine.library import LibrarySettings, NamedModel, NetworkLibrary, opened_library
from app.engine.model import EndsSettings, look_up
from app.engine.request import ModelUnavailableError
from routing.errors import SettingsError
from slicing.errors import ModelError
from slicing.hub import HubShards
from slicing.model_source import open_checkpoint
from slicing.progress import no_progress
from slicing.runner import PlainRunner
from slicing.sparse_file import SparseFile
from tests.app.fake_network import FakeDirectory, joined, names_of, node, offer
from tests.support.tiny_models import small_llama
from tests.support.tiny_tokenizer import write_tiny_tokenizer

OTHER = bytes([9]) * 32


@pytest.fixture(scope="module")
def llama() -> Iterator[LlamaForCausalLM]:
    with small_llama(64, vocab_size=300) as model:
        yield model


@pytest.fixture
def tiny(llama: LlamaForCausalLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> bytes:
    """A model in the folder `tiny` of the working directory; its digest."""
    monkeypatch.chdir(tmp_path)
    return write_model(llama, tmp_path / "tiny")


def write_model(llama: LlamaForCausalLM, folder: Path) -> bytes:
    llama.save_pretrained(write_tiny_tokenizer(folder))
    return look_up(str(folder), EndsSettings()).facts.digest


@contextlib.asynccontextmanager
async def library(**settings: Any) -> AsyncIterator[tuple[NetworkLibrary, FakeDirectory]]:
    network, directory = joined()
    async with opened_library(LibrarySettings(**settings), network) as opened:
        yield opened, directory


def whole(digest: bytes, *, name: str = "tiny") -> tuple[Any, ...]:
    return (node(1, offer(digest, 0, 4, name=name)),)


async def test_an_announced_model_that_is_here_is_listed_while_it_has_a_route(tiny: bytes) -> None:
    async with library() as (models, directory):
        await models.find_new()
        assert models.models() == ()
        directory.now_holds(node(1, offer(tiny, 0, 2)))
        await models.find_new()
        assert names_of(models.models()) == []
        known = models.find("tiny")
        assert known is not None
        assert (known.status.state, known.status.missing) == ("partial", ((2, 4),))
        directory.now_holds(*whole(tiny))
        assert names_of(models.models()) == ["tiny"]
        assert models.find("tiny").status.state == "available"  # type: ignore[union-attr]
        directory.now_holds()
        assert names_of(models.models()) == []


async def test_what_is_known_is_told_without_loading_anything(tiny: bytes) -> None:
    async with library() as (models, directory):
        directory.now_holds(*whole(tiny))
        await models.find_new()
        (known,) = models.models()
        assert (known.max_positions, known.status.num_layers) == (64, 4)
        assert known.created > 1_500_000_000
        assert directory.interests == {tiny}


async def test_the_ends_are_loaded_at_first_use_and_once(
    tiny: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    loads = counting(monkeypatch)
    async with library() as (models, directory):
        directory.now_holds(*whole(tiny))
        await models.find_new()
        assert loads == []
        first, second = await asyncio.gather(models.engine("tiny"), models.engine("tiny"))
        assert first is second
        assert first is await models.engine("tiny")
        assert models.find("tiny").status.state == "ready"  # type: ignore[union-attr]
    assert loads == ["tiny"]


async def test_a_thin_gateway_needs_the_tokenizer_only(tiny: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PlainRunner, "load", no_weights)
    async with library(ends=EndsSettings(ends="remote")) as (models, directory):
        directory.now_holds(*whole(tiny))
        await models.find_new()
        assert models.find("tiny").status.missing_ends == ("opening", "closing")  # type: ignore[union-attr]
        directory.now_holds(node(1, offer(tiny, 0, 4, holds_ends=True)))
        engine = await models.engine("tiny")
        assert engine.coverage().is_ready
        assert engine.tokenizer.encode("hello")


async def test_other_weights_under_the_same_name_are_not_served(tiny: bytes) -> None:
    async with library() as (models, directory):
        directory.now_holds(*whole(OTHER))
        await models.find_new()
        assert models.find("tiny") is None
        assert models.unserved() == {
            "tiny": f"nodes announce other weights under this name (09090909) than those here ({tiny.hex()[:8]})"
        }


async def test_of_two_digests_under_one_name_only_the_matching_nodes_count(tiny: bytes) -> None:
    async with library() as (models, directory):
        directory.now_holds(node(1, offer(tiny, 0, 2)), node(2, offer(OTHER, 0, 4)))
        await models.find_new()
        known = models.find("tiny")
        assert known is not None
        assert known.status.missing == ((2, 4),)
        assert known.status.reason == "nodes serve another model under this name (09090909)"
        assert models.unserved() == {}


async def test_a_name_is_looked_at_again_when_its_weights_change(tiny: bytes) -> None:
    async with library() as (models, directory):
        directory.now_holds(*whole(OTHER))
        await models.find_new()
        directory.now_holds(*whole(tiny))
        await models.find_new()
        assert names_of(models.models()) == ["tiny"]
        assert models.unserved() == {}


async def test_a_refusal_goes_with_its_announcement(tiny: bytes) -> None:
    async with library() as (models, directory):
        directory.now_holds(*whole(OTHER, name="away"))
        await models.find_new()
        assert "it is not on this machine" in models.unserved()["away"]
        directory.now_holds()
        await models.find_new()
        assert models.unserved() == {}


@pytest.mark.parametrize(
    "name",
    ["../tiny", "/etc", "./tiny", "~", "~root", ".", "..", "tiny/", "a/../../tiny", "tiny\x00", "", "-x"],
)
async def test_a_strangers_name_is_never_a_path(tiny: bytes, name: str) -> None:
    assert not local_models.is_here(name)
    assert not (name and local_models.is_hub_id(name))


async def test_nothing_is_fetched_because_a_stranger_announced_it(
    tiny: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[str, bool]] = []

    def refuse(model: str, *_: Any, may_fetch: bool, **__: Any) -> Any:
        asked.append((model, may_fetch))
        raise ModelError("no hub in tests")

    monkeypatch.setattr(library_module, "is_pipeline", lambda model, may_fetch: False)
    monkeypatch.setattr(library_module, "look_up", refuse)
    async with library() as (models, directory):
        directory.now_holds(*whole(OTHER, name="org/name"))
        await models.find_new()
        assert asked == []
        assert "--open-any" in models.unserved()["org/name"]
    async with library(opens_any=True) as (models, directory):
        directory.now_holds(*whole(OTHER, name="org/name"))
        await models.find_new()
        assert asked == [("org/name", True)]
        assert models.unserved()["org/name"] == "it cannot be opened here, the gateway's log says why"


async def test_a_flood_of_names_is_looked_at_in_part(tiny: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    looked: list[str] = []
    monkeypatch.setattr(library_module, "is_here", lambda name: looked.append(name) or False)
    crowd = [node(n, offer(OTHER, 0, 4, name=f"made-up-{n}")) for n in range(1, 500)]
    async with library() as (models, directory):
        directory.now_holds(*crowd, node(500, offer(tiny, 0, 4)), node(501, offer(tiny, 0, 4)))
        await models.find_new()
    assert len(looked) == library_module.MAX_NAMES
    assert looked[0] == "tiny", "what most nodes serve comes first"


async def test_named_models_are_opened_at_start_and_always_listed(tiny: bytes) -> None:
    async with library(models=(NamedModel("tiny", "mine"),)) as (models, directory):
        (opened,) = await models.open_named()
        assert opened.engine is not None
        directory.now_holds(*whole(OTHER, name="other"))
        await models.find_new()
        assert names_of(models.models()) == ["mine"]
        assert models.find("mine").status.state == "partial"  # type: ignore[union-attr]
        assert models.unserved() == {}, "only what was named is served"
        directory.now_holds(*whole(tiny, name="whatever it is called there"))
        assert models.find("mine").status.is_ready  # type: ignore[union-attr]


async def test_a_named_model_that_cannot_be_opened_ends_the_start(tiny: bytes) -> None:
    async with library(models=(NamedModel("nowhere"),)) as (models, _):
        with pytest.raises(ModelError, match="there is no model 'nowhere'"):
            await models.open_named()
    twice = (NamedModel("tiny"), NamedModel("./tiny"))
    async with library(models=twice) as (models, _):
        with pytest.raises(SettingsError, match="two models are called tiny"):
            await models.open_named()


async def test_a_failed_load_is_remembered_with_its_reason(
    tiny: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    loads = counting(monkeypatch, fails=ModelError("/secret/place lacks model-3.safetensors"))
    async with library() as (models, directory):
        directory.now_holds(*whole(tiny))
        await models.find_new()
        for _ in range(3):
            with pytest.raises(ModelUnavailableError, match="it cannot be opened here") as failed:
                await models.engine("tiny")
            assert failed.value.code == "model_failed"
            assert "secret" not in failed.value.message
        assert models.find("tiny").status.state == "failed"  # type: ignore[union-attr]
        assert len(loads) == 1
        monkeypatch.setattr(openable, "FAILED_S", 0.0)
        models._models["tiny"]._failure = None
        assert models.find("tiny").status.state == "available"  # type: ignore[union-attr]


async def test_whoever_stops_waiting_stops_nothing(tiny: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    may_go_on = threading.Event()
    counting(monkeypatch, before=lambda: may_go_on.wait(5))
    async with library() as (models, directory):
        directory.now_holds(*whole(tiny))
        await models.find_new()
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.02):
                await models.engine("tiny")
        assert models.find("tiny").status.state == "loading"  # type: ignore[union-attr]
        may_go_on.set()
        assert (await models.engine("tiny")).model_name == "tiny"


async def test_closing_a_library_ends_its_loads(tiny: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    reports = 0

    def load(found: Any, settings: Any, progress: Any) -> None:
        nonlocal reports
        while True:
            reports += 1
            progress("load", reports, 0)
            time.sleep(0.001)

    monkeypatch.setattr(openable, "load_ends", load)
    async with asyncio.timeout(5), library() as (models, directory):
        directory.now_holds(*whole(tiny))
        await models.find_new()
        waiting = asyncio.create_task(models.engine("tiny"))
        while not reports:
            await asyncio.sleep(0.001)
    with pytest.raises(ModelUnavailableError):
        await waiting


async def test_few_found_models_are_open_at_once(
    llama: LlamaForCausalLM, tiny: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(library_module, "MAX_OPEN", 1)
    llama.config.rope_theta = 5.0  # another digest
    other = write_model(llama, tmp_path / "other")
    async with library() as (models, directory):
        directory.now_holds(*whole(tiny), node(2, offer(other, 0, 4, name="other")))
        await models.find_new()
        await models.engine("tiny")
        with pytest.raises(ModelUnavailableError, match="1 other models are in use") as full:
            await models.engine("other")
        assert full.value.code == "overloaded"
        monkeypatch.setattr(library_module, "IDLE_S", 0.0)
        assert (await models.engine("other")).model_name == "other"
        assert models.find("tiny").status.state == "available"  # type: ignore[union-attr]


async def test_a_model_that_a_queued_request_may_ask_for_makes_no_room(
    llama: LlamaForCausalLM, tiny: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(library_module, "MAX_OPEN", 1)
    monkeypatch.setattr(library_module, "IDLE_S", 0.0)
    llama.config.rope_theta = 7.0  # another digest
    other = write_model(llama, tmp_path / "other")
    async with library(queue_s=100.0) as (models, directory):
        directory.now_holds(*whole(tiny), node(2, offer(other, 0, 4, name="other")))
        await models.find_new()
        await models.engine("tiny")
        with pytest.raises(ModelUnavailableError, match="other models are in use"):
            await models.engine("other")


async def test_changes_of_what_is_served_are_told(tiny: bytes) -> None:
    told: asyncio.Queue[list[str]] = asyncio.Queue()
    network, directory = joined()

    def note(event: dict[str, Any]) -> None:
        told.put_nowait(event["models"])

    async with opened_library(LibrarySettings(), network, on_event=note) as models:
        running = asyncio.create_task(models.run())
        await models.has_looked.wait()
        directory.now_holds(*whole(tiny))
        assert await asyncio.wait_for(told.get(), 5) == ["tiny"]
        directory.now_holds()
        assert await asyncio.wait_for(told.get(), 5) == []
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


def no_weights(*_: Any, **__: Any) -> Any:
    raise AssertionError("weights are loaded")


def counting(
    monkeypatch: pytest.MonkeyPatch,
    *,
    before: Callable[[], object] = lambda: None,
    fails: Exception | None = None,
) -> list[str]:
    """Note every load of ends; it may wait first, or fail."""
    loads: list[str] = []
    really = openable.load_ends

    def load(found: Any, *others: Any) -> Any:
        loads.append(found.facts.name)
        before()
        if fails is not None:
            raise fails
        return really(found, *others)

    monkeypatch.setattr(openable, "load_ends", load)
    return loads


def test_a_hub_is_never_asked_without_leave(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(ModelError, match=r"is not (cached )?here"):
        open_checkpoint("org/name", cache_dir=tmp_path, may_fetch=False)
    file = SparseFile(tmp_path / "model.safetensors")
    shards = HubShards("org/name", "org/name", tmp_path, tmp_path, no_progress, may_fetch=False)
    with pytest.raises(ModelError, match="not fully here; name it with --model"):
        shards._bring(file, [(0, 8)])
