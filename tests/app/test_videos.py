"""Video jobs, mostly through the official client: asked for, looked at, fetched, let go, and kept over a restart."""

from __future__ import annotations

import asyncio
import errno
import io
import json
import os
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import av
import openai
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from starlette.requests import Request
from starlette.responses import StreamingResponse

from app import whole_file
from app.api.errors import ApiError
from app.api.file_answer import file_answer
from app.api.multipart import parse_form
from app.api.video_protocol import FORM_TYPES, VideoJob, VideoList
from app.engine.request import ModelStatus
from app.jobs import runner
from app.jobs.job import Job
from app.jobs.store import JobStore
from app.state.state import JobBounds, JobRow, StateError
from routing.errors import NoRouteError
from tests.support.api_server import Served, events_of, serve_engines, settles
from tests.support.fake_pictures import FakePictures, fake_videos

PATH = "/v1/videos"
BODY: dict[str, Any] = {"model": "filmer", "prompt": "waves", "seed": 3}
REQUIRED = {
    "id", "object", "model", "status", "progress", "created_at", "completed_at", "expires_at", "prompt", "size",
    "seconds", "remixed_from_video_id", "error",
}  # fmt: skip

ROOMY = JobBounds(1000, 1 << 30, 3600.0)

pytestmark = pytest.mark.filterwarnings("ignore:The Sora API:DeprecationWarning")


@pytest.fixture
def filmer() -> FakePictures:
    return fake_videos()


@pytest.fixture
async def served(filmer: FakePictures, tmp_path: Path) -> AsyncIterator[Served]:
    async with serve_engines(filmer, FakePictures(), videos_dir=tmp_path / "videos") as running:
        yield running


async def post(served: Served, **changes: Any) -> dict[str, Any]:
    body = {name: value for name, value in {**BODY, **changes}.items() if value is not None}
    answer = await served.http.post(PATH, json=body)
    assert answer.status_code == 200, answer.text
    return dict(answer.json())


async def job_of(served: Served, job_id: str) -> dict[str, Any]:
    return dict((await served.http.get(f"{PATH}/{job_id}")).json())


async def over(served: Served, job_id: str) -> dict[str, Any]:
    """Wait until a job is over, as a client does."""
    async with asyncio.timeout(10):
        while (job := await job_of(served, job_id))["status"] in ("queued", "in_progress"):
            await asyncio.sleep(0.01)
    return job


def hold(filmer: FakePictures, at: int = 2) -> asyncio.Event:
    """Have the engine wait before a step until the event is set."""
    release = asyncio.Event()
    filmer.before_step = lambda number: release.wait() if number == at else None
    return release


async def test_the_official_client_makes_polls_fetches_and_deletes(client: openai.AsyncOpenAI) -> None:
    video = await client.videos.create_and_poll(
        model="filmer", prompt="waves", size="64x32", extra_body={"steps": 6, "seed": 3}, poll_interval_ms=20
    )
    assert (video.status, video.progress, video.size, video.seconds) == ("completed", 100, "64x32", "1.125")
    assert video.model_extra is not None
    assert (video.model_extra["seed"], video.model_extra["steps"]) == (3, 6)
    content = (await client.videos.download_content(video.id)).content
    with av.open(io.BytesIO(content)) as film:
        stream = film.streams.video[0]
        assert (stream.codec.name, stream.width, stream.height, stream.frames) == ("h264", 64, 32, 9)
    assert [one.id async for one in client.videos.list()] == [video.id]
    deleted = await client.videos.delete(video.id)
    assert (deleted.deleted, deleted.object) == (True, "video.deleted")
    with pytest.raises(openai.NotFoundError):
        await client.videos.retrieve(video.id)


async def test_json_and_form_ask_the_same(served: Served, filmer: FakePictures) -> None:
    fields: dict[str, Any] = {"num_frames": 5, "guidance_scale": 2.5, "extrapolate": True, "patches": 2}
    await over(served, (await post(served, **fields, diffuse={"max_hops": 2}))["id"])
    form = {name: (None, json.dumps(value)) for name, value in fields.items()}
    form |= {name: (None, str(value)) for name, value in BODY.items()}
    form["diffuse[max_hops]"] = (None, "2")
    answer = await served.http.post(PATH, files=form)
    assert answer.status_code == 200, answer.text
    await over(served, answer.json()["id"])
    first, second = filmer.requests
    names = ("prompt", "seed", "num_frames", "guidance_scale", "extrapolate", "patches", "route")
    assert [getattr(first, name) for name in names] == [getattr(second, name) for name in names]


@pytest.mark.parametrize(("seconds", "told"), [("2", "2"), (2.5, "2.5"), (None, "1.125")])
async def test_seconds_may_be_text_or_number_and_are_told_as_text(
    served: Served, filmer: FakePictures, seconds: Any, told: str
) -> None:
    hold(filmer)
    job = await post(served, seconds=seconds)
    assert job["seconds"] == told


async def test_a_job_has_every_required_key_from_the_beginning(served: Served, filmer: FakePictures) -> None:
    hold(filmer, -1)
    job = await post(served)
    assert job.keys() >= REQUIRED
    assert (job["status"], job["progress"], job["error"], job["expires_at"]) == ("queued", 0, None, None)
    assert VideoJob.model_validate(job).model_dump(mode="json") == job


async def test_progress_and_the_time_to_look_again_are_told(served: Served, filmer: FakePictures) -> None:
    release = hold(filmer)
    job = await post(served)
    await settles(lambda: filmer.num_open == 1)
    async with asyncio.timeout(3):
        while (await job_of(served, job["id"]))["progress"] != 47:  # 2 of 4 steps, of 95 percent
            await asyncio.sleep(0.01)
    answer = await served.http.get(f"{PATH}/{job['id']}")
    assert answer.json()["status"] == "in_progress"
    assert 500 <= int(answer.headers["openai-poll-after-ms"]) <= 10_000
    release.set()
    done = await over(served, job["id"])
    assert "openai-poll-after-ms" not in (await served.http.get(f"{PATH}/{job['id']}")).headers
    assert done["expires_at"] - done["completed_at"] == 24 * 3600


async def test_events_tell_each_step_and_end_when_the_job_does(served: Served, filmer: FakePictures) -> None:
    release = hold(filmer, 0)
    job = await post(served, patches=2)
    reading = asyncio.create_task(served.http.get(f"{PATH}/{job['id']}/events"))
    await asyncio.sleep(0.05)
    release.set()
    events = events_of((await reading).text)
    assert events[-1] == "[DONE]"
    told = [event for event in events if isinstance(event, dict)]
    assert told[-1]["status"] == "completed"
    assert {event["step"] for event in told} >= {4} or told[-2]["progress"] == 95
    assert "two streams" in next(event["patches"] for event in told if event["patches"])


async def test_an_early_look_is_there_before_the_video(served: Served, filmer: FakePictures) -> None:
    release = hold(filmer, 3)
    job = await post(served)
    path = f"{PATH}/{job['id']}/content"
    async with asyncio.timeout(3):
        while (answer := await served.http.get(path, params={"variant": "thumbnail"})).status_code == 409:
            await asyncio.sleep(0.01)
    assert Image.open(io.BytesIO(answer.content)).format == "WEBP"
    early = await served.http.get(path)
    assert (early.status_code, early.json()["error"]["code"]) == (409, "video_not_ready")
    release.set()
    await over(served, job["id"])
    sheet = await served.http.get(path, params={"variant": "spritesheet"})
    assert Image.open(io.BytesIO(sheet.content)).size == (4 * 64, 3 * 48)
    assert (await served.http.get(path, params={"variant": "sound"})).json()["error"]["param"] == "variant"


async def test_content_comes_in_ranges(served: Served) -> None:
    job = await over(served, (await post(served))["id"])
    path = f"{PATH}/{job['id']}/content"
    whole = await served.http.get(path)
    size = len(whole.content)
    assert (whole.headers["content-type"], whole.headers["accept-ranges"]) == ("video/mp4", "bytes")
    for asked, start, end in (
        ("0-9", 0, 10),
        ("10-", 10, size),
        ("-5", size - 5, size),
        ("5-999999", 5, size),
    ):
        piece = await served.http.get(path, headers={"range": f"bytes={asked}"})
        assert piece.status_code == 206
        assert piece.headers["content-range"] == f"bytes {start}-{end - 1}/{size}"
        assert piece.content == whole.content[start:end]
    beyond = await served.http.get(path, headers={"range": f"bytes={size}-"})
    assert (beyond.status_code, beyond.headers["content-range"]) == (416, f"bytes */{size}")
    assert beyond.json()["error"]["code"] == "invalid_range"
    several = await served.http.get(path, headers={"range": "bytes=0-1,4-5"})
    assert (several.status_code, several.content) == (200, whole.content)
    changed = await served.http.get(path, headers={"range": "bytes=0-1", "if-range": '"other"'})
    assert changed.status_code == 200
    head = await served.http.head(path)
    assert (head.headers["content-length"], head.content) == (str(size), b"")


async def test_jobs_wait_for_their_turn_and_come_in_order(served: Served, filmer: FakePictures) -> None:
    release = hold(filmer, 0)
    jobs = [await post(served, seed=seed) for seed in range(3)]
    await settles(lambda: filmer.num_open == 1)
    statuses = [(await job_of(served, job["id"]))["status"] for job in jobs]
    assert statuses == ["in_progress", "queued", "queued"]
    release.set()
    for job in jobs:
        await over(served, job["id"])
    assert [request.seed for request in filmer.requests] == [0, 1, 2]


async def test_a_job_waits_for_a_model_that_made_room_for_another(
    filmer: FakePictures, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with serve_engines(filmer, load_wait_s=0.02) as served:
        await wait_for_the_model(served, filmer, monkeypatch)


async def wait_for_the_model(served: Served, filmer: FakePictures, monkeypatch: pytest.MonkeyPatch) -> None:
    release = hold(filmer, 0)
    first, second = [(await post(served))["id"] for _ in range(2)]
    await settles(lambda: filmer.num_open == 1)
    monkeypatch.setattr(runner, "OPENING_S", 0.02)
    filmer.status = ModelStatus("loading", 8)
    library, real = served.gateway.library, served.gateway.library.engine

    async def slow(name: str) -> Any:
        return await real(name) if filmer.status.is_ready else await asyncio.Event().wait()

    monkeypatch.setattr(library, "engine", slow)
    release.set()
    await over(served, first)
    await asyncio.sleep(0.1)
    assert (await job_of(served, second))["status"] == "in_progress"
    filmer.status = ModelStatus("ready", 8)
    assert (await over(served, second))["status"] == "completed"


async def test_more_jobs_than_may_wait_are_a_503(filmer: FakePictures) -> None:
    hold(filmer, 0)
    async with serve_engines(filmer, videos_waiting=2) as served:
        for _ in range(2):
            await post(served)
        answer = await served.http.post(PATH, json=BODY)
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "overloaded")
        assert "retry-after" in answer.headers


@pytest.fixture
def slow_store(monkeypatch: pytest.MonkeyPatch) -> None:
    real = JobStore.add

    async def slow(store: JobStore, job: Job) -> None:
        await asyncio.sleep(0.05)
        await real(store, job)

    monkeypatch.setattr(JobStore, "add", slow)


@pytest.mark.usefixtures("slow_store")
async def test_no_more_jobs_than_may_wait_are_taken_at_the_same_time(filmer: FakePictures) -> None:
    hold(filmer, 0)
    async with serve_engines(filmer, videos_waiting=2) as served:
        answers = await asyncio.gather(*(served.http.post(PATH, json=BODY) for _ in range(6)))
        assert sorted(answer.status_code for answer in answers) == [200, 200, 503, 503, 503, 503]


@pytest.mark.usefixtures("slow_store")
async def test_a_job_that_comes_while_the_gateway_ends_is_not_left_waiting(filmer: FakePictures) -> None:
    async with serve_engines(filmer) as served:
        jobs = served.jobs
        await jobs.ready()
        asking = asyncio.create_task(served.http.post(PATH, json=BODY))
        await settles(lambda: jobs._num_coming == 1)
        await jobs.close()
        answer = await asking
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "shutting_down")
        assert not jobs._running


async def test_a_list_has_pages_in_both_orders(served: Served) -> None:
    ids = [(await post(served))["id"] for _ in range(5)]
    for job_id in ids:
        await over(served, job_id)
    for order, expected in (("asc", ids), ("desc", ids[::-1])):
        page = (await served.http.get(PATH, params={"limit": 2, "order": order})).json()
        assert VideoList.model_validate(page).model_dump(mode="json") == page
        assert [job["id"] for job in page["data"]] == expected[:2]
        assert (page["first_id"], page["last_id"], page["has_more"]) == (expected[0], expected[1], True)
        rest = {"limit": 3, "order": order, "after": page["last_id"]}
        page = (await served.http.get(PATH, params=rest)).json()
        assert ([job["id"] for job in page["data"]], page["has_more"]) == (expected[2:], False)
    long = "1" + "0" * 5000  # more digits than Python reads
    for wrong in (
        {"limit": "0"},
        {"limit": "x"},
        {"limit": long},
        {"limit": "000000001" + long},
        {"order": "up"},
        {"after": "video_none"},
    ):
        answer = await served.http.get(PATH, params=wrong)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, next(iter(wrong)))


async def test_deleting_cancels_a_running_and_a_waiting_job(
    served: Served, filmer: FakePictures, tmp_path: Path
) -> None:
    hold(filmer)
    running, waiting = [(await post(served))["id"] for _ in range(2)]
    await settles(lambda: filmer.num_open == 1)
    for job_id in (waiting, running):
        assert (await served.http.delete(f"{PATH}/{job_id}")).json()["deleted"] is True
        assert (await served.http.get(f"{PATH}/{job_id}")).status_code == 404
    assert filmer.num_open == 0
    assert [path.name for path in (tmp_path / "videos").iterdir()] == ["lock"]
    assert served.metric("diffuse_requests_running", model="filmer") == 0


async def test_a_key_sees_its_own_jobs_only(filmer: FakePictures) -> None:
    keys = ["a" * 20, "b" * 20]
    async with serve_engines(filmer, api_keys=tuple(keys)) as served:
        mine, other = ({"authorization": f"Bearer {key}"} for key in keys)
        job = (await served.http.post(PATH, json=BODY, headers=mine)).json()
        for path in (f"{PATH}/{job['id']}", f"{PATH}/{job['id']}/content", f"{PATH}/{job['id']}/events"):
            assert (await served.http.get(path, headers=other)).status_code == 404
        assert (await served.http.delete(f"{PATH}/{job['id']}", headers=other)).status_code == 404
        assert (await served.http.get(PATH, headers=other)).json()["data"] == []
        assert len((await served.http.get(PATH, headers=mine)).json()["data"]) == 1


async def test_a_failure_is_told_with_its_code_and_leaves_no_file(
    served: Served, filmer: FakePictures, tmp_path: Path
) -> None:
    def lose(number: int) -> None:
        if number == 2:
            raise NoRouteError(((2, 4),), "filmer", ())

    filmer.before_step = lose
    job = await over(served, (await post(served))["id"])
    assert (job["status"], job["error"]["code"]) == ("failed", "no_route")
    assert "2:4" in job["error"]["message"]
    assert not (tmp_path / "videos" / job["id"]).exists()
    content = await served.http.get(f"{PATH}/{job['id']}/content")
    assert (content.status_code, content.json()["error"]["code"]) == (404, "video_failed")
    assert served.metric("diffuse_request_errors_total", endpoint=PATH, code="no_route") == 1


async def test_a_full_disk_fails_the_job_and_leaves_no_litter(
    served: Served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.fsync

    def full(descriptor: int) -> None:
        real(descriptor)
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(whole_file.os, "fsync", full)
    job = await over(served, (await post(served))["id"])
    assert (job["status"], job["error"]["code"]) == ("failed", "storage_full")
    assert "disk is full" in job["error"]["message"]
    assert not (tmp_path / "videos" / job["id"]).exists()


async def test_the_oldest_videos_make_room_for_new_ones(filmer: FakePictures, tmp_path: Path) -> None:
    async with serve_engines(filmer, videos_dir=tmp_path, videos_bytes=1 << 16) as served:
        ids = [(await post(served, seed=seed))["id"] for seed in range(12)]
        for job_id in ids[-3:]:
            async with asyncio.timeout(10):
                while (await job_of(served, job_id)).get("status") != "completed":
                    await asyncio.sleep(0.01)
        kept = [job["id"] for job in (await served.http.get(PATH)).json()["data"]]
        assert kept == ids[::-1][: len(kept)]
        assert len(kept) < 12
        assert sum(file.stat().st_size for file in tmp_path.rglob("*") if file.is_file()) <= 1 << 16


async def test_a_video_beyond_the_bound_fails_with_the_numbers(
    filmer: FakePictures, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(filmer, "picture", lambda *_: Image.effect_noise((256, 256), 90))
    async with serve_engines(filmer, videos_bytes=1 << 16) as served:
        job = await over(served, (await post(served, num_frames=5))["id"])
    assert (job["status"], job["error"]["code"]) == ("failed", "storage_full")
    assert "65536 bytes" in job["error"]["message"]


async def test_a_restart_keeps_what_is_done_and_fails_what_ran(filmer: FakePictures, tmp_path: Path) -> None:
    kept = {"videos_dir": tmp_path / "videos", "state": f"sqlite://{tmp_path}/gateway.sqlite"}
    async with serve_engines(filmer, **kept) as served:
        done = await over(served, (await post(served))["id"])
        content = (await served.http.get(f"{PATH}/{done['id']}/content")).content
        hold(filmer)
        ran = await post(served)
        async with asyncio.timeout(5):
            while (await job_of(served, ran["id"]))["status"] != "in_progress":
                await asyncio.sleep(0.01)
        await served.gateway.state.jobs.add(_unfinished(), ROOMY)  # as a process that was killed leaves one
    (tmp_path / "videos" / done["id"] / "video.mp4.part").write_bytes(b"half")
    (tmp_path / "videos" / "video_broken").mkdir()
    async with serve_engines(filmer, **kept) as served:
        jobs = {job["id"]: job for job in (await served.http.get(PATH)).json()["data"]}
        assert jobs[done["id"]] == done
        for job_id in (ran["id"], "video_killed"):
            assert (jobs[job_id]["status"], jobs[job_id]["error"]["code"]) == ("failed", "interrupted")
        assert (await served.http.get(f"{PATH}/{done['id']}/content")).content == content
    assert sorted(path.name for path in (tmp_path / "videos").iterdir()) == ["lock", done["id"]]
    assert not list((tmp_path / "videos").rglob("*.part"))


def _unfinished() -> JobRow:
    job = Job("video_killed", "", "filmer", "waves", "64x48", "1", status="in_progress")
    return JobRow(job, "another gateway", 4096)


async def test_without_its_folder_a_finished_job_is_forgotten(filmer: FakePictures, tmp_path: Path) -> None:
    state = f"sqlite://{tmp_path}/gateway.sqlite"
    async with serve_engines(filmer, state=state) as served:
        await over(served, (await post(served))["id"])
    async with serve_engines(filmer, state=state) as served:
        assert (await served.http.get(PATH)).json()["data"] == []


async def test_ending_the_gateway_fails_running_jobs_and_tells_who_watches(
    filmer: FakePictures, tmp_path: Path
) -> None:
    hold(filmer)
    async with serve_engines(filmer, videos_dir=tmp_path) as served:
        job = await post(served)
        await settles(lambda: filmer.num_open == 1)
        reading = asyncio.create_task(served.http.get(f"{PATH}/{job['id']}/events"))
        await asyncio.sleep(0.05)
        await served.gateway.drain()
        await served.jobs.close()
        events = events_of((await reading).text)
        assert events[-1] == "[DONE]"
        assert isinstance(events[-2], dict)
        assert events[-2]["error"]["code"] == "interrupted"
    assert filmer.num_open == 0


async def test_jobs_end_with_their_time(filmer: FakePictures, tmp_path: Path) -> None:
    async with serve_engines(filmer, videos_dir=tmp_path, videos_lifetime_s=1.0) as served:
        job = await over(served, (await post(served))["id"])
        await asyncio.sleep(1.05)
        assert (await served.http.get(f"{PATH}/{job['id']}")).status_code == 404
        await post(served)
        assert not (tmp_path / job["id"]).exists()


async def test_two_gateways_do_not_share_a_folder(filmer: FakePictures, tmp_path: Path) -> None:
    async with (
        serve_engines(filmer, videos_dir=tmp_path) as first,
        serve_engines(filmer, videos_dir=tmp_path) as second,
    ):
        await post(first)
        answer = await second.http.post(PATH, json=BODY)
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "storage_in_use")


async def test_only_the_owner_of_the_process_can_read(served: Served, tmp_path: Path) -> None:
    job = await over(served, (await post(served))["id"])
    modes = {path.stat().st_mode & 0o077 for path in (tmp_path / "videos" / job["id"]).iterdir()}
    assert modes == {0}


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        ({"prompt": None}, "prompt"),
        ({"size": "65x48"}, "size"),
        ({"seconds": "long"}, "seconds"),
        ({"seconds": 0}, "seconds"),
        ({"seconds": 1, "num_frames": 9}, "num_frames"),
        ({"steps": 0}, "steps"),
        ({"n": 2}, "n"),
        ({"width": 64}, "width"),
        ({"fps": 30}, "fps"),
        ({"duration": 2}, "duration"),
        ({"input_reference": {"image_url": "x"}}, "input_reference"),
        ({"model": "painter"}, "model"),
    ],
)
async def test_bad_input_is_refused_by_name(served: Served, changes: dict[str, Any], param: str) -> None:
    body = {name: value for name, value in {**BODY, **changes}.items() if value is not None}
    answer = await served.http.post(PATH, json=body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)


async def test_a_file_in_a_form_is_refused_by_name(served: Served) -> None:
    form = {"prompt": (None, "waves"), "input_reference": ("a.png", b"\x89PNG")}
    answer = await served.http.post(PATH, files=form)
    error = answer.json()["error"]
    assert (answer.status_code, error["param"], error["code"]) == (
        400,
        "input_reference",
        "unsupported_parameter",
    )


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"--x",
        b"--x\r\n\r\n",
        b'--x\r\ncontent-disposition: form-data; name="prompt"\r\n\r\nwaves',
        b"--x\r\ncontent-disposition: form-data\r\n\r\nwaves\r\n--x--\r\n",
        b'--x\r\ncontent-disposition: form-data; name="prompt"\r\n\r\n\xff\xfe\r\n--x--\r\n',
        b'--x\r\ncontent-disposition: form-data; name="a[b][c][d]"\r\n\r\n1\r\n--x--\r\n',
        b"--x\r\n" + b"h: " + b"v" * 9000 + b"\r\n\r\n1\r\n--x--\r\n",
        b"".join(b'--x\r\ncontent-disposition: form-data; name="f%d"\r\n\r\n1\r\n' % n for n in range(200))
        + b"--x--\r\n",
        b'--x\r\ncontent-disposition: form-data; name="prompt"\r\n\r\n' + b"w" * 300_000 + b"\r\n--x--\r\n",
    ],
)
async def test_broken_forms_are_a_400(served: Served, body: bytes) -> None:
    answer = await served.http.post(
        PATH, content=body, headers={"content-type": "multipart/form-data; boundary=x"}
    )
    assert (answer.status_code, answer.json()["error"]["type"]) == (400, "invalid_request_error")


HEAD = b'--x\r\ncontent-disposition: form-data; name="'


@given(
    st.lists(
        st.one_of(st.binary(max_size=40), st.sampled_from([HEAD, b'"\r\n\r\n', b"\r\n--x--\r\n", b"[a]"]))
    )
)
def test_any_bytes_are_a_form_or_refused(pieces: list[bytes]) -> None:
    try:
        made = parse_form(b"".join(pieces), b"x", FORM_TYPES)
    except ApiError as error:
        assert error.status == 400
    else:
        assert isinstance(made, dict)


async def test_a_form_that_is_too_large_is_a_413(filmer: FakePictures) -> None:
    async with serve_engines(filmer, max_body_bytes=1024) as served:
        answer = await served.http.post(PATH, files={"prompt": (None, "w" * 3000)})
    assert (answer.status_code, answer.json()["error"]["code"]) == (413, "request_too_large")


@pytest.mark.parametrize("path", ["/edits", "/extensions", "/characters", "/video_1/remix"])
async def test_what_begins_from_a_video_is_an_enveloped_404(served: Served, path: str) -> None:
    answer = await served.http.post(PATH + path, json={"prompt": "x"})
    assert (answer.status_code, answer.json()["error"]["code"]) == (404, "not_found")


async def test_a_second_gone_by_is_seen_in_created_at(served: Served) -> None:
    job = await post(served)
    assert abs(job["created_at"] - time.time()) < 5


class Vanishing:
    """A file of 10 bytes that is removed when half of it was read."""

    size = 10
    is_closed = False

    async def read(self, start: int, end: int) -> bytes:
        return b"12345" if start == 0 else b""

    async def close(self) -> None:
        self.is_closed = True


async def test_a_file_that_goes_while_it_is_sent_breaks_the_answer_off() -> None:
    file = Vanishing()
    request = Request({"type": "http", "method": "GET", "headers": []})
    answer = await file_answer(request, file, "video/mp4", "tag")
    assert isinstance(answer, StreamingResponse)
    with pytest.raises(StateError):
        [piece async for piece in answer.body_iterator]
    assert file.is_closed
