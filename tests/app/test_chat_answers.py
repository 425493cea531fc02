"""Answers that come whole: their shape, where they end, and several at once."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from app.api.chat_reply import ChatCompletion
from app.engine.tokenizer import ChatTokenizer
from tests.app.conftest import ANSWER, Serve
from tests.support.api_server import Served, serve_engines, text_of
from tests.support.local_engine import LocalEngine, ScriptedEngine, ids_of, saying


@pytest.fixture
async def local(tokenizer: ChatTokenizer) -> AsyncIterator[Served]:
    """A tiny whole model behind the API."""
    async with serve_engines(LocalEngine(tokenizer, model_name="scripted")) as running:
        yield running


async def test_a_whole_answer_has_every_key_that_clients_need(served: Served) -> None:
    body = (await served.ask()).json()
    assert body["id"].startswith("chatcmpl-")
    assert body["object"] == "chat.completion"
    assert body["model"] == "scripted"
    assert body["system_fingerprint"] == "fp_test"
    assert body["service_tier"] == "default"
    assert body["choices"] == [
        {
            "index": 0,
            "message": {"role": "assistant", "content": ANSWER, "refusal": None, "annotations": []},
            "logprobs": None,
            "finish_reason": "stop",
        }
    ]
    ChatCompletion.model_validate_json((await served.ask()).content)


async def test_usage_counts_tokens_in_detail(served: Served, scripted: ScriptedEngine) -> None:
    usage = (await served.ask()).json()["usage"]
    num_prompt = len(scripted.requests[0].prompt_ids)
    num_answer = len(scripted.tokenizer.encode(ANSWER)) + 1
    assert usage == {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_answer,
        "total_tokens": num_prompt + num_answer,
        "prompt_tokens_details": {"cached_tokens": 0},
        "completion_tokens_details": {
            "reasoning_tokens": 0,
            "accepted_prediction_tokens": 0,
            "rejected_prediction_tokens": 0,
            "forced_tokens": 0,
        },
    }


async def test_tokens_guessed_ahead_are_told_in_usage_and_counted(
    served: Served, scripted: ScriptedEngine
) -> None:
    scripted.drafts = (9, 7)
    answer = (await served.ask(n=2)).json()
    details = answer["usage"]["completion_tokens_details"]
    assert (details["accepted_prediction_tokens"], details["rejected_prediction_tokens"]) == (14, 4)
    assert answer["drafts"] == {"drafted": 18, "accepted": 14, "off": None}
    metrics = (await served.http.get("/metrics")).text
    assert 'diffuse_drafted_tokens_total{model="scripted"} 18.0' in metrics
    assert 'diffuse_accepted_draft_tokens_total{model="scripted"} 14.0' in metrics


async def test_where_the_time_went_stands_beside_usage_and_in_headers(served: Served) -> None:
    response = await served.ask()
    timings = response.json()["timings"]
    assert (timings["compute_s"], timings["network_s"], timings["crypto_s"]) == (0.002, 0.001, 0.0005)
    assert "compute;dur=2.0" in response.headers["server-timing"]
    assert response.headers["openai-processing-ms"].isdecimal()


async def test_replays_are_told(serve: Serve, scripted: ScriptedEngine) -> None:
    scripted.replays = 2
    async with serve() as served:
        assert (await served.ask()).json()["replays"] == 2


@pytest.mark.parametrize(
    ("stop", "text"),
    [
        (" quick", "hello world, the"),
        (["fox", "world, t"], "hello "),
        (["orl"], "hello w"),
        (["", "never"], ANSWER),
        ("", ANSWER),
        ([], ANSWER),
    ],
)
async def test_a_stop_string_over_token_borders_never_shows(served: Served, stop: object, text: str) -> None:
    choice = (await served.ask(stop=stop)).json()["choices"][0]
    assert (choice["message"]["content"], choice["finish_reason"]) == (text, "stop")
    assert text_of(await served.stream(stop=stop)) == text


async def test_text_held_back_for_a_stop_string_comes_at_the_end(
    serve: Serve, tokenizer: ChatTokenizer
) -> None:
    engine = ScriptedEngine(tokenizer, saying(tokenizer, "hello wor"))
    async with serve(engine) as served:
        assert text_of(await served.stream(stop=["world"])) == "hello wor"


async def test_an_answer_cut_by_its_limit_says_length(served: Served) -> None:
    body = (await served.ask(max_tokens=2)).json()
    assert body["choices"][0]["message"]["content"] == "hello world"
    assert body["choices"][0]["finish_reason"] == "length"
    assert body["usage"]["completion_tokens"] == 2


async def test_characters_over_several_tokens_arrive_as_in_the_whole_answer(
    serve: Serve, tokenizer: ChatTokenizer
) -> None:
    text = "\u4f60\u597d \U0001f469\u200d\U0001f469\u200d\U0001f467 e\u0301"
    async with serve(ScriptedEngine(tokenizer, saying(tokenizer, text))) as served:
        assert (await served.ask()).json()["choices"][0]["message"]["content"] == text
        assert text_of(await served.stream()) == text


async def test_an_answer_that_ends_inside_a_character_drops_it(
    serve: Serve, tokenizer: ChatTokenizer
) -> None:
    engine = ScriptedEngine(tokenizer, ids_of([*tokenizer.encode("a\u4f60")[:-1], 2]))
    async with serve(engine) as served:
        assert (await served.ask()).json()["choices"][0]["message"]["content"] == "a"
        assert text_of(await served.stream()) == "a"


async def test_each_choice_has_its_own_answer(local: Served) -> None:
    body = (await local.ask(n=3, seed=5, max_tokens=8)).json()
    assert [choice["index"] for choice in body["choices"]] == [0, 1, 2]
    texts = [choice["message"]["content"] for choice in body["choices"]]
    assert len(set(texts)) == 3
    assert body["usage"]["completion_tokens"] == 24


async def test_the_same_seed_gives_the_same_choices(local: Served) -> None:
    first, second, other = [
        [
            choice["message"]["content"]
            for choice in (await local.ask(n=2, seed=seed, max_tokens=8)).json()["choices"]
        ]
        for seed in (5, 5, 6)
    ]
    assert first == second != other


async def test_a_seeded_answer_does_not_depend_on_how_many_choices_are_asked_for(local: Served) -> None:
    several = (await local.ask(n=2, seed=5, max_tokens=8)).json()["choices"][0]["message"]["content"]
    assert (await local.ask(seed=5, max_tokens=8)).json()["choices"][0]["message"]["content"] == several


@pytest.mark.parametrize("sampling", [{"temperature": 0}, {"seed": 3, "temperature": 1.2, "top_p": 0.9}])
async def test_streamed_and_whole_answers_are_equal(local: Served, sampling: dict[str, float]) -> None:
    whole = (await local.ask(max_tokens=24, **sampling)).json()["choices"][0]["message"]["content"]
    assert whole
    assert text_of(await local.stream(max_tokens=24, **sampling)) == whole


async def test_an_alias_answers_under_the_name_that_was_asked_for(serve: Serve) -> None:
    async with serve(model_aliases={"gpt-4o-mini": "scripted"}) as served:
        body = (await served.ask(model="gpt-4o-mini")).json()
    assert body["model"] == "gpt-4o-mini"
    assert body["choices"][0]["message"]["content"] == ANSWER
