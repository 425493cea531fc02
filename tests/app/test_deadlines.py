"""Each way in which an answer can be late, with its code: the first token, a stall, the whole."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from app.engine.watch import Deadlines, LateError, Sign, Watch
from slicing.diffusion.kinds import Kind
from tests.app.conftest import Serve
from tests.app.test_transcriptions import wav
from tests.support.api_server import serve_engines, settles
from tests.support.fake_embeddings import FakeEmbeddings
from tests.support.fake_pictures import SOUNDS, FakePictures
from tests.support.fake_scribe import FakeScribe
from tests.support.local_engine import ScriptedEngine

STREAMS: list[dict[str, Any]] = [{}, {"stream": True}]


def stuck_at(place: int) -> Any:
    return lambda number: asyncio.Event().wait() if number == place else None


# When it is late: pure --------------------------------------------------------------------------------------


def watched(**limits: float) -> Watch:
    return Watch(Deadlines(lambda event: event, **limits), 0.0)


def code(watch: Watch) -> str:
    error: LateError = watch.error()
    return error.code


def test_the_first_output_counts_from_the_beginning_whatever_is_prepared() -> None:
    watch = watched(first_s=10, stall_s=100)
    for now in (2.0, 4.0, 6.0, 8.0):
        watch.note(Sign.LIFE, now)
    assert (watch.due_at, code(watch)) == (10.0, "first_token_timeout")


def test_a_prompt_that_stops_being_read_is_a_stall() -> None:
    watch = watched(first_s=1000, stall_s=20)
    watch.note(Sign.LIFE, 1.0)
    assert (watch.due_at, code(watch)) == (21.0, "stalled")


def test_after_the_first_output_each_sign_puts_the_stall_off() -> None:
    watch = watched(first_s=10, stall_s=20)
    watch.note(Sign.OUTPUT, 1.0)
    watch.note(Sign.OUTPUT, 15.0)
    assert (watch.due_at, code(watch)) == (
        71.0,
        "stalled",
    )  # 14 s between two: four times that is no stall yet


def test_what_is_slow_all_the_time_is_no_stall() -> None:
    watch = watched(first_s=1000, stall_s=20)
    for now in (300.0, 600.0, 900.0):
        watch.note(Sign.OUTPUT, now)
    assert watch.due_at == 2100.0


def test_the_last_work_has_as_long_as_the_first() -> None:
    watch = watched(first_s=50, stall_s=2)
    watch.note(Sign.OUTPUT, 1.0)
    watch.note(Sign.LAST_WORK, 2.0)
    assert (watch.due_at, code(watch)) == (52.0, "stalled")


def test_the_next_answer_begins_anew() -> None:
    watch = watched(first_s=50, stall_s=2)
    watch.note(Sign.OUTPUT, 1.0)
    watch.note(Sign.END, 2.0)
    assert (watch.due_at, code(watch)) == (52.0, "first_token_timeout")


def test_what_says_nothing_changes_nothing_and_no_deadline_is_none() -> None:
    watch = watched(first_s=50)
    watch.note(Sign.NONE, 49.0)
    assert watch.due_at == 50.0
    assert watched().due_at == float("inf")


# As clients see it ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("changes", STREAMS)
async def test_a_prompt_whose_answer_does_not_begin(
    serve: Serve, scripted: ScriptedEngine, changes: dict[str, Any]
) -> None:
    scripted.before_token = stuck_at(0)
    scripted.prefill_steps = 3
    async with serve(first_token_timeout_s=0.1) as served:
        response = await served.ask(**changes)
        await settles(lambda: scripted.num_open == 0)
    assert "first_token_timeout" in response.text
    if not changes:
        assert response.status_code == 504
        assert response.headers["x-should-retry"] == "false"


async def test_prefill_that_goes_on_does_not_put_the_first_token_off(
    serve: Serve, scripted: ScriptedEngine
) -> None:
    async def creep(number: int) -> None:
        await asyncio.sleep(0.03)

    scripted.before_token = lambda number: creep(number) if number == 0 else None
    scripted.prefill_steps = 2
    async with serve(first_token_timeout_s=0.01, stall_timeout_s=5) as served:
        assert (await served.ask()).json()["error"]["code"] == "first_token_timeout"


@pytest.mark.parametrize("changes", STREAMS)
async def test_an_answer_that_stands_still(
    serve: Serve, scripted: ScriptedEngine, changes: dict[str, Any]
) -> None:
    scripted.before_token = stuck_at(3)
    async with serve(stall_timeout_s=0.2) as served:
        response = await served.ask(**changes)
        await settles(lambda: scripted.num_open == 0)
        assert served.gateway.num_running == 0
    assert '"stalled"' in response.text
    if not changes:
        assert response.status_code == 504
        assert "x-should-retry" not in response.headers  # other nodes may do better


async def test_one_answer_of_several_that_stands_still_is_noticed_while_others_go_on(
    serve: Serve, scripted: ScriptedEngine
) -> None:
    beats = 0

    async def beat() -> None:
        nonlocal beats
        beats += 1
        await asyncio.sleep(0.01)

    def before(number: int) -> object:
        is_first = number == 2 and beats < 2
        return asyncio.Event().wait() if is_first else beat()

    scripted.before_token = lambda number: None if number < 2 else before(number)
    scripted.script = lambda request: [5] * 200
    async with serve(stall_timeout_s=0.1) as served:
        response = await asyncio.wait_for(served.ask(n=2), 3)
    assert response.json()["error"]["code"] == "stalled"


@pytest.mark.parametrize("changes", STREAMS)
async def test_deadlines_of_nought_are_none(
    serve: Serve, scripted: ScriptedEngine, changes: dict[str, Any]
) -> None:
    scripted.before_token = lambda number: asyncio.sleep(0.02)
    async with serve(first_token_timeout_s=0, stall_timeout_s=0, request_timeout_s=0) as served:
        assert (await served.ask(**changes, max_tokens=3)).status_code == 200


async def test_the_scores_of_a_prompt_are_output(serve: Serve, scripted: ScriptedEngine) -> None:
    scripted.before_token = stuck_at(0)
    async with serve(first_token_timeout_s=0.1, stall_timeout_s=0.2) as served:
        body = {"model": "scripted", "prompt": "hello world", "echo": True, "logprobs": 1, "max_tokens": 1}
        response = await served.http.post("/v1/completions", json=body)
    assert response.json()["error"]["code"] == "stalled"


async def test_completions_made_in_turn_are_watched_one_by_one(
    serve: Serve, scripted: ScriptedEngine
) -> None:
    stuck = [False]

    def before(number: int) -> object:
        stuck[0] = scripted.num_opened == 3
        return asyncio.Event().wait() if stuck[0] and number == 0 else None

    scripted.before_token = before
    async with serve(max_choices=1, first_token_timeout_s=0.2) as served:
        body = {"model": "scripted", "prompt": ["a", "b", "c"]}
        response = await served.http.post("/v1/completions", json=body)
    assert response.json()["error"]["code"] == "first_token_timeout"


@pytest.mark.parametrize(("place", "said"), [(-1, "first_token_timeout"), (2, "stalled")])
@pytest.mark.parametrize("kind", ["picture", "sound"])
async def test_pictures_and_sounds_have_them_by_step(kind: str, place: int, said: str) -> None:
    engine = FakePictures() if kind == "picture" else FakePictures(Kind.AUDIO, defaults=SOUNDS)
    engine.before_step = stuck_at(place)
    path, body = {
        "picture": ("/v1/images/generations", {"prompt": "a fox"}),
        "sound": ("/v1/audio/speech", {"input": "a bell"}),
    }[kind]
    async with serve_engines(engine, first_token_timeout_s=0.2, stall_timeout_s=0.2) as served:
        response = await served.http.post(path, json=body)
        await settles(lambda: engine.num_open == 0)
    assert (response.status_code, response.json()["error"]["code"]) == (504, said)


@pytest.mark.parametrize(("place", "said"), [(0, "first_token_timeout"), (1, "stalled")])
async def test_recordings_have_them_by_window(scripted: ScriptedEngine, place: int, said: str) -> None:
    scribe = FakeScribe(scripted.tokenizer)
    scribe.before_window = stuck_at(place)
    async with serve_engines(scribe, first_token_timeout_s=0.2, stall_timeout_s=0.2) as served:
        answer = await served.http.post(
            "/v1/audio/transcriptions", data={"model": "scribe"}, files={"file": ("a.wav", wav(3))}
        )
        await settles(lambda: scribe.num_open == 0)
    assert (answer.status_code, answer.json()["error"]["code"]) == (504, said)


@pytest.mark.parametrize(
    ("place", "said"), [(2, "first_token_timeout"), (1, "stalled")]
)  # the last one comes first
async def test_vectors_have_them_by_text(scripted: ScriptedEngine, place: int, said: str) -> None:
    engine = FakeEmbeddings(scripted.tokenizer)
    engine.before_text = stuck_at(place)
    async with serve_engines(engine, first_token_timeout_s=0.2, stall_timeout_s=0.2) as served:
        answer = await served.http.post(
            "/v1/embeddings", json={"model": "librarian", "input": ["a", "b", "c"]}
        )
    assert (answer.status_code, answer.json()["error"]["code"]) == (504, said)
