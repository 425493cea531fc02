"""The layer of TLS alone, over a transport in memory: whatever comes, it ends in one word to whom it is under."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path
from typing import Any

import pytest

from routing.errors import SecurityError
from routing.tls import Tls, member_tls
from routing.tls_transport import TlsTransport
from tests.support.certificates import Authority


class Pipe(asyncio.Transport):
    """Keeps what is written until it is taken."""

    def __init__(self) -> None:
        super().__init__()
        self.written: list[bytes] = []
        self.is_closed = False

    def write(self, data: Any) -> None:
        self.written.append(bytes(data))

    def take(self) -> bytes:
        taken, self.written = b"".join(self.written), []
        return taken

    def write_eof(self) -> None: ...

    def close(self) -> None:
        self.is_closed = True

    def abort(self) -> None:
        self.is_closed = True

    def is_closing(self) -> bool:
        return self.is_closed

    def resume_reading(self) -> None: ...


class Inner(asyncio.Protocol):
    """What is on the connection."""

    def __init__(self) -> None:
        self.heard = b""
        self.lost: list[Exception | None] = []

    def data_received(self, data: bytes) -> None:
        self.heard += data

    def connection_lost(self, exc: Exception | None) -> None:
        self.lost.append(exc)


class End:
    """One side."""

    def __init__(self, tls: Tls, *, is_server: bool) -> None:
        context = tls.contexts.accept if is_server else tls.contexts.dial
        assert context is not None
        self.inner, self.pipe, self.faults = Inner(), Pipe(), list[SecurityError]()
        self.tls = TlsTransport(
            self.inner,
            context,
            is_server=is_server,
            timeout_s=5.0,
            on_fault=lambda _, fault: self.faults.append(fault),
        )
        self.tls.connection_made(self.pipe)


@pytest.fixture
def tls(tmp_path: Path) -> Tls:
    made = member_tls(Authority(tmp_path).files("member"))
    assert made is not None
    return made


def exchange(client: End, server: End) -> None:
    """Carry bytes until nobody has any."""
    while (there := client.pipe.take()) or server.pipe.written:
        if there:
            server.tls.data_received(there)
        if back := server.pipe.take():
            client.tls.data_received(back)


async def test_what_is_written_before_the_handshake_follows_it(tls: Tls) -> None:
    client, server = End(tls, is_server=False), End(tls, is_server=True)
    client.tls.write(b"early")
    exchange(client, server)
    assert server.inner.heard == b"early"
    server.tls.writelines([b"a", b"", b"b" * 40_000])
    exchange(client, server)
    assert client.inner.heard == b"a" + b"b" * 40_000


async def test_bytes_that_come_one_by_one_are_as_good(tls: Tls) -> None:
    client, server = End(tls, is_server=False), End(tls, is_server=True)
    for number in range(8):
        for end, other in ((client, server), (server, client)):
            for byte in end.pipe.take():
                other.tls.data_received(bytes([byte]))
        if number == 4:
            client.tls.write(b"slowly")
    assert server.inner.heard == b"slowly"


async def test_an_end_that_was_said_is_an_end_and_one_that_was_not_is_too(tls: Tls) -> None:
    client, server = End(tls, is_server=False), End(tls, is_server=True)
    exchange(client, server)
    client.tls.write(b"last words")
    client.tls.close()
    exchange(client, server)
    assert server.inner.heard == b"last words"
    assert server.pipe.is_closed
    client, server = End(tls, is_server=False), End(tls, is_server=True)
    exchange(client, server)
    assert server.tls.eof_received() is False
    server.tls.connection_lost(None)
    assert server.inner.lost == [None]


async def test_an_end_that_is_half_leaves_the_other_half(tls: Tls) -> None:
    client, server = End(tls, is_server=False), End(tls, is_server=True)
    exchange(client, server)
    server.tls.write(b"refused")
    server.tls.write_eof()
    server.tls.write(b"never")
    client.tls.write(b"on its way")
    for sent in client.pipe.written:
        server.tls.data_received(sent)
    assert server.inner.heard == b"on its way"
    client.pipe.written.clear()
    exchange(client, server)
    assert client.inner.heard == b"refused"
    assert client.pipe.is_closed


async def test_whatever_bytes_are_changed_only_a_true_prefix_is_heard(tls: Tls) -> None:
    draw = random.Random(11)
    for _ in range(120):
        client, server = End(tls, is_server=False), End(tls, is_server=True)
        client.tls.write(b"one two three")
        turn = draw.randrange(5)
        for number in range(5):
            end, other = (client, server) if number % 2 == 0 else (server, client)
            sent = bytearray(end.pipe.take())
            if sent and number == turn:
                sent[draw.randrange(len(sent))] ^= draw.randrange(1, 256)
            if sent:
                other.tls.data_received(bytes(sent))
        assert b"one two three".startswith(server.inner.heard)
        assert client.inner.heard == b""
        for end in (client, server):
            assert len(end.faults) <= 1
            end.tls.connection_lost(None)
            (lost,) = end.inner.lost
            assert lost is None or isinstance(lost, SecurityError)
            assert not end.faults or lost is end.faults[0]
