from __future__ import annotations

from collections import deque

import pytest
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from routing.circuit import MAX_BODY
from routing.errors import ErrorCode
from routing.metered_port import Allowance
from routing.mux import HEADER, WINDOW, Channel, ChannelEnd, DataFrame, FrameType, Mux
from routing.pace import START_WINDOW, Pace
from routing.splice import MAX_QUEUED_BODIES, Half, Splice


class Port:
    """A `splice.Port` over a bare mux: credit waits until a test lets it go."""

    def __init__(self, mux: Mux) -> None:
        self.mux = mux
        self.clock = self.rtt = 0.0
        self.owed: deque[tuple[Channel, int]] = deque()

    def end_channel(self, channel: Channel, code: int | None) -> None:
        self.mux.end(channel, code)

    def give_back(self, channel: Channel, size: int) -> None:
        self.owed.append((channel, size))

    def pump(self) -> None: ...

    def now(self) -> float:
        return self.clock

    @property
    def rtt_s(self) -> float:
        return self.rtt

    def pay(self) -> None:
        while self.owed:
            self.mux.give_back(*self.owed.popleft())


class End:
    """One of the two ends of a circuit: numbered bodies out, bodies in, credit given when a test says so."""

    def __init__(self, mux: Mux, channel: Channel) -> None:
        self.mux, self.channel = mux, channel
        channel.source = channel.taker = self
        channel.send_credit = START_WINDOW
        self.waiting: deque[bytes] = deque()
        self.sent: list[bytes] = []
        self.got: list[bytes] = []
        self.untaken = 0
        self.ends: list[int | None] = []

    def push(self, size: int) -> None:
        body = len(self.sent).to_bytes(8, "big") + bytes(size - 8)
        self.sent.append(body)
        self.waiting.append(body)

    def take(self) -> None:
        size, self.untaken = self.untaken, 0
        self.mux.give_back(self.channel, size)

    def next_size(self) -> int | None:
        return len(self.waiting[0]) if self.waiting else None

    def seal_next(self, out: memoryview) -> None:
        out[:] = self.waiting.popleft()

    def on_body(self, body: memoryview) -> None:
        self.got.append(bytes(body))
        self.untaken += len(body)

    def on_channel_over(self, code: int | None) -> None:
        self.ends.append(code)


class Path:
    """Dialler, sentinel and node, with the frames in flight between them."""

    def __init__(self, *, is_answered: bool = True, max_bytes: int = 1 << 40) -> None:
        self.near_mux, self.far_mux = Mux(is_dialler=False), Mux(is_dialler=False)  # the sentinel's
        dialler, node = Mux(is_dialler=True), Mux(is_dialler=True)
        self.dialler = End(dialler, dialler.open_circuit())
        self.overs = 0
        self.splice = Splice(self._over, max_bytes=max_bytes)
        self.near, self.far = Port(self.near_mux), Port(self.far_mux)
        halves = Half(self.splice, self.near), Half(self.splice, self.far)
        self.splice.join(*halves)
        self.halves = halves
        channels = self.near_mux.adopt(1), self.far_mux.open_circuit()
        for half, channel in zip(halves, channels, strict=True):
            half.attach(channel)
            channel.taker = half
        self.node = End(node, node.adopt(2))
        self.splice.is_answered = is_answered
        self.wires = [
            (dialler, self.near_mux),
            (self.near_mux, dialler),
            (self.far_mux, node),
            (node, self.far_mux),
        ]
        self.flying: list[deque[bytearray]] = [deque() for _ in self.wires]

    def _over(self, splice: Splice) -> None:
        self.overs += 1

    def write(self, wire: int) -> None:
        mux = self.wires[wire][0]
        if (frame := mux.next_frame() or mux.next_credit()) is not None:
            self.flying[wire].append(frame)

    def arrive(self, wire: int) -> None:
        if not self.flying[wire]:
            return
        event = self.wires[wire][1].receive(self.flying[wire].popleft())
        if isinstance(event, DataFrame):
            event.channel.taker.on_body(event.record)  # type: ignore[union-attr]
        elif isinstance(event, ChannelEnd):
            event.channel.taker.on_channel_over(event.code)  # type: ignore[union-attr]

    @property
    def _is_quiet(self) -> bool:
        waiting = (self.dialler.waiting, self.node.waiting, *(half.queue for half in self.halves))
        return not any(self.flying) and not any(waiting)

    def settle(self, num_rounds: int = 4000) -> None:
        """Let everything that can still move do so."""
        for _ in range(num_rounds):
            for wire in range(len(self.wires)):
                self.write(wire)
                self.arrive(wire)
            self.near.pay()
            self.far.pay()
            for end in (self.dialler, self.node):
                if end.channel.number in end.mux.channels:
                    end.take()
            if self._is_quiet:
                break
        for wire in range(len(self.wires)):
            self.write(wire)
            self.arrive(wire)


class Circuit(RuleBasedStateMachine):
    """Bodies both ways, frames and credits in any order of sending and arriving."""

    def __init__(self) -> None:
        super().__init__()
        self.path = Path()

    @rule(is_node=st.booleans(), sizes=st.lists(st.integers(8, MAX_BODY), min_size=1, max_size=40))
    def push(self, is_node: bool, sizes: list[int]) -> None:
        end = self.path.node if is_node else self.path.dialler
        for size in sizes:
            end.push(size)

    @rule(wire=st.integers(0, 3), num_frames=st.integers(1, 40))
    def write(self, wire: int, num_frames: int) -> None:
        for _ in range(num_frames):
            self.path.write(wire)

    @precondition(lambda self: any(self.path.flying))
    @rule(wire=st.integers(0, 3), num_frames=st.integers(1, 40))
    def arrive(self, wire: int, num_frames: int) -> None:
        for _ in range(num_frames):
            self.path.arrive(wire)

    @rule(seconds=st.floats(0.0, 1.0), rtt_s=st.floats(0.0, 0.5))
    def time_passes(self, seconds: float, rtt_s: float) -> None:
        for port in (self.path.near, self.path.far):
            port.clock += seconds
            port.rtt = rtt_s

    @rule(is_far=st.booleans())
    def quota_allows(self, is_far: bool) -> None:
        (self.path.far if is_far else self.path.near).pay()

    @rule(is_node=st.booleans())
    def take(self, is_node: bool) -> None:
        (self.path.node if is_node else self.path.dialler).take()

    @invariant()
    def credits_stay_within_the_window(self) -> None:
        muxes = {id(mux): mux for wire in self.path.wires for mux in wire}.values()
        for channel in (channel for mux in muxes for channel in mux.channels.values()):
            assert 0 <= channel.send_credit <= WINDOW
            assert 0 <= channel.receive_credit <= WINDOW
            assert channel.receive_credit + channel.consumed <= WINDOW

    @invariant()
    def a_direction_holds_a_window_at_most(self) -> None:
        for half in self.path.halves:
            assert half.queued_bytes == sum(map(len, half.queue)) <= WINDOW

    @invariant()
    def what_arrives_is_a_prefix_of_what_was_sent(self) -> None:
        for source, sink in ((self.path.dialler, self.path.node), (self.path.node, self.path.dialler)):
            assert sink.got == source.sent[: len(sink.got)]

    def teardown(self) -> None:
        """Whatever happened, everything is delivered, and a proper end comes after it."""
        self.path.settle()
        self.path.dialler.mux.end(self.path.dialler.channel)
        self.path.settle()
        assert self.path.node.got == self.path.dialler.sent
        assert self.path.dialler.got == self.path.node.sent
        assert self.path.node.ends == [None]
        assert self.path.overs == 1
        assert not self.path.near_mux.channels
        assert not self.path.far_mux.channels


TestCircuit = Circuit.TestCase
TestCircuit.settings = hypothesis_settings(max_examples=40, stateful_step_count=40, deadline=None)


def test_reset_reaches_the_other_end_at_once_and_drops_what_is_queued() -> None:
    path = Path()
    for _ in range(20):
        path.dialler.push(MAX_BODY)
    for _ in range(7):
        path.write(0)
        path.arrive(0)
    path.dialler.mux.end(path.dialler.channel, int(ErrorCode.LINK_LOST))
    path.write(0)
    path.arrive(0)
    path.write(2)
    path.arrive(2)
    assert path.node.ends == [ErrorCode.LINK_LOST]
    assert path.node.got == []
    assert path.overs == 1
    assert sum(half.queued_bytes for half in path.halves) == 0


def test_end_of_a_link_is_a_peer_that_is_gone() -> None:
    path = Path()
    path.halves[0].on_channel_over(int(ErrorCode.PEER_GONE))
    path.settle()
    assert path.node.ends == [ErrorCode.PEER_GONE]
    assert path.overs == 1


def test_overrun_ends_both_sides_with_what_each_may_know() -> None:
    path = Path()
    channel = path.near_mux.channels[1]
    channel.receive_credit = 100
    path.dialler.push(200)
    path.settle()
    assert path.dialler.ends == [ErrorCode.FLOW]
    assert path.node.ends == [ErrorCode.PEER_GONE]
    assert path.overs == 1


def test_tiny_bodies_cannot_pile_up() -> None:
    path = Path()
    path.near_mux.channels[1].receive_credit = WINDOW
    frame = HEADER.pack(FrameType.DATA, 0, 0, 1) + bytes(8)
    for _ in range(MAX_QUEUED_BODIES + 1):
        event = path.near_mux.receive(frame)
        assert isinstance(event, DataFrame)
        path.halves[0].on_body(event.record)
    path.settle()
    assert path.dialler.ends == [ErrorCode.FLOW]


def test_nothing_goes_to_a_node_before_it_has_answered() -> None:
    path = Path(is_answered=False)
    path.dialler.push(100)
    path.settle(10)
    assert path.node.got == []
    path.node.push(50)
    path.settle()
    assert path.dialler.got == path.node.sent
    assert path.node.got == path.dialler.sent


def test_dialler_that_ends_before_the_answer_takes_the_circuit_with_it() -> None:
    path = Path(is_answered=False)
    path.dialler.push(100)
    path.settle(10)
    path.dialler.mux.end(path.dialler.channel)
    path.settle(10)
    assert path.node.ends == [ErrorCode.PEER_GONE]
    assert path.overs == 1


@pytest.mark.parametrize("sender", ["dialler", "node"])
def test_bytes_over_the_limit_end_both_sides_with_quota(sender: str) -> None:
    path = Path(max_bytes=1000)
    getattr(path, sender).push(600)
    path.settle()
    getattr(path, sender).push(600)
    path.settle()
    assert path.dialler.ends == path.node.ends == [ErrorCode.QUOTA]
    assert path.overs == 1


def test_bulk_and_token_of_two_circuits_take_turns_chunk_by_chunk() -> None:
    """A window of prefill waits for the node's link; a token of another circuit goes out second at the latest."""
    mux = Mux(is_dialler=False)
    halves = []
    for number in range(2):
        splice = Splice(lambda _: None, max_bytes=1 << 40)
        splice.is_answered = True
        source = Mux(is_dialler=False)
        near, far = Half(splice, Port(source)), Half(splice, Port(mux))
        splice.join(near, far)
        near.attach(source.adopt(1))
        far.attach(mux.open_circuit())
        halves.append(near)
        assert number == len(halves) - 1
    for _ in range(7):
        halves[0].on_body(memoryview(bytes(32 << 10)))
    assert mux.next_frame() is not None
    halves[1].on_body(memoryview(b"token" * 100))
    sizes = [len(mux.next_frame() or b"") for _ in range(2)]
    assert 508 in sizes


def test_allowance_gives_its_burst_and_then_its_rate() -> None:
    allowance, channel = Allowance(rate=1000.0, burst=3000.0, now=0.0), Channel(1)
    for _ in range(10):
        allowance.owe(channel, 1000)
    assert len(allowance.due(0.0)) == 3
    assert allowance.wait_s == pytest.approx(0.0, abs=0.01)
    assert len(allowance.due(0.5)) == 1
    assert len(allowance.due(0.6)) == 0
    assert allowance.wait_s == pytest.approx(0.4, abs=0.01)
    assert len(allowance.due(100.0)) == 3
    assert len(allowance.owed) == 3


def test_allowance_owes_nothing_when_all_is_given() -> None:
    allowance = Allowance(rate=1000.0, burst=3000.0, now=0.0)
    allowance.owe(Channel(1), 100)
    allowance.due(0.0)
    assert allowance.wait_s is None


def pace_after(*, queued: int, took_s: float, num_looks: int = 10) -> tuple[int, int]:
    """The window after some half windows of the same kind, and the credit that was given for them less what passed."""
    pace, now, surplus = Pace(0.0), 0.0, 0
    for _ in range(num_looks):
        now += took_s
        passed = pace.window // 2
        surplus += pace.passed_on(passed, queued, now, rtt_s=0.1) - passed
    return pace.window, surplus


def test_window_grows_to_the_largest_while_a_fast_circuit_runs_dry() -> None:
    assert pace_after(queued=0, took_s=0.05) == (WINDOW, WINDOW - START_WINDOW)


def test_window_stays_small_for_tokens() -> None:
    assert pace_after(queued=0, took_s=1.0) == (START_WINDOW, 0)


def test_window_shrinks_by_what_stands_in_the_queue() -> None:
    window, surplus = pace_after(queued=100_000, took_s=0.05)
    assert window == 64 << 10
    assert surplus == window - START_WINDOW


def test_window_is_left_alone_while_little_is_queued() -> None:
    assert pace_after(queued=20_000, took_s=0.05) == (START_WINDOW, 0)
