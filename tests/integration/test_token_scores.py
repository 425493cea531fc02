"""How likely tokens are, told by an engine over real nodes: equal to the whole model's own log_softmax."""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM

from app.engine import drafts
from app.engine.request import Finished, PrefillProgress, RequestError
from app.engine.tokenizer import ChatTokenizer
from node import drawing
from routing.errors import ErrorCode, ProtocolError, WorkError
from routing.types import Answer, AnswerKind, Message
from slicing.invariant import InvariantRunner
from slicing.sampler import Sampler, SamplingParams
from slicing.token_scores import TokenScore
from tests.integration.chats import (
    GREEDY,
    HIDDEN_SIZE,
    NUM_LAYERS,
    PROMPT,
    SEEDED,
    VOCAB_SIZE,
    Chat,
    chat,
    request,
)
from tests.integration.test_text_engine import poisoned
from tests.support.tiny_models import small_llama

FEW = SamplingParams(temperature=1.0, seed=11, logit_bias=((64, 9.0), (12, 9.0), (7, 9.0)))
BIASED = SamplingParams(temperature=0.7, seed=3, logit_bias=((5, 9.0),), top_k=3, presence_penalty=1.0)
REPEATED = (7, 90, 31, 7, 90, 31, 7, 90, 31, 7, 90)


@pytest.fixture(scope="module")
def model() -> Iterator[LlamaForCausalLM]:
    with small_llama(64, vocab_size=VOCAB_SIZE, hidden_size=HIDDEN_SIZE, num_layers=NUM_LAYERS) as llama:
        yield llama


@torch.inference_mode()
def whole(model: LlamaForCausalLM, ids: Sequence[int]) -> torch.Tensor:
    """The stock model's own log-probabilities of what follows each token. [tokens, vocab]"""
    logits: torch.Tensor = model(torch.tensor([list(ids)])).logits
    return logits[0].float().log_softmax(-1)


def check(scores: Sequence[TokenScore], ids: Sequence[int], expected: torch.Tensor, num_top: int) -> None:
    assert [score.token_id for score in scores] == list(ids)
    for score, row in zip(scores, expected, strict=True):
        assert score.logprob == pytest.approx(float(row[score.token_id]), abs=1e-4)
        best = row.topk(num_top)
        assert [token_id for token_id, _ in score.top] == best.indices.tolist()
        assert [value for _, value in score.top] == pytest.approx(best.values.tolist(), abs=1e-4)


@pytest.mark.parametrize("local", [(0, 0), (1, 0), (1, 1), None])
@pytest.mark.parametrize("sampling", [GREEDY, SEEDED, BIASED], ids=["greedy", "seeded", "biased"])
async def test_drawn_tokens_are_scored_by_the_model_alone(
    model: LlamaForCausalLM,
    tokenizer: ChatTokenizer,
    local: tuple[int, int] | None,
    sampling: SamplingParams,
) -> None:
    async with chat(model, tokenizer, local, copies=1) as here:
        plain, _ = await here.tokens(sampling=sampling)
        for num_top in (0, 20):
            deltas, _ = await here.deltas(sampling=sampling, num_logprobs=num_top)
            drawn = [token_id for delta in deltas for token_id in delta.token_ids]
            assert drawn == plain  # asking changes nothing
            expected = whole(model, [*PROMPT, *drawn])[len(PROMPT) - 1 : -1]
            check([score for delta in deltas for score in delta.scores], drawn, expected, num_top)
        await here.is_freed()


async def scored(here: Chat, **fields: Any) -> tuple[list[TokenScore], list[TokenScore], Finished]:
    """Scores of the prompt and of what was drawn."""
    prompt: list[TokenScore] = []
    drawn: list[TokenScore] = []
    async with aclosing(here.engine.generate(request(scores_prompt=True, **fields))) as events:
        async for event in events:
            if isinstance(event, PrefillProgress):
                prompt += event.scores
            drawn += getattr(event, "scores", ()) if not isinstance(event, PrefillProgress) else ()
    assert isinstance(event, Finished)
    return prompt, drawn, event


@pytest.mark.parametrize("local", [(0, 0), (2, 0), (1, 1)])
@pytest.mark.parametrize("chunk", [3, 11, 64])
@pytest.mark.parametrize("max_tokens", [0, 4])
async def test_a_prompt_is_scored_as_the_stock_model_would(
    model: LlamaForCausalLM,
    tokenizer: ChatTokenizer,
    local: tuple[int, int],
    chunk: int,
    max_tokens: int,
) -> None:
    async with chat(model, tokenizer, local, copies=1, chunk=chunk) as here:
        prompt, drawn, finished = await scored(here, num_logprobs=5, max_tokens=max_tokens)
        text, _ = await here.tokens(max_tokens=max_tokens or 1)
        await here.is_freed()
    check(prompt, PROMPT[1:], whole(model, PROMPT)[:-1], 5)
    assert (finished.reason, finished.completion_tokens) == ("length", max_tokens)
    assert [score.token_id for score in drawn] == text[:max_tokens]


async def test_a_prompt_of_one_token_has_nothing_to_score(
    model: LlamaForCausalLM, tokenizer: ChatTokenizer
) -> None:
    async with chat(model, tokenizer, (1, 1), copies=1) as here:
        assert (await scored(here, prompt_ids=(9,), max_tokens=0))[0] == []
        prompt, drawn, _ = await scored(here, prompt_ids=(9,), max_tokens=2, num_logprobs=0)
        assert (prompt, len(drawn)) == ([], 2)
        full = tuple(range(3, 67))
        assert len((await scored(here, prompt_ids=full, max_tokens=0, num_logprobs=0))[0]) == 63
        await here.is_freed()


async def test_a_node_lost_while_a_prompt_is_scored_changes_nothing(
    model: LlamaForCausalLM, tokenizer: ChatTokenizer
) -> None:
    async with chat(model, tokenizer, (1, 1), copies=2) as here:
        seen = 0

        def lose(link: Any, message: Message) -> bool:
            nonlocal seen
            seen += isinstance(message, Answer)
            if seen == 2 and not here.lost:
                here.lost.add(link.own_id)
                here.here.rig.network.cut_off(link.own_id)
            return False

        here.here.rig.network.drop = lose
        prompt, _, finished = await scored(here, num_logprobs=2, max_tokens=1)
        assert finished.replays >= 1
        await here.is_freed()
    check(prompt, PROMPT[1:], whole(model, PROMPT)[:-1], 2)


@pytest.mark.parametrize("local", [(2, 1), None])
async def test_right_drafts_are_scored_too(
    model: LlamaForCausalLM,
    tokenizer: ChatTokenizer,
    local: tuple[int, int] | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(drafts, "ASSUMED_SHARE", 1e-9)  # drafts on every trip that has any
    async with chat(model, tokenizer, local, copies=1, runners=InvariantRunner) as here:
        deltas, finished = await here.deltas(
            prompt_ids=REPEATED, sampling=FEW, num_logprobs=1, max_tokens=30, draft="lookup"
        )
        assert finished.accepted > 3
        drawn = [token_id for delta in deltas for token_id in delta.token_ids]
    check(
        [score for delta in deltas for score in delta.scores],
        drawn,
        whole(model, [*REPEATED, *drawn])[len(REPEATED) - 1 : -1],
        1,
    )


# What cannot be had --------------------------------------------------------------------------------------------


async def test_a_route_that_scores_no_prompt_is_refused(
    model: LlamaForCausalLM, tokenizer: ChatTokenizer
) -> None:
    async with chat(model, tokenizer, None, copies=1) as here:
        with pytest.raises(RequestError) as caught:
            await scored(here)
        assert (caught.value.code, caught.value.param) == ("unsupported_by_route", "echo")
        await here.is_freed()


@pytest.mark.parametrize("sampling", [GREEDY, SEEDED], ids=["greedy", "seeded"])
@pytest.mark.parametrize("num_top", [0, 6, 20])  # 6: as many pairs as a node sends that knows nothing of this
async def test_a_node_that_does_not_know_scores_is_told_of(
    model: LlamaForCausalLM,
    tokenizer: ChatTokenizer,
    monkeypatch: pytest.MonkeyPatch,
    sampling: SamplingParams,
    num_top: int,
) -> None:
    def unaware(params: SamplingParams, vocab_size: int, *_: object) -> Sampler:
        return Sampler(params, vocab_size)

    monkeypatch.setattr(drawing, "_scoring_sampler", unaware)
    async with chat(model, tokenizer, None, copies=1) as here:
        with pytest.raises(RequestError) as caught:
            await here.text(sampling=sampling, num_logprobs=num_top)
        assert (caught.value.code, caught.value.param) == ("unsupported_by_route", "logprobs")
        await here.is_freed()


@pytest.mark.parametrize("how", ["nan", "likelier than certain", "outside"])
async def test_scores_that_cannot_be_fail_the_answer(
    model: LlamaForCausalLM, tokenizer: ChatTokenizer, how: str
) -> None:
    async with chat(model, tokenizer, None, copies=1) as here:

        def poison(link: Any, message: Message) -> bool:
            if not isinstance(message, Answer) or message.kind is not AnswerKind.CANDIDATES:
                return False
            here.here.switchboard.on_message(link.other_side, spoiled(message, how))
            return True

        here.here.rig.network.drop = poison
        with pytest.raises((WorkError, ProtocolError)) as caught:
            await here.text(num_logprobs=2)
        assert caught.value.code in (ErrorCode.COMPUTE, ErrorCode.MALFORMED)
        await here.is_freed()


def spoiled(answer: Answer, how: str) -> Answer:
    if how == "nan":
        return poisoned(answer)
    (token_id, logit), payload = struct.unpack_from("<If", answer.payload), bytearray(answer.payload)
    told = (VOCAB_SIZE, logit) if how == "outside" else (token_id, logit + 100)
    struct.pack_into("<If", payload, 0, *told)
    return replace(answer, payload=bytes(payload))


@pytest.mark.parametrize("local", [(0, 0), (2, 1)])
async def test_a_prompt_is_scored_in_pieces_where_rows_come_out_alike(
    model: LlamaForCausalLM, tokenizer: ChatTokenizer, local: tuple[int, int]
) -> None:
    long = tuple((7 * place + place * place) % 290 + 3 for place in range(60))
    async with chat(model, tokenizer, local, copies=1, runners=InvariantRunner, chunk=64) as here:
        plain, _ = await here.tokens(prompt_ids=long, sampling=SEEDED, max_tokens=4)
        prompt, drawn, _ = await scored(here, prompt_ids=long, sampling=SEEDED, num_logprobs=3, max_tokens=4)
        await here.is_freed()
    check(prompt, long[1:], whole(model, long)[:-1], 3)
    assert [score.token_id for score in drawn] == plain
