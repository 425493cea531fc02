"""Route choice against brute force: every option, small random directories, costs counted a second time here."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from dataclasses import dataclass, replace

import pytest

from routing.errors import NoRouteError
from routing.measurements import Measured
from routing.planner import RouteRequest, plan_route, route_ms
from routing.types import NodeAddress, NodeId, NodeRecord, Route, SliceOffer, SliceSpec, WireDtype

DIGEST = b"d" * 32
NUM_LAYERS = 6


@dataclass(frozen=True)
class Case:
    """One directory and one request."""

    records: list[NodeRecord]
    request: RouteRequest
    measured: dict[NodeId, Measured]
    sessions: dict[NodeId, int]


def directory(draws: random.Random) -> list[NodeRecord]:
    records, has_lines = [], draws.choice([0.0, 0.4])
    for _ in range(draws.randint(1, 6)):
        offers = []
        for _ in range(draws.choice([1, 1, 1, 2])):
            start, end = sorted(draws.sample(range(NUM_LAYERS + 1), 2))
            offers.append(
                SliceOffer(
                    "m",
                    DIGEST,
                    NUM_LAYERS,
                    64,
                    SliceSpec(start, end),
                    WireDtype.FLOAT32,
                    draws.choice(["a", "a", "b"]),
                    has_opening=draws.random() < 0.8,
                    has_closing=draws.random() < 0.8,
                    layer_ms=draws.choice([0.0, draws.uniform(0.01, 20), draws.uniform(1, 5)]),
                )
            )
        host = f"10.0.{draws.randrange(3)}.{draws.randrange(1, 99)}"
        relay = NodeId(b"r" * 32) if draws.random() < 0.3 else None
        address = NodeAddress(NodeId(draws.randbytes(32)), host, 9000, relay)
        rtt_ms = draws.choice([None, draws.uniform(0, 60)])
        max_sessions, owner = draws.choice([0, 2]), draws.choice(["", "x", "y"])
        is_verified = draws.random() < 0.7
        records.append(
            NodeRecord(
                address,
                b"s" * 32,
                (WireDtype.FLOAT32,),
                tuple(offers),
                load=draws.randrange(4),
                rtt_ms=rtt_ms,
                owner=owner,
                max_sessions=max_sessions,
                is_verified=is_verified,
            )
        )
    return [
        replace(
            record,
            neighbour_ms={
                other.address.node_id[:8]: draws.uniform(0, 40) for other in records if draws.random() < 0.4
            },
            mbps=draws.choice([None, None, 10 ** draws.uniform(-4, 3)]),
            neighbour_mbps={
                other.address.node_id[:8]: 10 ** draws.uniform(-4, 3)
                for other in records
                if draws.random() < has_lines
            },
        )
        for record in records
    ]


def case(seed: int) -> Case:
    draws = random.Random(seed)
    records = directory(draws)
    node_ids = [record.address.node_id for record in records]
    start = draws.choice([0, 0, 1])
    request = RouteRequest("m", DIGEST, SliceSpec(start, NUM_LAYERS - draws.choice([0, 0, 1])))
    if draws.random() < 0.3:
        request = replace(request, needs_opening=True, needs_closing=draws.random() < 0.5)
    if draws.random() < 0.4:
        pinned = draws.sample(node_ids, min(len(node_ids), draws.choice([1, 1, 2])))
        request = replace(request, pinned=frozenset(pinned))
    if draws.random() < 0.2:
        request = replace(request, excluded=frozenset(draws.sample(node_ids, 1)))
    if draws.random() < 0.3:
        request = replace(request, max_hops=draws.randint(1, 4))
    if draws.random() < 0.3:
        request = replace(request, distinct_owners=True)
    if draws.random() < 0.2:
        request = replace(request, forms=frozenset({"a"}))
    if draws.random() < 0.3:
        kept = draws.sample(records, min(len(records), 2))
        held = {r.address.node_id: draws.choice([r.offers[0].spec, SliceSpec(2, 4)]) for r in kept}
        request = replace(request, held=held)
    measured = {
        n: Measured(draws.choice([None, draws.uniform(0.5, 9)]), draws.uniform(0, 3))
        for n in node_ids
        if draws.random() < 0.4
    }
    return Case(records, request, measured, {n: draws.randrange(4) for n in node_ids if draws.random() < 0.3})


# The costs as routing/route_costs.py documents them, pair by pair ------------------------------------------------


def middle(values: list[float]) -> float:
    ordered, half = sorted(values), len(values) // 2
    return ordered[half] if len(values) % 2 else (ordered[half - 1] + ordered[half]) / 2


class Costs:
    def __init__(self, of: Case) -> None:
        self.case = of
        self.usable = [r for r in of.records if r.address.node_id not in of.request.excluded]
        spec = of.request.spec
        self.usable = [
            r
            for r in self.usable
            if any(o.spec.start < spec.end and o.spec.end > spec.start for o in r.offers)
        ]
        self.rtts = [r.rtt_ms for r in self.usable if r.rtt_ms is not None]

    def offers(self, record: NodeRecord) -> list[SliceOffer]:
        spec = self.case.request.spec
        return [o for o in record.offers if o.spec.start < spec.end and o.spec.end > spec.start]

    def rtt(self, record: NodeRecord) -> float:
        if record.rtt_ms is not None:
            return record.rtt_ms
        return 1.5 * middle(self.rtts) if self.rtts else 1.0

    def way(self, record: NodeRecord) -> float:
        return self.rtt(record) / 2 + (5.0 if record.address.is_relayed else 0.0)

    def between(self, here: NodeRecord, there: NodeRecord) -> float:
        a, b = self.rtt(here), self.rtt(there)
        told = [
            x.neighbour_ms[y.address.node_id[:8]]
            for x, y in ((here, there), (there, here))
            if y.address.node_id[:8] in x.neighbour_ms
        ]
        same = here.address.host.rsplit(".", 1)[0] == there.address.host.rsplit(".", 1)[0]
        is_near = same and not here.address.is_relayed and not there.address.is_relayed
        rtt = max(told) if told else min(max(a, b), 1.0) if is_near else max(a, b)
        lines = [
            x.neighbour_mbps[y.address.node_id[:8]]
            for x, y in ((here, there), (there, here))
            if y.address.node_id[:8] in x.neighbour_mbps
        ]
        relayed = 5.0 if there.address.is_relayed else 0.0
        return max(rtt, abs(a - b)) / 2 + relayed + self.row_ms(min(lines, default=None))

    def row_ms(self, mbps: float | None) -> float:
        """64 values of 4 bytes."""
        row_ms = 0.0 if mbps is None else min(64 * 4 * 8 / 1e6 / mbps * 1000, 1000.0)
        return row_ms if row_ms >= 0.01 else 0.0

    def layer_ms(self, record: NodeRecord, offer: SliceOffer) -> float:
        measured = self.case.measured
        ours = measured.get(record.address.node_id)
        if ours is not None and ours.layer_ms is not None:
            return ours.layer_ms
        claims = [
            min(o.layer_ms for o in self.offers(r) if o.layer_ms)
            for r in self.usable
            if any(o.layer_ms for o in self.offers(r))
        ]
        median = middle(claims) if claims else 0.0
        seen = [measured[r.address.node_id].layer_ms for r in self.usable if r.address.node_id in measured]
        best = min((ms for ms in seen if ms is not None), default=0.0)
        claim = (offer.layer_ms or median) * (1.2 if record.is_verified else 1.5)
        return max(claim, best, median / 16)

    def hop(self, record: NodeRecord, offer: SliceOffer, spec: SliceSpec) -> float:
        request, node_id = self.case.request, record.address.node_id
        load = max(record.load, self.case.sessions.get(node_id, 0))
        num_layers = spec.end - spec.start
        cost = 0.5 + 0.5 * load + num_layers * self.layer_ms(record, offer) * (1 + 0.05 * load)
        if node_id in self.case.measured:
            cost += self.case.measured[node_id].queue_ms
        if 0 < record.max_sessions <= load:
            cost += 1e4
        if request.forms and offer.form not in request.forms:
            cost += 1e7
        if request.held and request.held.get(node_id) != spec:
            cost += 1e4 * num_layers
        return cost

    def route(self, hops: list[tuple[NodeRecord, SliceOffer, SliceSpec]]) -> float:
        total = self.way(hops[0][0]) + self.way(hops[-1][0]) + sum(self.hop(*hop) for hop in hops)
        total += 0.0 if self.case.request.needs_closing else self.row_ms(hops[-1][0].mbps)
        return total + sum(self.between(a[0], b[0]) for a, b in itertools.pairwise(hops))


def is_allowed(request: RouteRequest, hops: list[tuple[NodeRecord, SliceOffer, SliceSpec]]) -> bool:
    owners = [r.owner or r.address.host.rsplit(".", 1)[0] for r, _, _ in (hops[0], hops[-1])]
    return (
        request.pinned <= {record.address.node_id for record, _, _ in hops}
        and len(hops) <= (request.max_hops or len(hops))
        and not (request.distinct_owners and owners[0] == owners[1])
        and (hops[0][1].has_opening or not request.needs_opening)
        and (hops[-1][1].has_closing or not request.needs_closing)
    )


def all_routes(
    of: Case, hops: list[tuple[NodeRecord, SliceOffer, SliceSpec]]
) -> Iterator[list[tuple[NodeRecord, SliceOffer, SliceSpec]]]:
    request = of.request
    at = hops[-1][2].end if hops else request.spec.start
    if at == request.spec.end:
        yield hops
        return
    for record in of.records:
        if record.address.node_id in request.excluded or any(record is r for r, _, _ in hops):
            continue
        for offer in record.offers:
            if offer.spec.start <= at:
                for end in range(at + 1, min(offer.spec.end, request.spec.end) + 1):
                    yield from all_routes(of, [*hops, (record, offer, SliceSpec(at, end))])


def planned(of: Case) -> Route:
    return plan_route(of.records, of.request, measured=of.measured, sessions=of.sessions)


def test_the_route_is_the_cheapest_of_all_on_a_thousand_directories() -> None:
    num_routes = 0
    for seed in range(1000):
        of = case(seed)
        costs = Costs(of)
        best = min(
            (costs.route(hops) for hops in all_routes(of, []) if is_allowed(of.request, hops)), default=None
        )
        try:
            route = planned(of)
        except NoRouteError as error:
            assert best is None, (seed, str(error))
            assert error.missing or error.missing_ends or error.reason, seed
            continue
        records = {record.address.node_id: record for record in of.records}
        hops = [(records[hop.address.node_id], hop.offer, hop.spec) for hop in route.hops]
        assert best is not None, seed
        assert is_allowed(of.request, hops), seed
        assert costs.route(hops) == pytest.approx(best, rel=1e-9), seed
        num_routes += 1
    assert 300 < num_routes < 900  # both kinds of outcome are tried


def test_the_cost_of_a_route_is_what_the_planner_minimised() -> None:
    for seed in range(200):
        of = case(seed)
        of = replace(of, request=replace(of.request, held={}, forms=frozenset()))
        try:
            route = planned(of)
        except NoRouteError:
            continue
        records = {record.address.node_id: record for record in of.records}
        hops = [(records[hop.address.node_id], hop.offer, hop.spec) for hop in route.hops]
        cost = route_ms(of.records, route, of.request, measured=of.measured, sessions=of.sessions)
        others = [
            [
                (record, offer, spec)
                for offer in record.offers
                if offer.spec.start <= spec.start < spec.end <= offer.spec.end
            ]
            for record, _, spec in hops
        ]
        assert cost == pytest.approx(min(Costs(of).route(list(way)) for way in itertools.product(*others))), (
            seed
        )
