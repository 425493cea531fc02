"""The order and the shape of a stream, as strict clients need it."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from app.api.sse import KEEPALIVE
from app.engine.tokenizer import ChatTokenizer
from tests.app.conftest import ANSWER, Serve
from tests.support.api_server import PATH, QUESTION, Served, chunks_of, text_of
from tests.support.local_engine import ScriptedEngine, saying

USAGE = {"stream_options": {"include_usage": True}}


def deltas(events: list[Any], index: int = 0) -> list[dict[str, Any]]:
    return [one["delta"] for chunk in chunks_of(events) for one in chunk["choices"] if one["index"] == index]


async def test_a_stream_is_role_text_end_and_done(served: Served) -> None:
    events = await served.stream()
    assert deltas(events)[0] == {"role": "assistant", "content": "", "refusal": None}
    assert text_of(events) == ANSWER
    assert deltas(events)[-1] == {}
    assert [one["choices"][0]["finish_reason"] for one in chunks_of(events)][-2:] == [None, "stop"]
    assert events[-1] == "[DONE]"


async def test_the_role_comes_once_and_only_the_assistants(served: Served) -> None:
    assert [delta["role"] for delta in deltas(await served.stream()) if "role" in delta] == ["assistant"]


async def test_id_creation_and_model_stay_the_same(served: Served) -> None:
    chunks = chunks_of(await served.stream())
    assert len({(chunk["id"], chunk["created"], chunk["model"], chunk["object"]) for chunk in chunks}) == 1
    assert chunks[0]["object"] == "chat.completion.chunk"


async def test_the_headers_keep_proxies_from_holding_the_stream(served: Served) -> None:
    response = await served.ask(stream=True)
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert response.headers["cache-control"] == "no-cache"
    assert response.headers["x-accel-buffering"] == "no"
    assert "content-encoding" not in response.headers


@pytest.mark.parametrize("options", [None, {"include_usage": False}, {}])
async def test_usage_is_not_sent_unasked(served: Served, options: dict[str, bool] | None) -> None:
    events = await served.stream(stream_options=options)
    assert all(chunk["choices"] and "usage" not in chunk for chunk in chunks_of(events))


async def test_usage_asked_for_is_the_last_chunk_and_null_before(served: Served) -> None:
    *others, last = chunks_of(await served.stream(**USAGE))
    assert last["choices"] == []
    assert last["usage"]["completion_tokens"] == 9
    assert all(chunk["usage"] is None for chunk in others)


async def test_running_usage_grows_with_the_text(served: Served) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    chunks = chunks_of(await served.stream(stream_options=options))
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks if chunk["usage"]]
    assert counts == [1, 2, 3, 4, 5, 6, 7, 8, 9]


async def test_each_choice_has_one_role_and_one_end_and_the_first_goes_first(served: Served) -> None:
    events = await served.stream(n=3, **USAGE)
    chunks = [chunk for chunk in chunks_of(events) if chunk["choices"]]
    assert [chunk["choices"][0]["index"] for chunk in chunks[:3]] == [0, 1, 2]
    assert all("role" in chunk["choices"][0]["delta"] for chunk in chunks[:3])
    assert all(len(chunk["choices"]) == 1 for chunk in chunks)
    ends = [chunk["choices"][0]["index"] for chunk in chunks if chunk["choices"][0]["finish_reason"]]
    assert sorted(ends) == [0, 1, 2]
    assert [text_of(events, index) for index in range(3)] == [ANSWER] * 3


async def test_timings_come_with_the_end_and_with_usage(served: Served) -> None:
    chunks = chunks_of(await served.stream(**USAGE))
    assert chunks[-1]["timings"]["compute_s"] == chunks[-2]["timings"]["compute_s"] == 0.002
    assert not any("timings" in chunk for chunk in chunks[:-2])


async def test_timings_per_token_come_when_asked_for(served: Served) -> None:
    chunks = chunks_of(await served.stream(timings_per_token=True))
    counts = [chunk["timings"]["tokens"] for chunk in chunks[1:-1]]
    assert counts == list(range(1, 9))


async def test_no_chunk_is_without_text_in_a_lively_stream(serve: Serve, tokenizer: ChatTokenizer) -> None:
    engine = ScriptedEngine(tokenizer, saying(tokenizer, "\u4f60\u597d"))
    async with serve(engine) as served:
        texts = [delta["content"] for delta in deltas(await served.stream())[1:-1]]
    assert texts == ["\u4f60", "\u597d"]


async def test_the_bytes_of_a_stream_are_bare_data_frames(served: Served) -> None:
    text = (await served.ask(stream=True)).text
    assert text.endswith("data: [DONE]\n\n")
    for block in text.removesuffix("\n\n").split("\n\n"):
        assert block.startswith("data: ")
        assert len(block) > len("data: ")
        assert "\n" not in block


# Signs of life --------------------------------------------------------------------------------------------


async def read_while_silent(
    serve: Serve, scripted: ScriptedEngine, num_parts: int, **settings: Any
) -> list[str]:
    """Hold the first token back until `num_parts` blank-line-ended parts have come; return the whole stream's."""
    go = asyncio.Event()
    scripted.before_token = lambda number: go.wait() if number == 0 else None
    parts: list[str] = []
    async with (
        serve(**settings) as served,
        served.http.stream("POST", PATH, json={**QUESTION, "stream": True}) as response,
    ):
        buffered = ""
        async for text in response.aiter_text():
            buffered += text
            *complete, buffered = buffered.split("\n\n")
            parts += complete
            if len(parts) >= num_parts:
                go.set()
    return parts


async def test_the_role_comes_at_admission_before_any_token(serve: Serve, scripted: ScriptedEngine) -> None:
    first, *_ = await read_while_silent(serve, scripted, 1)
    assert '"role":"assistant"' in first


async def test_a_silent_stream_gets_comments(serve: Serve, scripted: ScriptedEngine) -> None:
    parts = await read_while_silent(serve, scripted, 4, keepalive_s=0.02)
    comment = KEEPALIVE.decode().strip()
    assert parts[1:4] == [comment] * 3
    assert parts[-1] == "data: [DONE]"


async def test_a_silent_stream_gets_empty_chunks_too(serve: Serve, scripted: ScriptedEngine) -> None:
    scripted.prefill_steps = 3
    parts = await read_while_silent(serve, scripted, 3, keepalive_s=0, heartbeat_s=0.02)
    assert '"delta":{}' in parts[1]
    assert '"prefill":{"done":3,"total":3}' in parts[1]
    assert not any(part.startswith(":") for part in parts)


@pytest.mark.parametrize("keepalive_s", [0, 0.02])
async def test_a_long_prefill_gives_three_signs_of_life_and_tells_how_far_it_is(
    serve: Serve, scripted: ScriptedEngine, keepalive_s: float
) -> None:
    """Of a prompt that takes as long as 25 comments and 8 empty chunks."""
    scripted.prefill_steps = 5
    scripted.before_prefill = lambda step: asyncio.sleep(0.1)
    async with serve(keepalive_s=keepalive_s, heartbeat_s=0.06) as served:
        events = await served.stream()
        first, *silent = events[: next(n for n, event in enumerate(events) if "hello" in str(event))]
        assert isinstance(first, dict)
        assert first["choices"][0]["delta"]["role"] == "assistant"
        progress = [event.get("prefill") for event in silent if isinstance(event, dict)]
        done = [told["done"] for told in progress if told is not None]
        assert done == sorted(done)
        assert set(done) >= {1, 2, 3, 4}
        assert all(told["total"] == 5 for told in progress if told is not None)
        assert all(event["choices"][0]["delta"] == {} for event in silent if isinstance(event, dict))
        comments = [event for event in silent if isinstance(event, str)]
        assert (len(comments) >= 8) is bool(keepalive_s)
        client = served.openai()
        async with (
            client,
            client.chat.completions.stream(
                model="scripted", messages=[{"role": "user", "content": "hi"}]
            ) as stream,
        ):
            final = await stream.get_final_completion()
    assert final.choices[0].message.content == ANSWER


async def test_comments_can_be_turned_off(serve: Serve, scripted: ScriptedEngine) -> None:
    scripted.before_token = lambda number: asyncio.sleep(0.02)
    async with serve(keepalive_s=0) as served:
        assert not any(isinstance(event, str) and event != "[DONE]" for event in await served.stream())


async def test_a_stream_opens_even_while_admission_waits(serve: Serve, scripted: ScriptedEngine) -> None:
    go = asyncio.Event()
    scripted.before_token = lambda number: go.wait() if number == -1 else None
    async with (
        serve(keepalive_s=0.02) as served,
        served.http.stream("POST", PATH, json={**QUESTION, "stream": True}) as response,
    ):
        assert response.status_code == 200
        go.set()
        text = "".join([part async for part in response.aiter_text()])
    assert text.endswith("data: [DONE]\n\n")
