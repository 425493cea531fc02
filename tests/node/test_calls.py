"""Sessions of calls on one node: what it takes and refuses, what it counts, and what a failed call leaves behind."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import pytest
import pytest_asyncio
import torch

from routing import wire
from routing.errors import ErrorCode
from routing.parts import parts_of
from routing.types import Answer, AnswerKind, HopTrace, Opened, Step, StepFlag
from slicing.diffusion.calls import BlockCall, Pass, Plan
from slicing.diffusion.patches import Cut, Mode
from slicing.diffusion.wire import CallHeader, CallReceiver, CallSender
from slicing.runner import Cancelled
from tests.node.block_rig import GRID, STACK, ToyBlocks, add_block_node, run_whole, toy_pass
from tests.node.rig import Node, Rig, loopback_rig, until
from tests.node.test_steps import some_rows

CUT = Cut(GRID, 0, 2)


class Calls:
    """A session of calls as a gateway plays it."""

    def __init__(self, rig: Rig, *hops: tuple[Node, int, int], **changes: Any) -> None:
        self.rig = rig
        self.script = rig.script(*hops, changes={"calls": True, **changes})
        self.sender, self.receiver = CallSender(), CallReceiver()

    async def open(self) -> Calls:
        await self.script.open()
        return self

    def step(self, number: int, made: Pass | None = None, **header: Any) -> Step:
        made = toy_pass(number - 1) if made is None else made
        return self.step_of(number, self.sender.pack(CallHeader(pass_number=number - 1, **header), made))

    def step_of(self, number: int, payload: bytes, **fields: Any) -> Step:
        script, flags = self.script, StepFlag.CALL | fields.pop("flags", StepFlag.NONE)
        position = fields.pop("position", number - 1)
        return Step(script.session_id, script.epoch, number, position, 1, payload, flags=flags, **fields)

    async def send(self, step: Step) -> None:
        await self.script.first.send(step)

    async def run(self, number: int, made: Pass | None = None, **header: Any) -> list[torch.Tensor]:
        await self.send(self.step(number, made, **header))
        return await self.answer(number)

    async def answer(self, number: int) -> list[torch.Tensor]:
        answer = await self.rig.gateway.receive(Answer)
        assert (answer.step, answer.position, answer.rows) == (number, number - 1, 1)
        assert answer.kind is AnswerKind.CALL
        return self.receiver.unpack_streams(answer.payload)[1]

    async def failure(self) -> tuple[ErrorCode, str]:
        failure = await self.script.failure()
        return ErrorCode(failure.code), failure.text


def blocks_of(node: Node) -> ToyBlocks:
    assert isinstance(node.runner, ToyBlocks)
    return node.runner


async def test_a_call_runs_the_entrys_blocks_and_nothing_else(rig: Rig) -> None:
    node = await add_block_node(rig)
    calls = await Calls(rig, (node, 2, 5)).open()
    made = toy_pass(0)
    (got,) = await calls.run(1)
    expected = blocks_of(node).run(made, start=2, end=5)
    assert torch.equal(got, expected[0])
    assert blocks_of(node).passes == [(2, 5), (2, 5)]
    assert (node.stats.calls_run, node.stats.steps_run) == (1, 1)
    assert node.stats.call_bytes > made.streams[0].nbytes


async def test_each_hop_tells_its_times(rig: Rig) -> None:
    a, b = await add_block_node(rig, 0, 3), await add_block_node(rig, 3, 6)
    calls = await Calls(rig, (a, 0, 3), (b, 3, 6)).open()
    step = calls.step(1)
    await calls.send(calls.step_of(1, bytes(step.payload), flags=StepFlag.TRACE))
    answer = wire.open_answer(calls.script.answer_key, await rig.gateway.receive(Answer))
    assert len(answer.traces) == 2
    assert all(isinstance(trace, HopTrace) and trace.compute_us > 0 for trace in answer.traces)


async def test_calls_and_steps_are_not_confused(rig: Rig) -> None:
    blocks, layers = await add_block_node(rig), await rig.add_fake_node()
    for node, changes in ((blocks, {}), (layers, {"calls": True})):
        script = rig.script((node, 0, 6), changes=changes)
        await script.open()
        assert (await script.failure()).code == ErrorCode.MALFORMED
        assert node.stats.num_sessions == 0
    calls = await Calls(rig, (blocks, 0, 6)).open()
    await calls.send(calls.script.step(1, 0, some_rows(1)))
    assert (await calls.failure())[0] is ErrorCode.MALFORMED
    text = rig.script((layers, 0, 6))
    await text.open()
    await text.first.send(Step(text.session_id, 1, 1, 0, 1, bytes(32), flags=StepFlag.CALL))
    assert (await text.failure()).code == ErrorCode.MALFORMED


@pytest.mark.parametrize("changes", [{"resumes": True}, {"run_closing": True}])
async def test_a_route_entry_that_no_gateway_makes_is_refused(rig: Rig, changes: dict[str, Any]) -> None:
    calls = await Calls(rig, (await add_block_node(rig), 0, 6), **changes).open()
    assert (await calls.failure())[0] is ErrorCode.MALFORMED


async def test_what_holds_no_call_ends_the_session(rig: Rig) -> None:
    node = await add_block_node(rig)
    calls = await Calls(rig, (node, 0, 6)).open()
    await calls.send(calls.step_of(1, b"\0\0\0\2{}"))
    code, text = await calls.failure()
    assert code is ErrorCode.MALFORMED
    assert "header" in text
    assert node.stats.num_sessions == 0
    await calls.send(calls.step(2))
    assert (await calls.failure())[0] is ErrorCode.NO_SESSION


async def test_what_was_not_sent_to_this_node_asks_for_a_fresh_route(rig: Rig) -> None:
    node = await add_block_node(rig)
    calls = await Calls(rig, (node, 0, 6)).open()
    calls.sender.pack(CallHeader(), toy_pass(0))  # to another node
    await calls.send(calls.step_of(1, calls.sender.pack(CallHeader(pass_number=1), toy_pass(1))))
    assert (await calls.failure())[0] is ErrorCode.STEP


async def test_a_plan_of_another_stack_is_refused(rig: Rig) -> None:
    calls = await Calls(rig, (await add_block_node(rig), 0, 6)).open()
    made = toy_pass(0)
    made.plan = type(made.plan)("transformer_2.blocks", *list(vars(made.plan).values())[1:5])
    await calls.send(calls.step(1, made))
    code, text = await calls.failure()
    assert code is ErrorCode.MALFORMED
    assert "stack" in text


async def test_numbers_go_up_and_a_fresh_route_may_begin_anywhere(rig: Rig) -> None:
    calls = await Calls(rig, (await add_block_node(rig), 0, 6)).open()
    payload = calls.sender.pack(CallHeader(pass_number=6), toy_pass(6))
    await calls.send(calls.step_of(7, payload))
    assert (await calls.failure())[0] is ErrorCode.STEP
    await calls.send(calls.step_of(7, payload, flags=StepFlag.REPLAY))
    await calls.answer(7)
    await calls.run(8)


async def test_more_calls_than_were_announced_are_refused(rig: Rig) -> None:
    calls = await Calls(rig, (await add_block_node(rig), 0, 6), max_positions=1).open()
    await calls.run(1)
    await calls.send(calls.step(2))
    assert (await calls.failure())[0] is ErrorCode.TOO_BIG


async def test_a_repeated_call_is_sent_again_and_not_computed(rig: Rig) -> None:
    node = await add_block_node(rig)
    calls = await Calls(rig, (node, 0, 6)).open()
    step = calls.step(1)
    await calls.send(step)
    first = await calls.answer(1)
    await calls.send(step)
    assert torch.equal((await calls.answer(1))[0], first[0])
    assert len(blocks_of(node).passes) == 1
    assert node.stats.steps_repeated == 1


async def test_an_output_beyond_the_byte_budget_is_not_kept(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("node.openings.KEPT_CALL_BYTES", 100)
    node = await add_block_node(rig)
    calls = await Calls(rig, (node, 0, 6)).open()
    step = calls.step(1)
    await calls.send(step)
    await calls.answer(1)
    assert node.stats.history_bytes == 0
    await calls.send(step)
    assert (await calls.failure())[0] is ErrorCode.STEP


async def test_parts_become_one_call_and_out_of_order_they_end_the_session(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, size in (("PART_BYTES", 200), ("MIN_PART_BYTES", 100)):
        monkeypatch.setattr(f"routing.parts.{name}", size)
    node = await add_block_node(rig)
    calls = await Calls(rig, (node, 0, 6)).open()
    parts = list(parts_of(calls.step(1)))
    for part in parts:
        assert not blocks_of(node).passes
        await calls.send(part)
    answers = [await rig.gateway.receive(Answer) for _ in range(4)]
    assert [answer.rows for answer in answers] == [4, 3, 2, 1]
    _, (got,) = calls.receiver.unpack_streams([answer.payload for answer in answers])
    assert torch.equal(got, run_whole(toy_pass(0))[0])
    first, second, *_ = parts_of(calls.step(2))
    await calls.send(first)
    await calls.send(first)
    code, text = await calls.failure()
    assert code is ErrorCode.MALFORMED
    assert "order" in text
    await calls.send(second)
    assert (await calls.failure())[0] is ErrorCode.NO_SESSION
    assert node.stats.kv_bytes == 0


async def test_room_for_keys_is_set_aside_at_the_open_and_given_back(rig: Rig) -> None:
    node = await add_block_node(rig)
    calls = await Calls(rig, (node, 1, 5), room=10).open()
    await until(lambda: node.stats.num_sessions == 1)
    assert node.stats.kv_bytes == 4 * 10 * 1024
    await calls.script.first.send(calls.script.cancel())
    await until(lambda: node.stats.num_sessions == 0)
    assert node.stats.kv_bytes == 0


async def test_a_session_that_would_not_fit_is_told_how_much_would(rig: Rig) -> None:
    node = await add_block_node(rig, kv_budget_bytes=6 * 20 * 1024)
    calls = await Calls(rig, (node, 0, 6), room=21).open()
    failure = await calls.script.failure()
    assert (failure.code, failure.room) == (ErrorCode.NO_ROOM, 20)
    assert "21 KiB a block asked, there is room for 20" in failure.text
    await (await Calls(rig, (node, 0, 6), room=15).open()).run(1)
    other = await Calls(rig, (node, 0, 6), room=15).open()
    failure = await other.script.failure()
    assert failure.code == ErrorCode.BUSY
    assert failure.retry_ms > 0


async def test_a_session_that_waits_for_other_hops_keeps_its_room_longer(rig: Rig) -> None:
    node = await add_block_node(rig, kv_budget_bytes=6 * 20 * 1024)
    await (await Calls(rig, (node, 0, 6), room=15).open()).run(1)
    node.now[0] += 60.0
    other = await Calls(rig, (node, 0, 6), room=15).open()
    assert (await other.failure())[0] is ErrorCode.BUSY
    node.now[0] += 240.0
    await (await Calls(rig, (node, 0, 6), room=15).open()).run(1)
    assert node.stats.sessions_evicted == 1


async def test_what_arrives_and_what_is_remembered_counts_against_the_memory(rig: Rig) -> None:
    made = toy_pass(0, tokens=512)
    payload, receiver = CallSender().pack(CallHeader(), made), CallReceiver()
    receiver.unpack(payload)
    due = len(payload) + receiver.size_bytes
    node = await add_block_node(rig, kv_budget_bytes=due + 500)
    calls = await Calls(rig, (node, 0, 6)).open()
    await calls.run(1, made)
    assert node.stats.kv_bytes == due
    made.slots[0] = torch.randn(1, 40, 8)  # other text: both are remembered now
    await calls.send(calls.step(2, made))
    assert (await calls.failure())[0] is ErrorCode.BUSY
    assert node.stats.num_sessions == node.stats.kv_bytes == 0


async def test_rows_that_are_sent_once_count_as_what_they_become(rig: Rig) -> None:
    """A few hundred bytes that make a MiB each: what one session remembers is not free for the next."""
    node = await add_block_node(rig, kv_budget_bytes=3 << 20)
    plan = Plan(STACK, (BlockCall(0, (0, 1)),) * 6, toy_pass(0).plan.shapes, None, 1)
    made = Pass(plan, toy_pass(0).streams, [torch.zeros(1, 1 << 15, 8), torch.zeros(1, 1, 8)])
    for _ in range(2):
        calls = await Calls(rig, (node, 0, 6)).open()
        step = calls.step(1, made)
        assert len(step.payload) < 4000
        await calls.send(step)
        await calls.answer(1)
    assert node.stats.kv_bytes > 2 << 20
    calls = await Calls(rig, (node, 0, 6)).open()
    await calls.send(calls.step(1, made))
    code, text = await calls.failure()
    assert code is ErrorCode.BUSY
    assert "are free" in text
    assert node.stats.num_sessions == 2


async def test_what_a_call_leaves_behind_must_fit_or_the_session_ends(rig: Rig) -> None:
    made = toy_pass(0, tokens=64)
    size = len(CallSender().pack(CallHeader(), made))
    node = await add_block_node(rig, kv_budget_bytes=size + 500)
    calls = await Calls(rig, (node, 0, 6)).open()
    await calls.send(calls.step(1, made))
    assert (await calls.failure())[0] is ErrorCode.BUSY
    assert node.stats.num_sessions == node.stats.kv_bytes == 0


def crafted(name: str) -> Pass:
    """A pass whose plan is one, and fits no block."""
    good = toy_pass(0)
    text, embedding = {"slot": 0}, {"slot": 1}
    kwargs: dict[str, Any] = {"text": text, "embedding": embedding}
    args: list[Any] = [{"stream": 0}]
    match name:
        case "another name":
            kwargs = {"no_such_name": text, "embedding": embedding}
        case "itself":
            kwargs["self"] = 1
        case "twice":
            kwargs["hidden_states"] = 1
        case "a type for a tensor":
            args = [{"dtype": "int8"}]
        case "a nest for a tensor":
            args = [[[[[[[[{"stream": 0}]]]]]]]]
        case "no number":
            args = [{"float": "nan"}]
        case "a huge number":
            args = [1 << 24]
        case "whole numbers":
            good.slots[1] = torch.full((1, 1, 8), 1 << 40)
        case "others' width":
            good.slots[1] = torch.zeros(1, 1, 9)
        case "empty":
            good.slots[0] = torch.zeros(1, 0, 8)
        case "infinite":
            good.slots[1] = torch.full((1, 1, 8), float("nan"))
    shape = {"args": args, "kwargs": kwargs}
    outputs = (0, None) if name == "two outputs" else None
    plan = Plan(STACK, (BlockCall(0, (0, 1)),) * 6, (shape,), outputs, 1)
    return Pass(plan, good.streams, good.slots)


@pytest.mark.parametrize(
    "name",
    [
        *("another name", "itself", "twice", "a type for a tensor", "a nest for a tensor", "no number"),
        *("a huge number", "others' width", "empty", "infinite", "two outputs", "whole numbers"),
    ],
)
async def test_a_plan_that_fits_no_block_costs_its_own_session_only(rig: Rig, name: str) -> None:
    node = await add_block_node(rig)
    other = await Calls(rig, (node, 0, 6)).open()
    await other.run(1)
    calls = await Calls(rig, (node, 0, 6)).open()
    await calls.send(calls.step(1, crafted(name)))
    if name == "whole numbers":  # tanh of it is 1: an odd picture, and no trouble
        await calls.answer(1)
    else:
        code, text = await calls.failure()
        assert code is ErrorCode.COMPUTE
        assert "nan" not in text
        assert node.stats.num_sessions == 1
    await other.run(2)


async def test_flags_of_other_work_make_no_other_work_of_a_call(rig: Rig) -> None:
    node = await add_block_node(rig)
    calls = await Calls(rig, (node, 0, 6)).open()
    first = await calls.run(1)
    step = calls.step(2)
    await calls.send(calls.step_of(2, bytes(step.payload), flags=StepFlag.REPLAY))
    second = await calls.answer(2)
    assert torch.equal(second[0], run_whole(toy_pass(1))[0])
    assert not torch.equal(first[0], second[0])
    skipped = calls.sender.pack(CallHeader(pass_number=9), toy_pass(9))
    calls.sender.pack(CallHeader(pass_number=10), toy_pass(10))
    later = calls.sender.pack(CallHeader(pass_number=12), toy_pass(10))  # by digests that never came
    await calls.send(calls.step_of(13, later, flags=StepFlag.REPLAY))
    assert (await calls.failure())[0] is ErrorCode.STEP
    assert skipped
    assert node.stats.num_sessions == node.stats.kv_bytes == 0


async def test_a_call_that_never_ends_is_counted_and_given_up_with_its_session(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, size in (("PART_BYTES", 200), ("MIN_PART_BYTES", 100)):
        monkeypatch.setattr(f"routing.parts.{name}", size)
    node = await add_block_node(rig)
    calls = await Calls(rig, (node, 0, 6)).open()
    first, *_ = parts_of(calls.step(1))
    await calls.send(first)
    await until(lambda: node.stats.kv_bytes == 200)
    node.now[0] += 3600.0
    node.server.sweep()
    assert node.stats.num_sessions == node.stats.kv_bytes == 0


async def test_too_many_calls_under_way_are_refused(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("node.step_flow.MAX_PENDING_CALLS", 2)
    node = await add_block_node(rig)
    blocks_of(node).hold()
    calls = await Calls(rig, (node, 0, 6)).open()
    for number in (1, 2, 3):
        await calls.send(calls.step(number))
    assert (await calls.failure())[0] is ErrorCode.BUSY
    blocks_of(node).release()
    await until(lambda: node.stats.kv_bytes == 0)
    assert node.server._outbox.call_bytes == 0


@pytest.mark.parametrize(
    ("error", "code", "text"),
    [
        (RuntimeError("a secret of the picture"), ErrorCode.COMPUTE, "RuntimeError"),
        (MemoryError(), ErrorCode.COMPUTE, "MemoryError"),
        (Cancelled(), ErrorCode.CANCELLED, "cancelled between layers"),
    ],
)
async def test_a_failed_call_ends_its_session_and_no_other(
    rig: Rig, error: Exception, code: ErrorCode, text: str
) -> None:
    node = await add_block_node(rig)
    broken, other = await Calls(rig, (node, 0, 6)).open(), await Calls(rig, (node, 0, 6)).open()
    await other.run(1)
    blocks_of(node).error = error
    await broken.send(broken.step(1))
    assert await broken.failure() == (code, text)
    assert node.stats.num_sessions == 1
    await other.run(2)


async def test_a_deadline_ends_a_call_in_the_queue(rig: Rig) -> None:
    node = await add_block_node(rig)
    blocks_of(node).hold()
    first, second = await Calls(rig, (node, 0, 6)).open(), await Calls(rig, (node, 0, 6)).open()
    await first.send(first.step(1))
    await until(blocks_of(node).entered.is_set)
    await second.send(second.step_of(1, bytes(second.step(1).payload), deadline_ms=100))
    await asyncio.sleep(0.15)
    blocks_of(node).release()
    await first.answer(1)
    assert (await second.failure())[0] is ErrorCode.DEADLINE


async def test_a_patch_without_kept_keys_asks_for_a_fresh_route(rig: Rig) -> None:
    node = await add_block_node(rig)
    calls = await Calls(rig, (node, 0, 6), room=64).open()
    made = toy_pass(0)
    patch = Pass(made.plan, [CUT.take(made.streams[0])], made.slots)
    await calls.send(calls.step(1, patch, mode=Mode.PATCH, cut=CUT))
    code, text = await calls.failure()
    assert code is ErrorCode.STEP
    assert "must be whole" in text


async def test_text_and_calls_take_turns_on_one_compute_thread(rig: Rig) -> None:
    node = await rig.add_fake_node()
    held, blocks = node.slices.held[0], ToyBlocks(0, 6)
    node.slices.add(type(held)(blocks, replace(held.offer, model_digest=b"p" * 32), 0))
    text = rig.script((node, 0, 6))
    await text.open()
    await text.run(1, 0, some_rows(3))
    branches = [await Calls(rig, (node, 0, 6), model_digest=b"p" * 32).open() for _ in range(2)]
    blocks.hold()
    await branches[0].send(branches[0].step(1))
    await until(blocks.entered.is_set)
    for number in (2, 3, 4):
        await branches[0].send(branches[0].step(number))
        await branches[1].send(branches[1].step(number - 1))
        await text.send(number, number + 1, some_rows(1, number))
    blocks.release()
    answers = [await rig.gateway.receive(Answer) for _ in range(10)]
    of_text = [place for place, answer in enumerate(answers) if answer.session_id == text.session_id]
    assert of_text == [1, 2, 3], "a token waits for the call that runs, not for those behind it"
    assert node.stats.batches.works == 11
    assert len(blocks.passes) == 7


async def test_it_confirms_that_it_is_open(rig: Rig) -> None:
    node = await add_block_node(rig, keeps=True)
    calls = await Calls(rig, (node, 0, 6), room=1, confirms=True).open()
    assert (await rig.gateway.receive(Opened)).session_id == calls.script.session_id


@pytest_asyncio.fixture
async def real_rig() -> AsyncIterator[Rig]:
    async with loopback_rig() as made:
        yield made


class Plus(ToyBlocks):
    """Blocks that cost nothing."""

    def run(self, made: Pass, **_: Any) -> list[torch.Tensor]:
        return [stream + 1 for stream in made.streams]


async def test_a_stream_larger_than_any_message_crosses_real_links(real_rig: Rig) -> None:
    node = await add_block_node(real_rig)
    node.slices.remove(held := node.slices.held[0])
    node.slices.add(type(held)(Plus(0, 6, 1024), held.offer, 0))
    calls = await Calls(real_rig, (node, 0, 6)).open()
    stream = torch.zeros(1, 18 << 10, 1024)
    stream[0, :, 0] = torch.arange(18 << 10)
    assert stream.nbytes > 64 << 20
    made = toy_pass(0)
    step = calls.step(1, Pass(made.plan, [stream], made.slots))
    for part in parts_of(step):
        await calls.send(part)
    parts: list[Answer] = []
    while not parts or parts[-1].rows > 1:
        parts.append(await real_rig.gateway.receive(Answer))
    assert len(parts) > 4
    _, (got,) = calls.receiver.unpack_streams([part.payload for part in parts])
    assert torch.equal(got, stream + 1)
