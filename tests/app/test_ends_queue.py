"""The ends of many answers on one thread: who shares a call, who waits for whom, and whose trouble is whose."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import numpy as np
import pytest
import torch

from app.engine.drafts import Drafter, TripCosts
from app.engine.ends import Drawn, Due, LocalEnds
from app.engine.ends_queue import EndsQueue
from routing.errors import WorkError
from routing.types import Answer, SessionId, SliceSpec, WireDtype
from slicing.sampler import Sampler, SamplingParams
from tests.node.fake_runner import HIDDEN_SIZE, NUM_LAYERS, VOCAB_SIZE, FakeCache, FakeRunner
from tests.node.rig import until

FLOAT = WireDtype.FLOAT32
SEEDED = SamplingParams(temperature=1.0, seed=5, frequency_penalty=0.4)
MIDDLE = SliceSpec(1, 5)  # the first and the last layer are at home


@asynccontextmanager
async def queue_of(runner: FakeRunner, middle: SliceSpec = MIDDLE) -> AsyncIterator[EndsQueue]:
    queue = EndsQueue(runner, middle)
    try:
        yield queue
    finally:
        runner.release()
        await queue.close()


def ends_of(queue: EndsQueue, prompt: Sequence[int] = (3, 1, 4), seed: int = 5) -> LocalEnds:
    params = SamplingParams(temperature=1.0, seed=seed, frequency_penalty=0.4)
    return LocalEnds(queue, params, prompt, Drafter("off", TripCosts(), prompt, 200))


async def opened(queue: EndsQueue, count: int, length: int = 1) -> list[LocalEnds]:
    """Answers whose prompts of so many tokens went out; seeds count from 0."""
    sessions = [ends_of(queue, seed=seed) for seed in range(count)]
    for ends in sessions:
        await ends.open_rows(range(length), 0, FLOAT)
    return sessions


def rows(count: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((count, HIDDEN_SIZE)).astype("<f4")


def answer(values: np.ndarray, position: int) -> Answer:
    return Answer(SessionId(secrets.token_bytes(16)), 1, 1, position, len(values), values.tobytes())


async def draw(ends: LocalEnds, position: int, values: np.ndarray, drafts: tuple[int, ...] = ()) -> Drawn:
    """The rows at and before `position - 1` come back; the token at `position` is drawn."""
    due = Due(position, drafts)
    return await ends.draw(answer(values, position - len(values) + len(drafts)), due, FLOAT, FLOAT)


def alone(position: int, values: np.ndarray, seed: int) -> int:
    """The token that an answer draws which has the machine to itself."""
    runner = FakeRunner()
    logits = runner.run_closing(runner.new_cache(), torch.from_numpy(values.copy()), 0, start=5)
    params = SamplingParams(temperature=1.0, seed=seed, frequency_penalty=0.4)
    return Sampler(params, VOCAB_SIZE).sample(logits[-1], position)


async def busy(queue: EndsQueue, runner: FakeRunner) -> asyncio.Task[object]:
    """Keep the thread at something until `runner.release()`, so that what comes next meets in the queue."""
    queue._queue.short_ms = 0.0  # an opening that is known to be short would keep the event loop
    runner.hold()
    task: asyncio.Task[object] = asyncio.create_task(ends_of(queue).open_rows((1, 2), 0, FLOAT))
    await until(runner.entered.is_set)
    return task


async def test_turns_that_are_ready_share_a_call_for_each_half() -> None:
    runner = FakeRunner(max_works=8)
    async with queue_of(runner) as queue:
        sessions = await opened(queue, 8)
        held = await busy(queue, runner)
        before = len(runner.calls)
        turns = asyncio.gather(*(draw(ends, 1, rows(1, seed)) for seed, ends in enumerate(sessions)))
        await asyncio.sleep(0.05)
        runner.release()
        drawn = await turns
        await held
        assert [one.token_ids for one in drawn] == [(alone(1, rows(1, seed), seed),) for seed in range(8)]
        assert runner.calls[before:] == [[1] * 8, [1] * 8]  # closing, and opening what was drawn
        assert queue.counts.works == 8 + 1 + 8


async def test_one_answers_poison_is_its_own_trouble() -> None:
    runner = FakeRunner(max_works=8)
    async with queue_of(runner) as queue:
        sessions = await opened(queue, 4)
        held = await busy(queue, runner)
        values = [rows(1, seed) for seed in range(4)]
        values[1][0, 0] = np.nan
        values[2][0, 0] = runner.poison = 77.0  # a call with it raises
        turns = [draw(ends, 1, value) for ends, value in zip(sessions, values, strict=True)]
        gathered = asyncio.gather(*turns, return_exceptions=True)
        await asyncio.sleep(0.05)
        runner.release()
        first, second, third, fourth = await gathered
        await held
        assert isinstance(first, Drawn)
        assert isinstance(second, WorkError)
        assert isinstance(third, Exception)
        assert isinstance(fourth, Drawn)
        assert (first.token_ids, fourth.token_ids) == ((alone(1, values[0], 0),), (alone(1, values[3], 3),))


async def test_a_prompt_goes_in_pieces_and_an_answer_passes_it() -> None:
    runner = FakeRunner(max_works=8)
    async with queue_of(runner) as queue:
        (other,) = await opened(queue, 1)
        prompt = ends_of(queue)
        held = await busy(queue, runner)
        done: list[str] = []
        prompt_ids = [token % VOCAB_SIZE for token in range(2000)]

        async def open_prompt() -> bytes:
            payload = await prompt.open_rows(prompt_ids, 0, FLOAT)
            done.append("prompt")
            return bytes(payload)

        opening = asyncio.create_task(open_prompt())
        await asyncio.sleep(0.01)
        turn = asyncio.create_task(draw(other, 1, rows(1)))
        turn.add_done_callback(lambda _: done.append("turn"))
        await asyncio.sleep(0.05)
        runner.release()
        payload = await opening
        await turn, await held
        assert done == ["turn", "prompt"]
        whole = FakeRunner()
        expected = whole.run_opening(whole.new_cache(), torch.tensor(prompt_ids), 0, end=1)
        assert payload == expected.numpy().tobytes()
        assert max(len(call) and max(call) for call in runner.calls) < 2000


async def test_a_runner_that_depends_on_grouping_gets_each_call_whole_and_alone() -> None:
    runner = FakeRunner(max_works=1)
    async with queue_of(runner) as queue:
        (two,) = await opened(queue, 1, length=40)
        one = ends_of(queue)
        held = await busy(queue, runner)
        before = len(runner.calls)
        work = asyncio.gather(one.open_rows(range(30), 0, FLOAT), draw(two, 40, rows(40)))
        await asyncio.sleep(0.05)
        runner.release()
        await work
        await held
        assert sorted(runner.calls[before:]) == [[1], [30], [40]]


async def test_a_hundred_answers_get_equal_turns() -> None:
    runner = FakeRunner(max_works=8)
    turns: list[int] = []

    async def stream(number: int, ends: LocalEnds) -> None:
        for position in range(1, 11):
            await draw(ends, position, rows(1, number))
            turns.append(number)

    async with queue_of(runner, SliceSpec(1, NUM_LAYERS)) as queue:
        sessions = await opened(queue, 100)
        await asyncio.gather(*(stream(number, ends) for number, ends in enumerate(sessions)))
        assert len(turns) == 1000
        counts = [0] * 100
        for number in turns:
            counts[number] += 1
            assert max(counts) - min(counts) <= 2
        for ends in sessions:
            await ends.close()
    assert not any(cache.is_open for cache in runner.caches)


async def test_an_answer_that_leaves_frees_its_caches_behind_what_computes() -> None:
    runner = FakeRunner(max_works=8)
    async with queue_of(runner) as queue:
        ends = ends_of(queue)
        runner.hold()
        opening = asyncio.create_task(ends.open_rows(range(10), 0, FLOAT))
        await until(runner.entered.is_set)
        opening.cancel()
        closing = asyncio.create_task(ends.close())
        await asyncio.sleep(0.02)
        caches: list[FakeCache] = runner.caches
        assert all(cache.is_open for cache in caches)
        closing.cancel()
        runner.release()
        await until(lambda: not any(cache.is_open for cache in caches))
        await ends.close()


@pytest.mark.parametrize("middle", [SliceSpec(1, NUM_LAYERS), SliceSpec(1, 4)])
async def test_drafts_are_verified_row_by_row_and_undone_where_they_are_wrong(middle: SliceSpec) -> None:
    async with queue_of(FakeRunner(max_works=8), middle) as queue:
        plain, drafted = ends_of(queue), ends_of(queue)
        for ends in (plain, drafted):
            await ends.open_rows((9,), 0, FLOAT)
        values = rows(8)
        tokens: list[int] = []
        for position in range(1, 9):
            tokens += (await draw(plain, position, values[position - 1 : position])).token_ids
        first = await draw(drafted, 1, values[:1])
        wrong = (tokens[3] + 1) % VOCAB_SIZE
        await drafted.open_rows((tokens[1], tokens[2], wrong), 2, FLOAT)  # as a turn does that drafts them
        second = await draw(drafted, 2, values[1:5], (tokens[1], tokens[2], wrong))
        assert (second.token_ids, second.num_right) == ((tokens[1], tokens[2], tokens[3]), 2)
        await drafted.open_rows(tokens[4:7], 5, FLOAT)
        third = await draw(drafted, 5, values[4:8], (tokens[4], tokens[5], tokens[6]))
        assert (third.token_ids, third.num_right) == (tuple(tokens[4:8]), 3)
        assert [*first.token_ids, *second.token_ids, *third.token_ids] == tokens
