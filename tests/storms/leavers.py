"""Clients that ask for anything and leave at any moment: while they send, before a word came, or in the middle."""

from __future__ import annotations

import asyncio
import random
import socket
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tests.storms.seeds import form, posted, wav
from tests.storms.wire import Sent

LINGER_NONE = struct.pack("ii", 1, 0)  # closing resets the connection
ASKED = [{"role": "user", "content": "hello"}]


def text_requests(model: str, tokens: int) -> list[Sent]:
    """Every way to ask for text: whole or streamed, one choice or several, one prompt or many."""
    bodies: list[tuple[str, dict[str, Any]]] = [
        ("/v1/chat/completions", {"messages": ASKED, "stream": True}),
        ("/v1/chat/completions", {"messages": ASKED, "stream": True, "n": 3}),
        ("/v1/chat/completions", {"messages": ASKED}),
        ("/v1/chat/completions", {"messages": ASKED, "n": 2, "logprobs": True, "top_logprobs": 2}),
        ("/v1/completions", {"prompt": ["hello", "world", "fox"], "n": 2, "stream": True}),
        ("/v1/completions", {"prompt": "hello", "echo": True, "logprobs": 1}),
        ("/v1/responses", {"input": "hello", "stream": True}),
        ("/v1/responses", {"input": "hello"}),
    ]
    return [posted(path, body | {"model": model} | _limit(path, tokens)) for path, body in bodies]


def media_requests() -> list[Sent]:
    """Vectors, pictures, sounds, recordings, of the fakes."""
    picture = {"model": "painter", "prompt": "a fox", "size": "64x48"}
    bodies: list[tuple[str, dict[str, Any]]] = [
        ("/v1/embeddings", {"model": "librarian", "input": ["hello", "you"] * 8}),
        ("/v1/images/generations", picture | {"n": 2}),
        ("/v1/images/generations", picture | {"stream": True, "partial_images": 2}),
        (
            "/v1/audio/speech",
            {"model": "composer", "input": "rain", "seconds": 0.2, "response_format": "wav"},
        ),
    ]
    heard = ((b"model", None, b"scribe"), (b"file", b"a.wav", wav(0.5)))
    return [
        *(posted(path, body) for path, body in bodies),
        form("/v1/audio/transcriptions", *heard),
        form("/v1/audio/transcriptions", *heard, (b"stream", None, b"true")),
    ]


def _limit(path: str, tokens: int) -> Mapping[str, int]:
    return {"max_output_tokens": max(16, tokens)} if path == "/v1/responses" else {"max_tokens": tokens}


@dataclass
class Leavers:
    """Sends such requests from sockets of their own. `longest_s` is the latest moment to leave."""

    port: int
    requests: Sequence[Sent]
    chance: random.Random
    longest_s: float

    async def storm(self, count: int, at_once: int) -> None:
        """So many clients, some at a time."""
        turns = asyncio.Semaphore(at_once)

        async def client() -> None:
            async with turns:
                await self._leave()

        await asyncio.gather(*(client() for _ in range(count)))

    async def _leave(self) -> None:
        raw = self.chance.choice(self.requests).as_bytes()
        is_cut = self.chance.random() < 0.15  # it leaves before all of its request is there
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        try:
            writer.write(raw[: self.chance.randrange(len(raw))] if is_cut else raw)
            async with asyncio.timeout(self.chance.random() ** 2 * self.longest_s):
                await reader.read(self.chance.choice((1, 1 << 20)))
                await reader.read()
        except (TimeoutError, ConnectionError):
            pass
        finally:
            if self.chance.random() < 0.5:
                sock: socket.socket = writer.get_extra_info("socket")
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, LINGER_NONE)
            writer.close()
