"""Grammars over real node servers and a tiny real model: what leaves no choice takes no trips of its own."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import pytest
from transformers import LlamaForCausalLM

from app.engine import ends_jobs
from app.engine.grammar import Grammar, GrammarRules
from app.engine.request import Finished, RequestError
from app.engine.schema_rules import schema_rule
from app.engine.tokenizer import ChatTokenizer
from app.engine.tool_style import HERMES, ToolUse
from routing.types import Step
from slicing.sampler import SamplingParams
from tests.integration.chats import GREEDY, HIDDEN_SIZE, NUM_LAYERS, VOCAB_SIZE, Chat, chat
from tests.integration.test_drafts import PROMPT, drafting
from tests.support.tiny_models import small_llama

MAX_POSITIONS = 256
SAMPLINGS = [GREEDY, *(SamplingParams(temperature=1.0, seed=seed) for seed in range(4))]
PLACES = [(2, 1), (1, 0)]
TWO_FIELDS = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 12}, "days": {"type": "integer", "maximum": 99}},
    "required": ["city", "days"],
}


@pytest.fixture(scope="module")
def model() -> Iterator[LlamaForCausalLM]:
    with small_llama(
        MAX_POSITIONS, vocab_size=VOCAB_SIZE, hidden_size=HIDDEN_SIZE, num_layers=NUM_LAYERS
    ) as llama:
        yield llama


def held_to(tokenizer: ChatTokenizer, schema: dict[str, Any]) -> Grammar:
    rules = GrammarRules("response_format", f"start: {schema_rule(schema, 'response_format')}")
    return tokenizer.grammars.compile(rules, VOCAB_SIZE)


async def say(
    here: Chat, tokenizer: ChatTokenizer, schema: dict[str, Any], **fields: Any
) -> tuple[str, Finished]:
    told = {
        "prompt_ids": PROMPT,
        "max_tokens": 200,
        "sampling": GREEDY,
        "stop_token_ids": tokenizer.stop_token_ids,
        "grammar": held_to(tokenizer, schema),
    }
    return await here.text(**(told | fields))


@pytest.mark.parametrize(
    "sampling", SAMPLINGS, ids=lambda sampling: f"{sampling.temperature:.0f}-{sampling.seed}"
)
@pytest.mark.parametrize("local", PLACES)
async def test_a_two_field_object_saves_a_third_of_its_trips(
    model: LlamaForCausalLM, tokenizer: ChatTokenizer, local: tuple[int, int], sampling: SamplingParams
) -> None:
    async with drafting(model, tokenizer, local) as (here, sent):
        text, finished = await say(here, tokenizer, TWO_FIELDS, sampling=sampling, draft="off")
        value = json.loads(text)
        assert list(value) == ["city", "days"]
        assert (type(value["city"]), type(value["days"])) == (str, int)
        assert finished.reason == "stop"
        one_each = finished.completion_tokens - 1
        assert len(sent) <= 0.7 * one_each
        assert 0 < finished.forced < finished.completion_tokens
        assert (finished.drafted, finished.accepted) == (0, 0)
        assert (
            sum(step.rows for step in sent) <= one_each
        )  # no row is computed that is not part of the answer
        await here.is_freed()


@pytest.mark.parametrize("sampling", SAMPLINGS[:3], ids=["greedy", "0", "1"])
@pytest.mark.parametrize("draft", ["off", "lookup"])
async def test_the_text_is_what_it_is_token_by_token(
    model: LlamaForCausalLM,
    tokenizer: ChatTokenizer,
    sampling: SamplingParams,
    draft: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with drafting(model, tokenizer, (2, 1)) as (here, sent):
        text, finished = await say(here, tokenizer, TWO_FIELDS, sampling=sampling, draft=draft)
        num_together = len(sent)
        monkeypatch.setattr(ends_jobs, "MAX_FORCED", 0)
        alone, plain = await say(here, tokenizer, TWO_FIELDS, sampling=sampling, draft="off")
        assert (alone, plain.completion_tokens) == (text, finished.completion_tokens)
        assert plain.forced == finished.forced
        assert len(sent) - num_together > num_together
        await here.is_freed()


async def test_an_answer_that_is_known_from_the_start_takes_no_step(
    model: LlamaForCausalLM, tokenizer: ChatTokenizer
) -> None:
    async with drafting(model, tokenizer, (2, 1)) as (here, sent):
        text, finished = await say(here, tokenizer, {"const": {"answer": "the quick brown fox"}})
        assert json.loads(text) == {"answer": "the quick brown fox"}
        assert finished.forced == finished.completion_tokens
        assert finished.reason == "stop"
        assert sent == []


async def test_tokens_that_are_scored_are_all_drawn_from_rows(
    model: LlamaForCausalLM, tokenizer: ChatTokenizer
) -> None:
    async with drafting(model, tokenizer, (2, 1)) as (here, _sent):
        text, _ = await say(here, tokenizer, TWO_FIELDS)
        grammar = held_to(tokenizer, TWO_FIELDS)
        told = {"prompt_ids": PROMPT, "max_tokens": 200, "stop_token_ids": tokenizer.stop_token_ids}
        deltas, finished = await here.deltas(**told, grammar=grammar, num_logprobs=2)
        scores = [score for delta in deltas for score in delta.scores]
        assert "".join(delta.text for delta in deltas) == text
        assert len(scores) == finished.completion_tokens
        assert all(score.logprob < 0 for score in scores)  # of the model, not of what was left to choose from


@pytest.mark.parametrize("max_tokens", [1, 2, 5, 12])
async def test_an_answer_that_is_cut_is_cut_where_it_would_be(
    model: LlamaForCausalLM, tokenizer: ChatTokenizer, max_tokens: int
) -> None:
    async with drafting(model, tokenizer, (2, 1)) as (here, sent):
        whole, _ = await say(here, tokenizer, TWO_FIELDS)
        sent.clear()
        text, finished = await say(here, tokenizer, TWO_FIELDS, max_tokens=max_tokens)
        assert whole.startswith(text)
        assert (finished.reason, finished.completion_tokens) == ("length", max_tokens)
        assert all(step.position + step.rows <= len(PROMPT) + max_tokens for step in sent)
        await here.is_freed()


async def test_a_node_lost_under_a_forced_step_changes_nothing(
    model: LlamaForCausalLM, tokenizer: ChatTokenizer
) -> None:
    async with drafting(model, tokenizer, (2, 1), copies=2) as (here, _sent):
        expected, _ = await say(here, tokenizer, TWO_FIELDS)

        def lose(link: Any, message: Any) -> bool:
            is_there = link.peer_id in {node.node_id for node in here.nodes[2:4]}
            is_forced = isinstance(message, Step) and message.rows > 1 and message.position >= len(PROMPT)
            if is_there and is_forced and not here.lost:
                here.lost.add(link.peer_id)
                here.here.rig.network.cut_off(link.peer_id)
            return False

        here.here.rig.network.drop = lose
        text, finished = await say(here, tokenizer, TWO_FIELDS)
        assert text == expected
        assert finished.replays >= 1
        await here.is_freed()


async def test_answers_of_one_grammar_do_not_disturb_each_other(
    model: LlamaForCausalLM, tokenizer: ChatTokenizer
) -> None:
    async with drafting(model, tokenizer, (2, 1)) as (here, _sent):
        grammar = held_to(tokenizer, TWO_FIELDS)
        alone = [await say(here, tokenizer, TWO_FIELDS, sampling=sampling) for sampling in SAMPLINGS]

        together = await asyncio.gather(
            *(say(here, tokenizer, TWO_FIELDS, sampling=sampling, grammar=grammar) for sampling in SAMPLINGS)
        )
        assert [text for text, _ in together] == [text for text, _ in alone]


async def test_the_thin_mode_refuses_a_grammar_by_the_field_that_asked_for_it(
    model: LlamaForCausalLM, tokenizer: ChatTokenizer
) -> None:
    async with chat(model, tokenizer, None, 1) as here:
        with pytest.raises(RequestError) as refused:
            await say(here, tokenizer, TWO_FIELDS)
        assert (refused.value.code, refused.value.param) == ("unsupported_by_route", "response_format")


async def test_the_thin_mode_answers_with_free_tools(
    model: LlamaForCausalLM, tokenizer: ChatTokenizer
) -> None:
    async with chat(model, tokenizer, None, 1) as here:
        expected, _ = await here.text(max_tokens=6)
        text, finished = await here.text(max_tokens=6, tools=ToolUse(HERMES, frozenset({"f"})))
        assert (text, finished.forced) == (expected, 0)
