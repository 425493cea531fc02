"""Who holds up a step, by what the hops say, and how long a step may take."""

from __future__ import annotations

import pytest

from routing.inquiry import FIRST_SLACK_S, SLACK_S, SLOWER_BY, Behind, first_behind, is_stuck, patience_s
from routing.measurements import Measured
from routing.types import Hop, NodeAddress, NodeId, SessionId, SliceOffer, SliceSpec, Standing, WireDtype

SESSION = SessionId(bytes(16))


def told(last_done: int, next_step: int, epoch: int = 2, *, busy_ms: int = 0, busy_rows: int = 0) -> Standing:
    return Standing(SESSION, epoch, 0, last_done, next_step, busy_ms, busy_rows)


def a_hop(number: int, layer_ms: float = 1.0) -> Hop:
    node_id = NodeId(bytes([number]) * 32)
    spec = SliceSpec(0, 10)
    offer = SliceOffer("m", bytes(32), 30, 8, spec, WireDtype.FLOAT32, "plain", layer_ms=layer_ms)
    return Hop(NodeAddress(node_id, "127.0.0.1", 1), offer, spec, bytes(32))


@pytest.mark.parametrize(
    ("standings", "expected"),
    [
        ({0: told(7, 8), 1: told(7, 8), 2: told(7, 8)}, None),
        ({0: told(7, 8), 1: told(6, 8), 2: told(6, 7)}, Behind(1, True, told(6, 8))),
        ({0: told(7, 8), 1: told(6, 7), 2: told(6, 7)}, Behind(1, False)),
        ({0: told(6, 7)}, Behind(0, False)),
        ({0: told(7, 8), 1: told(9, 9, epoch=1)}, Behind(1, False)),
        ({0: told(7, 8), 2: told(6, 7)}, Behind(1, True)),
        ({0: told(7, 8), 2: told(7, 8)}, None),
        ({}, None),
    ],
)
def test_the_first_hop_that_has_not_done_the_step_is_found(
    standings: dict[int, Standing], expected: Behind | None
) -> None:
    assert first_behind(standings, 3, 2, 7) == expected


def test_a_route_that_does_not_open_hangs_at_the_first_hop_without_it() -> None:
    assert first_behind({0: told(0, 1), 1: told(5, 6, epoch=1)}, 2, 2, 0) == Behind(1, False)
    assert first_behind({0: told(0, 1), 1: told(5, 6)}, 2, 2, 0) is None


def test_patience_grows_with_rows_and_with_what_nodes_took_before() -> None:
    hops = [a_hop(1), a_hop(2)]
    assert patience_s(hops, [(1, 0)], {}) == pytest.approx(SLOWER_BY * 0.020)
    measured = {hops[0].address.node_id: Measured(4.0, 2.0, 0.5)}
    assert patience_s(hops, [(1, 0)], measured) == pytest.approx(SLOWER_BY * (0.042 + 0.010))
    assert patience_s(hops, [(100, 0)], measured) == pytest.approx(SLOWER_BY * (0.502 + 1.0))
    assert patience_s(hops, [(1, 1 << 20)], {}) > 10


def test_a_node_that_computes_for_others_is_not_stuck_and_one_that_hangs_is() -> None:
    hop, slack_ms = a_hop(1), int(SLACK_S * 1000)
    assert not is_stuck(hop, told(6, 8, busy_ms=slack_ms, busy_rows=1), None)
    assert is_stuck(hop, told(6, 8, busy_ms=slack_ms + 200, busy_rows=1), None)
    assert not is_stuck(hop, told(6, 8, busy_ms=slack_ms + 200, busy_rows=512), None)
    assert is_stuck(hop, told(6, 8), None)  # has the step, and does nothing
    assert not is_stuck(hop, told(6, 8, busy_ms=slack_ms + 200), None)  # loads another slice
    assert is_stuck(hop, told(6, 8, busy_ms=int(FIRST_SLACK_S * 1000) + 1), None)
