"""No word of a request gets into a log, whatever fails and wherever: the lines are a service's own, at debug level."""

from __future__ import annotations

import asyncio
import gc
import logging
import warnings
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import pytest

from app.api import answering, body, chat_reply, generation, sse
from app.engine import merge
from app.engine.tokenizer import ChatTokenizer
from tests.app.conftest import ANSWER, Serve
from tests.support.api_server import PATH, QUESTION, Served
from tests.support.local_engine import ScriptedEngine
from tests.support.log_lines import Lines, written

KEY = "sk-hush-0123456789"
SECRET = "hush, a secret"
TOLD: dict[str, Any] = {
    "messages": [{"role": "user", "content": SECRET}],
    "user": "hush",
    "metadata": {"hush": "hush"},
}


@pytest.fixture
def lines() -> Iterator[Lines]:
    with written(level=logging.DEBUG) as lines:
        yield lines


def check(lines: Lines, *, least: int = 1) -> list[dict[str, Any]]:
    """Each is valid, and none of them quotes the request or the answer."""
    told = lines.objects
    assert len(told) >= least
    for secret in ("hush", ANSWER, "quick"):
        assert secret not in lines.text, lines.text
    return told


def fails(*_: Any, **__: Any) -> Any:
    raise ValueError(SECRET)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("where", "name"),
    [
        (body, "parse_object"),
        (generation, "sampling_params"),
        (generation, "form_of"),
        (generation, "read_prompt"),
        (ChatTokenizer, "render"),
        (answering, "writers_of"),
        (chat_reply.ChatReply, "finish_chunk"),
        (chat_reply.ChatReply, "completion"),
        (chat_reply.ChatReply, "role_chunk"),
        (merge, "_next"),
        (sse, "_write"),
    ],
)
async def test_an_error_of_ours_quotes_nothing(
    where: Any, name: str, stream: bool, lines: Lines, serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(where, name, fails)
    async with serve(api_keys=[KEY]) as served:
        await _ask_badly(served, stream=stream)
    check(lines, least=0)


async def _ask_badly(served: Served, **changes: Any) -> None:
    headers = {"authorization": f"Bearer {KEY}", "x-other": "hush", "cookie": "hush"}
    try:
        await served.http.post(PATH, json=QUESTION | TOLD | changes, headers=headers)
    except Exception as error:  # a stream that broke off
        assert "hush" not in str(error)


@pytest.mark.parametrize("token", [-1, 0, 2])
async def test_an_engine_that_breaks_is_told_by_place(
    token: int, lines: Lines, serve: Serve, scripted: ScriptedEngine
) -> None:
    scripted.before_token = lambda number: fails() if number == token else None
    async with serve(api_keys=[KEY]) as served:
        await _ask_badly(served)
        await _ask_badly(served, stream=True)
    told = check(lines)
    errors = [line for line in told if line["level"] == "error"]
    assert len(errors) == 2
    assert all("ValueError in fails" in line["event"] and line["request_id"] for line in errors)


async def test_what_breaks_beside_a_request_is_told_by_place(
    lines: Lines, serve: Serve, scripted: ScriptedEngine
) -> None:
    async def later() -> None:
        fails()

    def begin(number: int) -> None:
        if number == 0:
            asyncio.ensure_future(later())  # noqa: RUF006 - nobody ever asks what became of it
            asyncio.get_running_loop().call_soon(fails, SECRET)
            with warnings.catch_warnings():
                warnings.simplefilter("always")
                warnings.warn(SECRET, stacklevel=1)
            logging.getLogger("httpx").info("GET https://hush")
            logging.getLogger("websockets.client").debug("> hush")

    scripted.before_token = begin
    async with serve(api_keys=[KEY]) as served:
        await _ask_badly(served)
        await asyncio.sleep(0)
        gc.collect()
        await asyncio.sleep(0)
    told = check(lines)
    assert {line["logger"] for line in told} >= {"asyncio", "app.api.request_line"}


BAD: list[Callable[[Served], Awaitable[Any]]] = [
    lambda served: served.http.post(PATH, content=b'{"hush": '),
    lambda served: served.http.post(PATH, content=b'{"hush": "\xff"}'),
    lambda served: served.http.post(PATH, content=b"[" * 5000 + b"hush"),
    lambda served: served.http.post(f"{PATH}?key=hush", json=QUESTION | {"hush": "hush"}),
    lambda served: served.ask(model="hush"),
    lambda served: served.ask(temperature="hush"),
    lambda served: served.ask(tools=[{"type": "function", "function": {"name": "hush hush"}}]),
    lambda served: served.ask(tool_choice={"type": "function", "function": {"name": "hush"}}),
    lambda served: served.ask(
        messages=[
            {"role": "user", "content": "hello"},
            {
                "role": "assistant",
                "tool_calls": [
                    {"id": "hush", "type": "function", "function": {"name": "hush", "arguments": '{"hush'}}
                ],
            },
        ]
    ),
    lambda served: served.ask(response_format={"type": "json_schema", "json_schema": {"name": "hush"}}),
    lambda served: served.http.post("/v1/hush/hush", content=b"hush"),
    lambda served: served.http.get("/v1/videos/hush"),
    lambda served: served.http.post(PATH, json=QUESTION, headers={"authorization": "Bearer hush"}),
    lambda served: served.http.post(PATH, json=QUESTION, headers={"host": "hush"}),
    lambda served: served.http.post(PATH, json=QUESTION, headers={"x-request-id": "hush hush\x7f"}),
    lambda served: served.http.post(
        "/v1/audio/transcriptions", files={"file": ("hush.wav", b"hush", "hush/hush")}, data={"model": "hush"}
    ),
]


@pytest.mark.parametrize("ask", BAD)
async def test_what_is_refused_is_not_quoted(
    ask: Callable[[Served], Awaitable[Any]], lines: Lines, serve: Serve
) -> None:
    async with serve() as served:
        await ask(served)
    told = check(lines, least=0)
    assert all("code" in line for line in told if "refused" in line["event"])


async def test_lines_of_requests_at_once_carry_their_own_ids(
    lines: Lines, serve: Serve, scripted: ScriptedEngine
) -> None:
    def say(number: int) -> None:
        if number >= 0:
            logging.getLogger("app.test").debug("a token")

    scripted.before_token = say
    async with serve() as served:
        ids = [f"own-{number}" for number in range(8)]
        await asyncio.gather(
            *(served.http.post(PATH, json=QUESTION, headers={"x-request-id": one}) for one in ids)
        )
        await served.http.get("/health")
    by_id = {one: [line for line in lines.objects if line.get("request_id") == one] for one in ids}
    assert len({len(own) for own in by_id.values()}) == 1
    for own in by_id.values():
        assert own[-1]["outcome"] == "finished"
        assert {(line["model"], line["endpoint"]) for line in own[-1:]} == {("scripted", PATH)}
        assert all(line["endpoint"] == PATH for line in own)
    of_app = [line for line in lines.objects if line["logger"].startswith("app.")]
    assert len(of_app) == sum(map(len, by_id.values()))
