"""One node with a music model and a chat model: both are served, songs share calls, and nobody's bits tell of it."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from node.held_slice import HeldSlice
from routing.types import Answer, SliceOffer, SliceSpec, Want, WireDtype
from slicing.ends import Parts
from slicing.invariant import InvariantRunner
from slicing.sampler import SamplingParams
from tests.node.rig import DIGEST, Node, Rig, Script
from tests.support.tiny_kinds import CODEBOOK, NUM_LAYERS, WIDTH, tiny_model
from tests.support.tiny_models import small_llama

MUSIC_DIGEST = b"m" * 32
STREAMS, BRANCHES = 4, 2
VOCAB_SIZE = 32
STEPS = 24
MEMORY_ROWS = (6, 20, 34)  # of songs, both branches together


@dataclass
class Both:
    """A node with both models, and what it answered to every session so far."""

    rig: Rig
    node: Node
    answers: dict[bytes, list[bytes]]
    arrived: asyncio.Condition

    async def receive(self) -> None:
        """Collect answers until cancelled."""
        while True:
            _, message = await self.rig.gateway.inbox.get()
            assert isinstance(message, Answer), message
            async with self.arrived:
                self.answers.setdefault(message.session_id, []).append(bytes(message.payload))
                self.arrived.notify_all()

    async def answer_to(self, script: Script, number: int) -> None:
        """Wait until a session has so many answers."""
        async with asyncio.timeout(60), self.arrived:
            await self.arrived.wait_for(lambda: len(self.answers.get(script.session_id, ())) >= number)

    async def sing(self, number: int, progress: Counter[str]) -> list[bytes]:
        """Play one song step by step; returns what was answered."""
        params = SamplingParams(temperature=0.9, seed=number, guidance_scale=3.0)
        rows = MEMORY_ROWS[number]
        script = self.rig.script(
            (self.node, 0, NUM_LAYERS),
            opens=True,
            closes=True,
            sampling={"params": params.to_map()},
            changes={
                "model_digest": MUSIC_DIGEST,
                "streams": STREAMS,
                "branches": BRANCHES,
                "memory_rows": rows,
                "max_positions": 60,
                "tenant": bytes([number]) * 8,
            },
        )
        await script.open()
        states = np.random.default_rng(number).standard_normal((rows, WIDTH), dtype=np.float32)
        await script.remember(1, states)
        fed = np.full((BRANCHES, STREAMS), CODEBOOK)
        for position in range(STEPS):
            await script.send(position + 2, position, fed)
            await self.answer_to(script, position + 1)
            drawn = np.frombuffer(self.answers[script.session_id][-1], "<u2")
            fed = np.repeat(drawn.reshape(1, STREAMS), BRANCHES, axis=0)
            progress[f"song {number}"] += 1
        await script.first.send(script.cancel())
        return self.answers[script.session_id]

    async def chat(self, number: int, progress: Counter[str]) -> list[bytes]:
        """Play one answer of the chat model step by step."""
        params = SamplingParams(temperature=0.9, seed=number)
        script = self.rig.script(
            (self.node, 0, NUM_LAYERS),
            opens=True,
            closes=True,
            sampling={"params": params.to_map()},
            changes={"max_positions": 60, "tenant": bytes([100 + number]) * 8},
        )
        await script.open()
        ids = [number + 1, 5, 9]
        position = 0
        for step in range(STEPS):
            await script.send(step + 1, position, ids, want=Want.LAST)
            await self.answer_to(script, step + 1)
            position += len(ids)
            ids = np.frombuffer(self.answers[script.session_id][-1][:4], "<u4").tolist()
            progress[f"chat {number}"] += 1
        await script.first.send(script.cancel())
        return self.answers[script.session_id]


@pytest.fixture(scope="module")
def runners() -> Iterator[tuple[InvariantRunner, InvariantRunner]]:
    """Of the chat model and of the music model."""
    parts = Parts.whole(NUM_LAYERS)
    with small_llama(1024, vocab_size=VOCAB_SIZE, num_layers=NUM_LAYERS) as llama:
        yield (
            InvariantRunner.from_model(llama, parts),
            InvariantRunner.from_model(tiny_model("musicgen"), parts),
        )


def offer_of(runner: Any, digest: bytes) -> SliceOffer:
    whole = SliceSpec(0, NUM_LAYERS)
    return SliceOffer(
        "tiny", digest, NUM_LAYERS, runner.hidden_size, whole, WireDtype.FLOAT32, runner.form, True, True
    )


async def both_of(rig: Rig, runners: tuple[InvariantRunner, InvariantRunner]) -> Both:
    chat, music = runners
    node = await rig.add_node(chat, offer_of(chat, DIGEST))
    node.slices.add(HeldSlice(music, offer_of(music, MUSIC_DIGEST), music.cache_bytes_per_position))
    return Both(rig, node, {}, asyncio.Condition())


async def test_songs_and_chats_get_the_bits_that_they_have_alone(
    rig: Rig, runners: tuple[InvariantRunner, InvariantRunner]
) -> None:
    both = await both_of(rig, runners)
    receiving = asyncio.create_task(both.receive())
    try:
        alone = [await both.sing(number, Counter()) for number in range(3)]
        alone += [await both.chat(number, Counter()) for number in range(3)]
        before = both.node.stats.batches.batches
        progress = Counter[str]()
        plays = [both.sing(number, progress) for number in range(3)]
        plays += [both.chat(number, progress) for number in range(3)]
        together = await asyncio.gather(*plays)
    finally:
        receiving.cancel()
    assert together == alone
    num_steps = (STEPS + 1) * 3 + STEPS * 3  # the songs' memory is a step, too
    assert both.node.stats.batches.batches - before < num_steps * 0.9  # songs share calls, and so do chats


async def test_neither_kind_waits_for_the_other_to_end(
    rig: Rig, runners: tuple[InvariantRunner, InvariantRunner]
) -> None:
    both = await both_of(rig, runners)
    receiving = asyncio.create_task(both.receive())
    progress = Counter[str]()
    plays = [both.sing(number, progress) for number in range(2)]
    plays += [both.chat(number, progress) for number in range(3)]
    playing = [asyncio.create_task(play) for play in plays]
    try:
        await asyncio.wait(playing, return_when=asyncio.FIRST_COMPLETED)
        behind = min(progress[name] for name in ("song 0", "song 1", "chat 0", "chat 1", "chat 2"))
        await asyncio.gather(*playing)
    finally:
        receiving.cancel()
    assert behind >= STEPS // 3  # when the first one ends
