"""Slices are read on a thread of their own, measured where they are computed, and a load can be ended."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest
import pytest_asyncio
import torch
from transformers import AutoConfig, PreTrainedModel

from node.budget import default_budget_bytes, free_memory_bytes
from node.memory import Memory
from node.scheduler import Scheduler
from node.slice_loader import SliceLoader
from node.slice_table import SliceTable
from routing.errors import SettingsError
from routing.types import SliceSpec
from slicing.errors import ModelError
from slicing.runner import PlainRunner
from slicing.stacks import build_weightless
from tests.node.rig import node_settings, until
from tests.node.test_slice_table import fake_held

TINY = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 64,
}


class Loading:
    """A loader, its compute thread, and what it tells."""

    def __init__(self, tmp_path: Path) -> None:
        self.events: list[dict[str, Any]] = []
        self.scheduler: Scheduler = Scheduler()
        settings = node_settings(cache_dir=tmp_path, threads=1, hold_ends=True)
        self.loader = SliceLoader(settings, self.scheduler, lambda event: self.events.append(dict(event)))


@pytest_asyncio.fixture
async def loading(tmp_path: Path) -> AsyncIterator[Loading]:
    made = Loading(tmp_path)
    yield made
    await made.loader.close()
    await made.scheduler.close()


async def test_a_model_is_examined_with_one_layer_and_no_ends(folder: Path, loading: Loading) -> None:
    facts = await loading.loader.examine(str(folder))
    loaded = await loading.loader.load(str(folder), SliceSpec(1, 2))
    assert (facts.num_layers, facts.digest) == (4, loaded.held.offer.model_digest)
    assert facts.layer_bytes == loaded.weights_bytes
    assert facts.cache_bytes == loaded.held.cache_bytes_per_position == 2 * 16 * 4
    assert 0 < facts.layer_ms < 1000


async def test_a_later_slice_is_measured_like_the_first(folder: Path, loading: Loading) -> None:
    first = await loading.loader.load(str(folder), SliceSpec(0, 2))
    later = await loading.loader.load(str(folder), SliceSpec(2, 4))
    assert first.held.offer.form == later.held.offer.form
    assert later.held.offer.layer_ms > 0
    assert (first.held.head_ms, later.held.head_ms > 0) == (0.0, True)  # the last one holds the head
    assert later.bytes_read < first.bytes_read + later.weights_bytes  # each counts its own


async def test_the_compute_thread_is_free_while_a_slice_is_read(
    folder: Path, loading: Loading, monkeypatch: pytest.MonkeyPatch
) -> None:
    await loading.loader.load(str(folder), SliceSpec(0, 1))
    may_read, read = threading.Event(), PlainRunner.load

    def slowly(*args: Any, **kwargs: Any) -> PlainRunner:
        assert may_read.wait(10)
        return read(*args, **kwargs)

    monkeypatch.setattr(PlainRunner, "load", slowly)
    load = asyncio.create_task(loading.loader.load(str(folder), SliceSpec(1, 2)))
    assert await loading.scheduler.call(lambda: 7) == 7
    may_read.set()
    await load


async def test_nothing_computes_while_a_model_is_built_in_another_type(
    folder: Path, loading: Loading, monkeypatch: pytest.MonkeyPatch
) -> None:
    built_on: list[str] = []

    def build(*args: Any) -> PreTrainedModel:
        built_on.append(threading.current_thread().name)
        return build_weightless(*args)

    monkeypatch.setattr("node.slice_loader.build_weightless", build)
    monkeypatch.setattr("node.loading.choose_dtype", lambda *_: torch.bfloat16)
    await loading.loader.load(str(folder), SliceSpec(0, 1))  # the first: there are no sessions
    loaded = await loading.loader.load(str(folder), SliceSpec(1, 2))
    assert (built_on, loaded.held.runner.dtype) == (["compute"], torch.bfloat16)


def test_models_built_on_several_threads_leave_initialisation_on() -> None:
    """transformers switches it off for the whole process meanwhile; two at once would leave it off for good."""
    config, before = (
        AutoConfig.for_model("llama", **TINY),
        (torch.nn.init.normal_, PreTrainedModel.init_weights),
    )
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda _: build_weightless(config, torch.float32), range(12)))
    assert (torch.nn.init.normal_, PreTrainedModel.init_weights) == before


async def test_a_load_that_nobody_waits_for_ends_at_its_next_sign_of_progress(
    folder: Path, loading: Loading, monkeypatch: pytest.MonkeyPatch
) -> None:
    running, ended = threading.Event(), threading.Event()

    def endless(*_: Any, progress: Any, **__: Any) -> None:
        running.set()
        try:
            while True:
                progress("load", 0, 1)
                time.sleep(0.001)
        finally:
            ended.set()

    monkeypatch.setattr(PlainRunner, "load", endless)
    load = asyncio.create_task(loading.loader.load(str(folder), None))
    await until(running.is_set)
    load.cancel()
    with pytest.raises(asyncio.CancelledError):
        await load
    assert ended.is_set()


async def test_what_cannot_be_loaded_is_named(folder: Path, loading: Loading) -> None:
    with pytest.raises(SettingsError, match="layers 0:4"):
        await loading.loader.load(str(folder), SliceSpec(3, 5))
    with pytest.raises(ModelError, match="nowhere"):
        await loading.loader.examine("nowhere")


def test_memory_for_slices_is_a_share_of_what_is_free() -> None:
    assert 0 < free_memory_bytes() <= psutil.virtual_memory().total
    slices = SliceTable((fake_held(0, 2),))  # 100 bytes
    memory = Memory(node_settings(overhead=0.5), 1000, fixed_bytes=100)
    room = memory.room(slices)
    assert room.allowed == 900
    assert room.free == pytest.approx(free_memory_bytes() / 2, rel=0.2)


def test_a_named_size_of_memory_is_kept_while_a_slice_moves() -> None:
    slices = SliceTable((fake_held(0, 2),))
    memory = Memory(node_settings(memory_bytes=1000), 1000, fixed_bytes=0)
    assert (memory.room(slices).allowed, memory.room(slices).free) == (1000, 900)


def test_sessions_get_what_weights_leave_where_placement_decides() -> None:
    slices = SliceTable((fake_held(0, 2),))
    assert Memory(node_settings(), 1000, 0).budget_bytes(slices, is_placed=True) == 900
    assert Memory(node_settings(), 100, 0).budget_bytes(slices, is_placed=True) == 10  # never nothing
    assert Memory(node_settings(kv_budget_bytes=5), 1000, 0).budget_bytes(slices, is_placed=True) == 5
    share = Memory(node_settings(), 1000, 0).budget_bytes(slices, is_placed=False)
    assert share == pytest.approx(default_budget_bytes(), rel=0.2)


def test_a_named_size_of_memory_holds_for_named_layers_too() -> None:
    slices = SliceTable((fake_held(0, 2),))
    memory = Memory(node_settings(memory_bytes=1000), 1000, fixed_bytes=100)
    memory.check()
    assert memory.budget_bytes(slices, is_placed=False) == 900
    with pytest.raises(SettingsError, match="--memory allows"):
        Memory(node_settings(memory_bytes=90), 90, fixed_bytes=100).check()
