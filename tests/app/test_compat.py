"""What is honoured, refused and passed over, told before and after."""

from __future__ import annotations

from typing import Any

import pytest

from app.engine.request import ModelStatus
from app.engine.tokenizer import ChatTokenizer
from tests.app.conftest import Serve
from tests.support.api_server import Served
from tests.support.local_engine import ScriptedEngine, saying

UNSAID = {"user": "u", "store": True, "an_unknown_field": 1}


@pytest.mark.parametrize("stream", [False, True])
async def test_fields_that_changed_nothing_are_named(served: Served, stream: bool) -> None:
    response = await served.ask(**UNSAID, temperature=0, tools=[], metadata=None, stream=stream)
    assert response.headers["x-ignored-params"] == "an_unknown_field, store, user"
    completion: dict[str, Any] = {"model": "scripted", "prompt": "hello", "stream": stream, "suffix": ""}
    response = await served.http.post("/v1/completions", json=completion | UNSAID)
    assert response.headers["x-ignored-params"] == "an_unknown_field, store, user"
    asked: dict[str, Any] = {"model": "scripted", "input": "hello", "stream": stream, "seed": 1}
    response = await served.http.post("/v1/responses", json=asked | UNSAID | {"metadata": {"a": "b"}})
    assert response.headers["x-ignored-params"] == "an_unknown_field, store, user"


async def test_where_all_was_honoured_no_field_is_named(served: Served) -> None:
    assert "x-ignored-params" not in (await served.ask(temperature=0, seed=1)).headers


async def test_names_that_could_break_a_header_are_left_out(served: Served) -> None:
    response = await served.ask(**{"a\r\nset-cookie: b": 1, "é": 2, "x" * 70: 3})
    assert response.status_code == 200
    assert "x-ignored-params" not in response.headers


async def test_compat_tells_what_each_model_takes(serve: Serve, tokenizer: ChatTokenizer) -> None:
    whole = ScriptedEngine(tokenizer, saying(tokenizer, "hello"), model_name="whole")
    away = ScriptedEngine(
        tokenizer, saying(tokenizer, "hello"), model_name="away", status=ModelStatus("partial", 30, ((0, 3),))
    )
    async with serve(whole, away) as served:
        told = (await served.http.get("/v1/compat")).json()
        chat = told["fields"]["/v1/chat/completions"]
        assert {"tools", "response_format", "seed"} <= set(chat["honoured"])
        for name in chat["refused"]:
            if name != "modalities":
                error = (await served.ask(model="whole", **{name: "?"})).json()["error"]
                assert (error["param"], error["code"]) == (name, "unsupported_parameter")
        everything = dict.fromkeys(chat["ignored"], "x")
        assert (await served.ask(model="whole", **everything)).status_code == 200
        by_id = {model["id"]: model for model in told["models"]}
        assert by_id["whole"]["tools"] == {"form": "plain", "can_be_required": True}
        assert by_id["whole"]["refused_by_route"] == []
        assert by_id["away"]["tools"] is None
        head = await served.http.head("/v1/compat")
        assert (head.status_code, head.content) == (200, b"")
