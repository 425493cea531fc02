"""What holds for every route: paths, ids, envelopes, hosts, keys and origins."""

from __future__ import annotations

import asyncio

import pytest

from tests.app.conftest import Serve
from tests.support.api_server import PATH, QUESTION, Served

KEYS = {"api_keys": "key-one, key-two"}


def is_envelope(body: object) -> bool:
    return (
        isinstance(body, dict)
        and set(body) == {"error"}
        and set(body["error"]) == {"message", "type", "param", "code"}
        and isinstance(body["error"]["message"], str)
    )


@pytest.mark.parametrize(
    "path",
    [PATH, f"{PATH}/", "/chat/completions", "/chat/completions/", "/v1//chat/completions", f"/{PATH}//"],
)
async def test_chat_is_there_with_and_without_v1_and_slash(served: Served, path: str) -> None:
    assert (await served.http.post(path, json=QUESTION)).status_code == 200


@pytest.mark.parametrize("name", ["models", "health", "ready", "version", "metrics", "models/scripted"])
async def test_each_page_is_there_with_and_without_v1_and_slash(served: Served, name: str) -> None:
    for path in (f"/{name}", f"/{name}/", f"/v1/{name}", f"/v1/{name}/"):
        assert (await served.http.get(path)).status_code == 200, path


@pytest.mark.parametrize(
    "path", ["/v1", "/v1/", "/nothing", "/v1/nothing", "/page", "/v2/models", "/v1/v1/models"]
)
async def test_an_unknown_route_is_an_enveloped_404(served: Served, path: str) -> None:
    response = await served.http.get(path)
    assert (response.status_code, response.json()["error"]["code"]) == (404, "not_found")
    assert is_envelope(response.json())


async def test_a_wrong_method_is_an_enveloped_405_that_names_the_right_ones(served: Served) -> None:
    response = await served.http.get(PATH)
    assert response.status_code == 405
    assert response.headers["allow"] == "POST"
    assert is_envelope(response.json())
    assert (await served.http.request("OPTIONS", PATH)).status_code == 405


async def test_head_is_answered_where_get_is(served: Served) -> None:
    response = await served.http.head("/health")
    assert (response.status_code, response.content) == (200, b"")


async def test_every_response_carries_an_id(served: Served) -> None:
    responses = [
        await served.ask(),
        await served.ask(stream=True),
        await served.ask(model="none"),
        await served.http.get("/nothing"),
        await served.http.get(PATH),
        await served.http.get("/health", headers={"host": "evil.example"}),
    ]
    ids = [response.headers["x-request-id"] for response in responses]
    assert len(set(ids)) == len(ids)


async def test_a_harmless_id_of_the_clients_own_comes_back(served: Served) -> None:
    response = await served.http.get("/health", headers={"x-request-id": "trace-1.2:3"})
    assert response.headers["x-request-id"] == "trace-1.2:3"


@pytest.mark.parametrize("told", ["a b", "<script>", "x" * 129, "a\tb", 'a"b', "\u00e9", ""])
async def test_any_other_id_is_replaced(served: Served, told: str) -> None:
    response = await served.http.get("/health", headers={"x-request-id": told.encode()})
    assert response.headers["x-request-id"].startswith("req_")


async def test_a_line_break_in_an_id_does_not_become_a_header(served: Served) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", served.port)
    writer.write(
        b"GET /health HTTP/1.1\r\nHost: localhost\r\nX-Request-Id: a\nEvil: 1\r\nConnection: close\r\n\r\n"
    )
    answer = await reader.read()
    writer.close()
    assert b"\nevil" not in answer.lower()


# Hosts ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "host", ["localhost", "LOCALHOST:99", "127.0.0.1:8000", "127.9.9.9", "[::1]:8000", "app.localhost"]
)
async def test_loopback_names_are_allowed(served: Served, host: str) -> None:
    assert (await served.http.get("/health", headers={"host": host})).status_code == 200


@pytest.mark.parametrize(
    "host",
    [
        "evil.example",
        "evil.example:8000",
        "192.168.1.5",
        "localhost.evil.example",
        "",
        "127.0.0.1.evil",
        "evil.example@127.0.0.1",
        "127.0.0.1@evil.example",
        "127.0.0.1/evil.example",
        "localhost:80:evil",
        "[::1",
        "2130706433",
        "[::",
    ],
)
async def test_a_foreign_host_is_refused(served: Served, host: str) -> None:
    response = await served.http.get("/v1/models", headers={"host": host})
    assert response.status_code == 403
    assert is_envelope(response.json())


async def test_configured_hosts_are_allowed(serve: Serve) -> None:
    async with serve(allowed_hosts="gateway.lan, other.lan") as served:
        assert (await served.http.get("/health", headers={"host": "Gateway.lan:8000"})).status_code == 200
    async with serve(allowed_hosts="*") as served:
        assert (await served.http.get("/health", headers={"host": "any.example"})).status_code == 200


async def test_bound_to_every_address_any_literal_address_is_allowed_but_no_name(serve: Serve) -> None:
    async with serve(host="0.0.0.0", allow_open=True) as served:
        assert (await served.http.get("/health", headers={"host": "192.168.1.5:8000"})).status_code == 200
        assert (await served.http.get("/health", headers={"host": "evil.example"})).status_code == 403


# Keys -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "headers",
    [
        {"authorization": "Bearer key-one"},
        {"authorization": "bearer key-two"},
        {"authorization": "BEARER  key-two"},
        {"x-api-key": "key-one"},
    ],
)
async def test_any_of_the_keys_opens(serve: Serve, headers: dict[str, str]) -> None:
    async with serve(**KEYS) as served:
        assert (await served.http.get("/v1/models", headers=headers)).status_code == 200


async def test_a_missing_and_a_wrong_key_are_refused_alike(serve: Serve) -> None:
    wrong = [{}, {"authorization": "Bearer key-on"}, {"authorization": "Basic key-one"}, {"x-api-key": ""}]
    async with serve(**KEYS) as served:
        responses = [await served.http.get("/v1/models", headers=headers) for headers in wrong]
        assert (await served.ask()).status_code == 401
        assert (await served.http.get("/nothing")).status_code == 401
    assert {response.status_code for response in responses} == {401}
    assert len({response.text for response in responses}) == 1
    assert responses[0].json()["error"]["code"] == "invalid_api_key"
    assert responses[0].headers["www-authenticate"] == "Bearer"


@pytest.mark.parametrize(
    "path", ["/health", "/v1/health/", "/ready", "/version", "/metrics", "/openapi.json"]
)
async def test_probes_and_scrapers_on_loopback_need_no_key(serve: Serve, path: str) -> None:
    async with serve(**KEYS) as served:
        assert (await served.http.get(path)).status_code == 200


async def test_metrics_need_a_key_where_others_can_connect(serve: Serve) -> None:
    async with serve(host="0.0.0.0", **KEYS) as served:
        assert (await served.http.get("/metrics")).status_code == 401
        opened = await served.http.get("/metrics", headers={"authorization": "Bearer key-one"})
        assert opened.status_code == 200


# Origins ----------------------------------------------------------------------------------------------------


async def test_other_origins_are_not_invited(served: Served) -> None:
    response = await served.http.get("/v1/models", headers={"origin": "https://evil.example"})
    assert "access-control-allow-origin" not in response.headers


async def test_a_configured_origin_may_ask_first_without_a_key(serve: Serve) -> None:
    headers = {
        "origin": "https://app.example",
        "access-control-request-method": "POST",
        "access-control-request-headers": "authorization,x-stainless-os",
    }
    async with serve(cors_origins="https://app.example", **KEYS) as served:
        preflight = await served.http.request("OPTIONS", PATH, headers=headers)
        refused = await served.http.get("/v1/models", headers={"origin": "https://app.example"})
    assert preflight.status_code == 200
    assert preflight.headers["access-control-allow-headers"] == "authorization,x-stainless-os"
    assert refused.status_code == 401
    assert refused.headers["access-control-allow-origin"] == "https://app.example"
    assert "x-request-id" in refused.headers["access-control-expose-headers"].lower()


async def test_the_api_describes_itself(served: Served) -> None:
    described = (await served.http.get("/openapi.json")).json()
    chat = described["paths"][PATH]["post"]
    body = chat["requestBody"]["content"]["application/json"]["schema"]
    assert body == {"$ref": "#/components/schemas/ChatRequest"}
    schemas = described["components"]["schemas"]
    assert {"ChatRequest", "ChatMessage", "ChatCompletion", "ErrorEnvelope"} <= set(schemas)
    assert "ErrorEnvelope" in str(chat["responses"]["4XX"])
    assert set(described["paths"]) == {
        PATH, "/v1/models", "/v1/models/{model}", "/v1/compat", "/health", "/ready", "/version", "/metrics",
        "/v1/completions", "/v1/chat/completions/input_tokens", "/tokenize", "/detokenize",
        "/v1/responses", "/v1/embeddings", "/v1/route", "/v1/requests/{id}",
        "/v1/images/generations", "/v1/images/content/{name}", "/v1/audio/speech",
        "/v1/audio/transcriptions", "/v1/audio/translations",
        "/v1/videos", "/v1/videos/{id}", "/v1/videos/{id}/content", "/v1/videos/{id}/events",
    }  # fmt: skip
    assert (await served.http.get("/docs")).status_code == 200
