"""A scrape of a gateway that answered nothing tells what may be counted; what clients make up makes no series."""

from __future__ import annotations

import re

import pytest

from app.engine.request import HopUse, RouteHop
from app.engine.tokenizer import ChatTokenizer
from app.known_series import CODES, ENDPOINTS, HEARD
from tests.app.conftest import Serve
from tests.support.api_server import PATH, Served
from tests.support.fake_embeddings import FakeEmbeddings
from tests.support.fake_pictures import FakePictures, fake_sounds, fake_videos
from tests.support.fake_scribe import FakeScribe
from tests.support.local_engine import ScriptedEngine


async def scraped(served: Served) -> list[str]:
    return (await served.http.get("/metrics")).text.splitlines()


async def test_counters_of_a_model_begin_at_zero(served: Served) -> None:
    lines = await scraped(served)
    for name in (
        'answers_total{endpoint="/v1/chat/completions",finish_reason="length",model="scripted"}',
        'generated_tokens_total{model="scripted"}',
        'prompt_tokens_cached_total{model="scripted"}',
        'drafted_tokens_total{model="scripted"}',
        'time_to_first_token_seconds_count{model="scripted"}',
        'requests_running{model="scripted"}',
        'requests_aborted_total{endpoint="/v1/responses"}',
        'requests_limited_total{reason="queue_timeout"}',
    ):
        assert f"diffuse_{name} 0.0" in lines
    for code in CODES:
        assert f'diffuse_request_errors_total{{code="{code}",endpoint="{PATH}"}} 0.0' in lines


async def test_every_kind_of_model_has_its_own(serve: Serve, tokenizer: ChatTokenizer) -> None:
    engines = [FakeEmbeddings(tokenizer), FakePictures(), fake_videos(), fake_sounds(), FakeScribe(tokenizer)]
    async with serve(*engines) as served:  # type: ignore[arg-type]
        lines = await scraped(served)
    for model, endpoint in {
        "librarian": "/v1/embeddings",
        "painter": "/v1/images/generations",
        "filmer": "/v1/videos",
        "composer": "/v1/audio/speech",
        "scribe": "/v1/audio/transcriptions",
    }.items():
        name = f'{{endpoint="{endpoint}",finish_reason="stop",model="{model}"}}'
        assert f"diffuse_answers_total{name} 0.0" in lines
    assert not [line for line in lines if "first_token" in line and "painter" in line]


async def test_endpoints_that_begin_are_routes(served: Served) -> None:
    paths = (await served.http.get("/openapi.json")).json()["paths"]
    assert {*HEARD, *(one for many in ENDPOINTS.values() for one in many)} <= paths.keys()


@pytest.mark.parametrize("count", [120, pytest.param(10_000, marks=pytest.mark.storm)])
async def test_made_up_models_and_paths_make_no_series(served: Served, count: int) -> None:
    await served.ask()
    await served.ask(model="made-up")
    await served.http.get("/made-up")
    before = await scraped(served)
    for number in range(count):
        if number % 2:
            await served.http.get(f"/v1/models/made-up-{number}")
        elif number % 8:
            await served.http.get(
                f"/made-up-{number}?a={number}", headers={"x-request-id": f"made-up-{number}"}
            )
        else:
            await served.ask(model=f"made-up-{number}", user=f"made-up-{number}")
    after = await scraped(served)
    assert not [line for line in after if "made-up" in line]
    assert len(after) <= len(before) + 2  # that unknown models were asked for by their own path


async def test_the_process_tells_of_itself_but_not_of_its_collector(served: Served) -> None:
    lines = await scraped(served)
    named = {match[0] for line in lines if (match := re.match(r"(process|python)_\w+", line))}
    assert {"process_resident_memory_bytes", "process_cpu_seconds_total", "process_open_fds"} <= named
    assert not [name for name in named if name.startswith("python_gc")]


def used(start: int, compute_s: float) -> HopUse:
    return HopUse(RouteHop("0a1b2c3d", start, start + 4), 3, compute_s, 0.0, 0.0, 0.125)


async def test_hops_are_told_by_their_place(served: Served, scripted: ScriptedEngine) -> None:
    scripted.hops = (used(4, 1.5), used(8, 0.25), used(8, 0.5))  # the last took over from the one before
    await served.ask()
    for stage, seconds in (("0", 1.5), ("1", 0.75)):
        labels = {"model": "scripted", "stage": stage, "part": "compute"}
        assert served.metric("diffuse_hop_seconds_total", **labels) == seconds
