"""The route that a request would take now, as clients are told of it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from app.api.route import RouteReport, report_of
from app.engine.coverage import ModelFacts, route_request
from app.engine.planned import PlannedHop, RoutePlan, planned
from app.engine.request import KnownModel, ModelStatus, RequestError, RouteHop
from app.engine.route_options import ANY_ROUTE, RouteOptions
from routing.errors import NoRouteError
from routing.switchboard import Switchboard
from routing.types import HopTrace, SliceSpec
from tests.app.conftest import Serve
from tests.app.fake_network import HIDDEN_SIZE, FakeDirectory, joined, node, offer
from tests.support.api_server import Served
from tests.support.local_engine import ScriptedEngine

DIGEST = bytes([7]) * 32
FACTS = ModelFacts("tiny", DIGEST, num_layers=6, hidden_size=HIDDEN_SIZE, vocab_size=300, max_positions=64)
HOPS = (
    PlannedHop(RouteHop("0a1b2c3d", 1, 3), 1.5, 2.0, 0.5, True, "float32", "fast/bf16"),
    PlannedHop(RouteHop("4e5f6a7b", 3, 6, is_relayed=True), None, None, 0.0, False, "float32", "plain/fp32"),
)
PLAN = RoutePlan(6, HOPS, home=((0, 1),), replicas=(0, 2, 2, 1, 1, 1), expected_ms=9.25)


@pytest.fixture
def swarm(monkeypatch: pytest.MonkeyPatch) -> tuple[Switchboard, FakeDirectory]:
    monkeypatch.setattr(Switchboard, "live_link", lambda self, node_id: None)
    network, directory = joined()
    return network.switchboard, directory


def layers(*spans: tuple[int, int], **told: Any) -> Any:
    return [offer(DIGEST, start, end, num_layers=6, **told) for start, end in spans]


def plan(switchboard: Switchboard, *, is_thin: bool = False, options: RouteOptions = ANY_ROUTE) -> RoutePlan:
    spec = SliceSpec(0, 6) if is_thin else SliceSpec(1, 6)
    return planned(switchboard, [("", route_request(FACTS, spec, is_thin=is_thin))], options)


async def test_a_route_is_told_hop_by_hop(served: Served, scripted: ScriptedEngine) -> None:
    scripted.plan = PLAN  # type: ignore[attr-defined]
    told = (await served.http.get("/v1/route?model=scripted")).json()
    assert RouteReport.model_validate_json(
        served_text := (await served.http.get("/route?model=scripted")).text
    )
    assert "float32" in served_text
    assert (told["object"], told["model"], told["layers"], told["home_layers"]) == (
        "route",
        "scripted",
        6,
        [[0, 1]],
    )
    first, second = told["hops"]
    assert (first["node"], first["layers"], first["path"]) == ("0a1b2c3d", [1, 3], "direct")
    assert (first["rtt_ms"], first["layer_ms"], first["token_ms"], first["is_measured"]) == (
        1.5,
        2.0,
        4.5,
        True,
    )
    assert (first["dtype"], first["form"]) == ("float32", "fast/bf16")
    assert (second["path"], second["rtt_ms"], second["token_ms"]) == ("relayed", None, None)
    assert (told["replicas"], told["expected_ms"]) == ([0, 2, 2, 1, 1, 1], 9.25)


async def test_without_a_name_it_is_the_first_that_can_answer(serve: Serve, scripted: ScriptedEngine) -> None:
    broken = replace(scripted, model_name="broken", status=ModelStatus("partial", 30, ((1, 2),)))
    async with serve(broken, scripted) as served:
        assert (await served.http.get("/v1/route")).json()["model"] == "scripted"


async def test_an_alias_is_told_of_under_its_name(serve: Serve) -> None:
    async with serve(model_aliases="gpt-4o-mini=scripted") as served:
        assert (await served.http.get("/v1/route?model=gpt-4o-mini")).json()["model"] == "gpt-4o-mini"


async def test_what_has_no_route_says_so_as_everywhere(served: Served, scripted: ScriptedEngine) -> None:
    unknown = await served.http.get("/v1/route?model=none")
    assert (unknown.status_code, unknown.json()["error"]["code"]) == (404, "model_not_found")
    scripted.status = ModelStatus("partial", 30, ((10, 20),))
    partial = await served.http.get("/v1/route?model=scripted")
    assert (partial.status_code, partial.json()["error"]["code"]) == (503, "no_route")
    assert "10:20" in partial.json()["error"]["message"]
    assert "retry-after" in partial.headers


async def test_it_needs_the_key(serve: Serve) -> None:
    async with serve(api_keys="secret") as served:
        assert (await served.http.get("/v1/route")).status_code == 401
        told = await served.http.get("/v1/route", headers={"authorization": "Bearer secret"})
        assert told.status_code == 200


@pytest.mark.parametrize(
    ("kind", "ends", "sees"),
    [
        ("text", False, [["hidden_states", "answer_length"]] * 2),
        ("text", True, [["token_ids", "hidden_states", "answer_length"], ["hidden_states", "answer"]]),
        ("seq2seq", False, [["hidden_states", "encoder_states", "answer_length"]] * 2),
        ("picture", False, [["hidden_states", "prompt_embeddings"]] * 2),
    ],
)
def test_who_sees_what_depends_on_where_the_ends_are(kind: str, ends: bool, sees: list[list[str]]) -> None:
    hops = (replace(HOPS[0], opens=ends), replace(HOPS[1], closes=ends))
    known = KnownModel("m", ModelStatus("ready", 6), 0, 64, kind=kind)
    report = report_of("m", known, replace(PLAN, hops=hops, has_ends=not ends))
    assert [list(hop.sees) for hop in report.hops] == sees
    assert report.privacy.ends == ("nodes" if ends else "home")
    assert all(hop.statement for hop in report.hops)


def test_a_plan_is_the_route_that_would_be_taken(swarm: tuple[Switchboard, FakeDirectory]) -> None:
    switchboard, directory = swarm
    directory.now_holds(node(1, *layers((0, 4))), node(2, *layers((3, 6))), node(3, *layers((4, 6))))
    made = plan(switchboard)
    assert [(hop.hop.start, hop.hop.end) for hop in made.hops] == [(1, 4), (4, 6)] or len(made.hops) == 2
    assert made.hops[0].hop.start == 1
    assert made.hops[-1].hop.end == 6
    assert made.home == ((0, 1),)
    assert made.replicas == (0, 1, 1, 2, 2, 2), "layers at home need no node"
    assert made.has_ends
    assert made.expected_ms is not None


def test_the_gateways_own_wishes_are_in_it(swarm: tuple[Switchboard, FakeDirectory]) -> None:
    switchboard, directory = swarm
    directory.now_holds(node(1, *layers((0, 6))), node(2, *layers((0, 6))))
    pinned = node(2).address.node_id.hex()
    assert plan(switchboard, options=RouteOptions(pin=(pinned,))).hops[0].hop.node == pinned[:8]
    with pytest.raises(RequestError):
        plan(switchboard, options=RouteOptions(pin=("00000001",), avoid=("00000001",)))


def test_where_nodes_hold_the_ends_they_are_named(swarm: tuple[Switchboard, FakeDirectory]) -> None:
    switchboard, directory = swarm
    directory.now_holds(node(1, *layers((0, 3), holds_ends=True)), node(2, *layers((3, 6), holds_ends=True)))
    made = plan(switchboard, is_thin=True)
    assert [(hop.opens, hop.closes) for hop in made.hops] == [(True, False), (False, True)]
    assert not made.has_ends
    assert made.home == ()


def test_measured_times_take_the_place_of_claims(swarm: tuple[Switchboard, FakeDirectory]) -> None:
    switchboard, directory = swarm
    directory.now_holds(node(1, *layers((1, 6))))
    (claimed,) = plan(switchboard).hops
    assert (claimed.layer_ms, claimed.is_measured) == (1.0, False)
    switchboard.measurements.note(node(1).address.node_id, 5, 1, HopTrace(10_000, 500, 0), model=DIGEST)
    (measured,) = plan(switchboard).hops
    assert (measured.layer_ms, measured.queue_ms, measured.is_measured) == (2.0, 0.5, True)


def test_a_plan_without_nodes_names_the_layers(swarm: tuple[Switchboard, FakeDirectory]) -> None:
    switchboard, directory = swarm
    directory.now_holds(node(1, *layers((0, 3))))
    with pytest.raises(NoRouteError, match="3:6"):
        plan(switchboard)
