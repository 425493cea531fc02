"""Probabilities over HTTP, from nodes that hold the layers: what the whole model says of the same tokens."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any

import openai
import pytest
import torch
from openai.types.chat import ChatCompletionTokenLogprob
from transformers import LlamaForCausalLM

from app.engine.tokenizer import ChatTokenizer
from tests.integration.chats import HIDDEN_SIZE, NUM_LAYERS, VOCAB_SIZE, Chat, chat
from tests.support.api_server import Served, serve_engines
from tests.support.tiny_models import small_llama

MAX_POSITIONS = 192
MESSAGES = [{"role": "user", "content": "né \U0001f98a 你好"}]
TEXT = "hello world, né \U0001f469\u200d\U0001f467 你好 the quick brown fox"


@pytest.fixture(scope="module")
def model() -> Iterator[LlamaForCausalLM]:
    with small_llama(
        MAX_POSITIONS, vocab_size=VOCAB_SIZE, hidden_size=HIDDEN_SIZE, num_layers=NUM_LAYERS
    ) as llama:
        yield llama


@asynccontextmanager
async def asked(
    model: LlamaForCausalLM, tokenizer: ChatTokenizer, local: tuple[int, int] | None
) -> AsyncIterator[tuple[openai.AsyncOpenAI, Served, Chat]]:
    """The official client of a gateway over two nodes."""
    async with chat(model, tokenizer, local, copies=1, chunk=16) as here:
        async with (
            serve_engines(here.engine) as served,
            served.openai() as client,
        ):
            yield client, served, here
        await here.is_freed()


@torch.inference_mode()
def whole(model: LlamaForCausalLM, ids: list[int]) -> torch.Tensor:
    """The stock model's log-probabilities of what follows each token. [tokens, vocab]"""
    logits: torch.Tensor = model(torch.tensor([ids])).logits
    return logits[0].float().log_softmax(-1)


def spelled(tokenizer: ChatTokenizer, data: list[list[int]]) -> list[int]:
    """The ids of tokens by their bytes; of a small vocabulary no two are alike."""
    ids = {tokenizer.bytes_of(token_id): token_id for token_id in range(VOCAB_SIZE - 1, 2, -1)}
    return [ids[bytes(one)] for one in data]


async def told_by(
    client: openai.AsyncOpenAI, fields: dict[str, Any], is_stream: bool
) -> tuple[list[ChatCompletionTokenLogprob], str]:
    """The tokens of an answer, and its text."""
    if not is_stream:
        choice = (await client.chat.completions.create(**fields)).choices[0]
        return list((choice.logprobs and choice.logprobs.content) or ()), choice.message.content or ""
    tokens: list[ChatCompletionTokenLogprob] = []
    texts: list[str] = []
    async for chunk in await client.chat.completions.create(**fields, stream=True):
        logprobs = chunk.choices[0].logprobs
        tokens += (logprobs and logprobs.content) or []
        texts.append(chunk.choices[0].delta.content or "")
    return tokens, "".join(texts)


@pytest.mark.parametrize("local", [(1, 0), (1, 1), None])
@pytest.mark.parametrize("is_stream", [False, True])
async def test_a_chats_probabilities_are_the_whole_models(
    model: LlamaForCausalLM, tokenizer: ChatTokenizer, local: tuple[int, int] | None, is_stream: bool
) -> None:
    fields: dict[str, Any] = {
        "model": "tiny",
        "messages": MESSAGES,
        "max_tokens": 24,
        "seed": 3,
        "temperature": 1.3,
    }
    named = {token_id: -100.0 for token_id in range(VOCAB_SIZE) if not tokenizer.bytes_of(token_id)}
    fields |= {"logit_bias": {str(token_id): bias for token_id, bias in named.items()}}
    async with asked(model, tokenizer, local) as (client, _, _):
        told, text = await told_by(client, fields | {"logprobs": True, "top_logprobs": 5}, is_stream)
    data = b"".join(bytes(token.bytes or []) for token in told)
    assert data.decode("utf-8", "replace").rstrip("\ufffd") == text.rstrip("\ufffd")
    prompt = list(tokenizer.render(MESSAGES))
    drawn = spelled(tokenizer, [token.bytes or [] for token in told])
    expected = whole(model, [*prompt, *drawn])[len(prompt) - 1 : -1]
    for token, row, token_id in zip(told, expected, drawn, strict=True):
        assert token.logprob == pytest.approx(float(row[token_id]), abs=1e-4)
        best = row.topk(5).values.tolist()
        assert [other.logprob for other in token.top_logprobs] == pytest.approx(best, abs=1e-4)


@pytest.mark.parametrize("local", [(1, 0), (1, 1)])
async def test_an_echoed_prompt_is_scored_as_by_the_whole_model(
    model: LlamaForCausalLM, tokenizer: ChatTokenizer, local: tuple[int, int]
) -> None:
    ids = tokenizer.encode(TEXT)
    async with asked(model, tokenizer, local) as (client, _, _):
        by_text = await client.completions.create(
            model="tiny", prompt=TEXT, echo=True, logprobs=2, max_tokens=0, temperature=0
        )
        by_ids = await client.completions.create(
            model="tiny", prompt=[ids, ids[:5]], echo=True, logprobs=1, max_tokens=1, temperature=0
        )
    logprobs = by_text.choices[0].logprobs
    assert by_text.choices[0].text == TEXT
    assert logprobs is not None
    assert logprobs.token_logprobs is not None
    expected = whole(model, ids)
    own = [float(row[token_id]) for row, token_id in zip(expected[:-1], ids[1:], strict=True)]
    assert logprobs.token_logprobs[1:] == pytest.approx(own, abs=1e-4)
    for choice, length in zip(by_ids.choices, (len(ids), 5), strict=True):
        told = choice.logprobs
        assert told is not None
        assert told.token_logprobs is not None
        assert told.token_logprobs[1:length] == pytest.approx(own[: length - 1], abs=1e-4)
        assert told.token_logprobs[length] == pytest.approx(float(expected[length - 1].max()), abs=1e-4)
        assert len(told.token_logprobs) == length + 1


async def test_a_gateway_without_ends_scores_answers_and_no_prompts(
    model: LlamaForCausalLM, tokenizer: ChatTokenizer
) -> None:
    async with asked(model, tokenizer, None) as (client, served, _):
        answer = await client.completions.create(model="tiny", prompt=TEXT, logprobs=5, max_tokens=4)
        assert answer.choices[0].logprobs is not None
        with pytest.raises(openai.BadRequestError) as caught:
            await client.completions.create(model="tiny", prompt=TEXT, logprobs=5, echo=True)
        assert (caught.value.code, caught.value.param) == ("unsupported_by_route", "echo")
        body = {"model": "tiny", "prompt": TEXT, "echo": True, "logprobs": 0, "stream": True}
        assert (await served.http.post("/v1/completions", json=body)).status_code == 400


async def test_texts_are_the_same_scored_or_not(model: LlamaForCausalLM, tokenizer: ChatTokenizer) -> None:
    fields: dict[str, Any] = {"model": "tiny", "prompt": TEXT, "seed": 5, "max_tokens": 30, "n": 2}
    async with asked(model, tokenizer, (1, 1)) as (client, _, _):
        plain = await client.completions.create(**fields)
        scored = await client.completions.create(**fields, logprobs=0, echo=True)
    assert [TEXT + choice.text for choice in plain.choices] == [choice.text for choice in scored.choices]
