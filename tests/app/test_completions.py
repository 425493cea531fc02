"""`/v1/completions`: prompts of every form, told back, scored and continued; what cannot be is refused by name."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator
from typing import Any

import httpx
import openai
import pytest
import torch

from app.api.completion_reply import Completion
from app.api.completions import PATH
from app.engine.request import RequestError
from app.engine.tokenizer import ChatTokenizer
from routing.errors import NoRouteError
from tests.app.conftest import ANSWER, Serve
from tests.app.test_failures import fail_at
from tests.support.api_server import Served, events_of, serve_engines, settles
from tests.support.local_engine import LocalEngine, ScriptedEngine, saying

PROMPT = "the quick brown"


async def complete(served: Served, **fields: Any) -> httpx.Response:
    body = {"model": "scripted", "prompt": PROMPT} | fields
    return await served.http.post(PATH, json=body)


async def stream(served: Served, **fields: Any) -> list[dict[str, Any]]:
    response = await complete(served, stream=True, **fields)
    assert response.status_code == 200, response.text
    *chunks, done = (event for event in events_of(response.text) if event != ": keep-alive")
    assert done == "[DONE]"
    return [chunk for chunk in chunks if isinstance(chunk, dict)]


def gathered(chunks: list[dict[str, Any]], index: int = 0) -> dict[str, Any]:
    """One choice of a stream, as the whole answer has it."""
    choices = [choice for chunk in chunks for choice in chunk["choices"] if choice["index"] == index]
    logprobs: dict[str, list[Any]] = {}
    for choice in choices:
        for name, values in (choice["logprobs"] or {}).items():
            logprobs.setdefault(name, []).extend(values)
    return {
        "index": index,
        "text": "".join(choice["text"] for choice in choices),
        "logprobs": logprobs or None,
        "finish_reason": choices[-1]["finish_reason"],
    }


@pytest.fixture
async def local(tokenizer: ChatTokenizer) -> AsyncIterator[tuple[Served, LocalEngine]]:
    engine = LocalEngine(tokenizer, model_name="scripted")
    async with serve_engines(engine) as running:
        yield running, engine


async def test_a_prompt_is_continued(served: Served, scripted: ScriptedEngine) -> None:
    response = await complete(served)
    body = response.json()
    assert body["id"].startswith("cmpl-")
    assert body["object"] == "text_completion"
    assert body["choices"] == [{"index": 0, "text": ANSWER, "logprobs": None, "finish_reason": "stop"}]
    assert body["usage"]["prompt_tokens"] == len(scripted.tokenizer.encode(PROMPT))
    assert scripted.requests[0].max_tokens == 16
    assert scripted.requests[0].continues_text
    assert "total;dur" in response.headers["server-timing"]
    Completion.model_validate_json(response.content)


async def test_prompts_come_in_four_forms(served: Served, scripted: ScriptedEngine) -> None:
    ids = scripted.tokenizer.encode(PROMPT)
    for prompt, count in (
        (PROMPT, 1),
        ([PROMPT], 1),
        (ids, 1),
        ([ids], 1),
        ([PROMPT, PROMPT], 2),
        ([ids] * 3, 3),
    ):
        scripted.requests.clear()
        body = (await complete(served, prompt=prompt)).json()
        assert [choice["text"] for choice in body["choices"]] == [ANSWER] * count
        assert [request.prompt_ids for request in scripted.requests] == [tuple(ids)] * count
        assert body["usage"]["prompt_tokens"] == len(ids) * count


async def test_choices_stand_prompt_by_prompt(local: tuple[Served, LocalEngine]) -> None:
    served, _ = local
    prompts = ["hello", "the fox", "STOP"]
    fields = {"n": 2, "seed": 7, "max_tokens": 6, "ignore_eos": True}
    together = (await complete(served, prompt=prompts, **fields)).json()
    alone = [(await complete(served, prompt=prompt, **fields)).json() for prompt in prompts]
    texts = [choice["text"] for choice in together["choices"]]
    assert texts == [choice["text"] for one in alone for choice in one["choices"]]
    assert [choice["index"] for choice in together["choices"]] == list(range(6))
    assert len(set(texts)) > 3
    chunks = await stream(served, prompt=prompts, **fields)
    assert [gathered(chunks, index)["text"] for index in range(6)] == texts
    assert together["usage"]["completion_tokens"] == 36
    assert together["usage"]["prompt_tokens"] == sum(one["usage"]["prompt_tokens"] for one in alone)


async def test_more_prompts_than_places_take_turns(serve: Serve, scripted: ScriptedEngine) -> None:
    most = 0

    def note(_: int) -> None:
        nonlocal most
        most = max(most, scripted.num_open)

    scripted.before_token = note
    async with serve(max_choices=3, max_requests=4) as served:
        body = (await complete(served, prompt=[PROMPT] * 50)).json()
        chunks = await stream(served, prompt=[PROMPT] * 50)
        assert served.gateway.num_running == 0
    assert len(body["choices"]) == 50
    assert {gathered(chunks, index)["text"] for index in range(50)} == {ANSWER}
    assert most == 3


async def test_a_stream_ends_like_the_whole_answer(served: Served) -> None:
    for fields in ({}, {"logprobs": 2}, {"echo": True}, {"echo": True, "logprobs": 0}, {"stop": "quick"}):
        whole = (await complete(served, **fields)).json()
        chunks = await stream(served, **fields, stream_options={"include_usage": True})
        assert gathered(chunks) == whole["choices"][0]
        assert {chunk["object"] for chunk in chunks} == {"text_completion"}
        assert (chunks[-1]["choices"], chunks[-1]["usage"]) == ([], whole["usage"])
        assert all(chunk["usage"] is None for chunk in chunks[:-1])


@pytest.mark.parametrize("options", [None, {}, {"include_usage": False}])
async def test_usage_is_not_sent_unasked(served: Served, options: dict[str, bool] | None) -> None:
    chunks = await stream(served, stream_options=options)
    assert all(chunk["choices"] and "usage" not in chunk for chunk in chunks)


async def test_a_stream_that_fails_midway_says_so_in_band_and_never_done(
    served: Served, scripted: ScriptedEngine
) -> None:
    fail_at(scripted, 3, NoRouteError([(10, 20)], "scripted"))
    events = events_of((await complete(served, stream=True)).text)
    *before, last = events
    assert isinstance(last, dict)
    assert last["error"]["code"] == "no_route"
    assert set(last["error"]) == {"message", "type", "param", "code"}
    assert not any(chunk["choices"][0]["finish_reason"] for chunk in before if isinstance(chunk, dict))
    assert "[DONE]" not in events
    async with served.openai() as client:
        chunks = await client.completions.create(model="scripted", prompt=PROMPT, stream=True)
        with pytest.raises(openai.APIError, match="no node serves layers 10:20"):
            _ = [chunk async for chunk in chunks]


async def test_a_silent_stream_gets_comments_and_empty_chunks(serve: Serve, scripted: ScriptedEngine) -> None:
    scripted.prefill_steps = 4
    scripted.before_prefill = lambda step: asyncio.sleep(0.1)
    async with serve(keepalive_s=0.02, heartbeat_s=0.08) as served, served.openai() as client:
        events = events_of((await complete(served, stream=True)).text)
        silent = events[: next(n for n, event in enumerate(events) if "hello" in str(event))]
        assert sum(isinstance(event, str) for event in silent) >= 2
        told = [event["choices"] for event in silent if isinstance(event, dict)]
        assert len(told) >= 2
        assert all(
            choices == [{"index": 0, "text": "", "logprobs": None, "finish_reason": None}] for choices in told
        )
        chunks = await client.completions.create(model="scripted", prompt=PROMPT, stream=True)
        assert "".join([chunk.choices[0].text async for chunk in chunks]) == ANSWER


# Echo and probabilities ----------------------------------------------------------------------------------------


def check_lengths(logprobs: dict[str, list[Any]]) -> int:
    (length,) = {len(values) for values in logprobs.values()}
    return length


@pytest.mark.parametrize("prompt", [PROMPT, "né \U0001f98a 你好", " two  spaces", "<|im_start|>user"])
async def test_a_string_is_told_back_as_it_was(served: Served, prompt: str) -> None:
    body = (await complete(served, prompt=prompt, echo=True, logprobs=1)).json()
    choice = body["choices"][0]
    assert choice["text"] == prompt + ANSWER
    logprobs = choice["logprobs"]
    assert check_lengths(logprobs) == body["usage"]["total_tokens"]
    assert logprobs["token_logprobs"][0] is logprobs["top_logprobs"][0] is None
    assert None not in logprobs["token_logprobs"][1:]
    assert logprobs["text_offset"] == sorted(logprobs["text_offset"])
    for token, offset in zip(logprobs["tokens"], logprobs["text_offset"], strict=True):
        if not token.startswith("bytes:") and token != "<|im_end|>":
            assert choice["text"][offset:].startswith(token)


async def test_token_ids_are_told_back_as_their_text(served: Served, tokenizer: ChatTokenizer) -> None:
    ids = [1, *tokenizer.encode("fox"), 2]
    choice = (await complete(served, prompt=ids, echo=True, max_tokens=0)).json()["choices"][0]
    assert choice == {
        "index": 0,
        "text": "<|im_start|>fox<|im_end|>",
        "logprobs": None,
        "finish_reason": "length",
    }


async def test_max_tokens_0_tells_back_and_computes_nothing(served: Served, scripted: ScriptedEngine) -> None:
    body = (await complete(served, echo=True, max_tokens=0)).json()
    assert (body["choices"][0]["text"], body["usage"]["completion_tokens"]) == (PROMPT, 0)
    assert scripted.requests == []
    chunks = await stream(served, echo=True, max_tokens=0)
    assert gathered(chunks)["text"] == PROMPT


async def test_a_prompt_is_scored_by_the_model(local: tuple[Served, LocalEngine]) -> None:
    served, engine = local
    ids = engine.tokenizer.encode("hello world, the quick fox")
    body = (await complete(served, prompt=ids, echo=True, logprobs=5, max_tokens=0)).json()
    logprobs = body["choices"][0]["logprobs"]
    with torch.inference_mode():
        expected = engine.model(torch.tensor([ids])).logits[0].float().log_softmax(-1)
    own = [float(row[token_id]) for row, token_id in zip(expected[:-1], ids[1:], strict=True)]
    assert logprobs["token_logprobs"][1:] == pytest.approx(own, abs=1e-5)
    for row, top in zip(expected[:-1], logprobs["top_logprobs"][1:], strict=True):
        assert 1 <= len(top) <= 6  # ids without a token look alike
        assert max(top.values()) == pytest.approx(float(row.max()), abs=1e-5)
    assert body["usage"]["completion_tokens"] == 0


async def test_what_lm_eval_asks_adds_up(local: tuple[Served, LocalEngine]) -> None:
    """Its loglikelihood request: context and continuation as ids, one token more, which it leaves out."""
    served, engine = local
    tokenizer = engine.tokenizer
    pairs = [
        (tokenizer.encode("hello"), tokenizer.encode(" world")),
        (tokenizer.encode("the quick"), [70, 71]),
    ]
    body = (
        await complete(
            served,
            prompt=[context + rest for context, rest in pairs],
            temperature=0,
            max_tokens=1,
            logprobs=1,
            seed=1234,
            echo=True,
        )
    ).json()
    for choice, (context, rest) in zip(body["choices"], pairs, strict=True):
        told = choice["logprobs"]["token_logprobs"][len(context) : -1]
        with torch.inference_mode():
            rows = engine.model(torch.tensor([context + rest])).logits[0].float().log_softmax(-1)
        places = range(len(context) - 1, len(context) + len(rest) - 1)
        own = [float(rows[place, token_id]) for place, token_id in zip(places, rest, strict=True)]
        assert told == pytest.approx(own, abs=1e-5)
        tops = choice["logprobs"]["top_logprobs"][len(context) : -1]
        is_greedy = all(value == max(top.values()) for value, top in zip(told, tops, strict=True))
        assert is_greedy == all(
            int(rows[place].argmax()) == one for place, one in zip(places, rest, strict=True)
        )


async def test_the_end_token_counts_among_the_tokens(served: Served, tokenizer: ChatTokenizer) -> None:
    body = (await complete(served, logprobs=0)).json()
    logprobs = body["choices"][0]["logprobs"]
    assert check_lengths(logprobs) == body["usage"]["completion_tokens"] == len(tokenizer.encode(ANSWER)) + 1
    assert (logprobs["tokens"][-1], logprobs["text_offset"][-1]) == ("<|im_end|>", len(ANSWER))
    assert logprobs["top_logprobs"][0] == {logprobs["tokens"][0]: -0.5}


async def test_tokens_of_parts_of_characters_tell_their_bytes(serve: Serve, tokenizer: ChatTokenizer) -> None:
    async with serve(ScriptedEngine(tokenizer, saying(tokenizer, "é"))) as served:
        logprobs = (await complete(served, logprobs=1)).json()["choices"][0]["logprobs"]
    assert logprobs["tokens"][:2] == ["bytes:\\xc3", "bytes:\\xa9"]


async def test_a_stop_string_ends_text_and_tokens(served: Served) -> None:
    choice = (await complete(served, stop=[" quick"], logprobs=1)).json()["choices"][0]
    assert choice["text"] == ANSWER.partition(" quick")[0]
    assert "".join(choice["logprobs"]["tokens"]) == choice["text"]


@pytest.mark.parametrize("stop", ["orl", "world, t", "o world", ["fox", "k bro"]])
async def test_no_character_of_a_stop_string_over_token_borders_shows(served: Served, stop: Any) -> None:
    first = min(ANSWER.index(one) for one in ([stop] if isinstance(stop, str) else stop))
    whole = (await complete(served, stop=stop, logprobs=0)).json()["choices"][0]
    streamed = gathered(await stream(served, stop=stop, logprobs=0))
    for choice in (whole, streamed):
        assert (choice["text"], choice["finish_reason"]) == (ANSWER[:first], "stop")
    assert "".join(whole["logprobs"]["tokens"]) == ANSWER[:first]


# Refusals ------------------------------------------------------------------------------------------------------

WRONG: list[tuple[dict[str, Any], str]] = [
    ({"prompt": None}, "prompt"),
    ({"prompt": []}, "prompt"),
    ({"prompt": [[]]}, "prompt.0"),
    ({"prompt": ["a", 5]}, "prompt.1"),
    ({"prompt": [5, "a"]}, "prompt"),
    ({"prompt": ["a", [5]]}, "prompt.1"),
    ({"prompt": [[5], ["a"]]}, "prompt.1"),
    ({"prompt": [[[5]]]}, "prompt.0"),
    ({"prompt": [-1]}, "prompt"),
    ({"prompt": [[5], [-1]]}, "prompt.1"),
    ({"prompt": [True]}, "prompt.0"),
    ({"prompt": [5, 1.5]}, "prompt"),
    ({"prompt": {"text": "a"}}, "prompt"),
    ({"prompt": 5}, "prompt"),
    ({"prompt": ""}, "prompt"),
    ({"prompt": ["a", ""]}, "prompt.1"),
    ({"prompt": [400]}, "prompt"),
    ({"prompt": [[5], [2**31 - 1]]}, "prompt.1"),
    ({"prompt": [2**80]}, "prompt"),
    ({"prompt": ["a"] * 2049}, "prompt"),
    ({"prompt": ["a"] * 2048, "n": 2}, "n"),
    ({"prompt": "a" * 300}, "prompt"),
    ({"prompt": "a" * 1_000_000}, "prompt"),
    ({"prompt": [5] * 256}, "prompt"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": -1, "echo": True}, "max_tokens"),
    ({"max_tokens": "5"}, "max_tokens"),
    ({"max_completion_tokens": 5}, "max_completion_tokens"),
    ({"logprobs": 6}, "logprobs"),
    ({"logprobs": -1}, "logprobs"),
    ({"logprobs": True}, "logprobs"),
    ({"top_logprobs": 2}, "top_logprobs"),
    ({"suffix": "end"}, "suffix"),
    ({"best_of": 2}, "best_of"),
    ({"best_of": 1, "n": 2}, "best_of"),
    ({"best_of": 0}, "best_of"),
    ({"n": 9}, "n"),
    ({"n": 0}, "n"),
    ({"echo": "yes"}, "echo"),
    ({"temperature": 3}, "temperature"),
    ({"logit_bias": {"400": 1}}, "logit_bias"),
    ({"stream_options": {"include_usage": True}}, "stream_options"),
    ({"messages": [{"role": "user", "content": "a"}]}, "messages"),
    ({"prompt_logprobs": 1}, "prompt_logprobs"),
    ({"diffuse": {"no": 1}}, "diffuse.no"),
]


@pytest.mark.parametrize(("fields", "param"), WRONG)
async def test_what_cannot_be_is_refused_by_name(served: Served, fields: dict[str, Any], param: str) -> None:
    response = await complete(served, **fields)
    assert response.status_code == 400, response.text
    assert response.json()["error"]["param"] == param
    assert len(response.content) < 700


@pytest.mark.parametrize("fields", [{"suffix": ""}, {"suffix": None}, {"best_of": 2, "n": 2}, {"user": "x"}])
async def test_what_asks_for_nothing_passes(served: Served, fields: dict[str, Any]) -> None:
    assert (await complete(served, **fields)).status_code == 200


async def test_a_prompt_that_fills_the_context_can_be_scored(local: tuple[Served, LocalEngine]) -> None:
    served, _ = local
    full = [[5] * 256]
    body = (await complete(served, prompt=full, echo=True, logprobs=0, max_tokens=0)).json()
    assert check_lengths(body["choices"][0]["logprobs"]) == 256
    response = await complete(served, prompt=full, echo=True, logprobs=0, max_tokens=1)
    assert response.json()["error"]["code"] == "context_length_exceeded"
    assert "maximum context length is 256" in response.json()["error"]["message"]


async def test_an_engine_speaks_of_the_prompt(serve: Serve, scripted: ScriptedEngine) -> None:
    def refuse(_: int) -> None:
        raise RequestError("messages", "context_length_exceeded", "but the messages have too many")

    scripted.before_token = refuse
    async with serve() as served:
        error = (await complete(served)).json()["error"]
    assert (error["param"], error["message"]) == ("prompt", "but the prompt have too many")


async def test_a_client_that_leaves_ends_all_its_answers(served: Served, scripted: ScriptedEngine) -> None:
    scripted.before_token = lambda number: asyncio.Event().wait() if number == 2 else None
    for is_stream in (True, False):
        task = asyncio.create_task(complete(served, prompt=[PROMPT] * 20, stream=is_stream))
        await settles(lambda: scripted.num_open == 8)
        task.cancel()
        await settles(lambda: scripted.num_open == 0 and served.gateway.num_running == 0)


# Clients -------------------------------------------------------------------------------------------------------


async def test_the_official_client(served: Served) -> None:
    async with served.openai() as client:
        answer = await client.completions.create(
            model="scripted", prompt=[PROMPT, "fox"], echo=True, logprobs=2, max_tokens=3
        )
        logprobs = answer.choices[1].logprobs
        assert answer.choices[1].text.startswith("fox")
        assert logprobs is not None
        assert logprobs.token_logprobs is not None
        assert math.isclose(logprobs.token_logprobs[1], -0.5)
        chunks = await client.completions.create(model="scripted", prompt=PROMPT, stream=True, logprobs=1)
        assert "".join([chunk.choices[0].text async for chunk in chunks]) == ANSWER
        with pytest.raises(openai.BadRequestError) as caught:
            await client.completions.create(model="scripted", prompt=PROMPT, best_of=3)
        assert caught.value.param == "best_of"
