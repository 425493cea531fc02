"""The official client against our server: what most programs out there do."""

from __future__ import annotations

import asyncio

import openai
import pytest

from app.engine.request import ModelStatus
from routing.errors import NoRouteError
from tests.app.conftest import ANSWER, Serve
from tests.app.test_failures import fail_at
from tests.support.api_server import settles
from tests.support.local_engine import ScriptedEngine

MESSAGES = [{"role": "user", "content": "hello"}]


async def test_a_whole_answer(client: openai.AsyncOpenAI) -> None:
    answer = await client.chat.completions.create(model="scripted", messages=MESSAGES)
    assert answer.choices[0].message.content == ANSWER
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage is not None
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + 9
    assert answer._request_id
    assert answer.model_extra is not None
    assert answer.model_extra["timings"]["tokens"] == 9


async def test_the_tutorial_loop(client: openai.AsyncOpenAI) -> None:
    stream = await client.chat.completions.create(model="scripted", messages=MESSAGES, stream=True)
    assert "".join([chunk.choices[0].delta.content or "" async for chunk in stream]) == ANSWER


async def test_the_stream_helper_gathers_text_and_usage(client: openai.AsyncOpenAI) -> None:
    options = {"include_usage": True}
    async with client.chat.completions.stream(
        model="scripted", messages=MESSAGES, stream_options=options
    ) as stream:
        final = await stream.get_final_completion()
    assert final.choices[0].message.content == ANSWER
    assert final.usage is not None
    assert final.usage.completion_tokens == 9


async def test_the_helper_keeps_several_choices_apart(client: openai.AsyncOpenAI) -> None:
    async with client.chat.completions.stream(model="scripted", messages=MESSAGES, n=3) as stream:
        final = await stream.get_final_completion()
    assert [choice.message.content for choice in final.choices] == [ANSWER] * 3


async def test_a_slow_stream_with_comments_and_heartbeats_reads_through(
    serve: Serve, scripted: ScriptedEngine
) -> None:
    scripted.before_token = lambda number: asyncio.sleep(0.08 if number < 2 else 0)
    async with serve(keepalive_s=0.01, heartbeat_s=0.03) as served:
        client = openai.AsyncOpenAI(base_url=served.url, api_key="none", max_retries=0)
        async with client, client.chat.completions.stream(model="scripted", messages=MESSAGES) as stream:
            assert (await stream.get_final_completion()).choices[0].message.content == ANSWER


def test_the_synchronous_client(serve: Serve) -> None:
    def ask(url: str) -> tuple[str | None, str]:
        with openai.OpenAI(base_url=f"{url}/v1", api_key="none") as client:
            whole = client.chat.completions.create(model="scripted", messages=MESSAGES)
            stream = client.chat.completions.create(model="scripted", messages=MESSAGES, stream=True)
            return whole.choices[0].message.content, "".join(c.choices[0].delta.content or "" for c in stream)

    async def run() -> tuple[str | None, str]:
        async with serve() as served:
            return await asyncio.to_thread(ask, served.url)

    assert asyncio.run(run()) == (ANSWER, ANSWER)


async def test_a_lost_node_midway_raises(client: openai.AsyncOpenAI, scripted: ScriptedEngine) -> None:
    fail_at(scripted, 3, NoRouteError([(10, 20)], "scripted"))
    stream = await client.chat.completions.create(model="scripted", messages=MESSAGES, stream=True)
    with pytest.raises(openai.APIError, match="no node serves layers 10:20"):
        _ = [chunk async for chunk in stream]


async def test_errors_arrive_as_the_classes_programs_catch(
    client: openai.AsyncOpenAI, scripted: ScriptedEngine
) -> None:
    with pytest.raises(openai.NotFoundError) as missing:
        await client.chat.completions.create(model="none", messages=MESSAGES)
    assert (missing.value.code, missing.value.param) == ("model_not_found", "model")
    with pytest.raises(openai.BadRequestError) as wrong:
        await client.chat.completions.create(model="scripted", messages=MESSAGES, temperature=3)
    assert (wrong.value.param, wrong.value.type) == ("temperature", "invalid_request_error")
    assert wrong.value.request_id
    scripted.status = ModelStatus("partial", 30, ((1, 2),))
    with pytest.raises(openai.InternalServerError) as nobody:
        await client.chat.completions.create(model="scripted", messages=MESSAGES)
    assert nobody.value.code == "no_route"


async def test_a_wrong_key_raises(serve: Serve) -> None:
    async with serve(api_keys="right") as served:
        wrong = openai.AsyncOpenAI(base_url=served.url, api_key="wrong", max_retries=0)
        right = openai.AsyncOpenAI(base_url=served.url, api_key="right", max_retries=0)
        async with wrong, right:
            with pytest.raises(openai.AuthenticationError):
                await wrong.models.list()
            assert [model.id async for model in right.models.list()] == ["scripted"]


async def test_a_model_is_retrieved(client: openai.AsyncOpenAI) -> None:
    assert (await client.models.retrieve("scripted")).id == "scripted"
    assert [model.id async for model in client.models.list()] == ["scripted"]


async def test_closing_a_stream_early_frees_the_answer(
    client: openai.AsyncOpenAI, scripted: ScriptedEngine
) -> None:
    scripted.before_token = lambda number: asyncio.Event().wait() if number == 3 else None
    stream = await client.chat.completions.create(model="scripted", messages=MESSAGES, stream=True)
    await anext(stream)
    await stream.close()
    await settles(lambda: scripted.num_open == 0)
