from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from routing import mux
from routing.errors import ErrorCode, ProtocolError
from routing.mux import (
    HEADER,
    MAX_FRAME,
    WINDOW,
    Channel,
    ChannelEnd,
    DataFrame,
    FrameType,
    HandshakeFrame,
    Mux,
    PongFrame,
    frame_name,
)


class Records:
    """A `RecordSource` of blank records of given sizes."""

    def __init__(self, *sizes: int) -> None:
        self.sizes = list(sizes)

    def next_size(self) -> int | None:
        return self.sizes[0] if self.sizes else None

    def seal_next(self, out: memoryview) -> None:
        out[:] = b"r" * self.sizes.pop(0)


def opened() -> tuple[Mux, Channel, Mux, Channel]:
    """Two ends of a link with channel 1 open."""
    dialler, acceptor = Mux(is_dialler=True), Mux(is_dialler=False)
    channel = dialler.open_channel()
    channel.handshakes.append(b"hello")
    frame = dialler.next_frame()
    assert frame is not None
    event = acceptor.receive(frame)
    assert isinstance(event, HandshakeFrame)
    return dialler, channel, acceptor, event.channel


def frames(source: Mux) -> list[bytearray]:
    taken = []
    while (frame := source.next_frame() or source.next_credit()) is not None:
        taken.append(frame)
    return taken


def refusal(target: Mux, frame: bytes) -> ErrorCode:
    with pytest.raises(ProtocolError) as caught:
        target.receive(frame)
    return caught.value.code


def test_handshake_frame_opens_the_diallers_channel() -> None:
    dialler, channel, acceptor, accepted = opened()
    assert channel.number == accepted.number == 1
    assert dialler.open_channel().number == 3
    assert acceptor.open_channel().number == 2


def test_decode_step_is_one_frame_of_8_bytes_more() -> None:
    dialler, channel, acceptor, _ = opened()
    channel.source = Records(2304 + 32 + 24)
    (frame,) = frames(dialler)
    assert len(frame) == 2304 + 64
    event = acceptor.receive(frame)
    assert isinstance(event, DataFrame)
    assert len(event.record) == 2304 + 56


def test_credit_rides_along_for_free_so_that_a_token_costs_one_frame_each_way() -> None:
    dialler, channel, acceptor, accepted = opened()
    for _ in range(5000):
        channel.source = Records(2360)
        (out,) = frames(dialler)
        acceptor.receive(out)
        accepted.source = Records(120)
        (back,) = frames(acceptor)
        assert (len(out), len(back)) == (2368, 128)
        dialler.receive(back)
    assert channel.send_credit > WINDOW - 3000


def test_credit_frame_comes_at_half_a_window_when_nothing_goes_back() -> None:
    dialler, channel, acceptor, _ = opened()
    num_frames = 0
    while not (grants := frames(acceptor)):
        channel.source = Records(2360)
        acceptor.receive(frames(dialler)[0])
        num_frames += 1
    assert num_frames == -(-(WINDOW // 2) // 2360)
    assert [frame_name(frame) for frame in grants] == ["CREDIT"]
    before = channel.send_credit
    dialler.receive(grants[0])
    assert channel.send_credit == before + num_frames * 2360 == WINDOW


def test_sender_stops_at_its_window_and_goes_on_with_credit() -> None:
    dialler, channel, acceptor, _ = opened()
    channel.source = source = Records(*[60_000] * 40)
    sent = frames(dialler)
    assert len(sent) == WINDOW // 60_000
    for frame in sent:
        acceptor.receive(frame)
    dialler.receive(frames(acceptor)[0])
    assert frames(dialler)
    assert len(source.sizes) < 40 - len(sent)


def test_overrun_is_a_flow_error() -> None:
    _, _, acceptor, accepted = opened()
    accepted.receive_credit = 99
    frame = HEADER.pack(FrameType.DATA, 0, 0, 1) + bytes(100)
    assert refusal(acceptor, frame) is ErrorCode.FLOW


def test_credit_beyond_the_largest_window_is_a_flow_error() -> None:
    dialler, *_ = opened()
    grant = (mux.MAX_WINDOW).to_bytes(4, "big")
    assert refusal(dialler, HEADER.pack(FrameType.CREDIT, 0, 0, 1) + grant) is ErrorCode.FLOW


def test_channels_take_turns() -> None:
    dialler = Mux(is_dialler=True)
    first, second = dialler.open_channel(), dialler.open_channel()
    first.source, second.source = Records(10, 10, 10), Records(20, 20)
    numbers = [HEADER.unpack_from(frame)[3] for frame in frames(dialler)]
    assert numbers == [1, 3, 1, 3, 1]


def test_channel_without_credit_does_not_hold_up_the_others() -> None:
    dialler = Mux(is_dialler=True)
    first, second = dialler.open_channel(), dialler.open_channel()
    first.source, second.source = Records(10), Records(20)
    first.send_credit = 9
    assert [HEADER.unpack_from(frame)[3] for frame in frames(dialler)] == [3]


def test_control_frames_go_before_data() -> None:
    dialler, channel, *_ = opened()
    channel.source = Records(10)
    dialler.receive(HEADER.pack(FrameType.PING, 0, 0, 0) + b"12345678")
    assert [frame_name(frame) for frame in frames(dialler)] == ["PONG", "DATA"]


def test_ping_comes_back_as_pong_and_a_flood_costs_one_answer() -> None:
    dialler, _, acceptor, _ = opened()
    for number in range(1000):
        dialler.ping(number.to_bytes(8, "big"))
        acceptor.receive(frames(dialler)[0])
    (pong,) = frames(acceptor)
    assert dialler.receive(pong) == PongFrame((999).to_bytes(8, "big"))


def test_reset_and_fin_end_a_channel_on_both_sides() -> None:
    for code in (None, 401):
        dialler, channel, acceptor, _ = opened()
        dialler.end(channel, code)
        (frame,) = frames(dialler)
        event = acceptor.receive(frame)
        assert isinstance(event, ChannelEnd)
        assert event.code == code
        assert not acceptor.channels


def test_frames_for_a_channel_that_is_over_are_ignored() -> None:
    dialler, channel, acceptor, accepted = opened()
    accepted.source = Records(10)
    late = frames(acceptor)[0]
    dialler.end(channel)
    assert dialler.receive(late) is None


@pytest.mark.parametrize("number", [0, 2, 3, 99])
def test_data_on_a_channel_that_never_was_is_a_state_error(number: int) -> None:
    _, _, acceptor, _ = opened()
    assert refusal(acceptor, HEADER.pack(FrameType.DATA, 0, 0, number) + bytes(50)) is ErrorCode.STATE


@pytest.mark.parametrize("number", [0, 2, 4])
def test_channel_number_of_the_other_side_is_a_state_error(number: int) -> None:
    acceptor = Mux(is_dialler=False)
    assert refusal(acceptor, HEADER.pack(FrameType.HS, 0, 0, number) + b"hello") is ErrorCode.STATE


def test_channels_are_bounded_on_both_sides() -> None:
    acceptor = Mux(is_dialler=False, max_channels=1)
    acceptor.receive(HEADER.pack(FrameType.HS, 0, 0, 1) + b"hello")
    assert refusal(acceptor, HEADER.pack(FrameType.HS, 0, 0, 3) + b"hello") is ErrorCode.TOO_BIG
    with pytest.raises(ProtocolError):
        acceptor.open_channel()


# --- circuits


def test_circuits_channel_is_announced_and_its_credit_comes_back_only_when_told() -> None:
    dialler, acceptor = Mux(is_dialler=True), Mux(is_dialler=False)
    near = dialler.open_circuit()
    far = acceptor.adopt(near.number)
    near.source = Records(*[32_000] * 4)
    for frame in frames(dialler):
        assert isinstance(acceptor.receive(frame), DataFrame)
    assert frames(acceptor) == []
    acceptor.give_back(far, 128_000)
    (credit,) = frames(acceptor)
    dialler.receive(credit)
    assert near.send_credit == WINDOW


@pytest.mark.parametrize("number", [0, 2, 3])
def test_adopting_a_number_of_ones_own_or_a_used_one_is_a_state_error(number: int) -> None:
    acceptor = Mux(is_dialler=False)
    acceptor.adopt(3)
    with pytest.raises(ProtocolError) as caught:
        acceptor.adopt(number)
    assert caught.value.code is ErrorCode.STATE


def test_circuit_that_breaks_its_credits_ends_alone() -> None:
    for grant in (False, True):
        dialler, acceptor = Mux(is_dialler=True), Mux(is_dialler=False)
        channel = acceptor.adopt(dialler.open_circuit().number)
        channel.receive_credit = 99
        frame = HEADER.pack(FrameType.DATA, 0, 0, channel.number) + bytes(100)
        if grant:
            frame = HEADER.pack(FrameType.CREDIT, 0, 0, channel.number) + mux.MAX_WINDOW.to_bytes(4, "big")
        assert acceptor.receive(frame) == ChannelEnd(channel, ErrorCode.FLOW)
        assert [frame_name(sent) for sent in frames(acceptor)] == ["RESET"]
        assert acceptor.receive(frame) is None


def test_forgotten_channel_says_nothing() -> None:
    dialler = Mux(is_dialler=True)
    channel = dialler.open_circuit()
    dialler.forget(channel)
    dialler.forget(channel)
    assert frames(dialler) == []
    assert not dialler.channels


MALFORMED = {
    "empty": b"",
    "cut header": HEADER.pack(FrameType.DATA, 0, 0, 1)[:7],
    "unknown critical type": HEADER.pack(0x90, 0, 0, 1),
    "reserved flag": HEADER.pack(FrameType.DATA, 2, 0, 1) + bytes(50),
    "credit without its flag": HEADER.pack(FrameType.DATA, 0, 5, 1) + bytes(50),
    "credit flag without credit": HEADER.pack(FrameType.DATA, 1, 0, 1) + bytes(50),
    "flag on control": HEADER.pack(FrameType.PING, 1, 1, 0) + bytes(8),
    "short ping": HEADER.pack(FrameType.PING, 0, 0, 0) + bytes(7),
    "long pong": HEADER.pack(FrameType.PONG, 0, 0, 0) + bytes(9),
    "short credit": HEADER.pack(FrameType.CREDIT, 0, 0, 1) + bytes(3),
    "fin with a body": HEADER.pack(FrameType.FIN, 0, 0, 1) + b"x",
    "short reset": HEADER.pack(FrameType.RESET, 0, 0, 1) + b"x",
}


@pytest.mark.parametrize("case", MALFORMED)
def test_bad_frame_is_malformed(case: str) -> None:
    _, _, acceptor, _ = opened()
    assert refusal(acceptor, MALFORMED[case]) is ErrorCode.MALFORMED


def test_long_frame_and_long_handshake_are_too_big() -> None:
    _, _, acceptor, _ = opened()
    assert refusal(acceptor, HEADER.pack(FrameType.DATA, 0, 0, 1) + bytes(MAX_FRAME)) is ErrorCode.TOO_BIG
    assert refusal(acceptor, HEADER.pack(FrameType.HS, 0, 0, 1) + bytes(1025)) is ErrorCode.TOO_BIG


def test_unknown_frame_type_that_is_not_critical_is_ignored() -> None:
    _, _, acceptor, _ = opened()
    assert acceptor.receive(HEADER.pack(0x7F, 0, 0, 1) + b"later") is None


@given(st.binary(max_size=100))
def test_junk_is_an_event_or_a_protocol_error(junk: bytes) -> None:
    _, _, acceptor, _ = opened()
    try:
        acceptor.receive(junk)
    except ProtocolError as error:
        assert error.code in {ErrorCode.MALFORMED, ErrorCode.TOO_BIG, ErrorCode.FLOW, ErrorCode.STATE}


class Link(RuleBasedStateMachine):
    """Two ends with frames in flight in both directions, in any order of sending and arriving."""

    def __init__(self) -> None:
        super().__init__()
        dialler, near, acceptor, far = opened()
        self.ends = [(dialler, near, acceptor), (acceptor, far, dialler)]
        self.flying: list[list[bytearray]] = [[], []]
        for _, channel, _ in self.ends:
            channel.source = Records()
        self.sent = self.arrived = 0

    @rule(side=st.integers(0, 1), size=st.integers(24, 65_535))
    def push(self, side: int, size: int) -> None:
        source = self.ends[side][1].source
        assert isinstance(source, Records)
        source.sizes.append(size)

    @rule(side=st.integers(0, 1))
    def write(self, side: int) -> None:
        end = self.ends[side][0]
        frame = end.next_frame() or end.next_credit()
        if frame is not None:
            self.sent += frame_name(frame) == "DATA"
            self.flying[side].append(frame)

    @precondition(lambda self: any(self.flying))
    @rule(side=st.integers(0, 1))
    def arrive(self, side: int) -> None:
        if self.flying[side]:
            event = self.ends[side][2].receive(self.flying[side].pop(0))
            self.arrived += isinstance(event, DataFrame)

    @invariant()
    def credit_is_never_negative_and_never_above_the_window(self) -> None:
        for _, channel, _ in self.ends:
            assert 0 <= channel.send_credit <= WINDOW
            assert 0 <= channel.receive_credit <= WINDOW
            assert channel.receive_credit + channel.consumed <= WINDOW

    def teardown(self) -> None:
        """Whatever happened, everything can still be delivered."""
        for _ in range(10_000):
            for side in (0, 1):
                self.write(side)
                self.arrive(side)
            if not any(self.flying) and not any(channel.source.sizes for _, channel, _ in self.ends):  # type: ignore[union-attr]
                break
        assert self.sent == self.arrived
        assert not any(channel.source.sizes for _, channel, _ in self.ends)  # type: ignore[union-attr]


TestCredits = Link.TestCase
TestCredits.settings = hypothesis_settings(max_examples=40, stateful_step_count=40, deadline=None)
