"""Moving averages over traces: speed, queue, forgetting, and traces that lie."""

from __future__ import annotations

import pytest

from routing.measurements import (
    FORGET_AFTER_S,
    MAX_JUMP,
    MAX_MEASURED,
    Measured,
    Measurements,
    believable,
)
from routing.types import Hop, HopTrace, NodeAddress, NodeId, SliceOffer, SliceSpec, WireDtype

NODE, OTHER = NodeId(b"n" * 32), NodeId(b"o" * 32)
DIGEST = b"d" * 32


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def hop(node_id: NodeId, start: int, end: int) -> Hop:
    offer = SliceOffer("m", DIGEST, 30, 64, SliceSpec(start, end), WireDtype.FLOAT32, "plain/fp32")
    return Hop(NodeAddress(node_id, "127.0.0.1", 9000), offer, offer.spec, b"s" * 32)


def test_a_decode_step_tells_ms_per_layer_and_what_steps_wait() -> None:
    measurements = Measurements()
    measurements.note(NODE, 10, 1, HopTrace(20_000, 3_000, 1_000))
    assert measurements.of()[NODE] == Measured(2.0, 4.0, None)


def test_prefill_is_kept_apart_per_row() -> None:
    measurements = Measurements()
    measurements.note(NODE, 10, 1, HopTrace(20_000, 0, 0))
    measurements.note(NODE, 10, 100, HopTrace(500_000, 90_000, 0))
    assert measurements.of()[NODE] == Measured(2.0, 0.0, 0.5)


def test_a_node_that_slows_down_shows_within_ten_steps() -> None:
    measurements = Measurements()
    for _ in range(50):
        measurements.note(NODE, 10, 1, HopTrace(10_000, 0, 0))
    for _ in range(10):
        measurements.note(NODE, 10, 1, HopTrace(80_000, 0, 0))
    measured = measurements.of()[NODE].layer_ms
    assert measured is not None
    assert 6.0 < measured < 8.0


def test_one_stopped_moment_is_not_a_slow_node() -> None:
    measurements = Measurements()
    for _ in range(50):
        measurements.note(NODE, 10, 1, HopTrace(10_000, 0, 0))
    measurements.note(NODE, 10, 1, HopTrace(60_000_000, 0, 0))
    measured = measurements.of()[NODE].layer_ms
    assert measured is not None
    assert measured <= MAX_JUMP


def test_models_are_kept_apart() -> None:
    measurements = Measurements()
    measurements.note(NODE, 1, 1, HopTrace(1_000, 0, 0), model=b"a")
    measurements.note(NODE, 1, 1, HopTrace(5_000, 0, 0), model=b"b")
    assert measurements.of(b"a")[NODE].layer_ms == 1.0
    assert measurements.of()[NODE].layer_ms == 5.0
    assert measurements.get(OTHER) is None


def test_ten_silent_minutes_are_forgotten(clock: Clock) -> None:
    measurements = Measurements(clock)
    measurements.note(NODE, 1, 1, HopTrace(1_000, 0, 0))
    clock.now = FORGET_AFTER_S - 1
    measurements.note(OTHER, 1, 1, HopTrace(1_000, 0, 0))
    assert len(measurements.of()) == 2
    clock.now = FORGET_AFTER_S + 1
    assert measurements.of().keys() == {OTHER}


def test_the_table_is_bounded_and_drops_the_longest_unheard() -> None:
    measurements = Measurements()
    for number in range(MAX_MEASURED + 5):
        measurements.note(NodeId(number.to_bytes(32, "big")), 1, 1, HopTrace(1, 0, 0))
        measurements.note(NODE, 1, 1, HopTrace(1, 0, 0))
    assert len(measurements) == MAX_MEASURED
    assert NODE in measurements.of()


def test_a_forgotten_node_begins_anew() -> None:
    measurements = Measurements()
    measurements.note(NODE, 1, 1, HopTrace(1_000, 0, 0), model=b"a")
    measurements.forget(NODE)
    assert measurements.get(NODE) is None


def test_traces_are_never_longer_than_what_was_waited() -> None:
    traces = believable([HopTrace(8_000, 1_000, 0), HopTrace(80_000, 0, 1_000)], 9.0)
    assert traces == (HopTrace(800, 100, 0), HopTrace(8_000, 0, 100))
    assert believable(traces, 9.0) == traces
    assert believable([HopTrace(1, 1, 1)], 0.0) == (HopTrace(0, 0, 0),)


def test_what_nobody_explains_is_laid_on_all_hops() -> None:
    """A node that claims to compute in no time is as slow as the gateway finds its routes."""
    measurements = Measurements()
    hops = [hop(NODE, 0, 10), hop(OTHER, 10, 20)]
    for _ in range(20):
        measurements.note_step(
            hops, 1, [HopTrace(0, 0, 0), HopTrace(10_000, 0, 0)], waited_ms=35.0, network_ms=5.0
        )
    assert measurements.of(DIGEST)[NODE] == Measured(0.0, pytest.approx(10.0))
    assert measurements.of(DIGEST)[OTHER] == Measured(pytest.approx(1.0), pytest.approx(10.0))


def test_traces_that_do_not_fit_the_route_are_not_counted() -> None:
    measurements = Measurements()
    measurements.note_step([hop(NODE, 0, 10)], 1, [], waited_ms=9.0)
    measurements.note(NODE, 0, 1, HopTrace(1, 1, 1))
    assert not measurements.of()
