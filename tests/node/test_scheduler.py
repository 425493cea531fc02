"""Steps of several sessions in one call, prefills in pieces; and what becomes of those that fail in company."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from node.scheduler import Scheduler
from node.step_rows import decode_rows
from routing.errors import ErrorCode
from routing.types import Answer, Failure, Step, Want
from slicing.batch_choice import FIRST_PIECE_ROWS
from tests.node.fake_runner import NUM_LAYERS, VOCAB_SIZE
from tests.node.rig import Node, Rig, Script, rows_of, until
from tests.node.test_steps import Whole, some_rows

MAX_WORKS = 4
LONG = 4 * FIRST_PIECE_ROWS


async def add_batching_node(rig: Rig, start: int = 0, end: int = NUM_LAYERS) -> Node:
    node = await rig.add_fake_node(start, end)
    node.runner.max_works, node.runner.is_invariant = MAX_WORKS, True
    return node


async def opened(rig: Rig, node: Node, number: int, **fields: object) -> list[Script]:
    scripts = [rig.script((node, 0, NUM_LAYERS), **fields) for _ in range(number)]
    for script in scripts:
        await script.open()
    return scripts


async def hold_thread(rig: Rig, node: Node) -> Script:
    """A session whose step keeps the compute thread, so that others queue up behind it."""
    (blocker,) = await opened(rig, node, 1)
    node.server._scheduler.short_ms = 0.0  # a step that is known to be short would keep the event loop
    node.runner.hold()
    await blocker.send(1, 0, some_rows(1))
    await until(node.runner.entered.is_set)
    return blocker


async def queued(node: Node, number: int) -> None:
    await until(lambda: node.server._scheduler.num_queued == number)


async def answers(rig: Rig, scripts: Sequence[Script]) -> list[Answer]:
    """The next answer of each of these sessions, whatever else arrives."""
    wanted, found = {script.session_id for script in scripts}, {}
    while wanted - found.keys():
        _, message = await asyncio.wait_for(rig.gateway.inbox.get(), 20)
        if isinstance(message, Answer):
            found[message.session_id] = message
    return [found[script.session_id] for script in scripts]


async def test_steps_that_are_ready_go_together_with_the_bits_that_each_has_alone(rig: Rig) -> None:
    node = await add_batching_node(rig)
    scripts = await opened(rig, node, MAX_WORKS + 1)
    for script in scripts:
        await script.run(1, 0, some_rows(1))
    await hold_thread(rig, node)
    for number, script in enumerate(scripts):
        await script.send(2, 1, some_rows(1, number))
        await queued(node, number + 1)  # each by itself: what comes together stays together
    node.runner.calls.clear()
    node.runner.release()
    made = await answers(rig, scripts)
    assert sorted(sum(call) for call in node.runner.calls) == [2, 3]  # two stages: half of them at a time
    for number, answer in enumerate(made):
        whole = Whole()
        whole.run(0, some_rows(1))
        assert np.array_equal(rows_of(answer), whole.run(1, some_rows(1, number)))
    counts = node.stats.batches
    assert counts.by_rows[1] == 2
    assert counts.works == node.stats.steps_run == 2 * len(scripts) + 1


async def test_a_plain_runner_gets_one_whole_step_a_call(rig: Rig) -> None:
    node = await rig.add_fake_node()
    scripts = await opened(rig, node, 3)
    await hold_thread(rig, node)
    for script, rows in zip(scripts, (1, 1, LONG), strict=True):
        await script.send(1, 0, some_rows(rows))
    await queued(node, 3)
    node.runner.release()
    await answers(rig, scripts)
    assert sorted(map(tuple, node.runner.calls)) == [(1,), (1,), (1,), (LONG,)]


async def test_a_prefill_goes_in_pieces_beside_decode_steps_and_is_answered_once(rig: Rig) -> None:
    node = await add_batching_node(rig)
    prompt, decoder = await opened(rig, node, 2)
    await decoder.run(1, 0, some_rows(1))
    await hold_thread(rig, node)
    await prompt.send(1, 0, some_rows(LONG), want=Want.ALL)
    await decoder.send(2, 1, some_rows(1, 2))
    await queued(node, 2)
    node.runner.release()
    long, short = await answers(rig, [prompt, decoder])
    assert np.array_equal(rows_of(long), Whole().run(0, some_rows(LONG)))
    assert short.position == 1
    assert node.stats.batches.pieces > 1
    assert node.stats.steps_run == 4
    assert rig.gateway.inbox.qsize() <= 1  # the blocker's: nothing of the prompt came twice


@pytest.mark.parametrize("want", [Want.LAST, Want.LIST])
async def test_logits_of_a_prefill_in_pieces_are_those_of_the_wanted_rows(rig: Rig, want: Want) -> None:
    node = await add_batching_node(rig)
    (script,) = await opened(rig, node, 1, opens=True, closes=True)
    token_ids = [number % VOCAB_SIZE for number in range(LONG)]
    want_rows = (3, 40, LONG - 1) if want is Want.LIST else ()
    answer = await script.run(1, 0, token_ids, want=want, want_rows=want_rows)
    plain = await rig.add_fake_node()
    (other,) = await opened(rig, plain, 1, opens=True, closes=True)
    expected = await other.run(1, 0, token_ids, want=want, want_rows=want_rows)
    assert bytes(answer.payload) == bytes(expected.payload)
    assert (answer.rows, answer.position, answer.kind) == (expected.rows, expected.position, expected.kind)
    assert len(node.runner.calls) > len(plain.runner.calls)


async def test_a_poisoned_step_fails_alone_and_leaves_its_neighbours_bits(rig: Rig) -> None:
    node = await add_batching_node(rig)
    poisoned, *healthy = scripts = await opened(rig, node, 3, changes={"num_hops": 1})
    for script in scripts:
        await script.run(1, 0, some_rows(1))
    node.runner.poison = 77.0
    await hold_thread(rig, node)
    wrong = some_rows(1)
    wrong[0, 0] = 77.0
    await poisoned.send(2, 1, wrong)
    for script in healthy:
        await script.send(2, 1, some_rows(1, 5))
    await queued(node, 3)
    node.runner.release()
    whole = Whole()
    whole.run(0, some_rows(1))
    expected = whole.run(1, some_rows(1, 5))
    seen: list[Answer | Failure] = [(await rig.gateway.inbox.get())[1] for _ in range(4)]
    (failure,) = [message for message in seen if isinstance(message, Failure)]
    assert (failure.session_id, failure.code, failure.text) == (
        poisoned.session_id,
        ErrorCode.COMPUTE,
        "RuntimeError",
    )
    good = {message.session_id: message for message in seen if isinstance(message, Answer)}
    assert all(np.array_equal(rows_of(good[script.session_id]), expected) for script in healthy)
    assert node.stats.batches.repeats >= 1


async def test_rows_of_a_batch_are_decoded_at_once_and_one_by_one_where_some_are_no_numbers(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    decoded: list[int] = []

    def counting(step: Step, *others: Any) -> Any:
        decoded.append(step.position)
        return decode_rows(step, *others)

    monkeypatch.setattr("node.step_job.decode_rows", counting)
    node = await add_batching_node(rig)
    wrong, right = scripts = await opened(rig, node, 2)
    for script in scripts:
        await script.run(1, 0, some_rows(1))
    assert not decoded
    await hold_thread(rig, node)
    poisoned = some_rows(1)
    poisoned[0, 0] = np.nan
    for script, rows in ((wrong, poisoned), (right, some_rows(1, 5))):
        await script.send(2, 1, rows)
    await queued(node, 2)
    node.runner.release()
    seen = [(await rig.gateway.inbox.get())[1] for _ in range(3)]
    (failure,) = [message for message in seen if isinstance(message, Failure)]
    assert (failure.session_id, failure.code) == (wrong.session_id, ErrorCode.MALFORMED)
    (answer,) = [message for message in seen if message.session_id == right.session_id]
    whole = Whole()
    whole.run(0, some_rows(1))
    assert np.array_equal(rows_of(answer), whole.run(1, some_rows(1, 5)))
    assert decoded  # those two, or the wrong one where it went alone


async def test_a_prefill_that_fails_in_a_later_piece_leaves_the_session_where_it_was(rig: Rig) -> None:
    node = await add_batching_node(rig)
    (script,) = await opened(rig, node, 1)
    await script.run(1, 0, some_rows(3))
    rows = some_rows(LONG, 1)
    rows[-1, 0] = np.nan
    await script.send(2, 3, rows)
    assert (await script.failure()).code == ErrorCode.MALFORMED
    cache = node.runner.caches[0]
    await until(lambda: cache.length == 3)
    answer = await script.run(2, 3, some_rows(LONG, 1))
    whole = Whole()
    whole.run(0, some_rows(3))
    assert np.array_equal(rows_of(answer), whole.run(3, some_rows(LONG, 1))[-1:])


async def test_a_deadline_is_looked_at_before_every_piece(rig: Rig) -> None:
    node = await add_batching_node(rig)
    (script,) = await opened(rig, node, 1)
    node.runner.hold()
    await script.send(1, 0, some_rows(LONG), deadline_ms=100)
    await until(node.runner.entered.is_set)
    await asyncio.sleep(0.15)  # the deadline is what passes here, in the first piece
    node.runner.release()
    assert (await script.failure()).code == ErrorCode.DEADLINE
    assert len(node.runner.calls) == 1
    answer = await script.run(1, 0, some_rows(LONG))
    assert np.array_equal(rows_of(answer), Whole().run(0, some_rows(LONG))[-1:])


async def test_a_cancelled_prefill_ends_between_pieces_and_frees_everything(rig: Rig) -> None:
    node = await add_batching_node(rig)
    (prompt,) = await opened(rig, node, 1)
    node.runner.hold()
    await prompt.send(1, 0, some_rows(LONG))
    await until(node.runner.entered.is_set)
    await prompt.first.send(prompt.cancel())
    await until(lambda: node.stats.num_sessions == 0)
    node.runner.release()
    await until(lambda: not any(cache.is_open for cache in node.runner.caches))
    assert len(node.runner.calls) == 1
    assert node.stats.kv_bytes == 0


async def test_a_step_that_is_cancelled_in_company_does_not_stop_the_others(rig: Rig) -> None:
    node = await add_batching_node(rig)
    scripts = await opened(rig, node, 2, changes={"num_hops": 1})
    gone, stays = scripts
    for script in scripts:
        await script.run(1, 0, some_rows(1))
    await hold_thread(rig, node)
    for script in scripts:
        await script.send(2, 1, some_rows(1))
    await queued(node, 2)
    node.runner.release()
    await gone.first.send(gone.cancel())
    (answer,) = await answers(rig, [stays])
    whole = Whole()
    whole.run(0, some_rows(1))
    assert np.array_equal(rows_of(answer), whole.run(1, some_rows(1)))


async def test_sessions_of_different_work_do_not_share_a_call(rig: Rig) -> None:
    node = await add_batching_node(rig)
    whole, part = rig.script((node, 0, NUM_LAYERS)), rig.script((node, 0, 3))
    await whole.open()
    await part.open()
    await hold_thread(rig, node)
    for script in (whole, part):
        await script.send(1, 0, some_rows(1))
    await queued(node, 2)
    node.runner.release()
    await answers(rig, [whole, part])
    assert node.runner.calls == [[1], [1], [1]]


async def test_gateways_without_tenants_take_turns_and_ends_at_home_are_a_stage(rig: Rig) -> None:
    node = await add_batching_node(rig)
    jobs = []
    original = node.server._scheduler.submit
    node.server._scheduler.submit = lambda job: (jobs.append(job), original(job))
    (script,) = await opened(rig, node, 1)
    (tagged,) = await opened(rig, node, 1, changes={"tenant": b"8 bytes."}, opens=True, closes=True)
    await script.run(1, 0, some_rows(1))
    await tagged.run(1, 0, [1])
    assert [(job.tenant, job.stages) for job in jobs] == [(script.gateway_id, 2), (b"8 bytes.", 1)]


async def test_idle_time_counts_while_sessions_are_open(rig: Rig) -> None:
    node = await add_batching_node(rig)
    await asyncio.sleep(0.05)
    assert node.stats.batches.idle_s == 0
    (script,) = await opened(rig, node, 1)
    await script.run(1, 0, some_rows(1))
    await asyncio.sleep(0.05)
    await script.run(2, 1, some_rows(1))
    assert node.stats.batches.idle_s > 0.04


async def test_a_scheduler_runs_other_work_too() -> None:
    scheduler = Scheduler()
    assert await scheduler.call(lambda: 7) == 7
    await scheduler.close()
