"""Encoder states of a session: kept by every hop, passed on once, never undone, within what was asked for."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from node import openings
from routing import wire
from routing.errors import ErrorCode
from routing.types import Answer, AnswerKind, Prefix, Step, StepFlag, Want, WireDtype
from slicing.sampler import SamplingParams
from tests.node.fake_runner import (
    CACHE_BYTES_PER_POSITION,
    MEMORY_BYTES_PER_ROW,
    NUM_LAYERS,
    FakeRunner,
)
from tests.node.rig import Node, Rig, Script, rows_of, until
from tests.node.test_resuming import sent_between, three
from tests.node.test_steps import Whole, some_rows

MEMORY = some_rows(10, seed=77)


class WholeWithMemory(Whole):
    """The uncut model that has the memory."""

    def __init__(self, memory: np.ndarray = MEMORY) -> None:
        super().__init__()
        self.cache.add_memory(torch.from_numpy(memory.copy()))


def script_of(rig: Rig, *hops: tuple[Node, int, int], rows: int = 10, **changes: object) -> Script:
    return rig.script(*hops, changes={"memory_rows": rows} | changes)


def values(script: Script, answer: Answer) -> np.ndarray:
    is_sealed = StepFlag.SEALED in answer.flags
    return rows_of(wire.open_answer(script.answer_key, answer) if is_sealed else answer)


def cache_of(node: Node, script: Script) -> object:
    session = node.server._sessions.get(script.session_id)
    assert session is not None
    return session.state.cache


async def begin(script: Script) -> None:
    """Open, and send the memory in two pieces, steps 1 and 2."""
    await script.open()
    await script.remember(1, MEMORY[:7])
    await script.remember(2, MEMORY[7:])


@pytest.fixture(autouse=True)
def _with_memory(rig: Rig) -> None:
    rig.takes_memory = True


async def test_a_chain_with_memory_equals_the_whole_model(rig: Rig) -> None:
    a, b = await rig.add_fake_node(0, 3), await rig.add_fake_node(3, 6)
    script, whole = script_of(rig, (a, 0, 3), (b, 3, 6)), WholeWithMemory()
    await begin(script)
    assert np.array_equal(
        values(script, await script.run(3, 0, some_rows(4)))[-1], whole.run(0, some_rows(4))[-1]
    )
    for number in range(4, 8):
        row = some_rows(1, number)
        assert np.array_equal(values(script, await script.run(number, number, row)), whole.run(number, row))


async def test_memory_crosses_each_link_once_and_unchanged(rig: Rig) -> None:
    a, b, c = [await rig.add_fake_node(n, n + 2) for n in (0, 2, 4)]
    script = script_of(rig, (a, 0, 2), (b, 2, 4), (c, 4, 6))
    await begin(script)
    for number in range(3, 9):
        await script.run(number, number - 3, some_rows(1, number))
    for one, other in ((a, b), (b, c)):
        steps = [message for message in sent_between(rig, one, other) if isinstance(message, Step)]
        pieces = [step for step in steps if step.is_memory]
        assert [step.step for step in pieces] == [1, 2]
        assert b"".join(bytes(step.payload) for step in pieces) == MEMORY.tobytes()
        assert len(steps) == 2 + 6


async def test_memory_is_answered_only_where_that_is_asked_for(rig: Rig) -> None:
    a, b = await rig.add_fake_node(0, 3), await rig.add_fake_node(3, 6)
    script = script_of(rig, (a, 0, 3), (b, 3, 6))
    await script.open()
    await script.remember(1, MEMORY[:7])
    await script.remember(2, MEMORY[7:], want=Want.LIST)
    answer = wire.open_answer(script.answer_key, await rig.gateway.receive(Answer))
    assert (answer.step, answer.rows, answer.position, len(answer.payload)) == (2, 0, 0, 0)
    assert answer.kind is AnswerKind.HIDDEN_STATES
    assert rig.gateway.inbox.empty()


async def test_a_repeated_piece_is_kept_once(rig: Rig) -> None:
    a, b = await rig.add_fake_node(0, 3), await rig.add_fake_node(3, 6)
    script, whole = script_of(rig, (a, 0, 3), (b, 3, 6)), WholeWithMemory()
    await begin(script)
    await script.remember(1, MEMORY[:7])
    await script.remember(2, MEMORY[7:])
    answer = await script.run(3, 0, some_rows(2))
    assert np.array_equal(values(script, answer), whole.run(0, some_rows(2))[-1:])
    await script.remember(2, MEMORY[7:])  # late, and known
    await script.run(4, 2, some_rows(1))
    assert cache_of(a, script).memory_rows == cache_of(b, script).memory_rows == 10


async def test_a_roll_back_to_the_beginning_keeps_memory(rig: Rig) -> None:
    a, b = await rig.add_fake_node(0, 3), await rig.add_fake_node(3, 6)
    script, whole = script_of(rig, (a, 0, 3), (b, 3, 6)), WholeWithMemory()
    await begin(script)
    await script.run(3, 0, some_rows(4))
    await script.run(4, 4, some_rows(1))
    again = await script.run(5, 0, some_rows(3, 9))
    assert np.array_equal(values(script, again), whole.run(0, some_rows(3, 9))[-1:])


async def test_a_new_next_hop_gets_memory_from_the_survivor(rig: Rig) -> None:
    a, b, spare = await three(rig)
    script, whole = script_of(rig, (a, 0, 3), (b, 3, 6)), WholeWithMemory()
    await begin(script)
    await script.run(3, 0, some_rows(4))
    await script.run(4, 2, some_rows(1))  # undoes some, and not the memory
    whole.run(0, some_rows(4))
    whole.run(2, some_rows(1))
    assert (await script.reopen((a, 0, 3), (spare, 3, 6), answered=4)).next_step == 5
    answer = await script.run(5, 3, some_rows(1, 5))
    assert np.array_equal(values(script, answer), whole.run(3, some_rows(1, 5)))
    steps = [message for message in sent_between(rig, a, spare) if isinstance(message, Step)]
    assert [(step.step, step.is_memory) for step in steps] == [
        (1, True),
        (2, True),
        (3, False),
        (4, False),
        (5, False),
    ]
    assert cache_of(spare, script).memory_rows == 10


async def test_a_new_first_hop_gets_memory_again_and_does_not_pass_it_on(rig: Rig) -> None:
    a, other, b = await rig.add_fake_node(0, 3), await rig.add_fake_node(0, 3), await rig.add_fake_node(3, 6)
    script, whole = script_of(rig, (a, 0, 3), (b, 3, 6)), WholeWithMemory()
    await begin(script)
    await script.run(3, 0, some_rows(4))
    whole.run(0, some_rows(4))
    assert (await script.reopen((other, 0, 3), (b, 3, 6), answered=3)).next_step == 1
    await script.remember(1, MEMORY[:7], flags=StepFlag.REPLAY)
    await script.remember(2, MEMORY[7:], flags=StepFlag.REPLAY)
    await script.send(3, 0, some_rows(4), want=Want.NONE, flags=StepFlag.REPLAY)
    answer = await script.run(4, 4, some_rows(1, 4))
    assert np.array_equal(values(script, answer), whole.run(4, some_rows(1, 4)))
    assert [m.step for m in sent_between(rig, other, b) if isinstance(m, Step)] == [4]
    assert cache_of(other, script).memory_rows == 10


async def test_a_survivor_without_history_passes_on_what_comes_again_and_keeps_it_once(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(openings, "SESSION_BYTES", 3 * 32)  # three rows
    a, b, spare = await three(rig)
    script, whole = script_of(rig, (a, 0, 3), (b, 3, 6)), WholeWithMemory()
    await begin(script)
    await script.run(3, 0, some_rows(4))
    assert (await script.reopen((a, 0, 3), (spare, 3, 6), answered=3)).next_step == 1
    await script.remember(1, MEMORY[:7], flags=StepFlag.REPLAY)
    await script.remember(2, MEMORY[7:], flags=StepFlag.REPLAY)
    await script.send(3, 0, some_rows(4), want=Want.NONE, flags=StepFlag.REPLAY)
    answer = await script.run(4, 4, some_rows(1))
    whole.run(0, some_rows(4))
    assert np.array_equal(values(script, answer), whole.run(4, some_rows(1)))
    assert cache_of(a, script).memory_rows == cache_of(spare, script).memory_rows == 10


async def test_memory_after_the_first_step_is_refused_and_the_session_goes_on(rig: Rig) -> None:
    node = await rig.add_fake_node()
    script, whole = script_of(rig, (node, 0, 6), rows=20), WholeWithMemory()
    await begin(script)
    await script.run(3, 0, some_rows(2))
    whole.run(0, some_rows(2))
    await script.remember(4, MEMORY[:1])
    failure = await script.failure()
    assert (failure.code, failure.step) == (ErrorCode.STEP, 4)
    await script.run(4, 0, some_rows(1))  # back at the beginning: memory is still too late
    await script.remember(5, MEMORY[:1])
    assert (await script.failure()).code == ErrorCode.STEP
    whole.run(0, some_rows(1))
    assert np.array_equal(values(script, await script.run(5, 1, some_rows(1))), whole.run(1, some_rows(1)))


async def test_more_memory_than_was_asked_for_is_refused(rig: Rig) -> None:
    node = await rig.add_fake_node()
    script = script_of(rig, (node, 0, 6), rows=9)
    await script.open()
    await script.remember(1, MEMORY[:7])
    await script.remember(2, MEMORY[7:])
    failure = await script.failure()
    assert (failure.code, failure.step) == (ErrorCode.TOO_BIG, 2)
    await script.remember(2, MEMORY[7:9])
    answer = await script.run(3, 0, some_rows(2))
    assert np.array_equal(values(script, answer), WholeWithMemory(MEMORY[:9]).run(0, some_rows(2))[-1:])


async def test_memory_that_comes_again_under_other_numbers_is_not_kept_beside_the_first(rig: Rig) -> None:
    """A re-route takes steps back whose answers are gone; what is in the cache already stays, and was paid for."""
    node = await rig.add_fake_node()
    script = script_of(rig, (node, 0, 6))
    await script.open()
    for number in range(1, 6):  # one answer more than a last hop keeps
        await script.remember(number, MEMORY[2 * number - 2 : 2 * number], want=Want.LIST)
        await script.gateway.receive(Answer)
    assert (await script.reopen(answered=0)).next_step == 1
    await script.remember(6, MEMORY[:2], flags=StepFlag.REPLAY)
    assert (await script.failure()).code == ErrorCode.TOO_BIG
    assert cache_of(node, script).memory_rows == 10


async def test_a_step_before_the_memory_that_it_needs_is_refused(rig: Rig) -> None:
    script = script_of(rig, (await rig.add_fake_node(), 0, 6))
    await script.open()
    await script.send(1, 0, some_rows(2))
    assert (await script.failure()).code == ErrorCode.MALFORMED


@pytest.mark.parametrize("number", [float("nan"), float("inf"), float("-inf")])
async def test_memory_that_is_no_number_fails_alone_and_may_come_again(rig: Rig, number: float) -> None:
    a, b = await rig.add_fake_node(0, 3), await rig.add_fake_node(3, 6)
    script, neighbour = (script_of(rig, (a, 0, 3), (b, 3, 6)) for _ in range(2))
    await begin(neighbour)
    await script.open()
    await script.remember(1, MEMORY[:7])
    wrong = MEMORY[7:].copy()
    wrong[1, 3] = number
    await script.remember(2, wrong)
    failure = await script.failure()
    assert (failure.code, failure.step, failure.hop) == (ErrorCode.MALFORMED, 2, 0)
    assert failure.text == "hidden states that are infinite or no numbers"
    await script.remember(2, MEMORY[7:])
    expected = WholeWithMemory().run(0, some_rows(2))[-1:]
    for each in (script, neighbour):
        assert np.array_equal(values(each, await each.run(3, 0, some_rows(2))), expected)


@pytest.mark.parametrize("size", [8 * 32 + 8, 8 * 16])
async def test_memory_of_another_size_is_refused(rig: Rig, size: int) -> None:
    script = script_of(rig, (await rig.add_fake_node(), 0, 6))
    await script.open()
    await script.remember(1, MEMORY[:8], payload=bytes(size))
    failure = await script.failure()
    assert failure.code == ErrorCode.MALFORMED
    await script.remember(1, MEMORY)
    await script.run(2, 0, some_rows(1))


async def test_a_model_without_cross_attention_takes_no_memory(rig: Rig) -> None:
    node = await rig.add_fake_node(runner=FakeRunner())
    script = script_of(rig, (node, 0, 6))
    await script.open()
    assert (await script.failure()).code == ErrorCode.MALFORMED
    plain = script_of(rig, (node, 0, 6), rows=0)
    await plain.open()
    await plain.remember(1, MEMORY)
    assert (await plain.failure()).code == ErrorCode.TOO_BIG


async def test_memory_and_a_held_prefix_are_never_combined(rig: Rig) -> None:
    node = await rig.add_fake_node(keeps=True)
    script = script_of(rig, (node, 0, 6), confirms=True, prefixes=(Prefix(16, bytes(16)),))
    await script.open()
    assert (await script.failure()).code == ErrorCode.MALFORMED


async def test_room_for_memory_is_set_aside_and_given_back(rig: Rig) -> None:
    node = await rig.add_fake_node()
    script = script_of(rig, (node, 0, 6), room=64)
    await begin(script)
    await script.run(3, 0, some_rows(2))
    assert node.stats.kv_bytes == 64 * CACHE_BYTES_PER_POSITION + 10 * MEMORY_BYTES_PER_ROW
    await script.first.send(script.cancel())
    await until(lambda: node.stats.kv_bytes == 0)
    assert not node.runner.caches[0].memory_rows or not node.runner.caches[0].is_open


async def test_memory_that_a_node_has_no_room_for_is_refused_before_it_is_sent(rig: Rig) -> None:
    budget = 64 * CACHE_BYTES_PER_POSITION + 100 * MEMORY_BYTES_PER_ROW
    node = await rig.add_fake_node(kv_budget_bytes=budget)
    script = script_of(rig, (node, 0, 6), rows=101, room=64)
    await script.open()
    failure = await script.failure()
    assert failure.code == ErrorCode.NO_ROOM
    assert node.stats.num_sessions == 0
    fits = script_of(rig, (node, 0, 6), rows=100, room=64)
    await fits.open()
    await fits.remember(1, MEMORY)
    await fits.run(2, 0, some_rows(1))


async def test_a_hop_of_another_element_type_gets_memory_in_it(rig: Rig) -> None:
    a, b = await rig.add_fake_node(0, 3), await rig.add_fake_node(3, 6)
    script = script_of(rig, (a, 0, 3), (b, 3, 6))
    script.entry_changes = {0: {"wire_out": WireDtype.BFLOAT16}, 1: {"wire_in": WireDtype.BFLOAT16}}
    await begin(script)
    await script.run(3, 0, some_rows(2))
    (first, _, _) = (message for message in sent_between(rig, a, b) if isinstance(message, Step))
    expected = torch.from_numpy(MEMORY[:7].copy()).to(torch.bfloat16)
    assert bytes(first.payload) == expected.view(torch.uint8).numpy().tobytes()
    assert torch.equal(cache_of(b, script).memory[:7], expected.float())


async def test_a_hop_that_takes_ids_takes_memory_in_float32(rig: Rig) -> None:
    node = await rig.add_fake_node()
    sampling = {"params": SamplingParams(temperature=0.0).to_map()}
    script = script_of(rig, (node, 0, 6))
    script.opens = script.closes = True
    script.sampling = sampling
    await begin(script)
    answer = await script.run(3, 0, [3, 1])
    cache = node.runner.new_cache()
    cache.add_memory(torch.from_numpy(MEMORY.copy()))
    states = node.runner.run_opening(cache, torch.tensor([3, 1]), 0, end=NUM_LAYERS)
    logits = node.runner.run_closing(cache, states, 0, start=NUM_LAYERS)[0]
    assert np.frombuffer(answer.payload[:4], "<u4")[0] == int(logits.argmax())


async def test_another_amount_of_memory_is_another_session_at_a_node(rig: Rig) -> None:
    """What is held was made of this memory; a route that announces other memory begins anew."""
    node = await rig.add_fake_node()
    script = script_of(rig, (node, 0, 6))
    await begin(script)
    await script.run(3, 0, some_rows(2))
    script.changes["memory_rows"] = 12
    assert (await script.reopen(answered=3)).next_step == 1


async def test_an_evicted_session_gets_its_memory_with_the_replay(rig: Rig) -> None:
    node = await rig.add_fake_node()
    script, whole = script_of(rig, (node, 0, 6)), WholeWithMemory()
    await begin(script)
    await script.run(3, 0, some_rows(2))
    whole.run(0, some_rows(2))
    session = node.server._sessions.get(script.session_id)
    assert session is not None
    node.server._evict(session)
    await until(lambda: node.stats.kv_bytes == 0)
    assert (await script.reopen(answered=3)).next_step == 1
    await script.remember(1, MEMORY[:7], flags=StepFlag.REPLAY)
    await script.remember(2, MEMORY[7:], flags=StepFlag.REPLAY)
    await script.send(3, 0, some_rows(2), want=Want.NONE, flags=StepFlag.REPLAY)
    answer = await script.run(4, 2, some_rows(1))
    assert np.array_equal(values(script, answer), whole.run(2, some_rows(1)))


async def test_pieces_of_memory_are_in_no_batch(rig: Rig) -> None:
    node = await rig.add_fake_node(keeps=True)
    scripts = [script_of(rig, (node, 0, 6)) for _ in range(3)]
    for script in scripts:
        await begin(script)
        await script.send(3, 0, some_rows(40))
    expected = WholeWithMemory().run(0, some_rows(40))[-1:]
    for _ in scripts:
        assert np.allclose(rows_of(await rig.gateway.receive(Answer)), expected, rtol=1e-5)
    assert sum(rows for call in node.runner.calls for rows in call) == 3 * 40


async def test_a_model_that_needs_memory_takes_no_session_without(rig: Rig) -> None:
    script = rig.script((await rig.add_fake_node(), 0, 6))
    await script.open()
    assert (await script.failure()).code == ErrorCode.MALFORMED
