"""Real nodes and tiny real models that are no plain text models: bit for bit what the whole model makes."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import pytest_asyncio
import torch

from node.drawing import CANDIDATE
from node.loading import ReadSlice, loaded_slice
from routing import wire
from routing.types import (
    Answer,
    AnswerKind,
    HopEntry,
    NodeId,
    SliceSpec,
    StepFlag,
    Want,
    WireDtype,
)
from slicing.batch import Work
from slicing.branches import BranchedCache
from slicing.runner import Parts, PlainRunner
from slicing.sampler import SamplingParams
from slicing.streams import StreamSampler
from tests.node.rig import DIGEST, Node, Rig, Script, add_real_node, loopback_rig
from tests.support.tiny_kinds import CODEBOOK, NUM_LAYERS, WIDTH, tiny_model
from tests.support.tiny_multimodal import stock_model, write_multimodal

SONG = SamplingParams(temperature=0.9, top_k=30, seed=4, guidance_scale=3.0)
STREAMS, BRANCHES = 4, 2
CUT = 2


@pytest_asyncio.fixture
async def rig() -> AsyncIterator[Rig]:
    async with loopback_rig() as made:
        yield made


async def halves(rig: Rig, model: Any) -> tuple[tuple[Node, int, int], tuple[Node, int, int]]:
    a, b = await add_real_node(rig, model, 0, CUT), await add_real_node(rig, model, CUT, NUM_LAYERS)
    await rig.gateway.endpoint.dial(b.address)
    return (a, 0, CUT), (b, CUT, NUM_LAYERS)


def whole_of(model: Any, branches: int, memory: np.ndarray | None = None) -> tuple[PlainRunner, Any]:
    runner = PlainRunner.from_model(model, Parts.whole(NUM_LAYERS))
    caches = [runner.new_cache() for _ in range(branches)]
    cache = BranchedCache(caches) if branches > 1 else caches[0]
    if memory is not None:
        cache.add_memory(torch.from_numpy(memory.copy()))
    return runner, cache


def some_rows(num: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((num, WIDTH), dtype=np.float32)


def rows_of(script: Script, answer: Answer) -> np.ndarray:
    if StepFlag.SEALED in answer.flags:
        answer = wire.open_answer(script.answer_key, answer)
    return np.frombuffer(answer.payload, "<f4").reshape(-1, WIDTH)


def test_what_memory_takes_is_known_before_anybody_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    """An Open asks on the event loop, while the compute thread may be in the model."""
    runner, digests = (
        PlainRunner.from_model(tiny_model("whisper"), Parts(((0, CUT),))),
        dict.fromkeys(range(CUT), bytes(8)),
    )
    runner.layer_hashes = digests
    source: Any = SimpleNamespace(public_name="tiny", digest=DIGEST)
    store: Any = None
    read = ReadSlice(source, SliceSpec(0, CUT), runner.parts, runner, store, None, 0, 0.0)
    held = loaded_slice(read, 1, 1.0, 0.0).held
    entry = HopEntry(
        bytes(32), 0, 1, NodeId(bytes(32)), DIGEST, 0, CUT, *[WireDtype.FLOAT32] * 2, 30, 60, memory_rows=9
    )
    monkeypatch.setattr(PlainRunner, "run_layers_batch", None)
    assert held.cache_bytes(entry, 0) > 9 * WIDTH * 4


async def test_a_guided_song_is_drawn_remotely_as_the_whole_model_draws_it(rig: Rig) -> None:
    model, memory = tiny_model("musicgen"), some_rows(7 * BRANCHES)
    script = rig.script(
        *await halves(rig, model),
        opens=True,
        closes=True,
        sampling={"params": SONG.to_map()},
        changes={"streams": STREAMS, "branches": BRANCHES, "memory_rows": len(memory), "max_positions": 60},
    )
    runner, cache = whole_of(model, BRANCHES, memory)
    sampler = StreamSampler(SONG, CODEBOOK, num_streams=STREAMS, branches=BRANCHES)
    await script.open()
    await script.remember(1, memory[:6])
    await script.remember(2, memory[6:])
    ids = np.full((1, STREAMS), CODEBOOK)
    for position in range(12):
        fed = np.repeat(ids, BRANCHES, axis=0)
        answer = await script.run(position + 3, position, fed)
        logits = runner.run_whole(cache, torch.from_numpy(fed), position, keep=[0, 1])
        expected = sampler.sample(logits.reshape(BRANCHES, STREAMS, CODEBOOK), position + 1)
        sampler.observe(expected)
        assert (answer.kind, len(answer.payload)) == (AnswerKind.TOKEN_IDS, 8)
        assert np.frombuffer(answer.payload, "<u2").tolist() == expected
        ids = np.array([expected])


@pytest.mark.parametrize("family", ["t5", "bart", "whisper"])
async def test_a_decoder_looks_at_memory_as_the_whole_model_does(rig: Rig, family: str) -> None:
    model, memory = tiny_model(family), some_rows(9)
    greedy = {"params": SamplingParams(temperature=0.0).to_map()}
    changes = {"memory_rows": len(memory), "max_positions": 30}
    script = rig.script(*await halves(rig, model), opens=True, closes=True, sampling=greedy, changes=changes)
    runner, cache = whole_of(model, 1, memory)
    await script.open()
    await script.remember(1, memory)
    ids, position = [1, 5, 9], 0
    for number in range(2, 10):
        answer = await script.run(number, position, ids)
        logits = runner.run_whole(cache, torch.tensor(ids), position, keep=-1)
        position += len(ids)
        best = np.frombuffer(answer.payload[:4], "<u4")
        assert best.tolist() == [int(logits.argmax())]
        ids = best.tolist()


@pytest.mark.parametrize("family", ["bert", "qwen3"])
async def test_texts_are_embedded_one_after_the_other(rig: Rig, family: str) -> None:
    model = tiny_model(family)
    script = rig.script(*await halves(rig, model), opens=True, closes=True, changes={"max_positions": 60})
    await script.open()
    for number, text in enumerate(([3, 1, 4, 1], [5, 9], [2, 6, 5, 3, 5]), start=1):
        answer = await script.run(number, 0, text, want=Want.ALL)
        runner, cache = whole_of(model, 1)
        expected = runner.run_whole(cache, torch.tensor(text), 0, keep=range(len(text)))
        assert (answer.kind, answer.rows) == (AnswerKind.HIDDEN_STATES, len(text))
        assert np.array_equal(rows_of(script, answer), expected.numpy())


async def test_hidden_states_of_two_branches_equal_the_whole_models(rig: Rig) -> None:
    model, memory = tiny_model("musicgen"), some_rows(5 * BRANCHES)
    changes = {"branches": BRANCHES, "memory_rows": len(memory), "max_positions": 60}
    script = rig.script(*await halves(rig, model), changes=changes)
    runner, cache = whole_of(model, BRANCHES, memory)
    await script.open()
    await script.remember(1, memory)
    for number, (position, frames) in enumerate([(0, 6), (6, 1), (3, 2), (0, 4)], start=2):
        rows = some_rows(frames * BRANCHES, number)
        answer = await script.run(number, position, rows, want=Want.ALL)
        cache.truncate(position)
        work = Work(cache, torch.from_numpy(rows.copy()), position)
        expected = runner.run_layers_batch([work], start=0, end=NUM_LAYERS)[0]
        assert np.array_equal(rows_of(script, answer), expected.numpy())


async def test_rotary_positions_with_axes_give_what_the_whole_model_makes(rig: Rig, tmp_path: Path) -> None:
    model = stock_model(write_multimodal(tmp_path, "qwen2_vl"))
    greedy = {"params": SamplingParams(temperature=0.0).to_map()}
    changes = {"axes": 3, "max_positions": 60}
    script = rig.script(*await halves(rig, model), opens=True, closes=True, sampling=greedy, changes=changes)
    runner, cache = whole_of(model, 1)
    await script.open()
    plane = np.array([[0, 1, 1, 1, 1, 3], [0, 1, 1, 2, 2, 3], [0, 1, 2, 1, 2, 3]])
    ids, places, position = [1, 7, 8, 9, 10, 5], plane, 0
    for number in range(1, 6):
        answer = await script.run(number, position, ids, places=places)
        at = torch.from_numpy(places)
        logits = runner.run_whole(cache, torch.tensor(ids), position, keep=-1, places=at)[0]
        shortlist = np.frombuffer(answer.payload, CANDIDATE)
        assert np.array_equal(shortlist["logit"], logits.sort(descending=True).values[:8].numpy())
        position += len(ids)
        ids, places = [int(shortlist["id"][0])], np.full((3, 1), 3 + number)
