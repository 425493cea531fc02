"""Log-probabilities in chats: each token of the text once, whole or streamed, and its bytes make the text."""

from __future__ import annotations

from typing import Any

import openai
import pytest

from app.api.token_alignment import TokenAligner
from app.engine.tokenizer import ChatTokenizer
from slicing.token_scores import TokenScore
from tests.app.conftest import ANSWER, Serve
from tests.support.api_server import Served, chunks_of, serve_engines, text_of
from tests.support.local_engine import LocalEngine, ScriptedEngine, ids_of, saying

TEXTS = [
    "hello world",
    "\U0001f469\u200d\U0001f469\u200d\U0001f467 fox",
    "你好，世界",
    "né\u0301e \U0001f98a!",
]


def joined(content: list[dict[str, Any]]) -> str:
    return b"".join(bytes(token["bytes"]) for token in content).decode()


def streamed(events: list[dict[str, Any] | str], index: int = 0) -> list[dict[str, Any]]:
    choices = [
        choice for chunk in chunks_of(events) for choice in chunk["choices"] if choice["index"] == index
    ]
    return [token for choice in choices if choice["logprobs"] for token in choice["logprobs"]["content"]]


@pytest.mark.parametrize("text", TEXTS)
async def test_bytes_of_tokens_make_the_text(serve: Serve, tokenizer: ChatTokenizer, text: str) -> None:
    async with serve(ScriptedEngine(tokenizer, saying(tokenizer, text))) as served:
        choice = (await served.ask(logprobs=True)).json()["choices"][0]
        events = await served.stream(logprobs=True)
    assert choice["message"]["content"] == text_of(events) == text
    content = choice["logprobs"]["content"]
    assert joined(content) == text
    assert len(content) == len(tokenizer.encode(text))  # the end token is none of the text's
    assert choice["logprobs"]["refusal"] is None
    assert all(token["top_logprobs"] == [] for token in content)
    assert streamed(events) == content


async def test_each_chunk_has_the_tokens_of_its_text(serve: Serve, tokenizer: ChatTokenizer) -> None:
    async with serve(ScriptedEngine(tokenizer, saying(tokenizer, TEXTS[1]))) as served:
        events = await served.stream(logprobs=True)
    for chunk in chunks_of(events):
        choice = chunk["choices"][0]
        if choice["delta"].get("content"):
            assert joined(choice["logprobs"]["content"]) == choice["delta"]["content"]
        else:
            assert choice["logprobs"] is None


async def test_a_stop_string_takes_its_tokens_along(serve: Serve, tokenizer: ChatTokenizer) -> None:
    async with serve(ScriptedEngine(tokenizer, saying(tokenizer, "hello world, the STOP end"))) as served:
        for stop in ("STOP", "orld", "rld, the S", " the STOP", "TOP e", "hello"):
            choice = (await served.ask(logprobs=True, stop=stop)).json()["choices"][0]
            events = await served.stream(logprobs=True, stop=stop)
            kept = "hello world, the STOP end".partition(stop)[0]
            assert choice["message"]["content"] == text_of(events) == kept
            assert joined(choice["logprobs"]["content"]) == joined(streamed(events)) == kept


async def test_text_held_for_a_stop_that_never_came_has_its_tokens(
    serve: Serve, tokenizer: ChatTokenizer
) -> None:
    async with serve(ScriptedEngine(tokenizer, saying(tokenizer, "hello STO"))) as served:
        events = await served.stream(logprobs=True, stop="STOP")
        assert joined(streamed(events)) == text_of(events) == "hello STO"


async def test_an_answer_cut_in_a_character_tells_its_beginning(
    serve: Serve, tokenizer: ChatTokenizer
) -> None:
    ids = tokenizer.encode("a\U0001f98a")[:3]
    async with serve(ScriptedEngine(tokenizer, ids_of(ids))) as served:
        choice = (await served.ask(logprobs=True)).json()["choices"][0]
        events = await served.stream(logprobs=True)
    assert choice["message"]["content"] == "a"
    assert [token["bytes"] for token in choice["logprobs"]["content"]] == [[97], [0xF0], [0x9F]]
    assert choice["logprobs"]["content"][1]["token"] == "\\xf0"
    assert streamed(events) == choice["logprobs"]["content"]


async def test_likely_tokens_come_with_true_bytes(serve: Serve, tokenizer: ChatTokenizer) -> None:
    async with serve(ScriptedEngine(tokenizer, saying(tokenizer, "fox"))) as served:
        content = (await served.ask(logprobs=True, top_logprobs=20)).json()["choices"][0]["logprobs"][
            "content"
        ]
    for token in content:
        assert len(token["top_logprobs"]) == 20
        assert token["top_logprobs"][0] == {name: token[name] for name in ("token", "logprob", "bytes")}
        for other in token["top_logprobs"]:
            assert bytes(other["bytes"]).decode(errors="backslashreplace") == other["token"]


async def test_a_special_token_has_a_name_and_no_bytes(serve: Serve, tokenizer: ChatTokenizer) -> None:
    ids = [*tokenizer.encode("fox"), 1, *tokenizer.encode(" end")]
    async with serve(ScriptedEngine(tokenizer, ids_of(ids))) as served:
        choice = (await served.ask(logprobs=True)).json()["choices"][0]
    assert joined(choice["logprobs"]["content"]) == choice["message"]["content"] == "fox end"
    assert {"token": "<|im_start|>", "logprob": -0.5, "bytes": [], "top_logprobs": []} in choice["logprobs"][
        "content"
    ]


async def test_logprobs_are_numbers_of_the_model_and_choices_keep_their_own(tokenizer: ChatTokenizer) -> None:
    async with serve_engines(LocalEngine(tokenizer, model_name="scripted")) as served:
        fields = {"logprobs": True, "top_logprobs": 3, "n": 2, "max_tokens": 8, "seed": 5}
        whole = (await served.ask(**fields)).json()
        events = await served.stream(**fields)
        bent = (await served.ask(**fields, temperature=0.1, logit_bias={"70": 5})).json()
    for index, choice in enumerate(whole["choices"]):
        content = choice["logprobs"]["content"]
        assert streamed(events, index) == content
        assert all(
            token["logprob"] <= max(other["logprob"] for other in token["top_logprobs"]) for token in content
        )
    first, other = whole["choices"][0]["logprobs"]["content"][0], bent["choices"][0]["logprobs"]["content"][0]
    assert first["top_logprobs"] == other["top_logprobs"]  # what is asked of the draw does not bend them


async def test_nothing_is_told_unasked(served: Served, scripted: ScriptedEngine) -> None:
    for asked in ({}, {"logprobs": False}, {"logprobs": None}):
        assert (await served.ask(**asked)).json()["choices"][0]["logprobs"] is None
    assert all(request.num_logprobs is None for request in scripted.requests)


async def test_the_official_client_reads_them(served: Served) -> None:
    messages: Any = [{"role": "user", "content": "hello"}]
    async with openai.AsyncOpenAI(base_url=served.url, api_key="none", max_retries=0) as client:
        answer = await client.chat.completions.create(
            model="scripted", messages=messages, logprobs=True, top_logprobs=2
        )
        async with client.chat.completions.stream(
            model="scripted", messages=messages, logprobs=True, top_logprobs=2
        ) as stream:
            final = await stream.get_final_completion()
    logprobs, gathered = answer.choices[0].logprobs, final.choices[0].logprobs
    assert logprobs is not None
    assert gathered is not None
    assert logprobs.content is not None
    assert b"".join(bytes(token.bytes or []) for token in logprobs.content).decode() == ANSWER
    assert gathered.content == logprobs.content


def test_a_token_that_a_stop_string_cuts_keeps_what_is_in_the_text(tokenizer: ChatTokenizer) -> None:
    aligner = TokenAligner(tokenizer.pieces(), frozenset())
    ids = tokenizer.encode("hello world")
    assert len(ids) == 2
    told = aligner.take("hel", [TokenScore(token_id, -1.0) for token_id in ids]) + aligner.finish()
    assert [(one.data, one.begin) for one in told] == [(b"hel", 0)]
