"""Decoders that attend to an encoder's states, over real node servers: tokens, losses, and what travels."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any

import pytest
import torch

from app.engine.request import EncodedPrompt
from app.engine.tokenizer import ChatTokenizer
from routing.types import Message, Step, StepFlag
from slicing.runner import Parts, PlainRunner
from slicing.sampler import Sampler, SamplingParams
from tests.integration.chats import chat
from tests.support.tiny_encoder_decoders import HIDDEN_SIZE, PENALTY, TinyPair, tiny_pair

GREEDY = SamplingParams(temperature=0.0, repetition_penalty=PENALTY)
SEEDED = SamplingParams(temperature=1.3, seed=9, top_p=0.9)
NUM_TOKENS = 14


@pytest.fixture(scope="module", params=["t5", "bart", "whisper"])
def pair(request: pytest.FixtureRequest) -> TinyPair:
    return tiny_pair(request.param)


def asked(pair: TinyPair, **fields: Any) -> dict[str, Any]:
    told = {"sampling": GREEDY, "max_tokens": NUM_TOKENS}
    return told | {"prompt_ids": pair.start_ids, "encoded": EncodedPrompt(memory=pair.memory())} | fields


def whole(pair: TinyPair, params: SamplingParams) -> list[int]:
    """What the uncut model answers under our sampler."""
    num_layers = 4
    runner = PlainRunner.from_model(pair.model, Parts.whole(num_layers))
    cache, ids = runner.new_cache(), list(pair.start_ids)
    cache.add_memory(pair.memory())
    sampler = Sampler(params, runner.vocab_size, ids)
    with torch.inference_mode():
        logits = runner.run_whole(cache, torch.tensor(ids), 0)
        while True:
            ids.append(sampler.sample(logits[-1], len(ids)))
            sampler.observe(ids[-1])
            if len(ids) == len(pair.start_ids) + NUM_TOKENS:
                return ids[len(pair.start_ids) :]
            logits = runner.run_whole(cache, torch.tensor(ids[-1:]), len(ids) - 1)


PLACES = [((0, 0), 1), ((1, 0), 2), ((0, 1), 3), ((1, 1), 2), (None, 1), (None, 3)]


@pytest.mark.parametrize(("local", "slices"), PLACES)
async def test_greedy_tokens_are_those_of_stock_generation(
    pair: TinyPair, tokenizer: ChatTokenizer, local: tuple[int, int] | None, slices: int
) -> None:
    expected = pair.generated(NUM_TOKENS)
    assert len(set(expected)) > 4
    async with chat(pair.model, tokenizer, local, copies=1, slices=slices) as here:
        tokens, finished = await here.tokens(**asked(pair))
        assert tokens == expected
        assert finished.completion_tokens == NUM_TOKENS
        await here.is_freed()


@pytest.mark.parametrize(("local", "slices"), [((1, 0), 2), (None, 3)])
async def test_seeded_tokens_are_those_of_the_whole_model(
    pair: TinyPair, tokenizer: ChatTokenizer, local: tuple[int, int] | None, slices: int
) -> None:
    async with chat(pair.model, tokenizer, local, copies=1, slices=slices) as here:
        tokens, _ = await here.tokens(**asked(pair, sampling=SEEDED))
    assert tokens == whole(pair, SEEDED)


@pytest.mark.parametrize("local", [(1, 0), (1, 1), None])
@pytest.mark.parametrize("after", [1, 2, 7])
async def test_a_node_lost_at_any_step_changes_nothing(
    pair: TinyPair, tokenizer: ChatTokenizer, local: tuple[int, int] | None, after: int
) -> None:
    async with chat(pair.model, tokenizer, local) as here:
        seen: list[Message] = []

        def lose(link: Any, message: Message) -> bool:
            is_end = link.peer_id in {node.node_id for node in here.nodes[2 * (after % 2) :][:2]}
            if isinstance(message, Step) and is_end:
                seen.append(message)
                if len(seen) == after:
                    here.lost.add(link.peer_id)
                    here.here.rig.network.cut_off(link.peer_id)
            return False

        here.here.rig.network.drop = lose
        tokens, finished = await here.tokens(**asked(pair))
        assert tokens == pair.generated(NUM_TOKENS)
        assert finished.replays >= 1
        await here.is_freed()


async def test_encoder_states_travel_once_a_session_and_hop(tokenizer: ChatTokenizer) -> None:
    pair = tiny_pair("whisper")
    memory = pair.memory()
    async with chat(pair.model, tokenizer, (1, 0), copies=1, slices=2) as here:
        rows: Counter[bytes] = Counter()
        sizes: Counter[bytes] = Counter()

        def count(link: Any, message: Message) -> bool:
            if isinstance(message, Step) and StepFlag.MEMORY in message.flags:
                rows[link.peer_id] += message.rows
                sizes[link.peer_id] += len(message.payload)
            return False

        here.here.rig.network.drop = count
        await here.tokens(**asked(pair))
        for node in here.nodes:
            assert rows[node.node_id] == len(memory)
            assert sizes[node.node_id] == len(memory) * HIDDEN_SIZE * 4
        await here.is_freed()


async def test_sessions_keep_their_own_states(tokenizer: ChatTokenizer) -> None:
    pair = tiny_pair("t5")
    other = EncodedPrompt(memory=torch.flip(pair.memory(), (0, 1))[:5])
    async with chat(pair.model, tokenizer, (1, 0), copies=1) as here:
        alone, _ = await here.tokens(**asked(pair, encoded=other))
        both = await asyncio.gather(
            here.tokens(**asked(pair)), here.tokens(**asked(pair, encoded=other)), here.tokens(**asked(pair))
        )
        assert [tokens for tokens, _ in both] == [
            pair.generated(NUM_TOKENS),
            alone,
            pair.generated(NUM_TOKENS),
        ]
        assert alone != pair.generated(NUM_TOKENS)


async def test_long_states_go_in_pieces(tokenizer: ChatTokenizer) -> None:
    pair = tiny_pair("t5")
    long = EncodedPrompt(memory=pair.memory().repeat(130, 1))  # 1170 rows
    async with chat(pair.model, tokenizer, (1, 0), copies=1) as here:
        pieces: list[int] = []

        def count(link: Any, message: Message) -> bool:
            if isinstance(message, Step) and StepFlag.MEMORY in message.flags:
                pieces.append(message.rows)
            return False

        here.here.rig.network.drop = count
        await here.tokens(**asked(pair, encoded=long))
        assert sorted(pieces) == sorted([512, 512, 146] * 2)
