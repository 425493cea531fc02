"""The queue in front of the places, as clients see it: who waits, for how long, and what is said to whom."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from app.api.middleware import ApiKeys
from app.api.rate_limit import RateLimit
from app.api.scope import caller_of
from app.engine.shelf import Shelf
from app.gateway import Gateway
from app.metrics import GatewayMetrics
from app.settings import GatewaySettings
from tests.app.conftest import Serve
from tests.app.test_api_keys import ANNA, BERT, bearer, entry, write
from tests.support.api_server import PATH, QUESTION, Served, events_of, serve_engines, settles
from tests.support.fake_pictures import FakePictures
from tests.support.local_engine import ScriptedEngine


class Held:
    """A scripted engine whose answers wait until they are let go, one at a time or all."""

    def __init__(self, scripted: ScriptedEngine) -> None:
        self.scripted = scripted
        self._gates: list[asyncio.Event] = []
        scripted.before_token = self._before

    @property
    def tenants(self) -> list[bytes]:
        """Who was answered, in order."""
        return [request.tenant for request in self.scripted.requests]

    async def let_go(self, number: int) -> None:
        """End the answer of this number, once it has begun."""
        await settles(lambda: len(self._gates) > number)
        self._gates[number].set()

    def let_all_go(self) -> None:
        self.scripted.before_token = lambda number: None
        for gate in self._gates:
            gate.set()

    def _before(self, number: int) -> object:
        if number != 0:
            return None
        self._gates.append(gate := asyncio.Event())
        return gate.wait()


@pytest.fixture
def held(scripted: ScriptedEngine) -> Held:
    return Held(scripted)


@asynccontextmanager
async def asking(
    served: Served, num: int, **changes: Any
) -> AsyncIterator[list[asyncio.Task[httpx.Response]]]:
    """Requests that are sent one after the other, each when the one before has its place or waits."""
    tasks: list[asyncio.Task[httpx.Response]] = []
    for number in range(num):
        before = served.gateway.num_running + served.gateway.places.num_queued
        tasks.append(asyncio.create_task(served.ask(**changes)))
        await settles(lambda: served.gateway.num_running + served.gateway.places.num_queued > before)  # noqa: B023
        assert number < num
    yield tasks
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def code_of(response: httpx.Response) -> tuple[int, str]:
    return response.status_code, response.json()["error"]["code"]


async def test_who_finds_no_place_waits_for_one(serve: Serve, held: Held) -> None:
    async with serve(max_requests=1) as served, asking(served, 3) as tasks:
        assert served.gateway.places.num_queued == 2
        assert served.metric("diffuse_requests_queued") == 2
        for number in range(3):
            await held.let_go(number)
        assert [response.status_code for response in await asyncio.gather(*tasks)] == [200, 200, 200]
        assert served.metric("diffuse_requests_queued") == 0
        assert served.metric("diffuse_queue_seconds_count") == 3
        assert served.metric("diffuse_queue_seconds_bucket", le="0.001") == 1
    assert held.scripted.num_opened == 3


async def test_a_full_queue_says_at_once_when_to_come_again_and_what_number_one_would_have(
    serve: Serve, held: Held
) -> None:
    async with serve(max_requests=1, max_queued=2) as served, asking(served, 3):
        refused = await served.ask()
        assert code_of(refused) == (503, "overloaded")
        assert 1 <= int(refused.headers["retry-after"]) <= 30
        message = refused.json()["error"]["message"]
        assert "its queue is full: this request would be number 3" in message
        assert f"in about {refused.headers['retry-after']} s" in message
        assert served.metric("diffuse_requests_limited_total", reason="overloaded") == 1


async def test_nobody_waits_longer_than_the_gateway_says(serve: Serve, held: Held) -> None:
    async with serve(max_requests=1, queue_timeout_s=0.05) as served, asking(served, 1):
        refused = await served.ask()
        assert code_of(refused) == (503, "queue_timeout")
        assert 1 <= int(refused.headers["retry-after"]) <= 30
        assert served.metric("diffuse_requests_limited_total", reason="queue_timeout") == 1
        assert served.gateway.places.num_queued == 0
        record = await served.http.get(f"/v1/requests/{refused.headers['x-request-id']}")
        assert (record.json()["status"], record.json()["error"]) == ("failed", "queue_timeout")


async def test_a_client_that_waits_only_a_little_hears_before_it_gives_up(serve: Serve, held: Held) -> None:
    async with serve(max_requests=1, queue_timeout_s=60) as served, asking(served, 1):
        patience = {"x-stainless-read-timeout": "0.2"}
        refused = await served.http.post(PATH, json=QUESTION, headers=patience, timeout=5)
        assert code_of(refused) == (503, "queue_timeout")


@pytest.mark.parametrize("told", ["600", "0", "-1", "nan", "x", "None", ""])
async def test_a_clients_patience_that_is_none_changes_nothing(serve: Serve, held: Held, told: str) -> None:
    async with serve(max_requests=1, queue_timeout_s=0.05) as served, asking(served, 1):
        headers = {"x-stainless-read-timeout": told}
        assert code_of(await served.http.post(PATH, json=QUESTION, headers=headers)) == (503, "queue_timeout")


@pytest.mark.parametrize("settings", [{"max_queued": 0}, {"queue_timeout_s": 0}])
async def test_where_nobody_may_wait_one_is_refused_at_once(
    serve: Serve, held: Held, settings: dict[str, Any]
) -> None:
    async with serve(max_requests=1, **settings) as served, asking(served, 1):
        assert code_of(await served.ask()) == (503, "overloaded")


async def test_keys_take_turns_however_many_requests_one_sends(
    serve: Serve, held: Held, tmp_path: Path
) -> None:
    write(path := tmp_path / "keys.toml", entry("anna", ANNA), entry("bert", BERT))
    async with serve(max_requests=1, keys_file=path) as served:
        tasks = []
        for key in (ANNA, ANNA, ANNA, ANNA, BERT):
            tasks.append(asyncio.create_task(served.http.post(PATH, json=QUESTION, headers=bearer(key))))
            places = served.gateway.places
            await settles(lambda: places.num_taken + places.num_queued == len(tasks))  # noqa: B023
        for number in range(5):
            await held.let_go(number)
        await asyncio.gather(*tasks)
    anna, bert = held.tenants[0], next(one for one in held.tenants if one != held.tenants[0])
    assert held.tenants == [anna, anna, bert, anna, anna]


async def test_a_request_for_many_answers_waits_for_all_its_places_and_is_not_passed(
    serve: Serve, held: Held
) -> None:
    async with (
        serve(max_requests=2) as served,
        asking(served, 2) as first,
        asking(served, 1, n=2) as large,
        asking(served, 1) as small,
    ):
        await held.let_go(0)
        await first[0]
        await asyncio.sleep(0.02)
        assert (served.gateway.num_running, held.scripted.num_opened) == (1, 2)
        for number in (1, 2, 3, 4):
            await held.let_go(number)
        assert len((await large[0]).json()["choices"]) == 2
        assert (await small[0]).status_code == 200


async def test_a_client_that_leaves_the_queue_frees_its_place_there(serve: Serve, held: Held) -> None:
    async with serve(max_requests=1, max_queued=1) as served, asking(served, 1) as first:
        for stream in (False, True):
            async with asking(served, 1, stream=stream):
                assert served.gateway.places.num_queued == 1
            await settles(lambda: served.gateway.places.num_queued == 0)
        assert served.metric("diffuse_requests_aborted_total", endpoint=PATH) == 2
        await held.let_go(0)
        assert (await first[0]).status_code == 200
    assert held.scripted.num_opened == 1


async def test_a_stream_that_waits_is_silent_at_first_and_then_shows_that_it_lives(
    serve: Serve, held: Held
) -> None:
    async with serve(max_requests=1, keepalive_s=0.08, heartbeat_s=0.2) as served, asking(served, 1) as first:
        async with served.http.stream("POST", PATH, json=QUESTION | {"stream": True}) as response:
            pieces = response.aiter_text()
            text = await anext(pieces)
            while "keep-alive" not in text or text.count('"delta":{}') < 1:
                text += await anext(pieces)
            assert held.scripted.num_opened == 1  # it still waits
            held.let_all_go()
            async for piece in pieces:
                text += piece
        assert (await first[0]).status_code == 200
    events = events_of(text)
    assert isinstance(events[0], dict)
    assert events[0]["choices"][0]["delta"]["role"] == "assistant"
    assert events[-1] == "[DONE]"
    roles = [
        event for event in events if isinstance(event, dict) and event["choices"][0]["delta"].get("role")
    ]
    assert len(roles) == 1


async def test_a_stream_that_gets_no_place_before_it_opens_is_an_ordinary_503(
    serve: Serve, held: Held
) -> None:
    async with serve(max_requests=1, queue_timeout_s=0.05) as served, asking(served, 1):
        assert code_of(await served.ask(stream=True)) == (503, "queue_timeout")


async def test_a_stream_that_gets_no_place_after_it_opened_says_so_in_it(serve: Serve, held: Held) -> None:
    async with serve(max_requests=1, queue_timeout_s=0.2, keepalive_s=0.04) as served, asking(served, 1):
        events = await served.stream()
        assert isinstance(events[-1], dict)
        assert events[-1]["error"]["code"] == "queue_timeout"


async def test_pictures_wait_for_the_same_places(scripted: ScriptedEngine, held: Held) -> None:
    async with serve_engines(scripted, FakePictures(), max_requests=1, keepalive_s=0.05) as served:
        async with asking(served, 1):
            body = {"prompt": "a fox", "stream": True}
            async with served.http.stream("POST", "/v1/images", json=body) as response:
                pieces = response.aiter_text()
                assert await anext(pieces) == ": keep-alive\n\n"
                held.let_all_go()
                text = "".join([piece async for piece in pieces])
        assert "image_generation.completed" in text


def test_what_admits_a_request_costs_a_tenth_of_a_millisecond_at_most() -> None:
    """The key among a thousand, the rate, the place and back: of one request that nothing limits."""

    async def answer(scope: Any, receive: Any, send: Any) -> None:
        async with gateway.admit(caller_of(scope), 1) as entrance:
            assert await entrance.is_in(1.0)

    async def cpu_s(num_requests: int) -> float:
        headers = [(b"authorization", b"Bearer key-500"), (b"x-stainless-read-timeout", b"600")]
        began = time.process_time()
        for _ in range(num_requests):
            scope = {"type": "http", "method": "POST", "path": PATH, "headers": headers}
            await app(scope, None, None)  # type: ignore[arg-type]
        return (time.process_time() - began) / num_requests

    keys = ",".join(f"key-{number}" for number in range(1000))
    gateway = Gateway(GatewaySettings(api_keys=keys), Shelf({}), GatewayMetrics())
    app = ApiKeys(RateLimit(answer, gateway), gateway.keys, metrics_are_open=True)
    assert min(asyncio.run(cpu_s(500)) for _ in range(3)) < 100e-6


# Stopping ---------------------------------------------------------------------------------------------------


async def test_a_gateway_that_stops_refuses_those_who_wait_at_once_and_ends_those_who_run(
    serve: Serve, held: Held
) -> None:
    async with serve(max_requests=1, drain_s=0.2) as served, asking(served, 2) as tasks:
        running, waiting = tasks
        draining = asyncio.create_task(served.gateway.drain())
        refused = await asyncio.wait_for(waiting, 0.15)
        assert code_of(refused) == (503, "shutting_down")
        assert "retry-after" in refused.headers
        assert not running.done()
        assert (await served.http.get("/health")).status_code == 503
        assert code_of(await served.ask()) == (503, "shutting_down")
        await draining
        assert code_of(await running) == (503, "shutting_down")
    assert held.scripted.num_opened == 1


async def test_a_stream_that_runs_when_the_gateway_stops_ends_with_an_error_in_it(
    serve: Serve, scripted: ScriptedEngine
) -> None:
    scripted.before_token = lambda number: asyncio.Event().wait() if number == 3 else None
    async with serve(drain_s=0.05) as served:
        running = asyncio.create_task(served.ask(stream=True))
        await settles(lambda: served.gateway.num_running == 1)
        await served.gateway.drain()
        last = (await running).text.removesuffix("\n\n").split("\n\n")[-1]
        assert json.loads(last.removeprefix("data: "))["error"]["code"] == "shutting_down"
