"""The committed OpenAPI document says what the gateway does."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from pydantic import BaseModel

from app.api.chat_reply import ChatCompletion
from app.api.health import HealthReport, ReadyReport, VersionReport
from app.api.models import ModelCard, ModelList
from app.api.route import RouteReport
from app.openapi_document import document
from app.stream_shapes import ChatChunk
from tests.support.api_server import Served, chunks_of
from tests.support.local_engine import ScriptedEngine

COMMITTED = Path(__file__).parents[2] / "openapi" / "gateway.json"


def test_the_committed_document_is_the_one_the_gateway_serves() -> None:
    assert COMMITTED.read_text() == document(), "run `make openapi` and commit the result"


@pytest.mark.parametrize(
    ("path", "model"),
    [
        ("/v1/models", ModelList),
        ("/v1/models/scripted", ModelCard),
        ("/health", HealthReport),
        ("/ready", ReadyReport),
        ("/version", VersionReport),
        ("/v1/route", RouteReport),
    ],
)
async def test_each_page_is_as_described(served: Served, path: str, model: type[BaseModel]) -> None:
    body = (await served.http.get(path)).text
    assert model.model_validate_json(body).model_dump_json() == body


async def test_an_answer_is_as_described(served: Served) -> None:
    body = (await served.ask(n=2)).text
    assert ChatCompletion.model_validate_json(body).model_dump_json() == body


@pytest.mark.parametrize("options", [None, {"include_usage": True, "continuous_usage_stats": True}])
async def test_every_chunk_is_as_described(
    served: Served, scripted: ScriptedEngine, options: dict[str, bool] | None
) -> None:
    scripted.prefill_steps = 2
    chunks = chunks_of(await served.stream(n=2, timings_per_token=True, stream_options=options))
    for chunk in chunks:
        assert ChatChunk.model_validate(chunk).model_dump(exclude_unset=True) == chunk


@pytest.mark.parametrize(
    ("path", "methods"),
    [
        ("/v1/videos/video_1", "DELETE, GET, HEAD"),
        ("/v1/videos", "GET, HEAD, POST"),
        ("/health/", "GET, HEAD"),
        ("/chat/completions", "POST"),
    ],
)
async def test_a_refused_method_hears_of_every_other(served: Served, path: str, methods: str) -> None:
    refused = await served.http.request("PATCH", path)
    assert (refused.status_code, refused.headers["allow"]) == (405, methods)


async def test_no_method_that_is_described_is_refused(served: Served) -> None:
    described = (await served.http.get("/openapi.json")).json()["paths"]
    for path, operations in described.items():
        answer = await served.http.request("PATCH", path)
        assert {method.upper() for method in operations} <= set(answer.headers["allow"].split(", "))


async def test_every_reference_leads_somewhere(served: Served) -> None:
    text = (await served.http.get("/openapi.json")).text
    names = set(re.findall(r"#/components/schemas/(\w+)", text))
    assert names <= json.loads(text)["components"]["schemas"].keys()
