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
from app.engine import swarm
from app.engine.request import ModelStatus
from app.settings import GatewaySettings
from routing.errors import SettingsError
from slicing import wide_head
from slicing.progress import no_progress
from tests.support.tiny_models import small_llama

SWARM = swarm.SwarmSettings(model="none", nodes=(), network_id=bytes(32))


@contextlib.asynccontextmanager
async def no_swarm(*arguments: Any, **options: Any) -> AsyncIterator[Any]:
    engine = SimpleNamespace(model_name="m", coverage=lambda: ModelStatus("ready", 1))
    yield SimpleNamespace(engine=engine, load_s=0.0)


async def test_a_server_that_ends_by_itself_ends_the_gateway(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serving, "open_swarm", no_swarm)

    async def die(self: uvicorn.Server, sockets: Any = None) -> None:
        await asyncio.sleep(0.01)

    monkeypatch.setattr(uvicorn.Server, "_serve", die)
    with pytest.raises(RuntimeError, match="ended by itself"):
        async with asyncio.timeout(5):
            await serving.run_gateway(GatewaySettings(port=0), SWARM)


async def test_a_cancelled_load_ends_at_its_next_report(monkeypatch: pytest.MonkeyPatch) -> None:
    reports = 0

    def load(settings: Any, progress: Any) -> None:
        nonlocal reports
        while True:
            reports += 1
            progress("download", reports, 0)

    monkeypatch.setattr(swarm, "_open_checkpoint", load)

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
        swarm.middle_layers(swarm.SwarmSettings("m", (), bytes(32), local_layers=(20, 10)), 30)


async def test_an_alias_of_a_model_that_is_not_here_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serving, "open_swarm", no_swarm)
    settings = GatewaySettings(port=0, model_aliases={"gpt": "other"})
    with pytest.raises(SettingsError, match="gpt=other: there is no such model here, only m"):
        async with asyncio.timeout(5):
            await serving.run_gateway(settings, SWARM)


async def test_the_gateways_head_is_shared_among_threads(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(wide_head, "MIN_SHARE_BYTES", 1)  # a real head is large
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    monkeypatch.setattr(swarm.ChatTokenizer, "load", lambda folder: None)
    with small_llama(64, vocab_size=512) as llama:
        llama.save_pretrained(tmp_path)
        settings = swarm.SwarmSettings(model=str(tmp_path), nodes=(), network_id=bytes(32))
        checkpoint, facts = swarm._open_checkpoint(settings, no_progress)
        middle = swarm.middle_layers(settings, facts.num_layers)
        runner, _ = swarm._load_ends(settings, checkpoint, middle, no_progress)
    assert runner is not None
    shares: list[str] = []
    plain = wide_head.functional.linear

    def linear(*arguments: Any) -> Any:
        shares.append(threading.current_thread().name)
        return plain(*arguments)

    monkeypatch.setattr(wide_head.functional, "linear", linear)
    runner.run_closing(runner.new_cache(), torch.randn(1, runner.hidden_size), 0, start=facts.num_layers)
    assert len(set(shares)) == 2, "half of the head in another thread"
