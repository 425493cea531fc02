"""Calls as bytes: what goes in comes out, constants cross once, and nothing hostile gets through or takes memory."""

from __future__ import annotations

import contextlib
import itertools
import json
import struct
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from slicing.diffusion.calls import DTYPES, BlockCall, Pass, Plan
from slicing.diffusion.patches import Cut
from slicing.diffusion.wire import (
    PLAN_FACTOR,
    CallHeader,
    CallReceiver,
    CallSender,
    HopVerdict,
    WireForm,
)
from slicing.diffusion.wire_tensors import HELD_BYTES
from slicing.errors import CallError, CallTooLarge, CallUnknown

FLOATS = [torch.float32, torch.bfloat16, torch.float16]
CUT = Cut((2, 4, 4), 1, 2)


def plan(num_streams: int = 1, num_slots: int = 2, *, num_blocks: int = 4) -> Plan:
    shape = {
        "args": [{"stream": 0}],
        "kwargs": {f"slot_{number}": {"slot": number} for number in range(num_slots)},
    }
    outputs = None if num_streams == 1 else tuple(range(num_streams))
    calls = tuple(BlockCall(0, tuple(range(num_slots))) for _ in range(num_blocks))
    return Plan("transformer.blocks", calls, (shape,), outputs, num_streams)


def some_pass(seed: int = 0, *, rows: int = 16, width: int = 64, dtype: torch.dtype = torch.float32) -> Pass:
    random = torch.Generator().manual_seed(seed)
    text = torch.randn(1, 7, 12, generator=torch.Generator().manual_seed(99))  # the same in every pass
    stream = torch.randn(1, rows, width, generator=random).to(dtype)
    return Pass(plan(), [stream], [text, torch.randn(1, 6, generator=random)])


def edited(payload: bytes, **changes: Any) -> bytes:
    """A container with other fields in its header."""
    (size,) = struct.unpack_from(">I", payload)
    header = json.loads(payload[4 : 4 + size])
    for name, value in changes.items():
        header[name] = value(header[name]) if callable(value) else value
    encoded = json.dumps(header).encode()
    return struct.pack(">I", len(encoded)) + encoded + payload[4 + size :]


tensors = st.builds(
    lambda dtype, shape, seed: torch.randint(0, 2, shape, generator=torch.Generator().manual_seed(seed)).to(
        dtype
    ),
    st.sampled_from(sorted(DTYPES.values(), key=str)),
    st.lists(st.integers(0, 5), max_size=4).map(tuple),
    st.integers(0, 1 << 30),
)


@settings(max_examples=60, deadline=None)
@given(
    streams=st.lists(tensors, min_size=1, max_size=3),
    slots=st.lists(tensors, max_size=5),
    cuts=st.lists(st.integers(0, 1 << 12), max_size=6),
)
def test_a_pass_comes_out_bit_for_bit_however_it_is_cut_into_buffers(
    streams: list[torch.Tensor], slots: list[torch.Tensor], cuts: list[int]
) -> None:
    made = Pass(plan(len(streams), len(slots)), streams, slots)
    header = CallHeader(2, 7, CUT, 0.5, [HopVerdict(1, allowed=False, reason="no sites", mode="slice all")])
    payload = CallSender().pack(header, made)
    places = sorted({0, len(payload), *(cut % (len(payload) + 1) for cut in cuts)})
    pieces = [payload[a:b] for a, b in itertools.pairwise(places)]
    told, got = CallReceiver().unpack(pieces)
    assert (told, got.plan) == (header, made.plan)
    for sent, here in zip([*streams, *slots], [*got.streams, *got.slots], strict=True):
        assert (sent.dtype, sent.shape) == (here.dtype, here.shape)
        assert torch.equal(sent, here)


def test_views_and_conjugates_travel_as_what_they_show() -> None:
    whole = torch.randn(4, 6, dtype=torch.complex64)
    made = Pass(plan(1, 1), [torch.randn(3, 8).T], [whole[::2].conj()])
    _, got = CallReceiver().unpack(CallSender().pack(CallHeader(), made))
    assert torch.equal(got.streams[0], made.streams[0])
    assert torch.equal(got.slots[0], made.slots[0])


@pytest.mark.parametrize("form", list(WireForm))
def test_the_order_of_dimensions_in_memory_travels(form: WireForm) -> None:
    """Matrix kernels give other bits for another order."""
    sender, receiver = CallSender(form), CallReceiver()
    for number in range(3):
        stream = torch.randn(2, 8, 16).transpose(1, 2)
        made = Pass(plan(1, 1), [stream], [torch.randn(3, 4, 5).permute(2, 0, 1)])
        _, got = receiver.unpack(sender.pack(CallHeader(pass_number=number), made))
        for sent, here in zip([stream, *made.slots], [*got.streams, *got.slots], strict=True):
            assert (sent.shape, sent.stride()) == (here.shape, here.stride())
        assert torch.allclose(got.streams[0], stream, atol=0.1)
        assert torch.equal(got.slots[0], made.slots[0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("starts", [[0], [0, 30], [0, 1, 2, 700]])
def test_equal_rows_of_a_large_slot_are_sent_once(dtype: torch.dtype, starts: list[int]) -> None:
    """As Wan 2.2 TI2V has it: an embedding of the step for each token."""
    lengths = [end - start for start, end in itertools.pairwise([*starts, 800])]
    rows = torch.randn(2, len(starts), 6, 64).to(dtype)
    rows[0, 0, 0, 0] = float("nan")  # compared bit by bit
    slot = torch.cat([rows[:, place : place + 1].expand(-1, n, -1, -1) for place, n in enumerate(lengths)], 1)
    made = Pass(plan(1, 1), [torch.randn(2, 800, 64)], [slot])
    sender, receiver = CallSender(), CallReceiver()
    for number in range(2):
        payload = sender.pack(CallHeader(pass_number=number), made)
        assert len(payload) < made.streams[0].nbytes + rows.nbytes + 1000
        _, got = receiver.unpack(payload, spare_bytes=slot.nbytes)
        assert torch.equal(got.slots[0].view(torch.int16), slot.view(torch.int16))
        assert got.slots[0].is_contiguous()
    assert len(payload) < made.streams[0].nbytes + 1000, "and the second time by its digest"
    with pytest.raises(CallTooLarge, match="are free"):
        CallReceiver().unpack(sender.pack(CallHeader(), made, fresh=True), spare_bytes=slot.nbytes // 2)


def test_rows_that_differ_are_sent_as_they_are() -> None:
    for slot in (torch.randn(1, 2000, 256), torch.randn(1, 2000, 2, 128).repeat_interleave(2, 1)):
        _, got = CallReceiver().unpack(
            CallSender().pack(CallHeader(), Pass(plan(1, 1), [torch.zeros(1)], [slot]))
        )
        assert torch.equal(got.slots[0], slot)


def test_blocks_that_are_sent_one_by_one_have_differences_of_their_own() -> None:
    sender, receiver = CallSender(WireForm.INT8_DELTA), CallReceiver()
    streams = [torch.randn(1, 16, 32) * 10**block for block in range(3)]
    errors: list[list[float]] = []
    for number in range(2):
        errors.append([])
        for block, stream in enumerate(streams):
            one = plan(1, 0, num_blocks=1)
            one = Plan(one.stack, one.blocks, one.shapes, one.outputs, one.num_streams, first=block)
            header = CallHeader(pass_number=3 * number + block)
            told, got = receiver.unpack(sender.pack(header, Pass(one, [stream], [])))
            assert told.first_block == block
            errors[-1].append(float((got.streams[0] - stream).abs().max()) / 10**block)
    assert max(errors[0]) < 0.02  # 8 bits of the stream itself
    assert max(errors[1]) < 0.0002  # and of what was missing then


def test_plans_and_constants_cross_once_and_what_changes_crosses_each_time() -> None:
    sender, receiver = CallSender(), CallReceiver()
    sizes = []
    for number in range(4):
        made = some_pass(number)
        payload = sender.pack(CallHeader(pass_number=number), made)
        sizes.append(len(payload))
        _, got = receiver.unpack(payload)
        assert torch.equal(got.slots[0], made.slots[0])
        assert torch.equal(got.slots[1], made.slots[1])
    text, plan_size = some_pass().slots[0].nbytes, len(plan().to_json())
    assert sizes[0] - sizes[1] > text + plan_size - 100
    assert max(sizes[1:]) - min(sizes[1:]) < 10


def test_what_two_passes_do_not_use_is_forgotten_at_both_ends() -> None:
    sender, receiver = CallSender(), CallReceiver()
    for number in range(20):
        receiver.unpack(sender.pack(CallHeader(pass_number=number), some_pass(number)))
    text, embedding = (slot.nbytes for slot in some_pass().slots)
    told_plan = PLAN_FACTOR * len(plan().to_json())
    assert receiver.size_bytes == text + 2 * embedding + 3 * HELD_BYTES + told_plan
    back = Pass(plan(), some_pass(50).streams, some_pass(3).slots)  # long forgotten: it is sent again
    _, got = receiver.unpack(sender.pack(CallHeader(pass_number=20), back))
    assert torch.equal(got.slots[1], back.slots[1])


def test_patches_of_one_pass_share_its_slots() -> None:
    sender, receiver = CallSender(), CallReceiver()
    payloads = [
        sender.pack(
            CallHeader(2, 5, CUT.at(index)), Pass(plan(), some_pass(index).streams, some_pass(0).slots)
        )
        for index in range(2)
    ]
    assert len(payloads[1]) < len(payloads[0]) - some_pass().slots[0].nbytes
    for payload in payloads:
        _, got = receiver.unpack(payload)
        assert torch.equal(got.slots[1], some_pass(0).slots[1])


def test_a_fresh_call_needs_nothing_before_and_makes_the_receiver_forget() -> None:
    sender, receiver = CallSender(WireForm.INT8_DELTA), CallReceiver()
    for number in range(2):
        receiver.unpack(sender.pack(CallHeader(pass_number=number), some_pass(number)))
    payload = sender.pack(CallHeader(pass_number=2), some_pass(2), fresh=True)
    for other in (receiver, CallReceiver()):
        _, got = other.unpack(payload)
        assert torch.equal(got.slots[0], some_pass().slots[0])
    last = sender.pack(CallHeader(pass_number=3), some_pass(3))
    assert torch.equal(receiver.unpack(last)[1].slots[0], some_pass().slots[0])


def test_slots_that_only_earlier_blocks_use_are_left_out() -> None:
    shape = {"args": [{"stream": 0}, {"slot": 0}, {"slot": 1}], "kwargs": {}}
    calls = tuple(
        BlockCall(0, (0, 1 + block)) for block in range(4)
    )  # a slice of the embedding for each block
    made = Pass(
        Plan("transformer.blocks", calls, (shape,), None, 1),
        [torch.randn(1, 2, 4)],
        [torch.randn(3) for _ in range(5)],
    )
    first, onward = CallSender(), CallSender()
    receiver = CallReceiver()
    _, got = receiver.unpack(first.pack(CallHeader(), made))
    payload = onward.pack(CallHeader(), got, first_block=2, digests=receiver.digests)
    last = CallReceiver()
    _, there = last.unpack(payload, blocks_of=lambda _: (2, 4))
    assert [slot.numel() for slot in there.slots] == [3, 0, 0, 3, 3]
    assert last.digests[3] == receiver.digests[3]
    with pytest.raises(CallError, match="lacks a slot"):
        CallReceiver().unpack(payload, blocks_of=lambda _: (1, 4))
    without_last = edited(payload, slots=lambda slots: [*slots[:-1], None])[: -made.slots[4].nbytes]
    with pytest.raises(CallError, match="lacks a slot"):  # that the hops after this one need
        CallReceiver().unpack(without_last, blocks_of=lambda _: (2, 3))


@pytest.mark.parametrize("dtype", FLOATS)
def test_bfloat16_rounds_streams_and_nothing_else(dtype: torch.dtype) -> None:
    made = some_pass(dtype=dtype)
    _, got = CallReceiver().unpack(CallSender(WireForm.BF16).pack(CallHeader(), made))
    assert torch.equal(got.streams[0], made.streams[0].bfloat16().to(dtype))
    assert torch.equal(got.slots[1], made.slots[1])


@pytest.mark.parametrize("dtype", FLOATS)
def test_differences_take_half_of_bfloat16_and_their_errors_do_not_add_up(dtype: torch.dtype) -> None:
    sender, receiver = CallSender(WireForm.INT8_DELTA), CallReceiver()
    random, errors, sizes = torch.Generator().manual_seed(1), [], []
    stream = torch.randn(1, 256, 128, generator=random)
    for number in range(30):
        stream = stream + 0.05 * torch.randn(1, 256, 128, generator=random)
        made = Pass(plan(1, 0), [stream.to(dtype)], [])
        payload = sender.pack(CallHeader(pass_number=number), made)
        sizes.append(len(payload))
        _, got = receiver.unpack(payload)
        assert got.streams[0].dtype is dtype
        errors.append(float((got.streams[0].float() - made.streams[0].float()).abs().max()))
    rounding = torch.finfo(torch.bfloat16 if dtype is torch.bfloat16 else dtype).eps * float(
        stream.abs().max()
    )
    assert max(errors[1:]) < 0.05 * 5 / 127 + rounding  # half a step of the largest difference, about
    assert max(errors[20:]) <= 2 * max(errors[1:10])
    header = 400
    assert max(sizes[1:]) - header <= 0.52 * 2 * stream.numel()


def test_patches_have_differences_of_their_own_and_another_cut_begins_anew() -> None:
    sender, receiver = CallSender(WireForm.INT8_DELTA), CallReceiver()
    base = {index: torch.randn(1, 16, 32) for index in range(2)}

    def send(number: int, cut: Cut | None, stream: torch.Tensor) -> float:
        payload = sender.pack(CallHeader(2 if cut else 1, number, cut), Pass(plan(1, 0), [stream], []))
        _, got = receiver.unpack(payload)
        error = float((got.streams[0] - stream).abs().max())
        assert error < 0.05
        return error

    firsts = [send(0, CUT.at(index), base[index]) for index in range(2)]
    seconds = [send(1, CUT.at(index), base[index] + 0.01) for index in range(2)]
    assert max(seconds) < min(firsts) / 10
    of_patches = sender.size_bytes
    send(2, None, torch.randn(1, 32, 32))
    told_plan = PLAN_FACTOR * len(plan(1, 0).to_json())
    assert receiver.size_bytes - told_plan == sender.size_bytes  # of the whole now, and of no patch
    assert sender.size_bytes == of_patches - HELD_BYTES
    assert send(3, CUT.at(0), base[0]) == firsts[0]


def test_a_difference_to_what_is_not_here_is_told_apart() -> None:
    sender = CallSender(WireForm.INT8_DELTA)
    sender.pack(CallHeader(pass_number=0), some_pass(0))
    later = sender.pack(CallHeader(pass_number=1), some_pass(1))
    with pytest.raises(CallUnknown):
        CallReceiver().unpack(later)
    streams = CallSender(WireForm.INT8_DELTA)
    streams.pack_streams(CallHeader(), some_pass(0).streams)
    with pytest.raises(CallUnknown, match="difference"):
        CallReceiver().unpack_streams(streams.pack_streams(CallHeader(), some_pass(1).streams))


def test_an_answer_must_be_like_what_was_sent() -> None:
    made = some_pass()
    payload = CallSender().pack_streams(CallHeader(verdicts=[HopVerdict(0, allowed=True)]), made.streams)
    header, streams = CallReceiver().unpack_streams(payload, made.streams)
    assert torch.equal(streams[0], made.streams[0])
    assert header.verdicts == [HopVerdict(0, allowed=True)]
    for other in ([made.streams[0][:, :-1]], [made.streams[0].double()], [*made.streams, made.streams[0]]):
        with pytest.raises(CallError, match="other shapes or types"):
            CallReceiver().unpack_streams(payload, other)
    with pytest.raises(CallError, match="more than streams"):
        CallReceiver().unpack_streams(CallSender().pack(CallHeader(), made), made.streams)


@pytest.mark.parametrize("form", list(WireForm))
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_streams_that_are_no_numbers_are_refused(form: WireForm, value: float) -> None:
    sender, receiver = CallSender(form), CallReceiver()
    receiver.unpack(sender.pack(CallHeader(pass_number=0), some_pass(0)))
    made = some_pass(1)
    made.streams[0][0, 3, 5] = value
    with pytest.raises(CallError, match="no number"):
        receiver.unpack(sender.pack(CallHeader(pass_number=1), made))


def test_infinities_in_a_mask_are_no_trouble() -> None:
    made = some_pass()
    made.slots[0][0, 0] = -float("inf")
    _, got = CallReceiver().unpack(CallSender().pack(CallHeader(), made))
    assert torch.equal(got.slots[0], made.slots[0])


def hostile() -> dict[str, bytes]:
    """Containers that break a rule each."""
    good = CallSender().pack(CallHeader(), some_pass())
    (size,) = struct.unpack_from(">I", good)
    after = len(good) - 4 - size
    truth = CallSender().pack(
        CallHeader(), Pass(plan(1, 1), [torch.zeros(1)], [torch.ones(3, dtype=torch.bool)])
    )

    def stream(
        form: str = "raw",
        dtype: Any = "float32",
        shape: Any = (1, 16, 64),
        order: Any = None,
        runs: Any = None,
    ) -> bytes:
        return edited(good, streams=[[form, dtype, shape, order, runs]])

    def slot(*entry: Any) -> bytes:
        return edited(good, slots=lambda slots: [list(entry), *slots[1:]])

    return {
        "empty": b"",
        "no header": struct.pack(">I", 0),
        "header too long": struct.pack(">I", 1 << 31) + good[4:],
        "header cut short": good[: 4 + size // 2],
        "tensors cut short": good[:-1],
        "more than said": good + b"\0",
        "not JSON": struct.pack(">I", 4) + b"\xff\xfe{}",
        "nested deeply": struct.pack(">I", 1 << 20) + b"[" * (1 << 20),
        "no object": struct.pack(">I", 2) + b"[]",
        "a field less": struct.pack(">I", 12) + b'{"mode": 0}\n',
        "no number": edited(good, mode=float("nan")),
        "huge number": edited(good, mode=10**400),
        "unknown mode": edited(good, mode=3),
        "mode is a truth": edited(good, mode=True),
        "negative pass": edited(good, **{"pass": -1}),
        "no share": edited(good, extrapolate=1.5),
        "no form": edited(good, form="int4"),
        "fresh is no truth": edited(good, fresh=1),
        "no cut": edited(good, cut={"grid": [1, 2], "index": 0, "of": 1}),
        "cut of a huge grid": edited(good, cut={"grid": [1 << 30, 1 << 30, 1], "index": 0, "of": 1}),
        "plan of no digest": edited(good, plan="xyz"),
        "plan of another digest": edited(good, plan="0" * 32),
        "plan longer than said": edited(good, plan_bytes=lambda size: size + 1),
        "plan longer than any": edited(good, plan_bytes=1 << 40),
        "dtype of none": stream(dtype="float8"),
        "dtype is a list": stream(dtype=["float32"]),
        "other dtype": stream(dtype="float64"),
        "form of none": stream(form="int4"),
        "shortened integers": stream("bf16", "int32"),
        "differences of one number": stream("int8-delta", "float32", []),
        "differences to nothing": stream("int8-delta", "float32", [1, 32, after - 64]),
        "other shape": stream(shape=[1, 16, 65]),
        "negative shape": stream(shape=[-1, -16, 64]),
        "huge shape": stream(shape=[1 << 39, 1 << 39, 1 << 39]),
        "shape of zero times huge": stream(shape=[0, 1 << 62]),
        "shape of nothing that reduces to much": stream(shape=[0, 1 << 15, 1 << 15]),
        "more rows than any stream has": edited(good, streams=[["raw", "int8", [1 << 10, 1 << 10, 1]]]),
        "too many dimensions": stream(shape=[1] * 9),
        "shape of truths": stream(shape=[True, 16, 64]),
        "order of none": stream(shape=[1, 16, 64], order=[0, 1]),
        "order twice": stream(shape=[1, 16, 64], order=[0, 1, 1]),
        "order of texts": stream(shape=[1, 16, 64], order=["0", "1", "2"]),
        "runs of a stream": stream(shape=[1, 16, 64], runs=[16]),
        "runs too short": slot(None, "raw", "float32", [1, 7, 12], None, [6]),
        "runs of nothing": slot(None, "raw", "float32", [1, 7, 12], None, [7, 0]),
        "runs that are negative": slot(None, "raw", "float32", [1, 7, 12], None, [8, -1]),
        "runs of no rows": slot(None, "raw", "float32", [7], None, [7]),
        "runs in an order": slot(None, "raw", "float32", [1, 7, 12], [0, 1, 2], [7]),
        "too many runs": slot(None, "raw", "float32", [1, 65, 1], None, [1] * 65),
        "first block of another plan": edited(good, first=1),
        "no streams": edited(good, streams=[]),
        "too many streams": edited(good, streams=[["raw", "float32", [0]]] * 17),
        "too many slots": edited(good, slots=[None] * 65537),
        "a slot less": edited(good, slots=lambda slots: slots[:1]),
        "a slot missing": edited(good, slots=lambda slots: [None, *slots[1:]]),
        "slot of short digest": slot("00"),
        "slot of odd digest": slot("g" * 32),
        "slot in bfloat16": slot(None, "bf16", "float32", [1, 7, 12]),
        "verdict of no hop": edited(good, verdicts=[[-1, True, "", ""]]),
        "verdict too long": edited(good, verdicts=[[0, True, "x" * 300, ""]]),
        "too many verdicts": edited(good, verdicts=[[0, True, "", ""]] * 200),
        "truth of two": truth[:-1] + b"\x02",
    }


@pytest.mark.parametrize("name", hostile())
def test_a_hostile_container_is_refused_by_name(name: str) -> None:
    with pytest.raises(CallError) as caught:
        CallReceiver().unpack(hostile()[name])
    assert len(str(caught.value)) < 300


def test_a_digest_or_plan_that_is_not_here_is_told_apart() -> None:
    good = CallSender().pack(CallHeader(), some_pass())
    (size,) = struct.unpack_from(">I", good)
    plan_size = len(plan().to_json())
    start = 4 + size
    without_plan = good[:start] + good[start + plan_size :]
    with pytest.raises(CallUnknown, match="plan"):
        CallReceiver().unpack(edited(without_plan, plan_bytes=0))
    text = some_pass().slots[0].nbytes
    embedding = some_pass().slots[1].nbytes
    without_text = good[: -text - embedding] + good[-embedding:]
    with pytest.raises(CallUnknown, match="constant"):
        CallReceiver().unpack(edited(without_text, slots=lambda slots: [["0" * 32], slots[1]]))


@settings(max_examples=200, deadline=None)
@given(place=st.integers(0, 1 << 16), value=st.integers(0, 255), cut=st.integers(0, 1 << 16))
def test_whatever_one_byte_becomes_nothing_but_a_call_error_comes_of_it(
    place: int, value: int, cut: int
) -> None:
    payload = bytearray(CallSender().pack(CallHeader(), some_pass(rows=2, width=4)))
    payload[place % len(payload)] = value
    del payload[len(payload) - cut % 3 :]
    with contextlib.suppress(CallError):
        CallReceiver().unpack(bytes(payload))


def test_what_takes_more_than_it_has_is_counted_before() -> None:
    """A shorter form is widened, and of differences both ends keep what the other has."""
    made = some_pass(rows=100)
    full = made.streams[0].nbytes
    for form, more in (
        (WireForm.RAW, 0),
        (WireForm.BF16, full // 2),
        (WireForm.INT8_DELTA, full - (full // 4 + 2 * 100) + 2 * full),  # with a scale for each row
    ):
        payload = CallSender(form).pack(CallHeader(), made)
        CallReceiver().unpack(payload, spare_bytes=more)
        with pytest.raises(CallTooLarge, match=f"takes {more} bytes more"):
            CallReceiver().unpack(payload, spare_bytes=more - 1)


def test_many_small_things_are_counted_as_what_they_take() -> None:
    """Of one pass, so that nothing is let go: without it, 4 bytes each would hide a kilobyte."""
    sender, receiver = CallSender(), CallReceiver()
    for number in range(5):
        slots = [torch.tensor([100 * number + place]) for place in range(100)]
        receiver.unpack(sender.pack(CallHeader(), Pass(plan(1, 100), [torch.zeros(1, 1)], slots)))
    assert receiver.size_bytes > 500 * 1024


def test_what_one_session_was_sent_is_not_in_another() -> None:
    """A digest opens nothing but what came over the same session."""
    payloads = [CallSender().pack(CallHeader(), some_pass())]
    sender = CallSender()
    payloads += [sender.pack(CallHeader(pass_number=number), some_pass(number)) for number in range(2)]
    first, second = CallReceiver(), CallReceiver()
    first.unpack(payloads[0])
    with pytest.raises(CallUnknown):
        second.unpack(payloads[2])
    digest = first.digests[0]
    assert digest is not None
    asked = edited(payloads[0], slots=lambda slots: [[digest.hex()], slots[1]])
    text, embedding = (slot.nbytes for slot in some_pass().slots)
    asked = asked[: len(asked) - text - embedding] + asked[len(asked) - embedding :]
    with pytest.raises(CallUnknown, match="constant"):
        CallReceiver().unpack(asked)


def test_constants_have_a_limit_that_both_ends_keep(monkeypatch: pytest.MonkeyPatch) -> None:
    good = CallSender().pack(CallHeader(), some_pass())
    monkeypatch.setattr("slicing.diffusion.wire.MAX_CONSTANT_BYTES", 100)
    with pytest.raises(CallError, match="more than a node keeps"):
        CallReceiver().unpack(good)
    sender, receiver = CallSender(), CallReceiver()
    for number in range(3):  # too large to keep: sent each time
        made = some_pass(number)
        _, got = receiver.unpack(sender.pack(CallHeader(pass_number=number), made))
        assert torch.equal(got.slots[0], made.slots[0])
        assert receiver.size_bytes <= 100 + PLAN_FACTOR * len(plan().to_json())
