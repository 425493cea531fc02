"""What a node makes of steps: computed in order, forwarded, answered, repeated, rolled back, refused."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import numpy as np
import pytest
import torch

from node.step_flow import SPARE_STEPS
from node.step_rows import TORCH_DTYPES
from routing import wire
from routing.errors import ErrorCode
from routing.types import Answer, AnswerKind, Failure, Step, StepFlag, Want, WireDtype
from tests.node.fake_runner import HIDDEN_SIZE, NUM_LAYERS, FakeRunner
from tests.node.rig import Rig, rows_of, until


def some_rows(num: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((num, HIDDEN_SIZE), dtype=np.float32)


class Whole:
    """The uncut model: what every chain must equal, bit for bit."""

    def __init__(self) -> None:
        self.runner = FakeRunner()
        self.cache = self.runner.new_cache()

    def run(self, position: int, rows: np.ndarray) -> np.ndarray:
        self.cache.truncate(position)
        states = torch.from_numpy(rows.copy())
        return self.runner.run_layers(self.cache, states, position, start=0, end=NUM_LAYERS).numpy()


async def test_a_chain_of_two_equals_the_whole_model(rig: Rig) -> None:
    script = rig.script((await rig.add_fake_node(0, 3), 0, 3), (await rig.add_fake_node(3, 6), 3, 6))
    whole = Whole()
    await script.open()
    prompt, token = some_rows(5), some_rows(1, seed=1)
    first = await script.run(1, 0, prompt, want=Want.ALL)
    whole_first = whole.run(0, prompt)
    # the last hop has no link to the gateway here: the answer came up the chain, sealed
    assert StepFlag.SEALED in first.flags
    assert np.array_equal(rows_of(wire.open_answer(script.answer_key, first)), whole_first)
    second = wire.open_answer(script.answer_key, await script.run(2, 5, token))
    assert np.array_equal(rows_of(second), whole.run(5, token))


async def test_the_answer_comes_straight_back_on_the_gateways_own_link(rig: Rig) -> None:
    a, b = await rig.add_fake_node(0, 3), await rig.add_fake_node(3, 6)
    await rig.gateway.endpoint.dial(b.address)
    script = rig.script((a, 0, 3), (b, 3, 6))
    await script.open()
    answer = await script.run(1, 0, some_rows(2))
    assert StepFlag.SEALED not in answer.flags
    assert np.array_equal(rows_of(answer), Whole().run(0, some_rows(2))[-1:])
    (between,) = (link for link in rig.network.links if link.own_id == a.node_id)
    assert between.counters.messages_received["Answer"] == 0


async def test_a_middle_hop_does_not_ask_for_room_for_what_it_only_passes(rig: Rig) -> None:
    a, b, c = [await rig.add_fake_node(n, n + 2) for n in (0, 2, 4)]
    script = rig.script((a, 0, 2), (b, 2, 4), (c, 4, 6))
    await script.open()
    for number in range(1, 6):
        answer = wire.open_answer(
            script.answer_key, await script.run(number, number - 1, some_rows(1, number))
        )
    assert answer.position == 4
    assert [node.stats.steps_run for node in rig.nodes] == [5, 5, 5]


@pytest.mark.parametrize(
    ("want", "want_rows", "expected"),
    [(Want.LAST, (), [3]), (Want.ALL, (), [0, 1, 2, 3]), (Want.LIST, (0, 2), [0, 2])],
)
async def test_only_wanted_rows_come_back(
    rig: Rig, want: Want, want_rows: tuple[int, ...], expected: list[int]
) -> None:
    script = rig.script((await rig.add_fake_node(), 0, 6))
    await script.open()
    answer = await script.run(1, 0, some_rows(4), want=want, want_rows=want_rows)
    assert (answer.rows, answer.position, answer.kind) == (
        len(expected),
        expected[0],
        AnswerKind.HIDDEN_STATES,
    )
    assert np.array_equal(rows_of(answer), Whole().run(0, some_rows(4))[expected])


async def test_a_step_that_wants_nothing_is_computed_and_not_answered(rig: Rig) -> None:
    script = rig.script((await rig.add_fake_node(), 0, 6))
    await script.open()
    await script.send(1, 0, some_rows(4), want=Want.NONE)
    answer = await script.run(2, 4, some_rows(1))
    whole = Whole()
    whole.run(0, some_rows(4))
    assert np.array_equal(rows_of(answer), whole.run(4, some_rows(1)))


async def test_a_position_below_the_length_rolls_back_first(rig: Rig) -> None:
    script = rig.script((await rig.add_fake_node(0, 3), 0, 3), (await rig.add_fake_node(3, 6), 3, 6))
    await rig.gateway.endpoint.dial(rig.nodes[1].address)
    await script.open()
    await script.run(1, 0, some_rows(6))
    answer = await script.run(2, 2, some_rows(3, seed=7))
    whole = Whole()
    whole.run(0, some_rows(6))
    assert np.array_equal(rows_of(answer), whole.run(2, some_rows(3, seed=7))[-1:])


async def test_a_repeated_step_is_answered_again_and_not_computed_again(rig: Rig) -> None:
    a, b = await rig.add_fake_node(0, 3), await rig.add_fake_node(3, 6)
    script = rig.script((a, 0, 3), (b, 3, 6))
    await script.open()
    first = [await script.run(number, number - 1, some_rows(1, number)) for number in (1, 2, 3)]
    again = [await script.run(number, number - 1, some_rows(1, number)) for number in (2, 3, 1)]
    assert [bytes(answer.payload) for answer in again] == [bytes(first[n].payload) for n in (1, 2, 0)]
    assert [node.stats.steps_run for node in (a, b)] == [3, 3]
    assert [node.stats.steps_repeated for node in (a, b)] == [3, 3]


async def test_a_repeat_of_a_step_that_is_still_computed_gives_one_answer(rig: Rig) -> None:
    node = await rig.add_fake_node()
    script = rig.script((node, 0, 6))
    await script.open()
    node.runner.hold()
    await script.send(1, 0, some_rows(1))
    await until(node.runner.entered.is_set)
    await script.send(1, 0, some_rows(1))
    node.runner.release()
    await rig.gateway.receive(Answer)
    await script.run(2, 1, some_rows(1))
    assert rig.gateway.inbox.empty()


async def test_a_step_that_is_no_longer_kept_is_refused(rig: Rig) -> None:
    script = rig.script((await rig.add_fake_node(), 0, 6))
    await script.open()
    for number in range(1, 7):
        await script.run(number, number - 1, some_rows(1))
    await script.send(2, 1, some_rows(1))
    assert (await script.failure()).code == ErrorCode.STEP
    await script.send(3, 2, some_rows(1))  # the fourth from the end
    await rig.gateway.receive(Answer)


@pytest.mark.parametrize(
    ("number", "position", "fields", "code"),
    [
        (4, 2, {}, ErrorCode.STEP),
        (2, 5, {}, ErrorCode.STEP),
        (3, 3, {}, ErrorCode.STEP),
        (3, 1, {"epoch": 2}, ErrorCode.STEP),
        (3, 2, {"payload": bytes(4 * (HIDDEN_SIZE - 1))}, ErrorCode.MALFORMED),
        (3, 2, {"payload": bytes(8 * HIDDEN_SIZE)}, ErrorCode.MALFORMED),
        (3, 2, {"flags": StepFlag.TOKEN_IDS, "payload": bytes(4)}, ErrorCode.MALFORMED),
        (3, 190, {"rows": 11, "payload": bytes(11 * 4 * HIDDEN_SIZE)}, ErrorCode.TOO_BIG),
        (3, 0, {"rows": 20, "payload": bytes(20 * 4 * HIDDEN_SIZE)}, ErrorCode.TOO_BIG),
    ],
)
async def test_a_wrong_step_fails_alone(
    rig: Rig, number: int, position: int, fields: dict[str, object], code: ErrorCode
) -> None:
    node = await rig.add_fake_node(max_rows=16)
    script = rig.script((node, 0, 6))
    await script.open()
    for good in (1, 2):
        await script.run(good, good - 1, some_rows(1, good))
    wrong = script.step(number, position, some_rows(1))
    values = {name: getattr(wrong, name) for name in Step.__dataclass_fields__} | fields
    await script.first.send(Step(**values))
    failure = await script.failure()
    assert (failure.code, failure.step, failure.hop) == (code, number, 0)
    answer = await script.run(3, 2, some_rows(1, 3))
    whole = Whole()
    rows = [whole.run(n - 1, some_rows(1, n)) for n in (1, 2, 3)]
    assert np.array_equal(rows_of(answer), rows[-1])


@pytest.mark.parametrize("wrong", [np.nan, np.inf])
async def test_rows_that_are_no_numbers_are_refused_and_may_come_again(rig: Rig, wrong: float) -> None:
    node = await rig.add_fake_node()
    poisoned, healthy = rig.script((node, 0, 6)), rig.script((node, 0, 6))
    await poisoned.open()
    await healthy.open()
    rows = some_rows(2)
    rows[1, 3] = wrong
    await poisoned.send(1, 0, rows)
    failure = await poisoned.failure()
    assert (failure.code, failure.hop) == (ErrorCode.MALFORMED, 0)
    assert str(rows[0, 0]) not in failure.text
    for script in (healthy, poisoned):
        answer = await script.run(1, 0, some_rows(2))
        assert np.array_equal(rows_of(answer), Whole().run(0, some_rows(2))[-1:])


async def test_layers_that_make_no_numbers_are_told_by_the_node_that_has_them(rig: Rig) -> None:
    a, b = await rig.add_fake_node(0, 3), await rig.add_fake_node(3, 6)
    script = rig.script((a, 0, 3), (b, 3, 6))
    await script.open()
    original = a.runner.run_layers
    a.runner.run_layers = lambda *args, **kwargs: original(*args, **kwargs) / 0
    await script.send(1, 0, some_rows(2))
    failure = await script.failure()
    assert (failure.code, failure.hop) == (ErrorCode.COMPUTE, 0)
    assert b.stats.steps_run == 0


async def test_an_exception_in_the_model_ends_that_session_only(rig: Rig) -> None:
    node = await rig.add_fake_node()
    broken, healthy = rig.script((node, 0, 6)), rig.script((node, 0, 6))
    await broken.open()
    await healthy.open()
    node.runner.error = RuntimeError("values 0.123 0.456")
    await broken.send(1, 0, some_rows(2))
    failure = await broken.failure()
    assert (failure.code, failure.text) == (ErrorCode.COMPUTE, "RuntimeError")
    await healthy.run(1, 0, some_rows(2))
    await broken.send(2, 2, some_rows(1))
    assert (await broken.failure()).code == ErrorCode.NO_SESSION


async def test_steps_behind_a_failed_one_fail_and_all_may_come_again(rig: Rig) -> None:
    node = await rig.add_fake_node()
    script, other = rig.script((node, 0, 6)), rig.script((node, 0, 6))
    await script.open()
    await other.open()
    node.runner.hold()
    await other.send(1, 0, some_rows(1))
    await until(node.runner.entered.is_set)
    await script.send(1, 0, some_rows(1), deadline_ms=100)
    await script.send(2, 1, some_rows(1, 2))
    await until(lambda: node.server.description().load == 2)
    await asyncio.sleep(0.15)  # the deadline is what passes here
    node.runner.release()
    await rig.gateway.receive(Answer)
    codes = [((failure := await script.failure()).step, failure.code) for _ in range(2)]
    assert codes == [(1, ErrorCode.DEADLINE), (2, ErrorCode.STEP)]
    await script.run(1, 0, some_rows(1))
    await script.run(2, 1, some_rows(1, 2))


async def test_the_deadline_that_is_left_travels_on(rig: Rig) -> None:
    a, b = await rig.add_fake_node(0, 3), await rig.add_fake_node(3, 6)
    script = rig.script((a, 0, 3), (b, 3, 6))
    await script.open()
    await script.run(1, 0, some_rows(1), deadline_ms=5000)
    (between,) = (link for link in rig.network.links if link.own_id == a.node_id)
    (onward,) = (message for message in between.sent if isinstance(message, Step))
    assert 4000 < onward.deadline_ms <= 5000


async def test_every_hop_adds_its_trace(rig: Rig) -> None:
    script = rig.script((await rig.add_fake_node(0, 3), 0, 3), (await rig.add_fake_node(3, 6), 3, 6))
    await script.open()
    answer = await script.run(1, 0, some_rows(1), flags=StepFlag.TRACE)
    assert len(answer.traces) == 2
    assert all(trace.compute_us > 0 for trace in answer.traces)
    plain = await script.run(2, 1, some_rows(1))
    assert plain.traces == ()


async def test_a_step_for_no_session_here_is_refused_to_its_sender(rig: Rig) -> None:
    script = rig.script((await rig.add_fake_node(), 0, 6))
    script.first = await rig.gateway.endpoint.dial(rig.nodes[0].address)
    await script.send(1, 0, some_rows(1))
    failure = await rig.gateway.receive(Failure)
    assert (failure.code, failure.step) == (ErrorCode.NO_SESSION, 1)


async def test_a_session_with_too_many_pending_steps_is_told_to_wait(rig: Rig) -> None:
    node = await rig.add_fake_node()
    script = rig.script((node, 0, 6), changes={"max_positions": 4})
    most = 4 + SPARE_STEPS
    await script.open()
    node.runner.hold()
    for number in range(1, most + 2):
        await script.send(number, 0, some_rows(1))
    failure = await script.failure()
    assert (failure.code, failure.step) == (ErrorCode.BUSY, most + 1)
    assert failure.retry_ms > 0
    node.runner.release()
    for _ in range(most):
        await rig.gateway.receive(Answer)
    await script.run(most + 1, 0, some_rows(1))


@pytest.mark.parametrize("wire_dtype", [WireDtype.BFLOAT16, WireDtype.FLOAT16])
async def test_the_wire_may_be_narrower_than_the_compute_dtype(rig: Rig, wire_dtype: WireDtype) -> None:
    torch_dtype = TORCH_DTYPES[wire_dtype]
    node = await rig.add_fake_node()
    script = rig.script((node, 0, 6), changes={"wire_in": wire_dtype, "wire_out": wire_dtype})
    await script.open()
    rows = torch.from_numpy(some_rows(2)).to(torch_dtype)
    step = replace(script.step(1, 0, some_rows(2)), payload=rows.view(torch.uint8).numpy().tobytes())
    await script.first.send(step)
    answer = await rig.gateway.receive(Answer)
    expected = torch.from_numpy(Whole().run(0, rows.float().numpy())[-1:]).to(torch_dtype)
    assert bytes(answer.payload) == expected.view(torch.uint8).numpy().tobytes()
