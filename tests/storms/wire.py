"""Requests as bytes, well-formed or not, and whatever comes back: no client of ours mends or refuses anything."""

from __future__ import annotations

import asyncio
import os
import time
from dataclasses import dataclass, field, replace

PATIENCE_S = 5.0  # on a machine that has nothing else to do; see `patience`
RECORDING_PATIENCE_S = 20.0  # each is decoded in a process that begins for it, two at a time


@dataclass(frozen=True)
class Sent:
    """One request, as it goes out. `length` is what its header claims of the body; None: the truth; -1: nothing."""

    method: bytes
    target: bytes
    headers: tuple[tuple[bytes, bytes], ...] = ()
    body: bytes = field(default=b"", repr=False)
    length: int | None = None

    def with_header(self, name: bytes, value: bytes) -> Sent:
        """The same with a header set."""
        kept = tuple(pair for pair in self.headers if pair[0].lower() != name.lower())
        return replace(self, headers=(*kept, (name, value)))

    def without_header(self, name: bytes) -> Sent:
        return replace(self, headers=tuple(p for p in self.headers if p[0].lower() != name.lower()))

    def as_bytes(self) -> bytes:
        lines = [self.method + b" " + self.target + b" HTTP/1.1"]
        lines += [name + b": " + value for name, value in self.headers]
        length = len(self.body) if self.length is None else self.length
        if length >= 0 and (self.body or self.method not in (b"GET", b"HEAD")):
            lines.append(b"Content-Length: %d" % length)
        return b"\r\n".join([*lines, b"Connection: close", b"", b""]) + self.body


@dataclass(frozen=True)
class Came:
    """What came back until the connection was closed. Status 0: nothing did."""

    status: int
    headers: dict[str, str]
    body: bytes
    took_s: float


async def exchange(port: int, sent: Sent) -> Came:
    """Send a request and read its answer to the end. Raises TimeoutError when that takes longer than it may."""
    began = time.perf_counter()
    async with asyncio.timeout(patience(sent)):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        raw = b""
        try:
            writer.write(sent.as_bytes())
            raw = await reader.read()
        except ConnectionError:  # it hung up while we were sending
            pass
        finally:
            writer.close()
    return parsed(raw, time.perf_counter() - began)


def patience(sent: Sent) -> float:
    """How long an answer may take, the longer the more others keep the cores busy."""
    is_recording = b"/audio/trans" in sent.target and b"name=" in sent.body
    crowd = max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1))
    return crowd * (RECORDING_PATIENCE_S if is_recording else PATIENCE_S)


def parsed(raw: bytes, took_s: float) -> Came:
    """Take an answer apart; the last one where there are several (a 100 comes first)."""
    head, _, body = raw.partition(b"\r\n\r\n")
    while head.startswith(b"HTTP/1.1 100"):
        head, _, body = body.partition(b"\r\n\r\n")
    if not head:
        return Came(0, {}, b"", took_s)
    first, *lines = head.decode("latin-1").split("\r\n")
    pairs = [line.partition(":") for line in lines]
    headers = {name.lower(): value.strip() for name, _, value in pairs}
    if headers.get("transfer-encoding") == "chunked":
        body = _joined(body)
    return Came(int(first.split(" ")[1]), headers, body, took_s)


def _joined(body: bytes) -> bytes:
    """The pieces of a chunked body."""
    pieces = []
    while body:
        size, _, body = body.partition(b"\r\n")
        length = int(size, 16)
        if length == 0:
            break
        pieces.append(body[:length])
        body = body[length + 2 :]
    return b"".join(pieces)
