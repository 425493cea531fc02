"""What clients are told of tokens that were not computed again, and whose prompts share them."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from dataclasses import dataclass, replace

import pytest

from app.engine.request import Finished, GenerationEvent, GenerationRequest, RequestError
from app.engine.tokenizer import ChatTokenizer
from routing.errors import ErrorCode, WorkError
from tests.app.conftest import ANSWER, Serve
from tests.support.api_server import QUESTION
from tests.support.local_engine import ScriptedEngine, saying


@dataclass
class CachingEngine(ScriptedEngine):
    """Says that so many tokens of each choice's prompt were held."""

    cached_tokens: tuple[int, ...] = (0,)

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[GenerationEvent, None]:
        held = self.cached_tokens[request.sampling.stream]
        async for event in super().generate(request):
            yield replace(event, cached_tokens=held) if isinstance(event, Finished) else event


def caching(tokenizer: ChatTokenizer, *cached_tokens: int) -> CachingEngine:
    return CachingEngine(tokenizer, saying(tokenizer, ANSWER), cached_tokens=cached_tokens)


async def test_usage_says_what_was_held(serve: Serve, tokenizer: ChatTokenizer) -> None:
    async with serve(caching(tokenizer, 3)) as served:
        told = (await served.ask()).json()["usage"]["prompt_tokens_details"]
        assert told == {"cached_tokens": 3}
        chunks = await served.stream(stream_options={"include_usage": True})
        usage = chunks[-2]["usage"]  # type: ignore[index]
        assert usage["prompt_tokens_details"] == {"cached_tokens": 3}
        assert served.metric("diffuse_prompt_tokens_cached_total", model="scripted") == 6
        assert served.metric("diffuse_prefix_hits_total", model="scripted") == 2


async def test_of_several_choices_what_all_of_them_were_spared_counts(
    serve: Serve, tokenizer: ChatTokenizer
) -> None:
    async with serve(caching(tokenizer, 3, 2)) as served:
        usage = (await served.ask(n=2)).json()["usage"]
        assert usage["prompt_tokens_details"] == {"cached_tokens": 2}
        assert served.metric("diffuse_prompt_tokens_cached_total", model="scripted") == 5


async def test_every_key_is_a_tenant_of_its_own(serve: Serve, scripted: ScriptedEngine) -> None:
    async with serve(api_keys="key-one, key-two") as served:
        headers = [{"authorization": "Bearer key-one"}, {"x-api-key": "key-one"}, {"x-api-key": "key-two"}]
        for shown in headers:
            response = await served.http.post("/v1/chat/completions", json=QUESTION, headers=shown)
            assert response.status_code == 200
    first, same, other = [request.tenant for request in scripted.requests]
    assert first == same != other
    assert len(first) == 32
    assert b"key" not in first


async def test_without_keys_all_are_one_tenant(serve: Serve, scripted: ScriptedEngine) -> None:
    async with serve() as served:
        await served.ask()
        await served.http.post("/v1/chat/completions", json=QUESTION, headers={"x-api-key": "any"})
    assert [request.tenant for request in scripted.requests] == [b"", b""]


@pytest.mark.parametrize(("limit", "is_open_ended"), [(None, True), (5, False)])
async def test_an_answer_without_a_limit_is_open_ended(
    serve: Serve, scripted: ScriptedEngine, limit: int | None, is_open_ended: bool
) -> None:
    async with serve() as served:
        await served.ask(max_tokens=limit)
    assert scripted.requests[0].is_open_ended is is_open_ended


@pytest.mark.parametrize(
    "error",
    [
        RequestError("messages", "context_length_exceeded", "too long"),
        WorkError(ErrorCode.NO_ROOM, "room", room=64),
    ],
)
async def test_a_prompt_without_room_is_the_callers_mistake(
    serve: Serve, scripted: ScriptedEngine, error: Exception
) -> None:
    def refuse(_: int) -> None:
        raise error

    scripted.before_token = refuse
    async with serve() as served:
        response = await served.ask()
    assert response.status_code == 400
    assert response.json()["error"]["code"] == "context_length_exceeded"


async def test_a_busy_swarm_says_when_to_ask_again(serve: Serve, scripted: ScriptedEngine) -> None:
    def refuse(_: int) -> None:
        raise WorkError(ErrorCode.BUSY, "no memory", retry_ms=7200)

    scripted.before_token = refuse
    async with serve() as served:
        response = await served.ask()
    assert (response.status_code, response.headers["retry-after"]) == (503, "8")
