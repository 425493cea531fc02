"""Calls of blocks as steps and answers: what travels, in which parts, and what is recorded of them."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from routing import wire
from routing.answers import SentStep, check_answer
from routing.calls import Calls
from routing.errors import ErrorCode, ProtocolError, SecurityError, TooLargeError
from routing.parts import MAX_CALL_BYTES, MIN_CALL_ROWS, Assembly, call_rows, parts_of
from routing.recorded import RecordedStep, Recording
from routing.sealing import decode_entry, encode_entry
from routing.types import (
    Answer,
    AnswerKind,
    HopEntry,
    HopTrace,
    NodeId,
    SessionId,
    Step,
    StepFlag,
    Want,
    WireDtype,
)

SESSION = SessionId(b"s" * 16)
KEY = b"k" * 32


@pytest.fixture(autouse=True)
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("routing.parts.PART_BYTES", 100)
    monkeypatch.setattr("routing.parts.MIN_PART_BYTES", 50)


def call(payload: bytes, **fields: object) -> Step:
    return replace(Step(SESSION, 1, 3, 2, 1, payload, flags=StepFlag.CALL), **fields)  # type: ignore[arg-type]


def made(payload: bytes, **fields: object) -> Answer:
    return replace(Answer(SESSION, 1, 3, 2, 1, payload, AnswerKind.CALL), **fields)  # type: ignore[arg-type]


def through(message: Step | Answer) -> Step | Answer:
    kind, buffers = wire.encode(message)
    decoded = wire.decode(kind, memoryview(b"".join(buffers)))
    assert isinstance(decoded, Step | Answer)
    return decoded


def assembled(parts: list[Step | Answer]) -> bytes:
    assembly = Assembly()
    *begun, whole = [assembly.add(part) for part in parts]
    assert not any(begun)
    assert whole is not None
    return b"".join(whole)


@pytest.mark.parametrize("size", [1, 99, 100, 101, 200, 1234])
@pytest.mark.parametrize("message", [call(b"x"), made(b"x")])
def test_parts_travel_and_make_the_whole(message: Step | Answer, size: int) -> None:
    payload = bytes(range(256)) * (size // 256 + 1)
    trace = HopTrace(1, 2, 3)
    whole = replace(message, payload=payload[:size], flags=message.flags | StepFlag.TRACE, traces=(trace,))
    parts = [through(part) for part in parts_of(whole)]
    assert [part.rows for part in parts] == list(range(len(parts), 0, -1))
    assert [part.traces for part in parts] == [()] * (len(parts) - 1) + [(trace,)]
    assert assembled(parts) == whole.payload


@given(st.lists(st.integers(1, 5), min_size=1, max_size=5))
def test_parts_out_of_order_are_refused(numbers: list[int]) -> None:
    assembly = Assembly()
    expected = list(range(numbers[0], 0, -1))
    try:
        for number in numbers:
            if assembly.add(call(bytes(60), rows=number)) is not None:
                break
    except ProtocolError as error:
        assert error.code is ErrorCode.MALFORMED
        assert numbers != expected[: len(numbers)]
    else:
        assert numbers[: len(expected)] == expected[: len(numbers)]


def test_small_and_endless_parts_are_refused() -> None:
    with pytest.raises(ProtocolError, match="too small"):
        Assembly().add(call(bytes(49), rows=2))
    full = Assembly()
    full.size_bytes = MAX_CALL_BYTES
    with pytest.raises(ProtocolError, match=f"more than {MAX_CALL_BYTES} B") as caught:
        full.add(call(bytes(60), rows=3))
    assert caught.value.code is ErrorCode.TOO_BIG


@pytest.mark.parametrize(
    "step",
    [
        call(b""),
        call(b"x", want=Want.NONE),
        call(b"x", want=Want.ALL),
        call(b"xxxx", flags=StepFlag.CALL | StepFlag.TOKEN_IDS),
        call(b"x", rows=0),
        call(b"x", flags=StepFlag.CALL | StepFlag.SEALED),
    ],
)
def test_a_call_that_no_gateway_makes_is_malformed(step: Step) -> None:
    with pytest.raises(ProtocolError):
        through(step)


@pytest.mark.parametrize("answer", [made(b""), made(b"x", rows=0), made(b"x" * 16, flags=StepFlag.SEALED)])
def test_an_answer_that_no_node_makes_is_malformed(answer: Answer) -> None:
    with pytest.raises(ProtocolError):
        through(answer)


def test_parts_are_sealed_each_for_itself_and_none_stands_for_another() -> None:
    whole = made(b"a" * 250)
    sealed = [through(wire.seal_answer(KEY, part)) for part in parts_of(whole)]
    assert len({bytes(part.payload)[:50] for part in sealed}) == 3, (
        "the same bytes, never the same key stream"
    )
    opened = [wire.open_answer(KEY, part) for part in sealed if isinstance(part, Answer)]
    assert assembled([*opened]) == whole.payload
    first, second, _ = sealed
    assert isinstance(first, Answer)
    with pytest.raises(SecurityError):
        wire.open_answer(KEY, replace(first, payload=second.payload))


def test_an_entry_says_that_a_session_is_of_calls() -> None:
    entry = HopEntry(
        route_key=KEY,
        hop=0,
        num_hops=1,
        gateway_id=NodeId(bytes(32)),
        model_digest=bytes(32),
        start=0,
        end=4,
        wire_in=WireDtype.BFLOAT16,
        wire_out=WireDtype.BFLOAT16,
        max_positions=80,
        idle_timeout_s=60,
        answer_key=KEY,
        room=1_600_000,
        calls=True,
    )
    assert decode_entry(encode_entry(entry)) == entry
    text = replace(entry, calls=False)
    assert decode_entry(encode_entry(text)) == text
    assert len(encode_entry(text)) < len(encode_entry(entry)), "it costs nothing where there are none"


async def test_only_unanswered_calls_are_recorded() -> None:
    recording = Recording()
    steps = [RecordedStep(n, 1, b"x", WireDtype.FLOAT32, Want.LAST, make=lambda _: b"x") for n in range(3)]
    for step in steps:
        step.answer = asyncio.get_running_loop().create_future()
        recording.add(step)
    recording.forget(steps[0])
    assert [step.number for step in recording] == [2, 3]
    assert recording.answered == 1
    for step in steps[1:]:
        recording.forget(step)
    assert (len(recording), recording.last_number, recording.answered) == (0, 3, 3)
    assert recording.has_sent, "a later route is no first one"


def test_an_answer_to_a_call_is_of_its_kind_and_place() -> None:
    step = RecordedStep(2, 1, b"x", WireDtype.FLOAT32, Want.LAST, make=lambda _: b"x", number=3)
    sent = SentStep(step, step.wanted, False, WireDtype.FLOAT32, 8, 3, 0.0)
    check_answer(made(b"anything"), sent)
    for answer in (made(b"x", kind=AnswerKind.HIDDEN_STATES), made(b"x", position=3)):
        with pytest.raises(ProtocolError) as caught:
            check_answer(answer, sent)
        assert (caught.value.code, caught.value.hop) == (ErrorCode.MALFORMED, 2)
    text = SentStep(replace_call(step), step.wanted, False, WireDtype.FLOAT32, 8, 3, 0.0)
    with pytest.raises(ProtocolError, match="where hidden states are due"):
        check_answer(made(bytes(32)), text)


def replace_call(step: RecordedStep) -> RecordedStep:
    return RecordedStep(step.position, 1, b"x", WireDtype.FLOAT32, Want.LAST, number=step.number)


def test_what_a_call_costs_is_told_in_rows() -> None:
    assert call_rows(1, 4096) == MIN_CALL_ROWS
    assert call_rows(4096 * 4096, 4096) == 4096
    assert call_rows(1 << 40, 2) == (1 << 16) - 1
    assert call_rows(1000, 0) == 1000


async def test_a_pass_that_no_node_takes_is_not_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("routing.calls.MAX_CALL_BYTES", 3)
    calls = Calls()
    recorded = calls.new(lambda is_fresh: b"four", None, None)
    with pytest.raises(TooLargeError, match="4 B is larger than 3 B"):
        await calls.make(recorded, cast(Any, SimpleNamespace(epoch=1)))
