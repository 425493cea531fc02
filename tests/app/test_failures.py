"""A failed request says so: with a status before the first frame, in band after it, never as a clean end."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import pytest
from starlette.types import Message, Receive, Scope, Send

from app.api.middleware import ErrorBoundary
from app.engine.request import ModelStatus, RequestError
from app.engine.tokenizer import ChatTokenizer
from routing.errors import ErrorCode, NoRouteError, remote_error
from slicing.errors import LogitsError
from tests.app.conftest import ANSWER, Serve
from tests.support.api_server import Served, chunks_of, settles
from tests.support.local_engine import ScriptedEngine, saying

FAILURES: list[tuple[Exception, int, str]] = [
    (NoRouteError([(10, 20)], "scripted"), 503, "no_route"),
    (NoRouteError([]), 503, "no_route"),
    (NoRouteError([], "scripted", ["closing"]), 503, "no_route"),
    (RequestError("temperature", "unsupported_by_route", "not on this route"), 400, "unsupported_by_route"),
    (remote_error(ErrorCode.HOP_LOST, hop=1), 503, "node_lost"),
    (remote_error(ErrorCode.LINK_LOST), 503, "node_lost"),
    (remote_error(ErrorCode.BUSY, retry_ms=3500), 503, "overloaded"),
    (remote_error(ErrorCode.NO_SLICE), 503, "no_route"),
    (remote_error(ErrorCode.DEADLINE), 504, "deadline_exceeded"),
    (remote_error(ErrorCode.COMPUTE, "secret"), 500, "compute_failed"),
    (remote_error(ErrorCode.DECRYPT, "secret"), 502, "bad_node"),
    (remote_error(ErrorCode.MALFORMED, "secret"), 502, "bad_node"),
    (LogitsError("secret"), 500, "compute_failed"),
    (ValueError("secret /root/path"), 500, "internal_error"),
]


def fail_at(engine: ScriptedEngine, number: int, error: Exception) -> None:
    def before_token(token: int) -> None:
        if token == number:
            raise error

    engine.before_token = before_token


@pytest.mark.parametrize(("error", "status", "code"), FAILURES)
async def test_a_whole_answer_that_fails_is_an_error_response(
    served: Served, scripted: ScriptedEngine, error: Exception, status: int, code: str
) -> None:
    fail_at(scripted, 3, error)
    response = await served.ask()
    told = response.json()["error"]
    assert (response.status_code, told["code"]) == (status, code)
    assert set(told) == {"message", "type", "param", "code"}
    assert "secret" not in response.text
    assert "Traceback" not in response.text


@pytest.mark.parametrize(("error", "status", "code"), FAILURES)
async def test_a_stream_that_fails_before_it_begins_is_an_error_response(
    served: Served, scripted: ScriptedEngine, error: Exception, status: int, code: str
) -> None:
    fail_at(scripted, -1, error)
    response = await served.ask(stream=True)
    assert (response.status_code, response.json()["error"]["code"]) == (status, code)
    assert response.headers["content-type"] == "application/json"


@pytest.mark.parametrize(("error", "status", "code"), FAILURES)
async def test_a_stream_that_fails_midway_says_so_in_band_and_never_done(
    served: Served, scripted: ScriptedEngine, error: Exception, status: int, code: str
) -> None:
    fail_at(scripted, 3, error)
    events = await served.stream()
    *before, last = chunks_of(events)
    assert last["error"]["code"] == code
    assert set(last["error"]) == {"message", "type", "param", "code"}
    assert "[DONE]" not in events
    assert not any(chunk["choices"][0]["finish_reason"] for chunk in before)
    assert "secret" not in str(last)


async def test_one_failed_choice_fails_the_request_and_frees_the_others(
    served: Served, scripted: ScriptedEngine
) -> None:
    fail_at(scripted, 3, NoRouteError([(1, 2)]))
    assert (await served.ask(n=3)).status_code == 503
    assert scripted.num_opened == 3
    assert scripted.num_open == 0


async def test_a_stream_of_which_one_choice_fails_after_another_ended_is_not_done(
    serve: Serve, tokenizer: ChatTokenizer
) -> None:
    short, long = saying(tokenizer, "hello"), saying(tokenizer, ANSWER)
    engine = ScriptedEngine(tokenizer, lambda asked: (long if asked.sampling.stream else short)(asked))
    fail_at(engine, 6, NoRouteError([(1, 2)]))
    async with serve(engine) as served:
        events = await served.stream(n=2)
    *before, last = chunks_of(events)
    ends = [choice["index"] for chunk in before for choice in chunk["choices"] if choice["finish_reason"]]
    assert ends == [0]
    assert last["error"]["code"] == "no_route"
    assert "[DONE]" not in events
    assert engine.num_open == 0


async def test_missing_layers_are_named_with_a_time_to_retry(serve: Serve, scripted: ScriptedEngine) -> None:
    scripted.status = ModelStatus("partial", 30, ((10, 20), (25, 30)))
    async with serve() as served:
        response = await served.ask(stream=True)
    assert response.status_code == 503
    assert response.json()["error"]["code"] == "no_route"
    assert "layers 10:20, 25:30 of scripted" in response.json()["error"]["message"]
    assert 1 <= int(response.headers["retry-after"]) <= 30


async def test_a_loading_model_says_so(serve: Serve, scripted: ScriptedEngine) -> None:
    scripted.status = ModelStatus("loading", 30)
    async with serve() as served:
        response = await served.ask()
    assert (response.status_code, response.json()["error"]["code"]) == (503, "model_loading")
    assert "retry-after" in response.headers


async def test_a_busy_nodes_wish_reaches_the_client(served: Served, scripted: ScriptedEngine) -> None:
    fail_at(scripted, 0, remote_error(ErrorCode.BUSY, retry_ms=3500))
    assert (await served.ask()).headers["retry-after"] == "4"


async def test_a_retry_that_cannot_help_is_discouraged(served: Served, scripted: ScriptedEngine) -> None:
    fail_at(scripted, 0, remote_error(ErrorCode.DEADLINE))
    assert (await served.ask()).headers["x-should-retry"] == "false"


async def test_an_unknown_model_is_named_beside_the_known_ones(served: Served) -> None:
    response = await served.ask(model="gpt\n5")
    error = response.json()["error"]
    assert (response.status_code, error["code"], error["param"]) == (404, "model_not_found", "model")
    assert error["message"] == "The model `gpt\\n5` does not exist. Available models: `scripted`"


async def test_more_answers_than_places_are_turned_away(serve: Serve, scripted: ScriptedEngine) -> None:
    go = asyncio.Event()
    scripted.before_token = lambda number: go.wait()
    async with serve(max_requests=2, max_queued=0) as served:
        running = [asyncio.create_task(served.ask()) for _ in range(2)]
        await settles(lambda: scripted.num_open == 2)
        refused = await served.ask()
        go.set()
        done = await asyncio.gather(*running)
        again = await served.ask()
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "overloaded")
    assert "retry-after" in refused.headers
    assert [response.status_code for response in (*done, again)] == [200, 200, 200]


@pytest.mark.parametrize("changes", [{}, {"stream": True}])
async def test_an_answer_beyond_its_time_ends_and_is_freed(
    serve: Serve, scripted: ScriptedEngine, changes: dict[str, Any]
) -> None:
    scripted.before_token = lambda number: asyncio.Event().wait() if number == 3 else None
    async with serve(request_timeout_s=0.1) as served:
        response = await served.ask(**changes)
        assert "deadline_exceeded" in response.text
        assert response.status_code == (200 if changes else 504)
        await settles(lambda: scripted.num_open == 0)
    assert 0 < (scripted.requests[0].deadline_s or 0) <= 0.1  # reading the prompt took some of it


@pytest.mark.parametrize("changes", [{}, {"stream": True}])
async def test_a_gateway_told_to_stop_ends_running_answers_with_an_error(
    serve: Serve, scripted: ScriptedEngine, changes: dict[str, Any]
) -> None:
    scripted.before_token = lambda number: asyncio.Event().wait() if number == 3 else None
    async with serve(drain_s=0.05) as served:
        running = asyncio.create_task(served.ask(**changes))
        await settles(lambda: served.gateway.num_running == 1)
        await served.gateway.drain()
        assert "shutting_down" in (await running).text
        assert (await served.ask()).json()["error"]["code"] == "shutting_down"
        assert (await served.http.get("/health")).status_code == 503
    assert scripted.num_open == 0


async def test_a_gateway_told_to_stop_lets_quick_answers_finish(
    serve: Serve, scripted: ScriptedEngine
) -> None:
    go = asyncio.Event()
    scripted.before_token = lambda number: go.wait()
    async with serve(drain_s=5) as served:
        running = asyncio.create_task(served.ask())
        await settles(lambda: served.gateway.num_running == 1)
        draining = asyncio.create_task(served.gateway.drain())
        go.set()
        await draining
        assert (await running).status_code == 200


async def test_our_own_bug_is_logged_by_place_and_never_by_its_text(
    served: Served, scripted: ScriptedEngine, caplog: pytest.LogCaptureFixture
) -> None:
    fail_at(scripted, 3, ValueError("my secret prompt"))
    with caplog.at_level(logging.INFO):
        response = await served.ask()
    request_id = response.headers["x-request-id"]
    assert request_id in response.json()["error"]["message"]
    assert f"request {request_id}" in caplog.text
    assert "ValueError in before_token" in caplog.text
    assert "secret" not in caplog.text


async def test_prompts_and_answers_are_not_logged(
    served: Served, scripted: ScriptedEngine, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.DEBUG, logger="app"):
        await served.ask(messages=[{"role": "user", "content": "my secret"}])
        await served.stream(messages=[{"role": "user", "content": "my secret"}])
    assert "finished" in caplog.text
    assert "secret" not in caplog.text
    assert "quick" not in caplog.text


async def test_an_error_after_a_response_has_begun_is_logged_and_cuts_the_response(
    served: Served, caplog: pytest.LogCaptureFixture
) -> None:
    async def breaks(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        raise ValueError("secret")

    sent: list[Message] = []

    async def send(message: Message) -> None:
        sent.append(message)

    await ErrorBoundary(breaks, served.gateway)({"type": "http"}, no_message, send)
    assert [message["type"] for message in sent] == ["http.response.start"]
    assert "ValueError in breaks" in caplog.text
    assert "secret" not in caplog.text


async def no_message() -> Message:
    raise AssertionError
