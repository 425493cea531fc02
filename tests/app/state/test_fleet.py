"""Two gateways over one Redis, as behind one Service: whichever is asked answers alike."""

from __future__ import annotations

import asyncio
import io
import re
from collections.abc import AsyncIterator
from typing import Any

import pytest
from PIL import Image

from app.engine.request import TextEngine
from app.jobs import runner
from app.state import redis_server, redis_state
from tests.app.test_videos import BODY, PATH, hold, job_of, over, post
from tests.support.api_server import Served, events_of, serve_engines, settles
from tests.support.fake_pictures import FakePictures, fake_videos
from tests.support.local_engine import ScriptedEngine
from tests.support.redis_server import RedisProcess

KEYS = ("a" * 20, "b" * 20)
MINE, OTHERS = ({"authorization": f"Bearer {key}"} for key in KEYS)


@pytest.fixture(autouse=True)
def hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "TELL_S", 0.05)
    monkeypatch.setattr(runner, "LOOK_S", 0.05)


@pytest.fixture
def filmer() -> FakePictures:
    """Of the first gateway."""
    return fake_videos()


@pytest.fixture
async def fleet(
    redis: RedisProcess, filmer: FakePictures, scripted: ScriptedEngine
) -> AsyncIterator[tuple[Served, Served]]:
    """Without keys: all requests are one caller's."""
    async with gateway(redis, filmer, scripted) as one, gateway(redis, fake_videos(), scripted) as other:
        yield one, other


def gateway(redis: RedisProcess, filmer: FakePictures, scripted: TextEngine, **settings: Any) -> Any:
    return serve_engines(filmer, scripted, FakePictures(), state=redis.url, **settings)


async def test_requests_of_a_minute_are_counted_over_the_fleet(
    redis: RedisProcess, filmer: FakePictures, scripted: ScriptedEngine
) -> None:
    limited: dict[str, Any] = {"api_keys": KEYS, "requests_per_minute": 3}
    async with (
        gateway(redis, filmer, scripted, **limited) as one,
        gateway(redis, fake_videos(), scripted, **limited) as other,
    ):
        body = {"model": "scripted", "messages": [{"role": "user", "content": "hello"}]}
        answers = [
            await served.http.post("/v1/chat/completions", json=body, headers=MINE)
            for served in (one, other, one, other)
        ]
        assert [answer.status_code for answer in answers] == [200, 200, 200, 429]
        assert 0 < int(answers[-1].headers["retry-after"]) <= 60
        theirs = await other.http.post("/v1/chat/completions", json=body, headers=OTHERS)
        assert theirs.status_code == 200


async def test_answers_at_once_are_counted_over_the_fleet_and_freed_by_a_death(
    redis: RedisProcess, filmer: FakePictures, scripted: ScriptedEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    limited: dict[str, Any] = {"api_keys": KEYS, "max_requests_per_key": 1}
    release = asyncio.Event()
    painter = FakePictures()
    painter.before_step = lambda number: release.wait() if number == 1 else None
    body = {"model": "painter", "prompt": "a circle"}
    async with (
        serve_engines(painter, state=redis.url, **limited) as one,
        serve_engines(FakePictures(), state=redis.url, **limited) as other,
    ):
        asking = asyncio.create_task(one.http.post("/v1/images/generations", json=body, headers=MINE))
        await settles(lambda: painter.num_open == 1)
        refused = await other.http.post("/v1/images/generations", json=body, headers=MINE)
        assert (refused.status_code, refused.json()["error"]["code"]) == (429, "concurrency_limit_exceeded")
        await die(one, monkeypatch)
        async with asyncio.timeout(5):
            while (
                await other.http.post("/v1/images/generations", json=body, headers=MINE)
            ).status_code != 200:
                await asyncio.sleep(0.05)
        release.set()
        await asking


async def die(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """Be as a gateway that was killed and whose lease is over: it says no more that it lives."""

    async def nothing() -> None:
        pass

    state = served.gateway.state
    monkeypatch.setattr(state, "beat", nothing)
    await redis_client(served).pexpire(redis_state.ALIVE + state.gateway_id, 1)


async def test_a_video_made_at_one_gateway_is_listed_sent_and_deleted_at_the_other(
    fleet: tuple[Served, Served],
) -> None:
    one, other = fleet
    job = await post(one)
    done = await over(other, job["id"])
    assert done == await job_of(one, job["id"])
    assert [found["id"] for found in (await other.http.get(PATH)).json()["data"]] == [job["id"]]
    path = f"{PATH}/{job['id']}/content"
    whole, at_home = (await other.http.get(path)), (await one.http.get(path))
    assert whole.content == at_home.content
    assert len(whole.content) > 1000
    piece = await other.http.get(path, headers={"range": "bytes=5-99"})
    assert (piece.status_code, piece.content) == (206, whole.content[5:100])
    sheet = await other.http.get(path, params={"variant": "spritesheet"})
    assert Image.open(io.BytesIO(sheet.content)).format == "WEBP"
    assert (await other.http.delete(f"{PATH}/{job['id']}")).json()["deleted"] is True
    for served in fleet:
        assert (await served.http.get(f"{PATH}/{job['id']}")).status_code == 404
        assert (await served.http.get(path)).status_code == 404


async def test_progress_early_looks_and_events_come_from_any_gateway(
    fleet: tuple[Served, Served], filmer: FakePictures
) -> None:
    one, other = fleet
    release = hold(filmer, 3)
    job = await post(one)
    async with asyncio.timeout(5):
        while (await job_of(other, job["id"]))["step"] != 3:
            await asyncio.sleep(0.02)
    told = await other.http.get(f"{PATH}/{job['id']}")
    assert (told.json()["status"], told.json()["progress"]) == ("in_progress", 71)
    assert int(told.headers["openai-poll-after-ms"]) >= 500
    path = f"{PATH}/{job['id']}/content"
    async with asyncio.timeout(5):
        while (early := await other.http.get(path, params={"variant": "thumbnail"})).status_code == 409:
            await asyncio.sleep(0.02)
    assert Image.open(io.BytesIO(early.content)).format == "WEBP"
    reading = asyncio.create_task(other.http.get(f"{PATH}/{job['id']}/events"))
    await asyncio.sleep(0.1)
    release.set()
    events = events_of((await reading).text)
    assert events[-1] == "[DONE]"
    statuses = [event["status"] for event in events if isinstance(event, dict)]
    assert (statuses[0], statuses[-1]) == ("in_progress", "completed")


async def test_deleting_at_one_gateway_cancels_what_runs_at_the_other(
    fleet: tuple[Served, Served], filmer: FakePictures
) -> None:
    one, other = fleet
    hold(filmer)
    running, waiting = [(await post(one))["id"] for _ in range(2)]
    await settles(lambda: filmer.num_open == 1)
    for job_id in (waiting, running):
        assert (await other.http.delete(f"{PATH}/{job_id}")).status_code == 200
    await settles(lambda: filmer.num_open == 0 and not one.jobs._running)
    assert len(filmer.requests) == 1
    assert (await one.http.get(PATH)).json()["data"] == []


async def test_jobs_of_a_gateway_that_died_have_failed(
    fleet: tuple[Served, Served], filmer: FakePictures, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, other = fleet
    hold(filmer)
    job = await post(one)
    await settles(lambda: filmer.num_open == 1)
    assert (await job_of(other, job["id"]))["status"] in ("queued", "in_progress")
    await die(one, monkeypatch)
    failed = await over(other, job["id"])
    assert (failed["status"], failed["error"]["code"]) == ("failed", "interrupted")
    assert failed["expires_at"] is not None
    await settles(lambda: filmer.num_open == 0)  # should it live after all, it gives up
    assert (await job_of(one, job["id"]))["error"]["code"] == "interrupted"


async def test_a_request_is_told_of_at_any_gateway_to_its_key_alone(
    redis: RedisProcess, filmer: FakePictures, scripted: ScriptedEngine
) -> None:
    async with (
        gateway(redis, filmer, scripted, api_keys=KEYS) as one,
        gateway(redis, fake_videos(), scripted, api_keys=KEYS) as other,
    ):
        body = {"model": "scripted", "messages": [{"role": "user", "content": "secretive"}]}
        answer = await one.http.post("/v1/chat/completions", json=body, headers=MINE)
        for some_id in (answer.headers["x-request-id"], answer.json()["id"]):
            path = f"/v1/requests/{some_id}"
            await kept(one)
            told = await other.http.get(path, headers=MINE)
            assert told.json() == (await one.http.get(path, headers=MINE)).json()
            assert told.json()["status"] == "finished"
            assert (await other.http.get(path, headers=OTHERS)).status_code == 404
        client = redis_client(one)
        stored = [await client.get(name) for name in await client.keys("diffuse:records:value:*")]
        assert len(stored) == 2
        assert not [value for value in stored if b"secretive" in value]


async def test_a_running_request_is_told_of_and_ends_with_its_gateway(
    fleet: tuple[Served, Served], monkeypatch: pytest.MonkeyPatch, scripted: ScriptedEngine
) -> None:
    one, other = fleet
    release = asyncio.Event()
    scripted.before_token = lambda number: release.wait() if number == 1 else None  # type: ignore[assignment]
    asking = asyncio.create_task(one.ask(user="x"))
    await settles(lambda: one.gateway.num_running == 1)
    (record,) = {id(record): record for record in one.gateway.records._live.values()}.values()
    await kept(one)
    path = f"/v1/requests/{record.request_id}"
    assert (await other.http.get(path)).json()["status"] == "running"
    await die(one, monkeypatch)
    async with asyncio.timeout(5):
        while (told := (await other.http.get(path)).json())["status"] == "running":
            await asyncio.sleep(0.05)
    assert (told["status"], told["error"]) == ("failed", "interrupted")
    release.set()
    await asking


async def test_a_picture_under_a_url_is_sent_by_any_gateway(fleet: tuple[Served, Served]) -> None:
    one, other = fleet
    body = {"model": "painter", "prompt": "a circle", "response_format": "url"}
    url = (await one.http.post("/v1/images/generations", json=body)).json()["data"][0]["url"]
    path = re.sub(r"^https?://[^/]+", "", url)
    picture = await other.http.get(path)
    assert Image.open(io.BytesIO(picture.content)).size == (64, 48)
    assert 0 < int(picture.headers["cache-control"].removeprefix("private, max-age=")) <= 3600


async def test_the_bound_of_bytes_is_the_fleets(
    redis: RedisProcess, filmer: FakePictures, scripted: ScriptedEngine
) -> None:
    small: dict[str, Any] = {"videos_bytes": 1 << 16}
    async with (
        gateway(redis, filmer, scripted, **small) as one,
        gateway(redis, fake_videos(), scripted, **small) as other,
    ):
        ids = []
        for number in range(8):
            job = await post((one, other)[number % 2], seed=number)
            await over(one, job["id"])
            ids.append(job["id"])
        left = [job["id"] for job in (await one.http.get(PATH)).json()["data"]]
        assert left == ids[::-1][: len(left)]
        assert 0 < len(left) < 8
        client = redis_client(one)
        sizes = [await client.strlen(name) for name in await client.keys("diffuse:job:*:*.*:*")]
        assert sum(sizes) <= 1 << 16


async def test_a_store_that_is_away_takes_no_answer_down(
    own_redis: RedisProcess, filmer: FakePictures, scripted: ScriptedEngine
) -> None:
    limited: dict[str, Any] = {"api_keys": KEYS, "requests_per_minute": 1, "max_requests_per_key": 1}
    async with gateway(own_redis, filmer, scripted, **limited) as served:
        own_redis.stop()
        body = {"model": "scripted", "messages": [{"role": "user", "content": "hello"}]}
        for _ in range(3):
            answer = await served.http.post("/v1/chat/completions", json=body, headers=MINE)
            assert answer.status_code == 200
        for path in (PATH, f"{PATH}/video_1", "/v1/requests/unknown"):
            refused = await served.http.get(path, headers=MINE)
            assert (refused.status_code, refused.json()["error"]["code"]) == (503, "state_unavailable")
            assert "retry-after" in refused.headers
        refused = await served.http.post(PATH, json=BODY, headers=MINE)
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "state_unavailable")
        assert served.metric("diffuse_state_errors_total", part="limits") >= 1
        assert served.metric("diffuse_state_errors_total", part="jobs") >= 1
        own_redis.start()
        await asyncio.sleep(1.0)  # it is left alone so long
        codes = [
            (await served.http.post("/v1/chat/completions", json=body, headers=MINE)).status_code
            for _ in range(2)
        ]
        assert codes == [200, 429]


async def test_a_video_outlasts_a_store_that_goes_for_a_moment(
    own_redis: RedisProcess,
    filmer: FakePictures,
    scripted: ScriptedEngine,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(redis_server, "ANSWER_S", 0.1)
    release = hold(filmer, 3)
    async with gateway(own_redis, filmer, scripted) as served:
        job = await post(served)
        await settles(lambda: filmer.num_open == 1)
        own_redis.pause()
        release.set()
        await settles(lambda: served.metric("diffuse_state_errors_total", part="jobs") > 1)
        own_redis.go_on()
        assert (await over(served, job["id"]))["status"] == "completed"


async def test_a_store_without_room_fails_the_job_with_the_reason(
    own_redis: RedisProcess, filmer: FakePictures, scripted: ScriptedEngine
) -> None:
    release = hold(filmer, 3)
    async with gateway(own_redis, filmer, scripted) as served:
        job = await post(served)
        await settles(lambda: filmer.num_open == 1)
        await redis_client(served).config_set("maxmemory", 1)
        release.set()
        await settles(lambda: not served.jobs._running)
        await redis_client(served).config_set("maxmemory", 0)
        await served.jobs.store.sweep()
        told = await job_of(served, job["id"])
        assert (told["status"], told["error"]["code"]) == ("failed", "storage_full")


async def kept(served: Served) -> None:
    """Wait until the records of a gateway are in the store."""
    await settles(lambda: not served.gateway.records._unkept)
    await served.gateway.records.close()


def redis_client(served: Served) -> Any:
    return served.gateway.state._server.client
