"""The limits of each key: requests in a minute, and answers at once."""

from __future__ import annotations

import asyncio
from pathlib import Path

import httpx
import pytest

from tests.app.conftest import Serve
from tests.app.test_admission import Held, asking, code_of
from tests.app.test_api_keys import ANNA, BERT, bearer, entry, write
from tests.support.api_server import PATH, QUESTION, Served, settles
from tests.support.local_engine import ScriptedEngine

LIMITS = ("x-ratelimit-limit-requests", "x-ratelimit-remaining-requests", "x-ratelimit-reset-requests")


@pytest.fixture
def held(scripted: ScriptedEngine) -> Held:
    return Held(scripted)


async def ask_as(served: Served, key: str, **changes: object) -> httpx.Response:
    return await served.http.post(PATH, json=QUESTION | changes, headers=bearer(key))


# Requests in a minute ---------------------------------------------------------------------------------------


async def test_a_key_has_so_many_requests_in_a_minute_and_hears_how_many_are_left(
    serve: Serve, tmp_path: Path
) -> None:
    write(path := tmp_path / "keys.toml", entry("anna", ANNA, "requests_per_minute = 2"), entry("bert", BERT))
    async with serve(keys_file=path) as served:
        answers = [await ask_as(served, ANNA) for _ in range(3)]
        other = await ask_as(served, BERT)
        assert served.metric("diffuse_requests_limited_total", reason="rate_limit_exceeded") == 1
        assert (
            served.metric("diffuse_request_errors_total", endpoint="other", code="rate_limit_exceeded") == 1
        )
    assert [answer.status_code for answer in answers] == [200, 200, 429]
    assert [answer.headers[LIMITS[1]] for answer in answers] == ["1", "0", "0"]
    assert {answer.headers[LIMITS[0]] for answer in answers} == {"2"}
    assert all(0 < float(answer.headers[LIMITS[2]].removesuffix("s")) <= 60 for answer in answers)
    refused = answers[2]
    assert refused.json()["error"]["type"] == "rate_limit_error"
    assert code_of(refused) == (429, "rate_limit_exceeded")
    assert 1 <= int(refused.headers["retry-after"]) <= 60
    assert other.status_code == 200
    assert not set(LIMITS) & set(other.headers)


async def test_a_request_that_is_refused_later_counts_and_tells_what_is_left(serve: Serve) -> None:
    async with serve(requests_per_minute=10) as served:
        wrong = await served.ask(temperature=9)
        unknown = await served.http.post("/v1/nothing", json={})
    assert (wrong.status_code, wrong.headers[LIMITS[1]]) == (400, "9")
    assert (unknown.status_code, unknown.headers[LIMITS[1]]) == (404, "8")


async def test_looking_at_things_is_free_and_needs_nothing_left(serve: Serve) -> None:
    async with serve(requests_per_minute=1) as served:
        await served.ask()
        assert (await served.ask()).status_code == 429
        for page in ("/v1/models", "/health", "/v1/route", "/metrics"):
            assert (await served.http.get(page)).status_code == 200


async def test_a_request_over_the_limit_is_refused_before_anything_is_made_of_its_body(serve: Serve) -> None:
    async with serve(requests_per_minute=1) as served:
        await served.ask()
        assert code_of(await served.http.post(PATH, content=b"{")) == (429, "rate_limit_exceeded")


async def test_the_limits_of_a_stream_are_in_its_headers(serve: Serve) -> None:
    async with serve(requests_per_minute=5) as served:
        answer = await served.ask(stream=True)
    assert answer.headers[LIMITS[1]] == "4"
    assert answer.text.endswith("[DONE]\n\n")


# Answers at once --------------------------------------------------------------------------------------------


async def test_a_key_has_so_many_answers_at_once_those_that_wait_too(
    serve: Serve, held: Held, tmp_path: Path
) -> None:
    write(path := tmp_path / "keys.toml", entry("anna", ANNA, "max_concurrent = 2"), entry("bert", BERT))
    async with serve(max_requests=1, keys_file=path) as served:
        served.http.headers.update(bearer(ANNA))
        async with asking(served, 2) as mine:
            refused = await served.ask()
            assert code_of(refused) == (429, "concurrency_limit_exceeded")
            assert 1 <= int(refused.headers["retry-after"]) <= 30
            assert served.metric("diffuse_requests_limited_total", reason="concurrency_limit_exceeded") == 1
            other = asyncio.create_task(ask_as(served, BERT))
            await settles(lambda: served.gateway.places.num_queued == 2)
            held.let_all_go()
            assert [answer.status_code for answer in await asyncio.gather(*mine, other)] == [200] * 3
        assert (await served.ask()).status_code == 200


async def test_a_request_for_more_answers_than_a_key_may_have_is_its_callers_mistake(
    serve: Serve, tmp_path: Path
) -> None:
    write(path := tmp_path / "keys.toml", entry("anna", ANNA, "max_concurrent = 2"))
    async with serve(keys_file=path) as served:
        refused = await ask_as(served, ANNA, n=3)
        assert code_of(refused) == (400, "invalid_value")
        assert refused.json()["error"]["param"] == "n"
        assert len((await ask_as(served, ANNA, n=2)).json()["choices"]) == 2


async def test_many_prompts_of_one_request_are_made_in_turn_where_a_key_may_have_few_at_once(
    serve: Serve, scripted: ScriptedEngine
) -> None:
    most = 0

    def look(number: int) -> None:
        nonlocal most
        most = max(most, scripted.num_open)

    scripted.before_token = look
    async with serve(max_requests_per_key=2) as served:
        body = {"model": "scripted", "prompt": ["a", "b", "c", "d", "e"]}
        answer = await served.http.post("/v1/completions", json=body)
    assert len(answer.json()["choices"]) == 5
    assert most == 2


@pytest.mark.parametrize("stream", [False, True])
async def test_places_of_a_key_are_given_back_however_an_answer_ends(
    serve: Serve, scripted: ScriptedEngine, stream: bool
) -> None:
    """It leaves in the middle, it fails, it is late, it leaves the queue, it finds the queue full."""
    async with serve(
        max_requests_per_key=2, max_requests=1, max_queued=1, stall_timeout_s=0.05, queue_timeout_s=0.05
    ) as served:
        scripted.before_token = lambda number: asyncio.Event().wait() if number == 2 else None
        async with asking(served, 1, stream=stream):
            pass
        await settles(lambda: scripted.num_open == 0)
        assert "stalled" in (await served.ask(stream=stream)).text
        async with asking(served, 2, stream=stream):
            pass
        await settles(lambda: served.gateway.num_running == 0)
        scripted.before_token = lambda number: 1 / 0 if number == 2 else None
        assert "internal_error" in (await served.ask(stream=stream)).text
        scripted.before_token = lambda number: None
        for _ in range(3):
            assert (await served.ask(stream=stream)).status_code == 200
        assert await served.gateway.limits.hold("", 2, 2) is not None
