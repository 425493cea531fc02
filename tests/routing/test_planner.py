"""Routes over snapshots: coverage, cost, exclusion, weights and forms."""

from __future__ import annotations

import random
import time
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from routing.errors import NoRouteError
from routing.planner import RouteRequest, missing_layers, plan_route
from routing.types import NodeAddress, NodeId, NodeRecord, SliceOffer, SliceSpec, WireDtype

DIGEST = b"d" * 32


def node(number: int, start: int, end: int, **changes: object) -> NodeRecord:
    offer_fields = {k: v for k, v in changes.items() if k in SliceOffer.__dataclass_fields__}
    record_fields = {k: v for k, v in changes.items() if k in ("load", "rtt_ms")}
    offer = SliceOffer(
        "m", DIGEST, 30, 64, SliceSpec(start, end), WireDtype.FLOAT32, form="plain/fp32", layer_ms=1.0
    )
    offer = replace(offer, **offer_fields)  # type: ignore[arg-type]
    address = NodeAddress(NodeId(bytes([number]) * 32), "127.0.0.1", 9000 + number)
    return NodeRecord(address, b"s" * 32, (WireDtype.FLOAT32,), (offer,), **record_fields)  # type: ignore[arg-type]


def request(start: int, end: int, **changes: object) -> RouteRequest:
    return RouteRequest("m", DIGEST, SliceSpec(start, end), **changes)  # type: ignore[arg-type]


def spans(records: list[NodeRecord], wanted: RouteRequest) -> list[tuple[int, int, int]]:
    return [(h.address.node_id[0], h.spec.start, h.spec.end) for h in plan_route(records, wanted).hops]


def test_a_route_takes_each_slice_from_where_the_last_one_ended() -> None:
    assert spans([node(1, 0, 10), node(2, 10, 20), node(3, 20, 30)], request(1, 30)) == [
        (1, 1, 10),
        (2, 10, 20),
        (3, 20, 30),
    ]


def test_fewer_hops_win_when_the_layers_cost_the_same() -> None:
    assert spans([node(1, 0, 10), node(2, 10, 30), node(3, 0, 30)], request(0, 30)) == [(3, 0, 30)]


def test_a_slow_node_is_left_out_when_two_fast_ones_are_quicker() -> None:
    records = [node(1, 0, 10), node(2, 10, 30), node(3, 0, 30, layer_ms=5.0)]
    assert [n for n, _, _ in spans(records, request(0, 30))] == [1, 2]


def test_overlapping_slices_may_be_entered_in_their_middle() -> None:
    assert spans([node(1, 0, 18), node(2, 12, 30)], request(0, 30)) in (
        [(1, 0, 18), (2, 18, 30)],
        [(1, 0, 12), (2, 12, 30)],
    )


def test_load_spreads_sessions_over_replicas() -> None:
    assert spans([node(1, 0, 30, load=3), node(2, 0, 30)], request(0, 30)) == [(2, 0, 30)]


def test_missing_layers_are_named() -> None:
    with pytest.raises(NoRouteError, match=r"layers 10:20, 25:30 of m") as caught:
        plan_route([node(1, 0, 10), node(2, 20, 25)], request(0, 30))
    assert caught.value.missing == ((10, 20), (25, 30))


def test_an_excluded_node_counts_as_missing() -> None:
    record = node(1, 0, 30)
    with pytest.raises(NoRouteError):
        plan_route([record], request(0, 30, excluded=frozenset({record.address.node_id})))


def test_another_models_layers_do_not_help() -> None:
    assert missing_layers([node(1, 0, 30, model_digest=b"x" * 32)], request(0, 30)) == [(0, 30)]


def test_a_thin_gateway_names_the_end_it_lacks() -> None:
    records = [node(1, 0, 10, has_opening=True), node(2, 10, 30)]
    with pytest.raises(NoRouteError, match="closing end"):
        plan_route(records, request(0, 30, needs_opening=True, needs_closing=True))


def test_a_replica_with_other_weights_is_never_taken() -> None:
    hashes = tuple(bytes([n]) * 8 for n in range(30))
    known = dict(enumerate(hashes))
    other = (b"changed!", *hashes[1:])
    with pytest.raises(NoRouteError):
        plan_route([node(1, 0, 30, layer_hashes=other)], request(0, 30, known_hashes=known))
    assert spans([node(2, 0, 30, layer_hashes=hashes)], request(0, 30, known_hashes=known)) == [(2, 0, 30)]


def test_another_form_is_the_last_resort() -> None:
    same, other = node(1, 0, 30, layer_ms=9.0), node(2, 0, 30, form="plain/bf16")
    wanted = request(0, 30, forms=frozenset({"plain/fp32"}))
    assert spans([same, other], wanted) == [(1, 0, 30)]
    assert spans([other], wanted) == [(2, 0, 30)]


def test_nothing_between_the_ends_needs_no_node() -> None:
    assert plan_route([], request(4, 4)).hops == ()


@given(
    st.lists(st.tuples(st.integers(0, 11), st.integers(1, 12)), max_size=8),
    st.integers(0, 5),
    st.integers(6, 12),
)
def test_a_route_covers_exactly_what_was_asked_or_names_what_is_missing(
    slices: list[tuple[int, int]], start: int, end: int
) -> None:
    records = [node(i, min(a, b - 1), max(a + 1, b)) for i, (a, b) in enumerate(slices) if a != b]
    wanted = request(start, end)
    try:
        hops = plan_route(records, wanted).hops
    except NoRouteError as error:
        assert error.missing
        assert list(error.missing) == missing_layers(records, wanted)
    else:
        assert [h.spec.start for h in hops] == [start, *(h.spec.end for h in hops[:-1])]
        assert hops[-1].spec.end == end
        assert all(h.offer.spec.start <= h.spec.start < h.spec.end <= h.offer.spec.end for h in hops)


def test_a_node_has_one_hop_in_a_route() -> None:
    slow, fast = node(1, 0, 30, layer_ms=50.0), node(2, 10, 20, layer_ms=0.1)
    assert spans([slow, fast], request(0, 30)) == [(1, 0, 30)]


def test_a_dearer_way_is_found_where_the_cheapest_wants_a_node_twice() -> None:
    first = node(1, 0, 10)
    twice = replace(first, offers=(*first.offers, node(1, 20, 30).offers[0]))
    records = [twice, node(2, 10, 20), node(3, 0, 10, layer_ms=9.0)]
    assert spans(records, request(0, 30)) == [(3, 0, 10), (2, 10, 20), (1, 20, 30)]
    with pytest.raises(NoRouteError) as caught:
        plan_route(records[:2], request(0, 30))
    assert caught.value.missing == ((20, 30),)


def test_an_offer_that_contradicts_the_model_is_not_taken() -> None:
    for lie in (node(1, 0, 30, num_layers=31), node(1, 0, 30, hidden_size=65)):
        with pytest.raises(NoRouteError):
            plan_route([lie], request(0, 30, num_layers=30, hidden_size=64))


def test_a_plan_over_a_crowd_takes_milliseconds() -> None:
    """500 nodes with 16 slices each, the most a directory takes; the bar is loose for shared machines."""
    draws = random.Random(1)
    crowd = []
    for number in range(500):
        record = node(number % 256, 0, 30)
        cuts = [sorted(draws.sample(range(31), 2)) for _ in range(16)]
        offers = tuple(
            replace(record.offers[0], spec=SliceSpec(a, b), layer_ms=draws.uniform(0.1, 9)) for a, b in cuts
        )
        address = replace(record.address, node_id=NodeId(number.to_bytes(32, "big")))
        crowd.append(replace(record, address=address, offers=offers))
    took_ms = []
    for _ in range(5):
        began = time.perf_counter()
        hops = plan_route(crowd, request(0, 30)).hops
        took_ms.append((time.perf_counter() - began) * 1000)
    assert len({hop.address.node_id for hop in hops}) == len(hops)
    assert min(took_ms) < 60, took_ms
