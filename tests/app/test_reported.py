"""What users of other gateways report again and again, asked of every way to get an answer here."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from app.engine.tokenizer import ChatTokenizer
from app.settings import GatewaySettings
from tests.app.conftest import ANSWER, Serve
from tests.storms.every_kind import every_kind
from tests.storms.judge import faults
from tests.storms.seeds import form, posted, wav
from tests.storms.wire import Sent, exchange
from tests.support.api_server import Served
from tests.support.local_engine import ScriptedEngine, ids_of, saying

HELLO = [{"role": "user", "content": "hello"}]
CHAT = ("/v1/chat/completions", {"messages": HELLO}, "max_tokens")
COMPLETIONS = ("/v1/completions", {"prompt": "hello"}, "max_tokens")
RESPONSES = ("/v1/responses", {"input": "hello"}, "max_output_tokens")
WAYS = pytest.mark.parametrize(
    ("path", "asked", "limit"), [CHAT, COMPLETIONS, RESPONSES], ids=["chat", "completions", "responses"]
)


async def ask(served: Served, path: str, asked: dict[str, Any], **changes: Any) -> Any:
    return await served.http.post(path, json={"model": "scripted"} | asked | changes)


def text_of(answer: dict[str, Any]) -> str:
    """The text of a whole answer of any kind."""
    if "output" in answer:
        return "".join(part["text"] for item in answer["output"] for part in item["content"])
    choice = answer["choices"][0]
    return str(choice["text"] if "text" in choice else choice["message"]["content"])


def streamed_text(raw: str) -> str:
    """The text of a stream of any kind, from its deltas alone."""
    texts = []
    for line in raw.split("\n"):
        if line.startswith("data: {"):
            event = json.loads(line.removeprefix("data: "))
            if event.get("type") == "response.output_text.delta":
                texts.append(event["delta"])
            for choice in event.get("choices", ()):
                texts.append(choice["text"] if "text" in choice else choice["delta"].get("content") or "")
    return "".join(texts)


# Text -----------------------------------------------------------------------------------------------------------


@WAYS
@pytest.mark.parametrize(
    "text", ["né 你好，世界 \U0001f98a!", "\U0001f469\u200d\U0001f469\u200d\U0001f467 e\u0301"]
)
async def test_characters_of_several_tokens_come_whole(
    serve: Serve, tokenizer: ChatTokenizer, path: str, asked: dict[str, Any], limit: str, text: str
) -> None:
    async with serve(ScriptedEngine(tokenizer, saying(tokenizer, text))) as served:
        whole = await ask(served, path, asked, **{limit: 100})
        stream = await ask(served, path, asked, stream=True, **{limit: 100})
    assert text_of(whole.json()) == streamed_text(stream.text) == text


# Limits ---------------------------------------------------------------------------------------------------------


@WAYS
@pytest.mark.parametrize(
    ("value", "count"), [(None, None), (1, 1), (10**8, 9), (0, 0), (-1, 0), ("5", 0), (5.5, 0), (True, 0)]
)
async def test_a_limit_of_tokens_is_kept_or_refused_by_its_name(
    served: Served, path: str, asked: dict[str, Any], limit: str, value: Any, count: int | None
) -> None:
    """A count of 0: refused."""
    response = await ask(served, path, asked, **{limit: value})
    if count == 0:
        assert (response.status_code, response.json()["error"]["param"]) == (400, limit)
        return
    assert response.status_code == 200, response.text
    usage = response.json()["usage"]
    assert usage.get("completion_tokens", usage.get("output_tokens")) == (9 if count is None else count)


@WAYS
async def test_an_answer_without_end_fills_the_context_and_says_so(
    serve: Serve, tokenizer: ChatTokenizer, path: str, asked: dict[str, Any], limit: str
) -> None:
    async with serve(ScriptedEngine(tokenizer, ids_of([70] * 1000))) as served:
        answer = (await ask(served, path, asked, **{limit: 10**8})).json()
    assert answer["usage"]["total_tokens"] == 256
    if "output" in answer:
        assert answer["incomplete_details"] == {"reason": "max_output_tokens"}
    else:
        assert answer["choices"][0]["finish_reason"] == "length"


@WAYS
@pytest.mark.parametrize("is_stream", [False, True])
async def test_a_prompt_longer_than_the_context_is_a_400_in_words_that_clients_know(
    served: Served, path: str, asked: dict[str, Any], limit: str, is_stream: bool
) -> None:
    (field,) = asked
    long: Any = "x " * 3000
    prompt = [{"role": "user", "content": long}] if field == "messages" else long
    response = await ask(served, path, {field: prompt}, stream=is_stream, **{limit: 5})
    error = response.json()["error"]
    assert (response.status_code, error["code"], error["param"]) == (400, "context_length_exceeded", field)
    assert "maximum context length is 256 tokens" in error["message"]
    assert not re.search(r"-\d", error["message"])


# Signs of life --------------------------------------------------------------------------------------------------


def test_a_silent_stream_is_never_silent_for_as_long_as_clients_and_proxies_bear() -> None:
    settings = GatewaySettings()
    assert 0 < settings.keepalive_s <= 15  # proxies and read time-outs
    assert 0 < settings.heartbeat_s <= 60  # LangChain gives up after 120 s without a chunk that it can parse


async def test_a_client_that_counts_parsed_chunks_only_outwaits_a_long_prefill(
    serve: Serve, scripted: ScriptedEngine
) -> None:
    scripted.before_token = lambda number: asyncio.sleep(2.5 if number == 0 else 0)
    text = ""
    async with serve(keepalive_s=0.02, heartbeat_s=0.05) as served, served.openai() as client:
        stream = await client.chat.completions.create(model="scripted", messages=HELLO, stream=True)  # type: ignore[call-overload]
        chunks = aiter(stream)
        while True:
            async with asyncio.timeout(1.8):  # machines are shared
                try:
                    chunk = await anext(chunks)
                except StopAsyncIteration:
                    break
            text += chunk.choices[0].delta.content or ""
    assert text == ANSWER


@WAYS
async def test_without_comments_there_are_none(
    serve: Serve, scripted: ScriptedEngine, path: str, asked: dict[str, Any], limit: str
) -> None:
    """For clients whose parser of events dies of them."""
    scripted.before_token = lambda number: asyncio.sleep(0.3 if number == 0 else 0)
    for keepalive_s in (0, 0.02):
        async with serve(keepalive_s=keepalive_s, heartbeat_s=0.1) as served:
            raw = (await ask(served, path, asked, stream=True, **{limit: 20})).text
        blocks = raw.removesuffix("\n\n").split("\n\n")
        assert any(block.startswith(":") for block in blocks) is bool(keepalive_s)
        assert streamed_text(raw) == ANSWER
        for block in blocks:
            lines = [line for line in block.split("\n") if not line.startswith("event: response.")]
            assert len(lines) == 1
            assert lines[0].startswith(":") or len(lines[0]) > len("data: ")


# Proxies --------------------------------------------------------------------------------------------------------


@asynccontextmanager
async def buffering_proxy(port: int) -> AsyncIterator[int]:
    """As nginx does it: an answer is held until its end, unless its head says `X-Accel-Buffering: no`."""

    async def relay(source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        while piece := await source.read(1 << 16):
            sink.write(piece)

    async def pass_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there, back = await asyncio.open_connection("127.0.0.1", port)
        asking = asyncio.create_task(relay(reader, back))
        try:
            head = await there.readuntil(b"\r\n\r\n")
            writer.write(head)
            if b"\r\nx-accel-buffering: no\r\n" in head.lower():
                await relay(there, writer)
            else:
                writer.write(await there.read())
        finally:
            asking.cancel()
            writer.close()
            back.close()

    proxy = await asyncio.start_server(pass_on, "127.0.0.1", 0)
    try:
        yield proxy.sockets[0].getsockname()[1]
    finally:
        proxy.close()


@WAYS
async def test_the_first_frame_passes_a_proxy_before_there_is_a_token(
    served: Served, scripted: ScriptedEngine, path: str, asked: dict[str, Any], limit: str
) -> None:
    go = asyncio.Event()
    scripted.before_token = lambda number: go.wait() if number == 0 else None
    body = json.dumps({"model": "scripted", "stream": True, limit: 20} | asked).encode()
    head = (
        f"POST {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    async with buffering_proxy(served.port) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(head.encode() + body)
        try:
            async with asyncio.timeout(5):
                first = await reader.readuntil(b"data: {")
                go.set()
                rest = await reader.read()
        finally:
            go.set()
            writer.close()
    assert streamed_text((first + rest).decode()) == ANSWER


STREAMS = {
    "chat": posted("/v1/chat/completions", {"model": "scripted", "messages": HELLO, "stream": True}),
    "completions": posted("/v1/completions", {"model": "scripted", "prompt": "hello", "stream": True}),
    "responses": posted("/v1/responses", {"model": "scripted", "input": "hello", "stream": True}),
    "pictures": posted(
        "/v1/images/generations", {"model": "painter", "prompt": "a fox", "size": "64x48", "stream": True}
    ),
    "sounds": posted(
        "/v1/audio/speech",
        {"model": "composer", "input": "rain", "seconds": 0.2, "response_format": "wav", "stream_format": "sse"},
    ),
    "recordings": form(
        "/v1/audio/transcriptions",
        (b"model", None, b"scribe"), (b"file", b"a.wav", wav(0.5)), (b"stream", None, b"true"),
    ),
}  # fmt: skip


async def test_no_stream_of_any_kind_is_held_or_pressed_by_a_proxy() -> None:
    async with every_kind() as running:
        for name, sent in STREAMS.items():
            came = await exchange(running.served.port, sent.with_header(b"Accept-Encoding", b"gzip, br"))
            told = (came.status, came.headers["content-type"], came.headers["cache-control"])
            assert told == (200, "text/event-stream; charset=utf-8", "no-cache"), name
            assert came.headers["x-accel-buffering"] == "no", name
            assert "content-encoding" not in came.headers, name
            assert not list(faults(sent, came)), name


# Refusals -------------------------------------------------------------------------------------------------------

USELESS = (b"", b"{", b"[]", b'"x"', b"null", b"{}", b'{"model":"nobody"}', b'{"model":5}', b"\xff")


def asking(method: str, path: str, body: bytes = b"") -> Sent:
    headers = ((b"Host", b"localhost"), (b"Content-Type", b"application/json"))
    return Sent(method.encode(), re.sub(r"\{\w+\}", "none", path).encode(), headers, body)


async def test_every_path_refuses_in_the_envelope_with_and_without_a_slash_at_its_end() -> None:
    async with every_kind() as running:
        described = (await running.served.http.get("/openapi.json")).json()["paths"]
        refused = [asking("PATCH", path) for path in described]
        refused += [
            asking("POST", path, body) for path in described if "post" in described[path] for body in USELESS
        ]
        refused += [asking(method.upper(), path) for path in described if "{" in path
                    for method in described[path] if method != "post"]  # fmt: skip
        assert len(refused) > 100
        for sent in refused:
            came = await exchange(running.served.port, sent)
            told = (sent.method, sent.target, sent.body, came.status, came.body)
            assert 400 <= came.status < 500, told
            assert not list(faults(sent, came)), told
            slashed = Sent(sent.method, sent.target + b"/", sent.headers, sent.body)
            assert (await exchange(running.served.port, slashed)).status == came.status, told
