"""Drafts over real node servers and a tiny real model: the same text with and without, whatever happens meanwhile."""

from __future__ import annotations

import asyncio
import math
import random
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest
from transformers import LlamaForCausalLM

from app.engine import drafts
from app.engine.request import Finished
from app.engine.tokenizer import ChatTokenizer
from routing.types import Message, Step
from slicing.ends import Parts
from slicing.invariant import InvariantRunner
from slicing.sampler import SamplingParams
from tests.integration.chats import GREEDY, HIDDEN_SIZE, NUM_LAYERS, SEEDED, VOCAB_SIZE, Chat, chat
from tests.support.tiny_models import small_llama

MAX_POSITIONS = 128
PROMPT = (7, 90, 31, 200, 5, 64, 12, 7, 90, 31, 44, 101, 3, 64, 12)
NUM_TOKENS = 40
PENALISED = SamplingParams(temperature=0.0, repetition_penalty=1.05, frequency_penalty=0.02)
FEW = SamplingParams(
    temperature=1.0, seed=11, presence_penalty=0.1, logit_bias=((64, 9.0), (12, 9.0), (7, 9.0))
)  # draws among three tokens: chance alone makes drafts right for a while
SAMPLINGS = [GREEDY, SEEDED, PENALISED, FEW]
SAMPLING_NAMES = ["greedy", "seeded", "penalised", "few"]
PLACES = [(2, 1), None]


@pytest.fixture(scope="module")
def model() -> Iterator[LlamaForCausalLM]:
    with small_llama(
        MAX_POSITIONS, vocab_size=VOCAB_SIZE, hidden_size=HIDDEN_SIZE, num_layers=NUM_LAYERS
    ) as llama:
        yield llama


@pytest.fixture(autouse=True)
def _rows_are_free(monkeypatch: pytest.MonkeyPatch) -> None:
    """Drafts on every trip that has any, however unlikely: what is looked at here is what becomes of them."""
    monkeypatch.setattr(drafts, "ASSUMED_SHARE", 1e-9)


class Runners:
    """Invariant runners are tried when they are made, which takes a while: each is made once, and lent out again."""

    def __init__(self) -> None:
        self._made: defaultdict[tuple[LlamaForCausalLM, Parts], list[InvariantRunner]] = defaultdict(list)
        self._lent: Counter[tuple[LlamaForCausalLM, Parts]] = Counter()

    def from_model(self, model: LlamaForCausalLM, parts: Parts) -> InvariantRunner:
        made, number = self._made[model, parts], self._lent[model, parts]
        self._lent[model, parts] += 1
        if number == len(made):
            made.append(InvariantRunner.from_model(model, parts))
        return made[number]

    def take_back(self) -> None:
        self._lent.clear()


RUNNERS = Runners()


@asynccontextmanager
async def drafting(
    model: LlamaForCausalLM, tokenizer: ChatTokenizer, local: tuple[int, int] | None, copies: int = 1
) -> AsyncIterator[tuple[Chat, list[Step]]]:
    """A chat, and the decode steps that its gateway sends."""
    RUNNERS.take_back()
    async with chat(model, tokenizer, local, copies, RUNNERS) as here:
        sent: list[Step] = []

        def watch(link: Any, message: Message) -> bool:
            is_ours = isinstance(message, Step) and link.own_id == here.here.endpoint.node_id
            if is_ours and message.position >= len(PROMPT):
                sent.append(message)
            return False

        here.here.rig.network.drop = watch
        yield here, sent


async def say(here: Chat, draft: str, **fields: Any) -> tuple[str, Finished]:
    told = {"prompt_ids": PROMPT, "max_tokens": NUM_TOKENS, "sampling": GREEDY} | fields
    return await here.text(draft=draft, **told)


def ending(finished: Finished) -> tuple[str, int]:
    return finished.reason, finished.completion_tokens


@pytest.fixture
def oracle(monkeypatch: pytest.MonkeyPatch) -> Callable[[Sequence[int], int], None]:
    """Have every draft be what really follows, but for tokens that a seed makes wrong."""

    def foretell(answer: Sequence[int], seed: int) -> None:
        ids, chance = [*PROMPT, *answer], random.Random(seed)

        def propose(lookup: drafts.PromptLookup, most: int) -> drafts.Draft:
            here = len(lookup._ids)
            true = ids[here : here + chance.randint(1, most)]
            wrong = chance.choice((0.0, 0.1, 0.5, 1.0))
            told = [(id_ + 1) % VOCAB_SIZE if chance.random() < wrong else id_ for id_ in true]
            return drafts.Draft(tuple(told))

        monkeypatch.setattr(drafts.PromptLookup, "propose", propose)

    return foretell


def drawn_ids(here: Chat, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """What the engine takes for the answer, token by token, from now on."""
    ids: list[int] = []
    judge = here.engine._judge_token

    def note(progress: Any, token_id: int) -> Any:
        ids.append(token_id)
        return judge(progress, token_id)

    monkeypatch.setattr(here.engine, "_judge_token", note)
    return ids


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=SAMPLING_NAMES)
@pytest.mark.parametrize("local", PLACES)
async def test_the_text_is_the_same_with_drafts_and_without(
    model: LlamaForCausalLM,
    tokenizer: ChatTokenizer,
    local: tuple[int, int] | None,
    sampling: SamplingParams,
) -> None:
    async with drafting(model, tokenizer, local) as (here, sent):
        expected, plain = await say(here, "off", sampling=sampling)
        num_plain = len(sent)
        text, finished = await say(here, "lookup", sampling=sampling)
        assert (text, ending(finished)) == (expected, ending(plain))
        assert (plain.drafted, num_plain) == (0, NUM_TOKENS - 1)
        trips = sent[num_plain:]
        assert len(trips) == num_plain - finished.accepted
        assert sum(step.rows for step in trips) == len(trips) + finished.drafted
        assert finished.drafted > finished.accepted
        assert finished.accepted > 0 or sampling is SEEDED
        await here.is_freed()


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=SAMPLING_NAMES)
@pytest.mark.parametrize("local", PLACES)
async def test_a_draft_may_be_wrong_anywhere(
    model: LlamaForCausalLM,
    tokenizer: ChatTokenizer,
    local: tuple[int, int] | None,
    sampling: SamplingParams,
    oracle: Callable[[Sequence[int], int], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with drafting(model, tokenizer, local) as (here, _sent):
        ids = drawn_ids(here, monkeypatch)
        expected, plain = await say(here, "off", sampling=sampling)
        answer = list(ids)
        for seed in range(3):
            ids.clear()
            oracle(answer, seed)
            text, finished = await say(here, "lookup", sampling=sampling)
            assert (text, ids, ending(finished)) == (expected, answer, ending(plain))
            assert 0 < finished.accepted < finished.drafted
        await here.is_freed()


@pytest.mark.parametrize("sampling", [GREEDY, FEW], ids=["greedy", "few"])
@pytest.mark.parametrize("local", PLACES)
@pytest.mark.parametrize("after", [2, 5, 7])
async def test_a_node_lost_in_the_middle_of_a_draft_changes_nothing(
    model: LlamaForCausalLM,
    tokenizer: ChatTokenizer,
    local: tuple[int, int] | None,
    sampling: SamplingParams,
    after: int,
    oracle: Callable[[Sequence[int], int], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with drafting(model, tokenizer, local, copies=2) as (here, _sent):
        ids = drawn_ids(here, monkeypatch)
        expected, _ = await say(here, "off", sampling=sampling)
        answer = list(ids)
        ids.clear()
        oracle(answer, after)
        stage = 2 * (after % 2)  # whose nodes: the first stage's or the last one's
        here.lose_at(
            after, here.nodes[stage : stage + 2], lambda step: step.rows > 1 and step.position >= len(PROMPT)
        )
        text, finished = await say(here, "lookup", sampling=sampling)
        assert (text, ids) == (expected, answer)
        assert finished.replays >= 1
        assert finished.accepted > 0
        await here.is_freed()


@pytest.mark.parametrize("local", [(1, 1), None])
@pytest.mark.parametrize("max_tokens", [1, 2, 17, MAX_POSITIONS])
async def test_an_answer_ends_where_it_would(
    model: LlamaForCausalLM, tokenizer: ChatTokenizer, local: tuple[int, int] | None, max_tokens: int
) -> None:
    async with drafting(model, tokenizer, local) as (here, sent):
        expected, plain = await say(here, "off", max_tokens=max_tokens)
        text, finished = await say(here, "lookup", max_tokens=max_tokens)
        assert (text, ending(finished)) == (expected, ending(plain))
        assert finished.completion_tokens == min(max_tokens, MAX_POSITIONS - len(PROMPT))
        assert all(step.position + step.rows <= MAX_POSITIONS for step in sent)


@pytest.mark.parametrize("local", [(1, 1), None])
async def test_a_stop_inside_a_right_draft_ends_the_answer_there(
    model: LlamaForCausalLM,
    tokenizer: ChatTokenizer,
    local: tuple[int, int] | None,
    oracle: Callable[[Sequence[int], int], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with drafting(model, tokenizer, local) as (here, _sent):
        ids = drawn_ids(here, monkeypatch)
        whole, _ = await say(here, "off")
        answer = list(ids)
        oracle(answer, 1)
        for end in (6, 11):
            stops = {"stop_token_ids": frozenset({answer[end]})}
            assert await _same(here, **stops)
            assert await _same(here, stop=(whole[end : end + 2],))
        await here.is_freed()


async def _same(here: Chat, **fields: Any) -> bool:
    expected, plain = await say(here, "off", **fields)
    text, finished = await say(here, "lookup", **fields)
    assert plain.reason == "stop"
    assert finished.accepted <= finished.completion_tokens
    return (text, ending(finished)) == (expected, ending(plain))


@pytest.mark.parametrize("local", [(2, 1), None])
async def test_answers_side_by_side_are_those_that_each_would_be_alone(
    model: LlamaForCausalLM, tokenizer: ChatTokenizer, local: tuple[int, int] | None
) -> None:
    samplings = [GREEDY, SEEDED, PENALISED, FEW, *(replace(FEW, seed=seed) for seed in range(2))]
    async with drafting(model, tokenizer, local) as (here, _sent):
        alone = [(await say(here, "off", sampling=sampling))[0] for sampling in samplings]
        asked = [say(here, "lookup", sampling=sampling) for sampling in samplings]
        together = await asyncio.gather(*asked)
        assert [text for text, _ in together] == alone
        assert sum(finished.accepted for _, finished in together) > 0
        await here.is_freed()


async def test_a_form_that_depends_on_grouping_has_no_drafts_and_says_so(
    model: LlamaForCausalLM, tokenizer: ChatTokenizer
) -> None:
    async with chat(model, tokenizer, (1, 0), copies=1) as here:
        _, finished = await say(here, "lookup")
        assert (finished.drafted, finished.accepted) == (0, 0)
        assert "grouped" in finished.draft_off
        assert not (await say(here, "off"))[1].draft_off


async def test_what_drafts_cost_is_measured_before_any_is_sent(
    model: LlamaForCausalLM, tokenizer: ChatTokenizer
) -> None:
    async with drafting(model, tokenizer, (1, 0)) as (here, sent):
        await say(here, "auto", max_tokens=2)
        assert [step.rows for step in sent] == [1]
        assert 0 < here.engine._costs.row_share < math.inf
