"""Branches, streams, axes and memory on the wire and in what is recorded: sizes, cuts, wider elements, hostility."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import msgpack
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from routing import wire
from routing.answers import SentStep, check_answer
from routing.errors import ErrorCode, ProtocolError
from routing.frames import (
    MEMORY_PIECE_BYTES,
    MEMORY_PIECE_ROWS,
    first_rows,
    join_payload,
    memory_pieces,
    memory_wire,
    split_payload,
)
from routing.opening import ChainOptions
from routing.recorded import RecordedStep, Recording
from routing.sealing import decode_entry, encode_entry
from routing.types import Answer, AnswerKind, HopEntry, NodeId, SessionId, Step, StepFlag, Want, WireDtype

SESSION = SessionId(b"s" * 16)
BF16_ONE = 0x3F80
ENTRY = HopEntry(
    bytes(32), 0, 1, NodeId(bytes(32)), bytes(32), 0, 1, WireDtype.FLOAT32, WireDtype.FLOAT32, 10, 60
)


def through(message: Step | Answer) -> Step | Answer:
    kind, buffers = wire.encode(message)
    decoded = wire.decode(kind, memoryview(bytearray(b"".join(buffers))))
    assert isinstance(decoded, Step | Answer)
    return decoded


def memory(payload: bytes = b"m" * 24, rows: int = 3, **fields: Any) -> Step:
    step = Step(SESSION, 1, 1, 0, rows, payload, Want.NONE, flags=StepFlag.MEMORY)
    return replace(step, **fields)


# On the wire ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("more", [StepFlag.NONE, StepFlag.REPLAY, StepFlag.TRACE])
@pytest.mark.parametrize("want", [Want.NONE, Want.LIST])
def test_memory_survives_the_round_trip(more: StepFlag, want: Want) -> None:
    step = memory(want=want, flags=StepFlag.MEMORY | more)
    decoded = through(step)
    assert decoded == step
    assert isinstance(decoded, Step)
    assert decoded.is_memory
    assert decoded.end(1) == decoded.end(3) == 0


HOSTILE_MEMORY: dict[str, dict[str, Any]] = {
    "at a position": {"position": 1},
    "of a call": {"flags": StepFlag.MEMORY | StepFlag.CALL, "want": Want.LAST},
    "of token ids": {"flags": StepFlag.MEMORY | StepFlag.TOKEN_IDS, "payload": b"m" * 12},
    "of which the last row is wanted": {"want": Want.LAST},
    "of which all rows are wanted": {"want": Want.ALL},
    "of which some rows are wanted": {"want": Want.LIST, "want_rows": (0,)},
    "that is no whole number of rows": {"payload": b"m" * 25},
    "that is sealed": {"flags": StepFlag.MEMORY | StepFlag.SEALED},
    "without bytes": {"payload": b""},
}


@pytest.mark.parametrize("case", HOSTILE_MEMORY)
def test_memory_is_refused(case: str) -> None:
    with pytest.raises(ProtocolError) as caught:
        through(memory(**HOSTILE_MEMORY[case]))
    assert caught.value.code is ErrorCode.MALFORMED


@pytest.mark.parametrize("numbers", [1, 4, 16, 20])
def test_a_row_holds_the_ids_of_all_streams_and_its_positions(numbers: int) -> None:
    step = Step(SESSION, 1, 1, 0, 3, bytes(3 * 4 * numbers), flags=StepFlag.TOKEN_IDS)
    assert through(step) == step


@pytest.mark.parametrize("size", [3 * 4 * 21, 3 * 6, 3 * 2])
def test_other_sizes_of_token_ids_are_malformed(size: int) -> None:
    with pytest.raises(ProtocolError):
        through(Step(SESSION, 1, 1, 0, 3, bytes(size), flags=StepFlag.TOKEN_IDS))


@pytest.mark.parametrize(
    ("key", "value"),
    [
        *[("br", value) for value in (0, -1, 9, 1.0, True, "2", None, 1 << 40)],
        *[("st", value) for value in (0, 17, [], "4")],
        *[("ax", value) for value in (-1, 5, True)],
        *[("me", value) for value in (-1, (1 << 16) + 1, 2.5, b"1")],
    ],
)
def test_impossible_numbers_in_an_entry_are_malformed(key: str, value: object) -> None:
    plain = msgpack.unpackb(encode_entry(ENTRY))
    with pytest.raises(ProtocolError) as caught:
        decode_entry(msgpack.packb(plain | {key: value}))
    assert caught.value.code is ErrorCode.MALFORMED


@pytest.mark.parametrize(("streams", "width"), [(2, 2), (4, 2), (16, 2), (4, 4), (16, 4)])
def test_ids_of_several_streams_travel(streams: int, width: int) -> None:
    answer = Answer(SESSION, 1, 1, 0, 2, b"i" * (2 * streams * width), AnswerKind.TOKEN_IDS)
    assert through(answer) == answer


# Frames ---------------------------------------------------------------------------------------------------


@given(st.integers(1, 6), st.integers(1, 6), st.integers(0, 4))
def test_a_cut_keeps_the_rows_and_their_positions(rows: int, width: int, axes: int) -> None:
    body = np.arange(rows * width, dtype="<f4").reshape(rows, width)
    positions = np.arange(100, 100 + rows * axes, dtype="<i4").reshape(axes, rows)
    payload = join_payload(body.tobytes(), positions.tobytes())
    for kept in range(1, rows + 1):
        cut = first_rows(payload, rows, kept, axes)
        kept_body, kept_positions = split_payload(cut, kept, axes)
        assert np.array_equal(np.frombuffer(kept_body, "<f4").reshape(kept, width), body[:kept])
        assert np.array_equal(np.frombuffer(kept_positions, "<i4").reshape(axes, kept), positions[:, :kept])


def test_memory_goes_in_the_rows_own_type_or_in_float32_where_ids_go() -> None:
    assert memory_wire(WireDtype.BFLOAT16) is WireDtype.BFLOAT16
    assert memory_wire(WireDtype.INT32) is WireDtype.FLOAT32


@given(st.integers(0, 2000), st.integers(1, 1 << 23), st.integers(1, 8))
def test_pieces_of_memory_hold_whole_places_and_all_of_them(
    places: int, row_bytes: int, branches: int
) -> None:
    num_rows = places * branches
    pieces = list(memory_pieces(num_rows, row_bytes, branches))
    assert [first for first, _ in pieces] == [sum(rows for _, rows in pieces[:n]) for n in range(len(pieces))]
    assert sum(rows for _, rows in pieces) == num_rows
    for _, rows in pieces:
        assert rows % branches == 0
        assert rows == branches or (rows <= MEMORY_PIECE_ROWS and rows * row_bytes <= MEMORY_PIECE_BYTES)


# Recorded steps -------------------------------------------------------------------------------------------


def recorded(position: int, rows: int, want: Want = Want.LAST, **fields: Any) -> RecordedStep:
    branches = fields.get("branches", 1)
    return RecordedStep(
        position, rows * branches, b"x" * (rows * branches * 8), WireDtype.FLOAT32, want, **fields
    )


def recorded_memory(rows: int = 3) -> RecordedStep:
    return recorded(0, rows, Want.NONE, is_memory=True)


def test_no_roll_back_undoes_memory() -> None:
    recording = Recording()
    for step in (recorded_memory(), recorded_memory(), recorded(0, 5), recorded(5, 1)):
        recording.add(step)
    assert recording.end == 6
    recording.add(recorded(0, 2))
    assert [(step.number, step.is_memory) for step in recording] == [(1, True), (2, True), (5, False)]
    assert recording.end == 2


def test_memory_alone_takes_no_positions() -> None:
    recording = Recording()
    recording.add(recorded_memory())
    assert recording.end == 0
    assert recording.has_sent
    assert recording.answered == 1


def test_positions_of_branches_are_counted_once() -> None:
    step = recorded(4, 3, Want.ALL, branches=2)
    assert (step.rows, step.num_frames, step.end, step.wanted) == (6, 3, 7, (0, 1, 2))
    assert recorded(4, 3, branches=2).wanted == (2,)


@pytest.mark.parametrize("branches", [1, 2, 4])
def test_a_cut_step_keeps_whole_positions_of_all_branches(branches: int) -> None:
    recording = Recording()
    body = np.arange(5 * branches * 2, dtype="<f4").reshape(5 * branches, 2)
    axes = np.arange(3 * 5 * branches, dtype="<i4").reshape(3, 5 * branches)
    payload = body.tobytes() + axes.tobytes()
    step = RecordedStep(2, 5 * branches, payload, WireDtype.FLOAT32, Want.ALL, branches=branches, axes=3)
    recording.add(step)
    recording.add(RecordedStep(4, branches, b"", WireDtype.FLOAT32, Want.LAST, branches=branches, axes=3))
    kept = 2 * branches
    assert (step.rows, step.end, step.want, step.want_rows) == (kept, 4, Want.LIST, (0, 1))
    assert bytes(step.payload) == body[:kept].tobytes() + axes[:, :kept].tobytes()


@pytest.mark.parametrize("wire_dtype", [WireDtype.BFLOAT16, WireDtype.FLOAT16])
def test_wider_elements_leave_positions_alone(wire_dtype: WireDtype) -> None:
    one = BF16_ONE if wire_dtype is WireDtype.BFLOAT16 else np.float16(1).view("<u2")
    axes = np.array([[7, 8], [1 << 20, 3]], dtype="<i4")
    payload = np.full((2, 3), one, dtype="<u2").tobytes() + axes.tobytes()
    step = RecordedStep(0, 2, payload, wire_dtype, Want.LAST, axes=2)
    step.widen_to(WireDtype.FLOAT32)
    assert bytes(step.payload) == np.ones((2, 3), "<f4").tobytes() + axes.tobytes()
    step.widen_to(WireDtype.FLOAT32)
    assert len(step.payload) == 24 + 16


def test_rows_that_every_node_held_have_their_positions_once_they_are_sent_after_all() -> None:
    recording = Recording()
    recording.leave_out(2, 512, WireDtype.BFLOAT16, axes=3)
    (step,) = recording
    axes = np.arange(6, dtype="<i4").tobytes()
    step.payload, step.is_held = np.full((2, 4), BF16_ONE, dtype="<u2").tobytes() + axes, False
    step.widen_to(WireDtype.FLOAT32)
    assert bytes(step.payload) == np.ones((2, 4), "<f4").tobytes() + axes


# Answers --------------------------------------------------------------------------------------------------


def sent(draws: bool = True, streams: int = 1, branches: int = 1, want: Want = Want.ALL) -> SentStep:
    step = recorded(4, 3, want, branches=branches)
    return SentStep(step, step.wanted, draws, WireDtype.FLOAT32, 8, 3, 0.0, streams=streams)


def answer(rows: int, size: int, kind: AnswerKind, position: int = 4) -> Answer:
    return Answer(SESSION, 1, 1, position, rows, b"z" * size, kind)


@pytest.mark.parametrize("branches", [1, 2])
@pytest.mark.parametrize(("streams", "width"), [(1, 4), (4, 2), (4, 4), (16, 2)])
def test_a_row_of_ids_for_each_position_is_right(branches: int, streams: int, width: int) -> None:
    given_sent = sent(streams=streams, branches=branches)
    check_answer(answer(3, 3 * streams * width, AnswerKind.TOKEN_IDS), given_sent)
    check_answer(answer(3, 3 * streams * 64, AnswerKind.CANDIDATES), given_sent)


WRONG: dict[str, tuple[SentStep, Answer]] = {
    "short ids of one stream": (sent(), answer(3, 6, AnswerKind.TOKEN_IDS)),
    "ids of one stream where four are due": (sent(streams=4), answer(3, 12, AnswerKind.TOKEN_IDS)),
    "ids of three streams where four are due": (sent(streams=4), answer(3, 18, AnswerKind.TOKEN_IDS)),
    "ids of eight streams where four are due": (sent(streams=4), answer(3, 3 * 8 * 4, AnswerKind.TOKEN_IDS)),
    "half a shortlist": (sent(streams=4), answer(3, 3 * 4 * 4, AnswerKind.CANDIDATES)),
    "a shortlist too few": (sent(streams=16), answer(3, 3 * 64, AnswerKind.CANDIDATES)),
    "ids of both branches": (sent(branches=2), answer(6, 24, AnswerKind.TOKEN_IDS)),
    "hidden states of one branch": (
        sent(draws=False, branches=2),
        answer(3, 3 * 32, AnswerKind.HIDDEN_STATES),
    ),
    "hidden states where tokens are due": (sent(streams=4), answer(3, 96, AnswerKind.HIDDEN_STATES)),
    "another position": (sent(branches=2), answer(3, 12, AnswerKind.TOKEN_IDS, position=8)),
}


@pytest.mark.parametrize("case", WRONG)
def test_other_answers_are_the_last_hops_fault(case: str) -> None:
    given_sent, given_answer = WRONG[case]
    with pytest.raises(ProtocolError) as caught:
        check_answer(given_answer, given_sent)
    assert (caught.value.code, caught.value.hop) == (ErrorCode.MALFORMED, 2)


def test_hidden_states_come_for_all_branches() -> None:
    check_answer(answer(6, 6 * 32, AnswerKind.HIDDEN_STATES), sent(draws=False, branches=2))
    last = sent(draws=False, branches=2, want=Want.LAST)
    check_answer(answer(2, 2 * 32, AnswerKind.HIDDEN_STATES, position=6), last)


def test_memory_that_is_confirmed_has_an_empty_answer() -> None:
    step = replace_memory_want()
    due = SentStep(step, step.wanted, True, WireDtype.FLOAT32, 8, 3, 0.0, streams=4)
    check_answer(answer(0, 0, AnswerKind.HIDDEN_STATES, position=0), due)
    with pytest.raises(ProtocolError):
        check_answer(answer(1, 8, AnswerKind.TOKEN_IDS, position=0), due)


def replace_memory_want() -> RecordedStep:
    return recorded(0, 3, Want.LIST, is_memory=True)


def test_sessions_with_memory_or_branches_share_nothing_with_others() -> None:
    assert ChainOptions(max_positions=9).may_share
    assert not ChainOptions(max_positions=9, branches=2).may_share
    assert not ChainOptions(max_positions=9, memory_rows=1).may_share


def test_a_headless_model_draws_nothing() -> None:
    assert ChainOptions(max_positions=9, runs_closing=True).draws
    assert not ChainOptions(max_positions=9, runs_closing=True, headless=True).draws
