"""Vectors over HTTP: both encodings, order, usage, and what is refused."""

from __future__ import annotations

import asyncio
import base64
import logging
from collections.abc import AsyncIterator
from typing import Any

import numpy as np
import openai
import pytest

from app.engine.request import ModelStatus
from app.engine.tokenizer import ChatTokenizer
from routing.errors import ErrorCode, WorkError
from tests.support.api_server import Served, serve_engines, settles
from tests.support.fake_embeddings import FINGERPRINT, SIZE, FakeEmbeddings, vector_of
from tests.support.local_engine import ScriptedEngine

PATH = "/v1/embeddings"
BODY: dict[str, Any] = {"model": "librarian", "input": ["hello", "the quick brown fox", "hello world"]}


@pytest.fixture
def librarian(tokenizer: ChatTokenizer) -> FakeEmbeddings:
    return FakeEmbeddings(tokenizer)


@pytest.fixture
async def served(librarian: FakeEmbeddings, scripted: ScriptedEngine) -> AsyncIterator[Served]:
    async with serve_engines(librarian, scripted) as running:
        yield running


async def post(served: Served, **changes: Any) -> Any:
    body = {name: value for name, value in {**BODY, **changes}.items() if value is not None}
    return await served.http.post(PATH, json=body)


async def test_vectors_come_in_the_order_of_their_texts(served: Served, librarian: FakeEmbeddings) -> None:
    answer = (await post(served)).json()
    texts = [librarian.encode(text) for text in BODY["input"]]
    assert answer["object"] == "list"
    assert [one["index"] for one in answer["data"]] == [0, 1, 2]
    assert [one["embedding"] for one in answer["data"]] == [vector_of(text).tolist() for text in texts]
    count = sum(map(len, texts))
    assert answer["usage"] == {"prompt_tokens": count, "total_tokens": count}
    assert answer["model"] == "librarian"


async def test_base64_holds_the_same_little_endian_floats(served: Served) -> None:
    numbers = (await post(served, encoding_format="float")).json()["data"]
    coded = (await post(served, encoding_format="base64")).json()["data"]
    for one, other in zip(numbers, coded, strict=True):
        decoded = np.frombuffer(base64.b64decode(other["embedding"]), dtype="<f4")
        np.testing.assert_array_equal(decoded, np.asarray(one["embedding"], dtype=np.float32))


@pytest.mark.parametrize("encoding", ["float", "base64", openai.omit])
async def test_the_official_client_reads_every_encoding(
    served: Served, librarian: FakeEmbeddings, encoding: Any
) -> None:
    async with served.openai() as client:
        made = await client.embeddings.create(model="librarian", input="hello", encoding_format=encoding)
    expected = vector_of(librarian.encode("hello"))
    if encoding == "base64":
        assert (
            np.frombuffer(base64.b64decode(made.data[0].embedding), dtype="<f4").tolist() == expected.tolist()
        )
    else:
        assert made.data[0].embedding == expected.tolist()


@pytest.mark.parametrize("given", [[5, 6, 7], [[5, 6, 7]]])
async def test_token_ids_are_taken_as_they_are(served: Served, librarian: FakeEmbeddings, given: Any) -> None:
    answer = (await post(served, input=given)).json()
    assert librarian.requests[-1].texts == ((5, 6, 7),)
    assert answer["usage"]["prompt_tokens"] == 3


async def test_an_answer_tells_where_it_was_made(served: Served, librarian: FakeEmbeddings) -> None:
    librarian.replays = 2
    response = await post(served)
    answer = response.json()
    assert (answer["system_fingerprint"], answer["replays"]) == (FINGERPRINT, 2)
    assert answer["route"] == [{"node": "0a1b2c3d", "layers": [1, 6], "path": "direct"}]
    assert "compute;dur=200.0" in response.headers["server-timing"]


async def test_dimensions_reach_the_engine(served: Served, librarian: FakeEmbeddings) -> None:
    librarian.cuts = frozenset({2})
    assert [len(one["embedding"]) for one in (await post(served, dimensions=2)).json()["data"]] == [2, 2, 2]
    assert (await post(served, dimensions=SIZE)).status_code == 200


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        ({"input": None}, "input"),
        ({"input": ""}, "input"),
        ({"input": []}, "input"),
        ({"input": 7}, "input"),
        ({"input": {"text": "a"}}, "input"),
        ({"input": ["a", "b", "c", ""]}, "input.3"),
        ({"input": ["a", 5]}, "input.1"),
        ({"input": ["a", [5]]}, "input.1"),
        ({"input": [[5], "a"]}, "input.1"),
        ({"input": [[5], []]}, "input.1"),
        ({"input": [[5], [True]]}, "input.1"),
        ({"input": [5, -1]}, "input"),
        ({"input": [5, 1.5]}, "input"),
        ({"input": [5, 1 << 40]}, "input"),
        ({"input": ["a"] * 2049}, "input"),
        ({"input": [1] * 300_001}, "input"),
        ({"input": [[1] * 200_000] * 2}, "input"),
        ({"input": "a " * (1 << 20) + "a"}, "input"),
        ({"encoding_format": "int8"}, "encoding_format"),
        ({"dimensions": 0}, "dimensions"),
        ({"dimensions": 3}, "dimensions"),
        ({"dimensions": "5"}, "dimensions"),
        ({"truncate_prompt_tokens": 8}, "truncate_prompt_tokens"),
        ({"input_type": "query"}, "input_type"),
        ({"normalize": False}, "normalize"),
        ({"diffuse": {"pins": []}}, "diffuse.pins"),
        ({"model": "scripted"}, "model"),
    ],
)
async def test_bad_input_is_refused_by_name(
    served: Served, librarian: FakeEmbeddings, changes: dict[str, Any], param: str
) -> None:
    answer = await post(served, **changes)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)
    assert not librarian.requests


@pytest.mark.parametrize(
    ("given", "param"), [("hello " * 40, "input"), (["a"] * 3 + ["hello " * 40], "input.3")]
)
async def test_a_text_past_the_models_length_is_refused_in_words_that_clients_know(
    served: Served, given: Any, param: str
) -> None:
    error = (await post(served, input=given)).json()["error"]
    assert (error["code"], error["param"]) == ("context_length_exceeded", param)
    assert "maximum context length is 32 tokens" in error["message"]


async def test_what_changes_nothing_is_passed_over(served: Served) -> None:
    extras = {"user": "somebody", "normalize": True, "truncate": False, "metadata": {"a": "b"}}
    assert (await post(served, **extras)).status_code == 200


async def test_a_chat_with_a_model_of_vectors_is_refused_by_name(served: Served) -> None:
    answer = await served.ask(model="librarian")
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "model")
    assert PATH in answer.json()["error"]["message"]


async def test_no_model_for_vectors_is_a_404(scripted: ScriptedEngine) -> None:
    async with serve_engines(scripted) as served:
        answer = await post(served)
    assert (answer.status_code, answer.json()["error"]["code"]) == (404, "model_not_found")


async def test_the_list_of_models_says_that_it_makes_vectors(served: Served) -> None:
    card = (await served.http.get("/v1/models/librarian")).json()
    assert card["architecture"] == {"input_modalities": ["text"], "output_modalities": ["embeddings"]}
    assert card["max_model_len"] == 32


async def test_without_a_route_the_client_is_told_to_come_back(
    served: Served, librarian: FakeEmbeddings
) -> None:
    librarian.status = ModelStatus("partial", 6, ((2, 4),))
    answer = await post(served)
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "no_route")
    assert int(answer.headers["retry-after"]) > 0


async def test_a_node_that_fails_is_an_error_and_no_short_list(
    served: Served, librarian: FakeEmbeddings
) -> None:
    def fail(number: int) -> None:
        if number == 1:
            raise WorkError(ErrorCode.HOP_LOST, "gone")

    librarian.before_text = fail
    answer = await post(served)
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "node_lost")
    assert served.gateway.num_running == 0


async def test_leaving_ends_the_work(served: Served, librarian: FakeEmbeddings) -> None:
    librarian.before_text = lambda number: asyncio.Event().wait() if number == 1 else None
    writer = await served.begin(PATH, BODY)
    await settles(lambda: librarian.num_open == 1)
    writer.close()
    await settles(lambda: librarian.num_open == 0 and served.gateway.num_running == 0)
    assert served.metric("diffuse_requests_aborted_total", endpoint=PATH) == 1


async def test_metrics_count_texts_and_tokens(served: Served) -> None:
    tokens = (await post(served)).json()["usage"]["prompt_tokens"]
    labels = {"model": "librarian"}
    assert served.metric("diffuse_embedded_texts_total", **labels) == 3
    assert served.metric("diffuse_prompt_tokens_total", **labels) == tokens
    assert served.metric("diffuse_answers_total", **labels, endpoint=PATH, finish_reason="stop") == 1
    assert served.metric("diffuse_requests_running", **labels) == 0


async def test_texts_never_reach_the_log(served: Served, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    await post(served, input="a secret that nobody reads")
    await post(served, input=["a secret that nobody reads", ""])
    assert "librarian" in caplog.text
    assert "secret" not in caplog.text
