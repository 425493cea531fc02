"""A chat's next turn, and prompts that begin alike, over real node servers and a tiny real model.

They cost what is new in them, and say the same.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import aclosing
from typing import Any

import pytest
from transformers import LlamaForCausalLM

from app.engine.request import Finished, RequestError, TextDelta
from app.engine.tokenizer import ChatTokenizer
from node import room
from routing import switchboard
from routing.types import Keep, Message, Step
from slicing.invariant import InvariantRunner
from slicing.runner import PlainRunner
from slicing.sampler import SamplingParams
from tests.integration.chats import GREEDY, HIDDEN_SIZE, NUM_LAYERS, SEEDED, VOCAB_SIZE, Chat, chat, request
from tests.node.rig import until
from tests.support.tiny_models import small_llama

SECRET = b"s" * 32
SHORT: dict[str, Any] = {"runners": InvariantRunner, "chunk": 32}
TURN_ONE = tuple(3 + (7 * n) % 250 for n in range(90))
PLACES = [(0, 0), (1, 0), (2, 1), None]


@pytest.fixture(scope="module")
def model() -> Iterator[LlamaForCausalLM]:
    with small_llama(256, vocab_size=VOCAB_SIZE, hidden_size=HIDDEN_SIZE, num_layers=NUM_LAYERS) as llama:
        yield llama


@pytest.fixture(autouse=True)
def _no_haste(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nodes of these tests say nothing of their speed: what they hold decides where a route goes."""
    monkeypatch.setattr(switchboard, "prefers_holders", lambda *_ms, num_held, **_others: num_held > 0)


def turn_two(ids: tuple[int, ...], new: int = 20) -> tuple[int, ...]:
    """What a client sends next: everything so far, and a few tokens more."""
    return (*ids, *(3 + (11 * n) % 250 for n in range(new)))


def rows_run(here: Chat) -> list[int]:
    return [node.stats.rows_run for node in here.nodes]


async def said(here: Chat, **fields: Any) -> tuple[str, Finished, tuple[int, ...]]:
    """An answer, how it ended, and the prompt with the answer's ids, as the last Keep named them."""
    ids: list[int] = []
    original = type(here.engine)._judge_token

    def spy(engine: Any, progress: Any, token_id: int) -> Any:
        ids.append(token_id)
        return original(engine, progress, token_id)

    type(here.engine)._judge_token = spy  # type: ignore[method-assign]
    try:
        text, finished = await here.text(**fields)
    finally:
        type(here.engine)._judge_token = original  # type: ignore[method-assign]
    return text, finished, (*fields["prompt_ids"], *ids)


@pytest.mark.parametrize("sampling", [GREEDY, SEEDED], ids=["greedy", "seeded"])
@pytest.mark.parametrize("local", PLACES)
async def test_a_second_turn_costs_its_new_tokens_and_says_the_same(
    model: LlamaForCausalLM,
    tokenizer: ChatTokenizer,
    local: tuple[int, int] | None,
    sampling: SamplingParams,
) -> None:
    async with chat(model, tokenizer, local, copies=1, **SHORT, secret=SECRET) as here:
        text, finished, ids = await said(here, prompt_ids=TURN_ONE, sampling=sampling, max_tokens=9)
        assert finished.cached_tokens == 0
        asked, before = turn_two(ids), rows_run(here)
        warm, finished, _ = await said(here, prompt_ids=asked, sampling=sampling, max_tokens=9)
        held = (len(ids) - 1) // 16 * 16
        assert finished.cached_tokens == held
        computed = {now - then for now, then in zip(rows_run(here), before, strict=True)}
        assert len(asked) - held + 8 <= max(computed) <= len(asked) - held + 9 + finished.drafted
        await here.is_freed()
    async with chat(model, tokenizer, local, copies=1, **SHORT) as cold:
        assert (await cold.text(prompt_ids=TURN_ONE, sampling=sampling, max_tokens=9))[0] == text
        again, finished = await cold.text(prompt_ids=asked, sampling=sampling, max_tokens=9)
        assert (again, finished.cached_tokens) == (warm, 0)


@pytest.mark.parametrize("local", PLACES)
async def test_prompts_that_begin_alike_share_what_is_alike(
    model: LlamaForCausalLM, tokenizer: ChatTokenizer, local: tuple[int, int] | None
) -> None:
    others = [(*TURN_ONE[:70], *(number,) * 10) for number in (5, 9)]
    async with chat(model, tokenizer, local, copies=1, **SHORT) as cold:
        expected = [(await cold.text(prompt_ids=ids))[0] for ids in others]
    async with chat(model, tokenizer, local, copies=1, **SHORT, secret=SECRET) as here:
        await here.text(prompt_ids=TURN_ONE)
        for ids, text in zip(others, expected, strict=True):
            assert await here.text(prompt_ids=ids) == (text, Ending(64))
    assert here.prefixes is not None
    assert (here.prefixes.counts.hits, here.prefixes.counts.tokens) == (2, 128)


class Ending:
    """Equal to an ending with so many cached tokens."""

    def __init__(self, cached_tokens: int) -> None:
        self.cached_tokens = cached_tokens

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Finished) and other.cached_tokens == self.cached_tokens

    __hash__ = None  # type: ignore[assignment]


async def test_the_same_prompt_again_computes_its_last_token(
    model: LlamaForCausalLM, tokenizer: ChatTokenizer
) -> None:
    async with chat(model, tokenizer, (1, 0), copies=1, **SHORT, secret=SECRET) as here:
        prompt = TURN_ONE[:80]
        first, _ = await here.text(prompt_ids=prompt)
        assert await here.text(prompt_ids=prompt) == (
            first,
            Ending(64),
        )  # the last block holds the last token


async def test_another_key_finds_nothing(model: LlamaForCausalLM, tokenizer: ChatTokenizer) -> None:
    async with chat(model, tokenizer, None, copies=1, **SHORT, secret=SECRET) as here:
        names: list[set[bytes]] = []

        def watch(link: Any, message: Message) -> bool:
            if isinstance(message, Keep):
                names.append(set(message.hashes))
            return False

        here.here.rig.network.drop = watch
        for tenant in (b"alice", b"bob", b""):
            _, finished = await here.text(prompt_ids=TURN_ONE, tenant=tenant)
            assert finished.cached_tokens == 0
        _, finished = await here.text(prompt_ids=TURN_ONE, tenant=b"alice")
        assert finished.cached_tokens == 80
        unique = {frozenset(each) for each in names}
        assert len(unique) == 3
        assert not set.intersection(*map(set, unique))


@pytest.mark.parametrize("local", [(2, 1), None])
@pytest.mark.parametrize("hop", [0, 1])
@pytest.mark.parametrize("after", [1, 4])
async def test_a_node_killed_after_a_cached_start_changes_no_token(
    model: LlamaForCausalLM, tokenizer: ChatTokenizer, local: tuple[int, int] | None, hop: int, after: int
) -> None:
    asked = turn_two(TURN_ONE)
    async with chat(model, tokenizer, local, copies=1, **SHORT) as cold:
        expected, _ = await cold.text(prompt_ids=asked, sampling=SEEDED, max_tokens=12)
    async with chat(model, tokenizer, local, copies=2, **SHORT, secret=SECRET) as here:
        await here.text(prompt_ids=TURN_ONE)
        used = [node for node in here.nodes if node.stats.rows_run]
        here.lose_at(after, [used[hop]])
        text, finished = await here.text(prompt_ids=asked, sampling=SEEDED, max_tokens=12)
        assert text == expected
        assert finished.cached_tokens >= 80
        assert finished.replays == 1
        here.here.rig.network.drop = None
        _, finished = await here.text(prompt_ids=asked)  # kept again, on the route that it ended on
        assert finished.cached_tokens == (len(asked) - 1) // 16 * 16
        await here.is_freed()


async def test_a_slice_that_moves_after_a_cached_start_changes_no_token(
    model: LlamaForCausalLM, tokenizer: ChatTokenizer
) -> None:
    asked = turn_two(TURN_ONE)
    async with chat(model, tokenizer, (1, 0), copies=1, **SHORT) as cold:
        expected, _ = await cold.text(prompt_ids=asked, max_tokens=12)
    async with chat(model, tokenizer, (1, 0), copies=2, **SHORT, secret=SECRET) as here:
        await here.text(prompt_ids=TURN_ONE)
        used = [node for node in here.nodes if node.stats.rows_run][1]
        before = used.stats.steps_run

        def move(link: Any, message: Message) -> bool:
            if isinstance(message, Step) and used.stats.steps_run > before + 5 and used.slices.held:
                used.slices.remove(used.slices.held[0])
            return False

        here.here.rig.network.drop = move
        text, finished = await here.text(prompt_ids=asked, max_tokens=12, draft="off")
        assert text == expected
        assert (finished.cached_tokens, finished.replays) == (80, 1)
        assert used.stats.num_prefixes == 0


async def test_another_gateway_of_a_fleet_finds_what_the_first_one_left(
    model: LlamaForCausalLM, tokenizer: ChatTokenizer
) -> None:
    prompt = tuple(3 + (7 * n) % 250 for n in range(240))
    options: dict[str, Any] = {**SHORT, "secret": SECRET, "guesses": True}
    async with chat(model, tokenizer, None, copies=1, **options) as here:
        import app.engine.prefix as prefix

        first, _ = await here.text(prompt_ids=prompt, max_tokens=5)
        assert here.prefixes is not None
        here.prefixes.close()  # as if it were another one: it knows of nothing
        prefix.MIN_GUESSED, saved = 64, prefix.MIN_GUESSED
        try:
            text, finished = await here.text(prompt_ids=prompt, max_tokens=5)
        finally:
            prefix.MIN_GUESSED = saved
        assert (text, finished.cached_tokens) == (first, 224)


async def test_plain_runners_keep_nothing_and_answer_as_ever(
    model: LlamaForCausalLM, tokenizer: ChatTokenizer
) -> None:
    async with chat(model, tokenizer, (1, 0), copies=1, runners=PlainRunner, chunk=64, secret=SECRET) as here:
        first, _ = await here.text(prompt_ids=TURN_ONE)
        assert await here.text(prompt_ids=TURN_ONE) == (first, Ending(0))
        assert here.here.messages_sent()["Keep"] == 0
        await here.is_freed()


async def test_a_prompt_longer_than_any_nodes_room_is_refused_with_the_numbers(
    model: LlamaForCausalLM, tokenizer: ChatTokenizer
) -> None:
    async with chat(model, tokenizer, (1, 0), copies=1, **SHORT, secret=SECRET) as here:
        for node in here.nodes:
            (held,) = node.slices.held
            node.budget.limit_bytes = held.runner.cache_bytes(64)
        with pytest.raises(RequestError) as caught:
            await here.text(prompt_ids=TURN_ONE, max_tokens=20)
        assert caught.value.code == "context_length_exceeded"
        assert "90 tokens" in caught.value.message
        assert "110" in caught.value.message
        assert "64 tokens" in caught.value.message
        assert sum(rows_run(here)) == 0
        await here.text(prompt_ids=TURN_ONE[:40], max_tokens=20)


async def test_an_answer_of_any_length_asks_for_a_usual_ones_room(
    model: LlamaForCausalLM, tokenizer: ChatTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("app.engine.text.USUAL_TOKENS", 8)
    async with chat(model, tokenizer, (1, 0), copies=1, **SHORT, secret=SECRET) as here:
        for node in here.nodes:
            (held,) = node.slices.held
            node.budget.limit_bytes = held.runner.cache_bytes(128)
        _, finished = await here.text(prompt_ids=TURN_ONE[:50], max_tokens=70, is_open_ended=True)
        assert finished.completion_tokens == 70  # it grew beyond what was set aside
        assert room.EVICT_IDLE_S == 10.0


@pytest.mark.parametrize("runners", [InvariantRunner, PlainRunner])
async def test_a_client_that_stopped_reading_makes_way_and_still_gets_its_answer(
    model: LlamaForCausalLM, tokenizer: ChatTokenizer, runners: Any
) -> None:
    async with chat(model, tokenizer, (1, 0), copies=1, runners=runners, chunk=32) as cold:
        expected, _ = await cold.text(prompt_ids=TURN_ONE, max_tokens=12)
    async with chat(model, tokenizer, (1, 0), copies=1, runners=runners, chunk=32) as here:
        for node in here.nodes:
            (held,) = node.slices.held
            node.budget.limit_bytes = held.runner.cache_bytes(128)
        asked = request(prompt_ids=TURN_ONE, max_tokens=12)
        async with aclosing(here.engine.generate(asked)) as events:
            text, num_deltas = "", 0
            async for event in events:
                if isinstance(event, TextDelta):
                    text, num_deltas = text + event.text, num_deltas + 1
                if num_deltas == 3 and not here.nodes[0].stats.sessions_evicted:
                    await until(lambda: {node.stats.steps_run for node in here.nodes} == {3 + 3})
                    for node in here.nodes:  # nothing is read for so long
                        node.now[0] += room.EVICT_IDLE_S
                    await here.text(prompt_ids=TURN_ONE[:70], max_tokens=4)
        assert isinstance(event, Finished)
        assert (text, event.replays) == (expected, 1)
        assert [node.stats.sessions_evicted for node in here.nodes] == [1, 1]
