"""What a request may ask of its route: checked at the edge, put over the gateway's own wishes, kept by the engine."""

from __future__ import annotations

from contextlib import aclosing
from dataclasses import replace
from typing import Any

import openai
import pytest
from pydantic import ValidationError

from app.engine.coverage import ModelFacts
from app.engine.request import GenerationRequest, ModelUnavailableError, RequestError, RouteHop
from app.engine.route_options import ANY_ROUTE, RouteOptions
from app.engine.text import ChainTextEngine
from app.engine.tokenizer import ChatTokenizer
from app.settings import GatewaySettings
from routing.errors import NoRouteError
from routing.planner import RouteRequest
from routing.types import SliceSpec
from slicing.sampler import SamplingParams
from tests.app.conftest import Serve
from tests.app.fake_network import joined, node, offer
from tests.app.test_failures import fail_at
from tests.support.api_server import Served, chunks_of
from tests.support.local_engine import ScriptedEngine

A, B = "ab" * 32, "cd" * 32
DIGEST = bytes([1]) * 32


# The body -----------------------------------------------------------------------------------------------------


async def test_without_wishes_any_route_will_do(served: Served, scripted: ScriptedEngine) -> None:
    for body in ({}, {"diffuse": {}}, {"diffuse": {"pin": None, "max_hops": None}}):
        assert (await served.ask(**body)).status_code == 200
        assert scripted.requests[-1].route == ANY_ROUTE


async def test_wishes_reach_the_engine(served: Served, scripted: ScriptedEngine) -> None:
    wishes = {"pin": [A, A.upper(), B[:8]], "avoid": ["00112233"], "max_hops": 4, "distinct_owners": True}
    assert (await served.ask(diffuse=wishes)).status_code == 200
    assert scripted.requests[-1].route == RouteOptions((A, B[:8]), ("00112233",), 4, True)


async def test_the_official_client_sends_them_as_an_extra(served: Served, scripted: ScriptedEngine) -> None:
    async with served.openai() as client:
        answer = await client.chat.completions.create(
            model="scripted",
            messages=[{"role": "user", "content": "hello"}],
            extra_body={"diffuse": {"max_hops": 2, "avoid": [A]}},
        )
        with pytest.raises(openai.BadRequestError) as refused:
            await client.chat.completions.create(
                model="scripted",
                messages=[{"role": "user", "content": "hello"}],
                extra_body={"diffuse": {"max_hop": 2}},
            )
    assert answer.choices[0].finish_reason == "stop"
    assert scripted.requests[-1].route == RouteOptions((), (A,), 2)
    assert refused.value.param == "diffuse.max_hop"


@pytest.mark.parametrize(
    ("wishes", "param"),
    [
        ({"prefer": "latency"}, "diffuse.prefer"),
        ({"pin": A}, "diffuse.pin"),
        ({"pin": [A[:7]]}, "diffuse.pin.0"),
        ({"pin": [A + "0"]}, "diffuse.pin.0"),
        ({"pin": [B, "not hex!"]}, "diffuse.pin.1"),
        ({"pin": [7]}, "diffuse.pin.0"),
        ({"pin": [f"{n:08x}" for n in range(9)]}, "diffuse.pin"),
        ({"avoid": [f"{n:08x}" for n in range(257)]}, "diffuse.avoid"),
        ({"max_hops": 0}, "diffuse.max_hops"),
        ({"max_hops": 129}, "diffuse.max_hops"),
        ({"max_hops": True}, "diffuse.max_hops"),
        ({"max_hops": "3"}, "diffuse.max_hops"),
        ({"distinct_owners": 1}, "diffuse.distinct_owners"),
        ({"draft": "yes"}, "diffuse.draft"),
        ({"draft": True}, "diffuse.draft"),
        ({"pin": [A], "avoid": [A]}, "diffuse.pin"),
        ({"pin": [A, B], "max_hops": 1}, "diffuse.max_hops"),
        ({"distinct_owners": True, "max_hops": 1}, "diffuse.max_hops"),
        ([], "diffuse"),
        ("fast", "diffuse"),
    ],
)
async def test_nonsense_is_refused_by_name(
    served: Served, scripted: ScriptedEngine, wishes: Any, param: str
) -> None:
    response = await served.ask(diffuse=wishes)
    assert (response.status_code, response.json()["error"]["param"]) == (400, param)
    assert scripted.requests == []


# The gateway's own --------------------------------------------------------------------------------------------


async def test_a_request_goes_before_the_gateways_own_wishes(serve: Serve, scripted: ScriptedEngine) -> None:
    async with serve(pin=A, max_hops=3, distinct_owners=True) as served:
        await served.ask()
        assert scripted.requests[-1].route == RouteOptions((A,), (), 3, True)
        await served.ask(diffuse={"pin": [], "max_hops": 5})
        assert scripted.requests[-1].route == RouteOptions((), (), 5, True)
        nonsense = await served.ask(diffuse={"max_hops": 1})
    assert (nonsense.status_code, nonsense.json()["error"]["param"]) == (400, "diffuse.max_hops")


async def test_drafts_are_the_requests_choice_then_the_gateways(
    serve: Serve, scripted: ScriptedEngine
) -> None:
    async with serve() as served:
        await served.ask()
    async with serve(draft="off") as served:
        await served.ask()
        await served.ask(diffuse={"max_hops": 5})
        await served.ask(diffuse={"draft": "lookup"})
    assert [request.draft for request in scripted.requests] == ["auto", "off", "off", "lookup"]


def test_wishes_of_the_gateway_may_be_separated_by_commas() -> None:
    assert GatewaySettings(pin=f"{A}, {B.upper()}", max_hops=2).route == RouteOptions((A, B), (), 2)


@pytest.mark.parametrize(
    "wrong",
    [
        {"pin": A[:8]},
        {"avoid": "zz" * 32},
        {"pin": A, "avoid": A},
        {"pin": f"{A},{B}", "max_hops": 1},
        {"max_hops": 0},
        {"max_hops": 1, "distinct_owners": True},
    ],
)
def test_senseless_wishes_of_the_gateway_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        GatewaySettings(**wrong)


# The engine ---------------------------------------------------------------------------------------------------


async def asked_of_the_planner(
    tokenizer: ChatTokenizer, options: RouteOptions, *, avoided: frozenset[Any] = frozenset()
) -> RouteRequest:
    """The route request that these wishes become, with nodes 1 and 2 around and 0x00000003.. twice."""
    network, directory = joined()
    twins = [node(3), node(3)]
    twins[1] = node(3, host="127.0.0.2")
    object.__setattr__(twins[1].address, "node_id", twins[1].address.node_id[:-1] + b"\x07")
    directory.now_holds(node(1, offer(DIGEST, 0, 2)), node(2, offer(DIGEST, 2, 4)), *twins)
    facts = ModelFacts("tiny", DIGEST, 4, 32, 400, 64)
    engine = ChainTextEngine(facts, tokenizer, network.switchboard, None, SliceSpec(0, 4), excluded=avoided)
    return engine._routes.asked(options)


async def test_beginnings_become_ids(tokenizer: ChatTokenizer) -> None:
    first, second = node(1).address.node_id, node(2).address.node_id
    asked = await asked_of_the_planner(
        tokenizer, RouteOptions((first.hex()[:8],), (second.hex()[:10],), 5, True)
    )
    assert (asked.pinned, asked.excluded) == ({first}, {second})
    assert (asked.max_hops, asked.distinct_owners) == (5, True)


async def test_an_ambiguous_beginning_cannot_be_pinned_but_is_avoided_whole(tokenizer: ChatTokenizer) -> None:
    with pytest.raises(RequestError, match="2 nodes' ids begin with 00000003") as refused:
        await asked_of_the_planner(tokenizer, RouteOptions(("00000003",)))
    assert refused.value.param == "diffuse.pin"
    assert len((await asked_of_the_planner(tokenizer, RouteOptions((), ("00000003",)))).excluded) == 2


async def test_a_pinned_node_that_is_away_is_worth_a_retry(tokenizer: ChatTokenizer) -> None:
    with pytest.raises(ModelUnavailableError, match="no live node's id begins with 99999999") as away:
        await asked_of_the_planner(tokenizer, RouteOptions(("99999999",)))
    assert (away.value.code, away.value.param) == ("no_route", "diffuse.pin")


async def test_a_node_that_is_away_is_avoided_by_its_whole_id_only(tokenizer: ChatTokenizer) -> None:
    with pytest.raises(RequestError, match="give the whole id") as refused:
        await asked_of_the_planner(tokenizer, RouteOptions((), ("99999999",)))
    assert refused.value.param == "diffuse.avoid"
    assert (await asked_of_the_planner(tokenizer, RouteOptions((), ("99" * 32,)))).excluded == {
        bytes([0x99]) * 32
    }


async def test_what_the_gateway_avoids_no_request_can_pin(tokenizer: ChatTokenizer) -> None:
    barred = node(1).address.node_id
    with pytest.raises(RequestError, match="node 00000001 is to be avoided"):
        await asked_of_the_planner(tokenizer, RouteOptions(("00000001",)), avoided=frozenset({barred}))
    asked = await asked_of_the_planner(tokenizer, RouteOptions(max_hops=2), avoided=frozenset({barred}))
    assert asked.excluded == {barred}


async def test_a_wish_that_cannot_be_met_now_is_refused_before_anything_is_opened(
    tokenizer: ChatTokenizer,
) -> None:
    network, directory = joined()
    directory.now_holds(node(1, offer(DIGEST, 0, 2)), node(2, offer(DIGEST, 2, 4)))
    request = GenerationRequest(
        "r", "tiny", (5, 6), SamplingParams(), 4, route=RouteOptions(pin=("deadbeef",))
    )
    facts = ModelFacts("tiny", DIGEST, 4, 32, 400, 64)
    engine = ChainTextEngine(facts, tokenizer, network.switchboard, None, SliceSpec(0, 4))
    async with aclosing(engine.generate(request)) as events:
        with pytest.raises(ModelUnavailableError, match="deadbeef"):
            await anext(events)
    assert engine.num_running == 0


# What comes back ----------------------------------------------------------------------------------------------


async def test_an_impossible_option_is_named_and_worth_a_retry(
    served: Served, scripted: ScriptedEngine
) -> None:
    fail_at(scripted, -1, NoRouteError((), "scripted", reason="max_hops is 1"))
    response = await served.ask(diffuse={"max_hops": 1})
    error = response.json()["error"]
    assert (response.status_code, error["code"], error["param"]) == (503, "no_route", "diffuse")
    assert "there is no route of scripted: max_hops is 1" in error["message"]
    assert "retry-after" in response.headers


async def test_a_pinned_node_that_is_away_is_a_503_that_names_the_option(
    served: Served, scripted: ScriptedEngine
) -> None:
    message = "no live node's id begins with 99999999"
    fail_at(scripted, -1, ModelUnavailableError("no_route", message, 5, param="diffuse.pin"))
    response = await served.ask(diffuse={"pin": ["99999999"]})
    error = response.json()["error"]
    assert (response.status_code, error["code"], error["param"]) == (503, "no_route", "diffuse.pin")
    assert (error["message"], response.headers["retry-after"]) == (message, "5")


async def test_the_answer_says_which_route_it_took(served: Served, scripted: ScriptedEngine) -> None:
    scripted.route = (RouteHop("0a1b2c3d", 1, 16), RouteHop("4e5f6071", 16, 30, is_relayed=True))
    told = [
        {"node": "0a1b2c3d", "layers": [1, 16], "path": "direct"},
        {"node": "4e5f6071", "layers": [16, 30], "path": "relayed"},
    ]
    assert (await served.ask()).json()["route"] == told
    chunks = chunks_of(await served.stream(stream_options={"include_usage": True}))
    assert [chunk["route"] for chunk in chunks if "route" in chunk] == [told, told]
    assert chunks[-2]["choices"][0]["finish_reason"] == "stop"


@pytest.mark.parametrize(
    ("wishes", "param"),
    [
        (RouteOptions(max_hops=1), "diffuse.max_hops"),
        (RouteOptions(distinct_owners=True), "diffuse.distinct_owners"),
        (RouteOptions(avoid=("00000001",)), "diffuse.avoid"),
        (RouteOptions(avoid=("00000001",), max_hops=9), "diffuse"),
    ],
)
async def test_options_that_leave_no_route_are_blamed(
    tokenizer: ChatTokenizer, wishes: RouteOptions, param: str
) -> None:
    network, directory = joined()
    directory.now_holds(
        node(1, offer(DIGEST, 0, 2, holds_ends=True)), node(2, offer(DIGEST, 2, 4, holds_ends=True))
    )
    request = GenerationRequest("r", "tiny", (5, 6), SamplingParams(), 4, route=wishes)
    facts = ModelFacts("tiny", DIGEST, 4, 32, 400, 64)
    engine = ChainTextEngine(facts, tokenizer, network.switchboard, None, SliceSpec(0, 4))
    async with aclosing(engine.generate(request)) as events:
        with pytest.raises(ModelUnavailableError, match="it was asked for with") as refused:
            await anext(events)
        assert refused.value.param == param
    directory.now_holds()
    async with aclosing(engine.generate(replace(request, route=RouteOptions(max_hops=2)))) as events:
        with pytest.raises(NoRouteError, match="no node serves layers 0:4"):
            await anext(events)
