"""The API over HTTPS: the same answers, for clients that trust the CA, and nothing for whoever speaks otherwise."""

from __future__ import annotations

import asyncio
import logging
import ssl
from collections.abc import AsyncIterator
from typing import Any

import httpx
import openai
import pytest

from app.api import secured_connection
from tests.app.conftest import ANSWER, Serve
from tests.support.api_server import QUESTION, Served, serve_engines, settles
from tests.support.certificates import Authority
from tests.support.fake_pictures import FakePictures
from tests.support.local_engine import ScriptedEngine

MESSAGES: Any = [{"role": "user", "content": "hello"}]


@pytest.fixture
async def served(serve: Serve, ca: Authority) -> AsyncIterator[Served]:
    files = ca.files("gateway")
    async with serve(tls_cert=files.cert, tls_key=files.key) as running:
        yield running


def trusting(ca: Authority) -> ssl.SSLContext:
    return ssl.create_default_context(cafile=str(ca.path))


async def test_the_official_client_chats_over_https(served: Served, ca: Authority) -> None:
    async with (
        openai.DefaultAsyncHttpxClient(verify=trusting(ca)) as http,
        openai.AsyncOpenAI(base_url=f"{served.url}/v1", api_key="none", http_client=http) as client,
    ):
        whole = await client.chat.completions.create(model="scripted", messages=MESSAGES)
        assert whole.choices[0].message.content == ANSWER
        stream = await client.chat.completions.create(model="scripted", messages=MESSAGES, stream=True)
        assert "".join([chunk.choices[0].delta.content or "" async for chunk in stream]) == ANSWER


async def test_a_client_that_does_not_know_the_ca_refuses(served: Served) -> None:
    async with httpx.AsyncClient(base_url=served.url) as http:
        with pytest.raises(httpx.ConnectError, match="CERTIFICATE_VERIFY_FAILED"):
            await http.get("/health")


async def test_plain_http_at_the_port_is_told_what_it_speaks(served: Served) -> None:
    async with httpx.AsyncClient(base_url=served.url.replace("https", "http")) as http:
        answer = await http.post("/v1/chat/completions", json=QUESTION)
    assert answer.status_code == 400
    assert answer.json()["error"]["code"] == "https_only"
    assert "https://" in answer.json()["error"]["message"]


@pytest.mark.parametrize("garbage", [b"\x00" * 50, b"\x16\x03\x01\x00\x05zzzzz", b"\x80\x2e\x01\x00\x02"])
async def test_garbage_is_hung_up_on_without_a_word_in_the_log(
    served: Served, ca: Authority, caplog: pytest.LogCaptureFixture, garbage: bytes
) -> None:
    await served.talk(garbage)
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING or record.exc_info]
    assert (await served.http.get("/health")).status_code == 200


async def test_what_is_no_http_under_tls_gets_its_400(
    served: Served, ca: Authority, caplog: pytest.LogCaptureFixture
) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", served.port, ssl=trusting(ca))
    writer.write(b"no request\r\n\r\n" + b"more of it" * 1000)
    async with asyncio.timeout(5):
        answer = await reader.read()
    assert answer.startswith(b"HTTP/1.1 400 ")
    assert b"invalid_http" in answer
    writer.close()
    await asyncio.sleep(0.05)
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]


async def test_one_that_dawdles_in_the_handshake_is_cut(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(secured_connection, "HANDSHAKE_TIMEOUT_S", 0.1)
    async with asyncio.timeout(1):
        await served.talk(b"\x16\x03\x01")


@pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3])
async def test_tls_from_1_2_on_with_ciphers_of_today(
    served: Served, ca: Authority, version: ssl.TLSVersion
) -> None:
    context = trusting(ca)
    context.set_alpn_protocols(["h2", "http/1.1"])
    context.minimum_version = context.maximum_version = version
    _, writer = await asyncio.open_connection("127.0.0.1", served.port, ssl=context)
    spoken = writer.get_extra_info("ssl_object")
    assert spoken.selected_alpn_protocol() == "http/1.1"
    assert any(mode in spoken.cipher()[0] for mode in ("GCM", "CHACHA20"))
    writer.close()


async def test_older_ciphers_are_refused(served: Served, ca: Authority) -> None:
    context = trusting(ca)
    context.maximum_version = ssl.TLSVersion.TLSv1_2
    context.set_ciphers("AES128-SHA:ECDHE-ECDSA-AES128-SHA256")
    with pytest.raises(ssl.SSLError):
        await asyncio.open_connection("127.0.0.1", served.port, ssl=context)


async def test_a_client_that_leaves_ends_its_answer(
    served: Served, ca: Authority, scripted: ScriptedEngine
) -> None:
    scripted.before_token = lambda number: asyncio.Event().wait() if number == 2 else None
    async with httpx.AsyncClient(base_url=served.url, verify=trusting(ca)) as http:
        asking = asyncio.create_task(http.post("/v1/chat/completions", json=QUESTION))
        await settles(lambda: scripted.num_open == 1)
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
    await settles(lambda: scripted.num_open == 0)


async def test_a_plain_client_that_leaves_is_no_trouble(served: Served) -> None:
    assert b"https_only" in await served.talk(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")


async def test_a_large_body_and_its_answer_pass_whole(served: Served, ca: Authority) -> None:
    text = "word " * 200_000
    answer = await served.http.post("/tokenize", json={"model": "scripted", "prompt": text})
    assert answer.status_code == 200, answer.text[:200]
    assert answer.json()["count"] >= 200_000


async def test_links_to_pictures_are_https(ca: Authority) -> None:
    files, painter = ca.files("gateway"), FakePictures()
    async with serve_engines(painter, tls_cert=files.cert, tls_key=files.key) as served:
        body = {"model": painter.model_name, "prompt": "a cat", "size": "32x16", "response_format": "url"}
        answer = await served.http.post("/v1/images/generations", json=body)
        url = answer.json()["data"][0]["url"]
        assert url.startswith(f"{served.url}/v1/images/content/")
        assert (await served.http.get(url)).status_code == 200


async def test_a_renewed_certificate_is_shown_from_the_next_connection_on(
    served: Served, ca: Authority
) -> None:
    before = await _shown(served, ca)
    ca.files("gateway")
    assert served.tls is not None
    served.tls.reload()
    assert await _shown(served, ca) != before


async def _shown(served: Served, ca: Authority) -> bytes:
    _, writer = await asyncio.open_connection("127.0.0.1", served.port, ssl=trusting(ca))
    try:
        shown: bytes = writer.get_extra_info("ssl_object").getpeercert(binary_form=True)
        return shown
    finally:
        writer.close()
