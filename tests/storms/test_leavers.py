"""Hundreds of clients leave at random points: sessions, memory, gauges, tasks and descriptors are as before."""

from __future__ import annotations

import asyncio
import gc
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest
import pytest_asyncio
from transformers import LlamaForCausalLM

from app.engine.tokenizer import ChatTokenizer
from slicing.invariant import InvariantRunner
from tests.integration.chats import HIDDEN_SIZE, NUM_LAYERS, Chat, chat
from tests.storms.every_kind import EveryKind, every_kind
from tests.storms.leavers import Leavers, media_requests, text_requests
from tests.support.api_server import Served, serve_engines, settles
from tests.support.tiny_models import small_llama
from tests.support.tiny_tokenizer import write_tiny_tokenizer

VOCAB_SIZE = 400  # the tiny tokenizer's ids, with room
GROWTH_BYTES = 24 << 20  # of the resident memory, over a storm that follows another: buffers, not answers
LAST = 3  # behind it only leaving ends an answer
GAUGES = ("diffuse_requests_running", "diffuse_requests_queued")


@dataclass(frozen=True)
class Held:
    """What a process holds."""

    tasks: int
    descriptors: int
    resident_bytes: int

    @classmethod
    def now(cls) -> Held:
        gc.collect()
        process = psutil.Process()
        return cls(len(asyncio.all_tasks()), process.num_fds(), process.memory_info().rss)


async def returns_to(before: Held) -> None:
    """Wait until tasks and descriptors are no more than before; raises TimeoutError."""
    async with asyncio.timeout(10):
        while (now := Held.now()).tasks > before.tasks or now.descriptors > before.descriptors:
            await asyncio.sleep(0.05)


def gauges(served: Served) -> dict[str, float]:
    """Those that are not at rest."""
    served.metrics.render()
    samples = [one for family in served.metrics.registry.collect() for one in family.samples]
    return {f"{one.name}{one.labels}": one.value for one in samples if one.name in GAUGES and one.value}


@pytest_asyncio.fixture
async def kinds() -> AsyncIterator[EveryKind]:
    """Fakes that never come to an end by themselves, and fewer places than clients: some are left in the queue."""
    async with every_kind(max_requests=24, max_queued=400, queue_timeout_s=20.0) as running:
        pace(running, lambda number: asyncio.sleep(0.004) if number < LAST else asyncio.Event().wait())
        yield running


def pace(running: EveryKind, wait: Callable[[int], Awaitable[object]]) -> None:
    """What each engine waits for before a token, a text, a step, or a second of sound."""
    for engine in running.engines.values():
        for name in ("before_token", "before_text", "before_step", "before_window"):
            if hasattr(engine, name):
                setattr(engine, name, wait)


@pytest.mark.parametrize("count", [60, pytest.param(300, marks=pytest.mark.storm)])
async def test_of_every_kind_of_request_nothing_is_left(kinds: EveryKind, count: int) -> None:
    leavers = Leavers(
        kinds.served.port, text_requests("scripted", 40) + media_requests(), random.Random(count), 0.5
    )
    await leavers.storm(count, at_once=60)  # warms up: threads, imports, decoders
    await kinds.is_at_rest(within_s=10)
    before = Held.now()
    await leavers.storm(count, at_once=60)
    await kinds.is_at_rest(within_s=10)
    await returns_to(before)
    await settles(lambda: gauges(kinds.served) == {}, within_s=10)
    assert Held.now().resident_bytes < before.resident_bytes + GROWTH_BYTES
    aborted = [one for family in kinds.served.metrics.aborts.collect() for one in family.samples]
    assert sum(one.value for one in aborted if one.name.endswith("_total")) > count / 4
    pace(kinds, lambda _: asyncio.sleep(0))
    assert (await kinds.served.ask()).status_code == 200


@pytest.fixture(scope="module")
def model() -> Iterator[LlamaForCausalLM]:
    with small_llama(256, vocab_size=VOCAB_SIZE, hidden_size=HIDDEN_SIZE, num_layers=NUM_LAYERS) as llama:
        yield llama


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> ChatTokenizer:
    folder: Path = tmp_path_factory.mktemp("tiny")
    return ChatTokenizer.load(write_tiny_tokenizer(folder))


async def nodes_are_free(here: Chat) -> None:
    await settles(lambda: not any(node.stats.num_sessions for node in here.nodes), within_s=10)
    await settles(lambda: not any(node.stats.kv_bytes for node in here.nodes), within_s=10)
    assert here.here.switchboard.num_chains == 0


@pytest.mark.parametrize("place", [(1, 0), None], ids=["ends at home", "thin"])
@pytest.mark.parametrize("count", [20, pytest.param(300, marks=pytest.mark.storm)])
async def test_nodes_are_free_again(
    model: LlamaForCausalLM, tokenizer: ChatTokenizer, place: tuple[int, int] | None, count: int
) -> None:
    settings: dict[str, Any] = {"max_requests": 12, "max_queued": 400, "queue_timeout_s": 30.0}
    async with (
        chat(model, tokenizer, place, runners=InvariantRunner, chunk=32) as here,
        serve_engines(here.engine, **settings) as served,
    ):
        leavers = Leavers(served.port, text_requests("tiny", 150), random.Random(count), 0.6)
        await leavers.storm(count // 4, at_once=24)
        await nodes_are_free(here)
        before = Held.now()
        await leavers.storm(count, at_once=24)
        await settles(lambda: served.gateway.num_running == 0, within_s=20)
        await nodes_are_free(here)
        await returns_to(before)
        await settles(lambda: gauges(served) == {}, within_s=10)
        assert Held.now().resident_bytes < before.resident_bytes + GROWTH_BYTES
        stays = await served.ask(model="tiny", max_tokens=4)
        assert stays.status_code == 200, stays.text
        await nodes_are_free(here)
