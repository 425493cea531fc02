"""How a gateway starts and ends, where starting or serving goes wrong. Without a model."""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import uvicorn

from app import serving
from app.engine import library, model, swarm
from app.engine.library import LibrarySettings, NamedModel
from app.engine.model import EndsSettings
from app.engine.network import MemberSettings
from app.engine.request import KnownModel, ModelStatus
from app.settings import GatewaySettings
from routing.errors import SettingsError
from routing.tls import Tls
from slicing import wide_head
from tests.app.fake_network import joined
from tests.support.certificates import Authority
from tests.support.tiny_models import small_llama

SWARM = swarm.SwarmSettings(model="none", nodes=(), network_id=bytes(32))
MEMBER = MemberSettings(bytes(32))
NAMED = LibrarySettings((NamedModel("m"),))


class OneModel:
    """A library of one model, which is there at once."""

    def __init__(self) -> None:
        self.has_looked = asyncio.Event()
        self.has_looked.set()

    def models(self) -> tuple[KnownModel, ...]:
        return (KnownModel("m", ModelStatus("ready", 1), 0, 1),)

    async def open_named(self) -> tuple[Any, ...]:
        return (SimpleNamespace(facts=SimpleNamespace(name="m"), load_s=0.0),)

    async def run(self) -> None:
        await asyncio.Event().wait()


@pytest.fixture
def no_swarm(monkeypatch: pytest.MonkeyPatch) -> None:
    @contextlib.asynccontextmanager
    async def network(*_: Any) -> AsyncIterator[Any]:
        yield joined()[0]

    @contextlib.asynccontextmanager
    async def opened(*_: Any, **__: Any) -> AsyncIterator[Any]:
        yield OneModel()

    monkeypatch.setattr(serving, "open_network", network)
    monkeypatch.setattr(serving, "opened_library", opened)


async def test_a_server_that_ends_by_itself_ends_the_gateway(
    no_swarm: None, monkeypatch: pytest.MonkeyPatch
) -> None:

    async def die(self: uvicorn.Server, sockets: Any = None) -> None:
        await asyncio.sleep(0.01)

    monkeypatch.setattr(uvicorn.Server, "_serve", die)
    with pytest.raises(RuntimeError, match="ended by itself"):
        async with asyncio.timeout(5):
            await serving.run_gateway(GatewaySettings(port=0), MEMBER, NAMED)


async def test_a_gateway_says_https_and_watches_its_certificate(
    no_swarm: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    watched, told = asyncio.Event(), list[dict[str, Any]]()

    async def watch(self: Tls) -> None:
        watched.set()
        await asyncio.Event().wait()

    monkeypatch.setattr(Tls, "watch", watch)
    files = Authority(tmp_path).files("gateway")
    settings = GatewaySettings(port=0, tls_cert=files.cert, tls_key=files.key)
    running = asyncio.create_task(serving.run_gateway(settings, MEMBER, NAMED, on_event=told.append))
    async with asyncio.timeout(10):
        await watched.wait()
        while not [event for event in told if event["event"] == "ready"]:
            await asyncio.sleep(0.01)
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    assert told[-1]["url"].startswith("https://127.0.0.1:")


async def test_a_cancelled_load_ends_at_its_next_report(monkeypatch: pytest.MonkeyPatch) -> None:
    reports = 0

    def load(*_: Any, progress: Any, **__: Any) -> None:
        nonlocal reports
        while True:
            reports += 1
            progress("download", reports, 0)

    monkeypatch.setattr(library, "look_up", load)

    async def start() -> None:
        async with swarm.open_swarm(SWARM):
            pass

    task = asyncio.create_task(start())
    while not reports:
        await asyncio.sleep(0.001)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        async with asyncio.timeout(5):
            await task


def test_a_gateway_that_holds_every_layer_is_refused() -> None:
    with pytest.raises(SettingsError, match="leave none of 30 layers"):
        model.middle_layers(EndsSettings(local_layers=(20, 10)), 30)


async def test_an_alias_of_a_model_that_is_not_here_is_refused(no_swarm: None) -> None:
    settings = GatewaySettings(port=0, model_aliases={"gpt": "other"})
    with pytest.raises(SettingsError, match="gpt=other: there is no such model here, only m"):
        async with asyncio.timeout(5):
            await serving.run_gateway(settings, MEMBER, NAMED)


async def test_in_a_swarm_an_alias_may_stand_for_a_model_that_is_yet_to_come(
    no_swarm: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
    settings = GatewaySettings(port=0, model_aliases={"gpt": "other"})
    serves = serving.run_gateway(settings, MEMBER, LibrarySettings(), on_event=told.put_nowait)
    task = asyncio.create_task(serves)
    assert (await asyncio.wait_for(told.get(), 5))["models"] == ["m"]
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_the_gateways_head_is_shared_among_threads(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(wide_head, "MIN_SHARE_BYTES", 1)  # a real head is large
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    monkeypatch.setattr(model.ChatTokenizer, "load", lambda *_, **__: None)
    with small_llama(64, vocab_size=512) as llama:
        llama.save_pretrained(tmp_path)
        found = model.look_up(str(tmp_path), EndsSettings())
        runner = model.load_ends(found, EndsSettings(runner="plain")).runner
    assert runner is not None
    shares: list[str] = []
    plain = wide_head.functional.linear

    def linear(*arguments: Any) -> Any:
        shares.append(threading.current_thread().name)
        return plain(*arguments)

    monkeypatch.setattr(wide_head.functional, "linear", linear)
    runner.run_closing(
        runner.new_cache(), torch.randn(1, runner.hidden_size), 0, start=found.facts.num_layers
    )
    assert len(set(shares)) == 2, "half of the head in another thread"
