"""What a bare connection may bring: odd but valid HTTP is answered, the rest is refused in our own words."""

from __future__ import annotations

import asyncio
import json
import socket

import pytest

from app.api import connection
from app.api.connection import MAX_HEAD_BYTES
from tests.support.api_server import PATH, QUESTION, Served

BODY = json.dumps(QUESTION).encode()
POST = f"POST {PATH} HTTP/1.1\r\nHost: localhost\r\n".encode()
LENGTH = f"Content-Length: {len(BODY)}\r\n\r\n".encode()
CLOSE = b"Connection: close\r\n"


def status_of(answer: bytes) -> int:
    return int(answer.split(b" ", 2)[1])


NOT_HTTP: list[tuple[str, bytes]] = [
    ("TLS", b"\x16\x03\x01\x02\x00\x01\x00\r\n\r\n"),
    ("no host", b"GET /health HTTP/1.1\r\n\r\n"),
    ("two hosts", b"GET /health HTTP/1.1\r\nHost: localhost\r\nHost: evil.example\r\n\r\n"),
    ("two lengths", POST + b"Content-Length: 4\r\nContent-Length: 5\r\n\r\nabcde"),
    ("a negative length", POST + b"Content-Length: -1\r\n\r\n"),
    ("a broken chunk", POST + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n"),
    ("both framings", POST + CLOSE + b"Content-Length: 4\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n"),
    ("a space before a colon", b"GET /health HTTP/1.1\r\nHost : localhost\r\n\r\n"),
]


@pytest.mark.parametrize("sent", [pytest.param(sent, id=name) for name, sent in NOT_HTTP])
async def test_what_is_not_http_gets_an_envelope_and_an_id(served: Served, sent: bytes) -> None:
    answer = await served.talk(sent)
    head, _, body = answer.partition(b"\r\n\r\n")
    assert status_of(answer) == 400
    assert json.loads(body)["error"]["code"] == "invalid_http"
    assert b"x-request-id: req_" in head.lower()


async def test_garbage_behind_a_request_does_not_spoil_its_answer(served: Served) -> None:
    answer = await served.talk(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n\x00\xff\r\n\r\n")
    assert answer.startswith(b"HTTP/1.1 200 ")
    assert answer.count(b"HTTP/1.1 400 ") == 1


async def test_headers_without_end_are_cut_off(served: Served) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", served.port)
    writer.write(b"GET /health HTTP/1.1\r\nHost: localhost\r\n" + b"X: " + b"x" * (MAX_HEAD_BYTES + 1000))
    assert status_of(await reader.readuntil(b"}}")) == 400
    writer.close()


async def test_headers_that_drip_are_given_up(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "HEAD_TIMEOUT_S", 0.05)
    assert await served.talk(b"") == b""
    assert await served.talk(b"GET /health HTTP/1.1\r\nHost:") == b""


async def test_a_slow_answer_is_not_a_slow_request(
    served: Served, scripted: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "HEAD_TIMEOUT_S", 0.05)
    monkeypatch.setattr(scripted, "before_token", lambda number: asyncio.sleep(0.03))
    assert status_of(await served.talk(POST + CLOSE + LENGTH + BODY)) == 200


async def test_a_client_that_offers_another_protocol_is_answered_in_this_one(served: Served) -> None:
    offer = b"Connection: Upgrade, HTTP2-Settings, close\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABk\r\n"
    assert status_of(await served.talk(POST + offer + LENGTH + BODY)) == 200


async def test_an_old_probe_needs_no_host(served: Served) -> None:
    assert status_of(await served.talk(b"GET /health HTTP/1.0\r\n\r\n")) == 200
    assert status_of(await served.talk(b"GET /health HTTP/1.0\r\nHost: evil.example\r\n\r\n")) == 403


async def test_a_stream_reaches_an_http_1_0_client_without_chunks(served: Served) -> None:
    body = json.dumps({**QUESTION, "stream": True}).encode()
    head = f"POST {PATH} HTTP/1.0\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n"
    answer = await served.talk(head.encode() + body)
    assert b"transfer-encoding" not in answer.lower()
    assert answer.endswith(b"\n\ndata: [DONE]\n\n")


async def test_a_request_about_no_path_at_all_is_not_found(served: Served) -> None:
    assert status_of(await served.talk(b"OPTIONS * HTTP/1.1\r\nHost: localhost\r\n" + CLOSE + b"\r\n")) == 404


async def test_several_requests_at_once_are_answered_in_order(served: Served) -> None:
    first, last = (
        b"GET /version HTTP/1.1\r\nHost: localhost\r\n",
        b"GET /health HTTP/1.1\r\nHost: localhost\r\n",
    )
    answer = await served.talk(first + b"\r\n" + last + CLOSE + b"\r\n")
    assert answer.count(b"HTTP/1.1 200 OK") == 2
    assert answer.index(b'"version"') < answer.index(b'"status"')


@pytest.mark.parametrize(
    ("head", "status"),
    [
        (b"POST /v1/nothing HTTP/1.1\r\nHost: localhost\r\n", 404),
        (b"POST /health HTTP/1.1\r\nHost: localhost\r\n", 405),
        (b"POST /v1/images/edits HTTP/1.1\r\nHost: evil.example\r\n", 403),
        (POST + b"Content-Encoding: gzip\r\n", 415),
        (POST + b"Host: localhost\r\n", 400),  # not even HTTP
    ],
)
async def test_who_reads_only_after_sending_everything_gets_the_refusal(
    served: Served, head: bytes, status: int
) -> None:
    body = bytes(8 << 20)  # more than what lies between two sockets
    reader, writer = await asyncio.open_connection("127.0.0.1", served.port)
    writer.write(head + CLOSE + b"Content-Length: %d\r\n\r\n" % len(body) + body)
    async with asyncio.timeout(10):
        await writer.drain()
        assert status_of(await reader.read()) == status
    writer.close()


@pytest.fixture
def told_at_once(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """For each connection, whether it waits for nothing."""
    told: list[bool] = []
    send_at_once = connection._send_at_once

    def seen(transport: asyncio.BaseTransport) -> None:
        send_at_once(transport)
        sock = transport.get_extra_info("socket")
        told.append(bool(sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)))

    monkeypatch.setattr(connection, "_send_at_once", seen)
    return told


async def test_a_body_does_not_wait_until_its_head_is_acknowledged(
    served: Served, told_at_once: list[bool]
) -> None:
    await served.talk(b"GET /health HTTP/1.1\r\nHost: localhost\r\n" + CLOSE + b"\r\n")
    assert told_at_once == [True]
