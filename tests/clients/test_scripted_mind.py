"""The scripted engine that third-party clients are tried against: it keeps to grammars and answers to the point."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import pytest

from app.engine.tokenizer import ChatTokenizer
from tests.clients.scripted_mind import ANSWER, TEMPLATE, ScriptedMind
from tests.support.api_server import Served, chunks_of, serve_engines, text_of
from tests.support.tiny_tokenizer import write_tiny_tokenizer

WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
            "required": ["city"],
        },
    },
}
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "age": {"type": "integer"},
        "pets": {"type": "array", "items": {"type": "string"}, "minItems": 1},
    },
    "required": ["name", "age", "pets"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> ChatTokenizer:
    return ChatTokenizer.load(write_tiny_tokenizer(tmp_path_factory.mktemp("mind"), template=TEMPLATE))


@pytest.fixture
async def served(tokenizer: ChatTokenizer) -> AsyncIterator[Served]:
    async with serve_engines(ScriptedMind(tokenizer)) as running:
        yield running


async def answer(served: Served, text: str, **fields: Any) -> dict[str, Any]:
    told = {"model": "fixture", "messages": [{"role": "user", "content": text}], **fields}
    reply = await served.ask(**told)
    assert reply.status_code == 200, reply.text
    choice: dict[str, Any] = reply.json()["choices"][0]
    return choice


def called(choice: dict[str, Any]) -> list[tuple[str, Any]]:
    calls = choice["message"].get("tool_calls", [])
    return [(call["function"]["name"], json.loads(call["function"]["arguments"])) for call in calls]


async def test_it_says_what_it_is_told(served: Served) -> None:
    assert (await answer(served, "Hello"))["message"]["content"] == ANSWER
    assert (await answer(served, "Say: 日本 👩‍👩‍👧"))["message"]["content"] == "日本 👩‍👩‍👧"


@pytest.mark.parametrize("choice", ["auto", "required"])
async def test_a_tool_that_is_meant_is_called_for_each_place(served: Served, choice: str) -> None:
    asked = "What is the weather in Paris and in San Francisco, CA?"
    told = await answer(served, asked, tools=[WEATHER], tool_choice=choice)
    assert called(told) == [
        ("get_weather", {"city": "Paris"}),
        ("get_weather", {"city": "San Francisco, CA"}),
    ]
    assert not called(await answer(served, "Hello", tools=[WEATHER]))


async def test_a_schema_gets_the_values_of_the_text(served: Served) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "person", "schema": PERSON}}
    told = await answer(served, "The name is Ada, her age is 36.", response_format=form)
    assert json.loads(told["message"]["content"]) == {"name": "Ada", "age": 36, "pets": ["some pets"]}


async def test_a_free_object_gets_the_keys_that_are_quoted(served: Served) -> None:
    asked = "Return a JSON with 'setup' and 'punchline' keys."
    told = await answer(served, asked, response_format={"type": "json_object"})
    assert json.loads(told["message"]["content"]).keys() == {"setup", "punchline"}


async def test_it_breaks_and_pauses_where_asked(served: Served) -> None:
    broken = await served.stream(model="fixture", messages=[{"role": "user", "content": "Break"}])
    assert "error" in chunks_of(broken)[-1]
    assert broken[-1] != "[DONE]"
    slow = await served.stream(model="fixture", messages=[{"role": "user", "content": "Slowly"}])
    assert text_of(slow) == ANSWER
