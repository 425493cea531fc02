"""Thoughts over real node servers: told apart by the engine itself, whatever tokens travel together."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest
from transformers import LlamaForCausalLM

from app.engine.grammar import GrammarRules
from app.engine.reasoning import BLOCKS, Thoughts
from app.engine.schema_rules import schema_rule
from app.engine.tokenizer import ChatTokenizer
from tests.integration.chats import GREEDY, HIDDEN_SIZE, NUM_LAYERS, VOCAB_SIZE
from tests.integration.test_drafts import PROMPT, drafting
from tests.support.tiny_models import small_llama

SCHEMA = {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"]}


@pytest.fixture(scope="module")
def model() -> Iterator[LlamaForCausalLM]:
    with small_llama(256, vocab_size=VOCAB_SIZE, hidden_size=HIDDEN_SIZE, num_layers=NUM_LAYERS) as llama:
        yield llama


@pytest.mark.parametrize("is_raw", [False, True])
@pytest.mark.parametrize("num_logprobs", [None, 1])  # with scores each token has a step of its own
async def test_a_thought_is_told_apart_and_stops_nothing(
    model: LlamaForCausalLM, tokenizer: ChatTokenizer, is_raw: bool, num_logprobs: int | None
) -> None:
    rule = schema_rule(SCHEMA, "response_format")
    lark = f'start: "the fox?\\n</think>\\n\\n" held\nheld: {rule}'
    grammar = tokenizer.grammars.compile(GrammarRules("response_format", lark), VOCAB_SIZE)
    async with drafting(model, tokenizer, (2, 1)) as (here, _sent):
        deltas, finished = await here.deltas(
            prompt_ids=PROMPT,
            max_tokens=200,
            sampling=GREEDY,
            stop=("fox",),
            stop_token_ids=tokenizer.stop_token_ids,
            grammar=grammar,
            thoughts=Thoughts(BLOCKS[0], is_open=True, is_raw=is_raw),
            num_logprobs=num_logprobs,
        )
        thought = "".join(delta.thought for delta in deltas)
        text = "".join(delta.text for delta in deltas)
        told = text.removeprefix("the fox?\n</think>\n\n") if is_raw else text
        assert (thought, is_raw) in (("the fox?", False), ("", True))
        assert json.loads(told).keys() == {"a"}
        assert finished.reason == "stop"
        assert finished.thinking_tokens == len(tokenizer.encode("the fox?\n</think>"))
        await here.is_freed()
