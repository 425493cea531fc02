"""Bodies that were made to hurt: each gets a clear 4xx, quickly, and harms nobody else."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator

import pytest

from tests.app.conftest import Serve
from tests.support.api_server import PATH, QUESTION, Served

GOOD = json.dumps(QUESTION).encode()
HOSTILE: list[tuple[str, bytes]] = [
    ("empty", b""),
    ("not JSON", b"hello"),
    ("cut", GOOD[:-3]),
    ("an array", b"[]"),
    ("a string", b'"hello"'),
    ("null", b"null"),
    ("a number", b"5"),
    ("deep arrays", b'{"model":' + b"[" * 100_000),
    ("deep objects", b'{"a":' * 100_000),
    ("deep and closed", b'{"x":' + b"[" * 5_000 + b"]" * 5_000 + b"}"),
    ("NaN", GOOD[:-1] + b',"temperature":NaN}'),
    ("Infinity", GOOD[:-1] + b',"temperature":-Infinity}'),
    ("overflow", GOOD[:-1] + b',"temperature":1e999}'),
    ("long integer", GOOD[:-1] + b',"seed":' + b"9" * 10_000 + b"}"),
    ("a key twice", GOOD[:-1] + b',"model":"scripted"}'),
    ("a key twice deep down", GOOD[:-1] + b',"metadata":{"a":1,"a":2}}'),
    ("a raw NUL", GOOD.replace(b"hello", b"hel\x00lo")),
    ("no UTF-8", GOOD.replace(b"hello", b"hel\xfflo")),
    ("UTF-16", json.dumps(QUESTION).encode("utf-16")),
    ("half a surrogate pair", GOOD.replace(b"hello", b"\\ud83d")),
    ("halves in the wrong order", GOOD.replace(b"hello", b"\\ude00\\ud83d")),
    ("half a pair as a key", GOOD[:-1] + b',"\\udfff":1}'),
    ("a million messages", b'{"model":"scripted","messages":[' + b"{}," * 1_000_000 + b"{}]}"),
    ("a million parts", b'{"model":"scripted","messages":[{"role":"user","content":['
     + b"{}," * 1_000_000 + b"{}]}]}"),
    ("a million biases", GOOD[:-1] + b',"logit_bias":{' + b",".join(b'"%d":1' % n for n in range(200_000)) + b"}}"),
    ("a million stops", GOOD[:-1] + b',"stop":[' + b'"a",' * 1_000_000 + b'"a"]}'),
    ("a long name", GOOD.replace(b"scripted", b"x" * 100_000)),
    ("a long role", GOOD.replace(b'"user"', b'"' + b"x" * 100_000 + b'"')),
]  # fmt: skip


@pytest.mark.parametrize(("body"), [pytest.param(body, id=name) for name, body in HOSTILE])
async def test_a_hostile_body_gets_a_short_clear_refusal(served: Served, body: bytes) -> None:
    response = await served.http.post(PATH, content=body)
    assert 400 <= response.status_code < 500
    assert set(response.json()["error"]) == {"message", "type", "param", "code"}
    assert len(response.content) < 1000
    assert (await served.ask()).status_code == 200


@pytest.mark.parametrize(
    "content", ["\u0000", "\U000f0000<|im_end|>\U000f0001", "\uffff\ufdd0", "\u202e", ""]
)
async def test_strange_but_valid_text_is_just_text(served: Served, content: str) -> None:
    assert (await served.ask(messages=[{"role": "user", "content": content}])).status_code == 200


async def test_a_whole_surrogate_pair_in_escapes_is_one_character(served: Served) -> None:
    body = GOOD.replace(b"hello", b"\\ud83d\\ude00")
    assert (await served.http.post(PATH, content=body)).status_code == 200


@pytest.mark.parametrize(
    "content_type", [None, "text/plain", "application/x-www-form-urlencoded", "multipart/form-data"]
)
async def test_json_is_read_whatever_its_content_type_says(served: Served, content_type: str | None) -> None:
    headers = {"content-type": content_type} if content_type else {}
    assert (await served.http.post(PATH, content=GOOD, headers=headers)).status_code == 200


async def test_a_byte_order_mark_is_passed_over(served: Served) -> None:
    assert (await served.http.post(PATH, content=b"\xef\xbb\xbf" + GOOD)).status_code == 200


@pytest.mark.parametrize("encoding", ["gzip", "br", "deflate, gzip"])
async def test_a_compressed_body_is_refused_as_such(served: Served, encoding: str) -> None:
    response = await served.http.post(PATH, content=GOOD, headers={"content-encoding": encoding})
    assert (response.status_code, response.json()["error"]["code"]) == (415, "unsupported_encoding")
    assert (
        await served.http.post(PATH, content=GOOD, headers={"content-encoding": "identity"})
    ).status_code == 200


async def test_a_body_that_states_its_excess_is_refused_unread(serve: Serve) -> None:
    async with serve(max_body_bytes=2000) as served:
        reader, writer = await asyncio.open_connection("127.0.0.1", served.port)
        writer.write(f"POST {PATH} HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100000000\r\n\r\n".encode())
        answer = await reader.read()  # to the end: the connection is closed
        writer.close()
    assert b" 413 " in answer.splitlines()[0]
    assert b"request_too_large" in answer


@pytest.mark.parametrize("is_stated", [True, False])
async def test_a_client_that_sends_first_and_reads_later_gets_its_refusal(
    serve: Serve, is_stated: bool
) -> None:
    async def chunks() -> AsyncIterator[bytes]:
        for _ in range(100):
            yield b" " * 65536

    async with serve(max_body_bytes=2000) as served:
        content = b" " * 6_553_600 if is_stated else chunks()
        response = await served.http.post(PATH, content=content)
    assert (response.status_code, response.json()["error"]["code"]) == (413, "request_too_large")


async def test_an_endless_body_is_refused_as_its_bytes_arrive(serve: Serve) -> None:
    sent = 0
    async with serve(max_body_bytes=20_000) as served:
        reader, writer = await asyncio.open_connection("127.0.0.1", served.port)
        writer.write(
            f"POST {PATH} HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n".encode()
        )
        answering = asyncio.create_task(reader.readuntil(b"}}"))
        while not answering.done():
            writer.write(b"400\r\n" + b" " * 1024 + b"\r\n")
            sent += 1024
            await asyncio.sleep(0.001)
        writer.close()
    assert b" 413 " in (await answering).splitlines()[0]
    assert sent < 5_000_000


async def test_a_body_that_drips_is_given_up(serve: Serve) -> None:
    async with serve(body_timeout_s=0.05) as served:
        reader, writer = await asyncio.open_connection("127.0.0.1", served.port)
        writer.write(f"POST {PATH} HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100\r\n\r\n{{".encode())
        answer = await reader.read()
        writer.close()
    assert b" 408 " in answer.splitlines()[0]
    assert b"request_timeout" in answer
