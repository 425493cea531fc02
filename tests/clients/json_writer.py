"""Writes JSON byte by byte where a grammar decides what may come next, with values that somebody wished for."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator

from tests.clients.wishes import Wishes

OPENINGS = (b'"', b"t", b"{", b"[", b"n")


class JsonWriter:
    """Proposes the next byte of what stands in `written`, the best first; the caller takes one that is allowed."""

    def __init__(self, wanted: str, wishes: Wishes) -> None:
        self.written = b""
        self._wanted = wanted.encode()
        self._wishes = wishes
        self._keys = list(wishes.quoted)  # of an object that may have any
        self._number: tuple[int, bytes] | None = None

    @property
    def is_done(self) -> bool:
        """Whether it may end here, if the grammar allows it."""
        return self.written == self._wanted if self._follows else bool(self.written.strip())

    @property
    def _follows(self) -> bool:
        return bool(self._wanted) and self._wanted.startswith(self.written)

    def next_bytes(self) -> Iterator[bytes]:
        """Yield proposals for the next byte."""
        if self._follows and len(self.written) < len(self._wanted):
            yield self._wanted[len(self.written) : len(self.written) + 1]
        begun = _open_string(self.written)
        if begun is not None:
            yield from self._in_string(begun)
        else:
            yield from self._outside()

    def _in_string(self, begun: int) -> Iterator[bytes]:
        before, inside = self.written[: begun - 1], self.written[begun:]
        if _expects_key(before):
            target = self._next_key()
        else:
            target = json.dumps(self._wishes.string(_last_key(before)), ensure_ascii=False)[1:-1]
        encoded = target.encode()
        if encoded.startswith(inside) and len(inside) < len(encoded):
            yield encoded[len(inside) : len(inside) + 1]
        yield from (b'"', b"a", b"1", b"0", b"-")

    def _outside(self) -> Iterator[bytes]:
        text = self.written.rstrip()
        if text.endswith(b":") or text.endswith(b"[") or not text:
            yield from self._value(text)
        elif self._number is not None and len(self.written) > self._number[0]:
            begun, digits = self._number
            done = self.written[begun:]
            if digits.startswith(done) and len(done) < len(digits):
                yield digits[len(done) : len(done) + 1]
        if text.endswith((b"{", b",")):
            if self._next_key() or text.endswith(b","):
                yield b'"'
        elif self._next_key() and not text.endswith(b":"):
            yield b","
        yield from (b"]", b"}", b",", b" ", b'"', b"0")

    def _value(self, text: bytes) -> Iterator[bytes]:
        yield b'"'
        if self._number is None or self._number[0] != len(self.written):
            self._number = (len(self.written), self._wishes.number(_last_key(text)).encode())
        yield self._number[1][:1]
        yield from OPENINGS[1:]

    def _next_key(self) -> str:
        """The next key of an object that may have any: those that the user quoted, once each."""
        left = [key for key in self._keys if f'"{key}":'.encode() not in self.written]
        return left[0] if left else ""


def _open_string(written: bytes) -> int | None:
    """Where the string begins that is not closed yet."""
    begun: int | None = None
    at = 0
    while at < len(written):
        byte = written[at : at + 1]
        if begun is not None and byte == b"\\":
            at += 1
        elif byte == b'"':
            begun = at + 1 if begun is None else None
        at += 1
    return begun


def _expects_key(before: bytes) -> bool:
    """Whether a string that begins behind this is a key: it stands in an object, and not behind a colon."""
    text = before.rstrip()
    if text.endswith((b":", b"[")) or not text:
        return False
    if text.endswith(b"{"):
        return True
    depth: list[bytes] = []
    for mark in re.findall(rb"[\[\]{}]", re.sub(rb'"(?:\\.|[^"\\])*"', b"", text)):
        if mark in b"[{":
            depth.append(mark)
        elif depth:
            depth.pop()
    return bool(depth) and depth[-1] == b"{"


def _last_key(before: bytes) -> str:
    keys = re.findall(rb'"((?:\\.|[^"\\])*)"\s*:', before)
    return keys[-1].decode(errors="replace") if keys else "value"
