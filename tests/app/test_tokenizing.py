"""What a model's tokenizer makes of texts, chats and ids, asked over HTTP."""

from __future__ import annotations

from typing import Any

import pytest

from app.engine.request import ModelStatus
from app.engine.tokenizer import ChatTokenizer
from tests.app.conftest import Serve
from tests.support.api_server import QUESTION, Served
from tests.support.local_engine import ScriptedEngine


@pytest.mark.parametrize("path", ["/tokenize", "/v1/tokenize", "/tokenize/"])
async def test_a_text_becomes_ids_and_back(served: Served, tokenizer: ChatTokenizer, path: str) -> None:
    text = "hello <|im_end|> né \U0001f98a"
    body = (await served.http.post(path, json={"model": "scripted", "prompt": text})).json()
    ids = tokenizer.encode_whole(text)
    assert body == {"count": len(ids), "max_model_len": 256, "tokens": ids, "token_strs": None}
    back = await served.http.post("/detokenize", json={"model": "scripted", "tokens": ids})
    assert back.json() == {"prompt": text}


async def test_names_come_where_asked_for(served: Served) -> None:
    asked = {"prompt": "hello world<|im_end|>", "return_token_strs": True, "add_special_tokens": False}
    body = (await served.http.post("/tokenize", json=asked)).json()
    assert body["token_strs"] == ["hello", "Ġworld", "<|im_end|>"]


async def test_a_chat_is_counted_as_it_would_be_asked(served: Served, scripted: ScriptedEngine) -> None:
    counted = (await served.http.post("/v1/chat/completions/input_tokens", json=QUESTION)).json()
    tokens = (await served.http.post("/tokenize", json=QUESTION)).json()
    asked = (await served.ask()).json()
    num_tokens = asked["usage"]["prompt_tokens"]
    assert counted == {"object": "response.input_tokens", "input_tokens": num_tokens}
    assert (tokens["count"], tuple(tokens["tokens"])) == (num_tokens, scripted.requests[0].prompt_ids)


async def test_a_chat_beyond_the_context_is_counted_too(served: Served) -> None:
    long = {"model": "scripted", "messages": [{"role": "user", "content": "z" * 500}]}
    counted = await served.http.post("/chat/completions/input_tokens", json=long)
    assert counted.json()["input_tokens"] > 500
    assert (await served.ask(messages=long["messages"])).status_code == 400


async def test_no_node_is_needed(serve: Serve, scripted: ScriptedEngine) -> None:
    scripted.status = ModelStatus("partial", 30, ((1, 2),))
    async with serve() as served:
        assert (await served.http.post("/tokenize", json={"prompt": "hello"})).status_code == 200
        assert (await served.ask()).status_code == 503


async def test_pieces_of_characters_and_nothing_detokenize(served: Served, tokenizer: ChatTokenizer) -> None:
    ids = tokenizer.encode("\U0001f98a")
    for tokens, text in (([], ""), (ids[:2], "\ufffd"), ([399], "")):
        response = await served.http.post("/detokenize", json={"tokens": tokens})
        assert response.json() == {"prompt": text}


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": 5}, "prompt"),
        ("/tokenize", {"prompt": ["a"]}, "prompt"),
        ("/tokenize", {"prompt": "a" * (2 << 20) + "a"}, "prompt"),
        ("/tokenize", {"prompt": "a", "messages": [{"role": "user", "content": "a"}]}, "prompt"),
        ("/tokenize", {"messages": []}, "messages"),
        (
            "/tokenize",
            {"messages": [{"role": "user", "content": "a"}], "add_generation_prompt": False},
            "add_generation_prompt",
        ),
        ("/detokenize", {}, "tokens"),
        ("/detokenize", {"tokens": "a"}, "tokens"),
        ("/detokenize", {"tokens": [-1]}, "tokens.0"),
        ("/detokenize", {"tokens": [400]}, "tokens"),
        ("/detokenize", {"tokens": [2**70]}, "tokens"),
        ("/detokenize", {"tokens": [1.5]}, "tokens.0"),
        ("/chat/completions/input_tokens", {"messages": []}, "messages"),
    ],
)
async def test_what_cannot_be_is_refused_by_name(
    served: Served, path: str, fields: dict[str, Any], param: str
) -> None:
    response = await served.http.post(path, json={"model": "scripted"} | fields)
    assert response.status_code == 400, response.text
    assert response.json()["error"]["param"] == param


@pytest.mark.parametrize("path", ["/tokenize", "/detokenize", "/v1/chat/completions/input_tokens"])
async def test_an_unknown_model_is_a_404(served: Served, path: str) -> None:
    body = {"model": "none", "prompt": "a", "tokens": [1]} | {"messages": QUESTION["messages"]}
    if path == "/tokenize":
        del body["prompt"]
    response = await served.http.post(path, json=body)
    assert (response.status_code, response.json()["error"]["code"]) == (404, "model_not_found")


async def test_keys_are_asked_for(serve: Serve) -> None:
    async with serve(api_keys="right") as served:
        response = await served.http.post("/tokenize", json={"prompt": "hello"})
        assert response.status_code == 401
