from __future__ import annotations

from app.engine.request import ModelStatus
from app.engine.tokenizer import ChatTokenizer
from tests.app.conftest import ANSWER, Serve
from tests.support.api_server import PATH, Served
from tests.support.local_engine import ScriptedEngine, saying

ORG = "org/name-1.5"


async def test_models_are_listed_as_clients_expect(served: Served, scripted: ScriptedEngine) -> None:
    listed = (await served.http.get("/v1/models")).json()
    assert listed["object"] == "list"
    (model,) = listed["data"]
    assert (model["id"], model["object"], model["owned_by"]) == ("scripted", "model", "diffuse")
    assert model["created"] == scripted.tokenizer.created > 1_500_000_000
    assert (model["max_model_len"], model["status"]) == (256, "ready")


async def test_a_model_with_a_slash_is_found_both_ways(serve: Serve, tokenizer: ChatTokenizer) -> None:
    engine = ScriptedEngine(tokenizer, saying(tokenizer, ANSWER), model_name=ORG)
    async with serve(engine) as served:
        listed = (await served.http.get("/v1/models")).json()["data"][0]
        for path in ("/v1/models/org/name-1.5", "/v1/models/org%2Fname-1.5", "/models/org%2Fname-1.5/"):
            assert (await served.http.get(path)).json() == listed


async def test_an_alias_is_retrieved_under_its_own_name(serve: Serve) -> None:
    async with serve(model_aliases="gpt-4o-mini=scripted") as served:
        assert (await served.http.get("/v1/models/gpt-4o-mini")).json()["id"] == "gpt-4o-mini"


async def test_an_unknown_model_is_not_found(served: Served) -> None:
    response = await served.http.get("/v1/models/org/none")
    assert (response.status_code, response.json()["error"]["code"]) == (404, "model_not_found")
    assert "`org/none`" in response.json()["error"]["message"]


async def test_missing_layers_show_everywhere_and_go_when_a_node_returns(
    served: Served, scripted: ScriptedEngine
) -> None:
    scripted.status = ModelStatus("partial", 30, ((10, 20),))
    model = (await served.http.get("/v1/models/scripted")).json()
    assert (model["status"], model["layers_covered"], model["missing_layers"]) == ("partial", 20, [[10, 20]])
    ready = await served.http.get("/ready")
    assert ready.status_code == 503
    assert ready.json()["models"]["scripted"]["missing_layers"] == [[10, 20]]
    assert (await served.http.get("/health")).status_code == 200
    scripted.status = ModelStatus("ready", 30)
    assert (await served.http.get("/ready")).status_code == 200
    assert (await served.ask()).status_code == 200


async def test_one_model_can_be_asked_about(
    serve: Serve, scripted: ScriptedEngine, tokenizer: ChatTokenizer
) -> None:
    broken = ScriptedEngine(
        tokenizer, saying(tokenizer, ANSWER), model_name="broken", status=ModelStatus("loading", 30)
    )
    async with serve(scripted, broken) as served:
        assert (await served.http.get("/ready")).status_code == 503
        assert (await served.http.get("/ready?model=scripted")).status_code == 200
        assert (await served.http.get("/ready?model=none")).status_code == 404


async def test_while_models_load_they_are_not_unknown(serve: Serve) -> None:
    async with serve() as served:
        served.gateway.is_loading = True
        ready = await served.http.get("/ready")
        coming = await served.ask(model="coming")
        assert (await served.http.get("/health")).status_code == 200
    assert (ready.status_code, ready.json()["status"]) == (503, "loading")
    assert (coming.status_code, coming.json()["error"]["code"]) == (503, "model_loading")
    assert "retry-after" in coming.headers


async def test_the_version_is_told(served: Served) -> None:
    assert (await served.http.get("/version")).json() == {"name": "diffuse", "version": "0.1.0"}


# Metrics ----------------------------------------------------------------------------------------------------


async def test_answers_tokens_and_times_are_counted(served: Served, scripted: ScriptedEngine) -> None:
    await served.ask()
    await served.stream(n=2, max_tokens=3)
    assert served.metric(
        "diffuse_answers_total", model="scripted", endpoint=PATH, finish_reason="stop"
    ) == 1  # fmt: skip
    assert served.metric(
        "diffuse_answers_total", model="scripted", endpoint=PATH, finish_reason="length"
    ) == 2  # fmt: skip
    assert served.metric("diffuse_generated_tokens_total", model="scripted") == 9 + 6
    assert served.metric("diffuse_prompt_tokens_total", model="scripted") == 40
    assert served.metric("diffuse_request_seconds_count", model="scripted", endpoint=PATH) == 2
    assert served.metric("diffuse_inter_token_seconds_count", model="scripted") == 8 + 2 * 2
    assert served.metric("diffuse_token_seconds_count", model="scripted", part="crypto") == 3


async def test_the_time_to_the_first_token_is_taken_of_streams_only(served: Served) -> None:
    await served.ask()
    assert served.metric("diffuse_time_to_first_token_seconds_count", model="scripted") == 0
    await served.stream()
    assert served.metric("diffuse_time_to_first_token_seconds_count", model="scripted") == 1


async def test_errors_are_counted_by_code_and_route(served: Served) -> None:
    await served.ask(model="none")
    await served.http.get("/made/up/path")
    assert served.metric("diffuse_request_errors_total", endpoint=PATH, code="model_not_found") == 1
    assert served.metric("diffuse_request_errors_total", endpoint="other", code="not_found") == 1


async def test_coverage_is_as_it_is_at_the_scrape(served: Served, scripted: ScriptedEngine) -> None:
    scripted.status = ModelStatus("partial", 30, ((10, 20),))
    text = (await served.http.get("/metrics")).text
    assert 'diffuse_model_layers_covered{model="scripted"} 20.0' in text
    assert 'diffuse_model_ready{model="scripted"} 0.0' in text


async def test_labels_hold_nothing_that_a_client_made_up(served: Served) -> None:
    await served.ask(model="made-up-model", user="made-up-user")
    await served.http.get("/made-up-path", headers={"x-request-id": "made-up-id"})
    assert "made-up" not in (await served.http.get("/metrics")).text


async def test_a_replay_is_counted(serve: Serve, scripted: ScriptedEngine) -> None:
    scripted.replays = 2
    async with serve() as served:
        await served.ask()
        assert served.metric("diffuse_replays_total", model="scripted") == 2
