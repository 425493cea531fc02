"""Clients of a gateway in a process of their own, asked as a `JsonChild`: streams that count, and a probe of `/health`.

Bare sockets, so that reading costs little: a client that is slow itself would measure itself.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from typing import Any

from bench.gateway_child import MODEL
from cli.runtime import run_fast

PROMPT = "Tell me a story about a lighthouse keeper who learns to talk with the gulls."
PROBE_GAP_S = 0.01


async def main() -> None:
    """Do what is asked until standard input ends."""
    print(json.dumps({"ready": True}), flush=True)
    while line := await asyncio.to_thread(sys.stdin.readline):
        asked = json.loads(line)
        told = await (_probe(**asked["probe"]) if "probe" in asked else _streams(**asked["streams"]))
        print(json.dumps(told), flush=True)


async def _streams(port: int, streams: int, tokens: int, spread_s: float = 0.0) -> dict[str, Any]:
    """Read so many streams at once, begun over `spread_s`; when each first token came, and the gaps."""
    answers = await asyncio.gather(
        *(_stream(port, tokens, spread_s * number / streams) for number in range(streams))
    )
    return {
        "first_s": [first for first, _, _ in answers],
        "worst_gap_s": max(gap for _, gap, _ in answers),
        "tokens": sum(count for _, _, count in answers),
    }


async def _stream(port: int, tokens: int, after_s: float) -> tuple[float, float, int]:
    await asyncio.sleep(after_s)
    asked = {
        "model": MODEL,
        "stream": True,
        "max_tokens": tokens,
        "messages": [{"role": "user", "content": PROMPT}],
    }
    body = json.dumps(asked).encode()
    began = last = time.perf_counter()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n"
    writer.write(head.encode() + body)
    first, worst, count, is_over = 0.0, 0.0, 0, False
    while not is_over:
        data = await reader.read(1 << 16)
        now = time.perf_counter()
        found = data.count(b'"delta":{"content":" ')  # not the role chunk's empty text
        if found and not count:
            first = now - began
        elif found:
            worst = max(worst, now - last)
        if found:
            count, last = count + found, now
        is_over = not data or b"data: [DONE]" in data
    writer.close()
    return first, worst, count


async def _probe(port: int, seconds: float) -> dict[str, Any]:
    """Ask `/health` over and over; how long each answer took, and by how much our own sleep was late meanwhile."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    request = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"
    times, late, until = [], [], time.perf_counter() + seconds
    while (began := time.perf_counter()) < until:
        writer.write(request)
        head = await reader.readuntil(b"\r\n\r\n")
        length = int(head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0])
        await reader.readexactly(length)
        asleep = time.perf_counter()
        times.append(asleep - began)
        await asyncio.sleep(PROBE_GAP_S)
        late.append(time.perf_counter() - asleep - PROBE_GAP_S)
    writer.close()
    return {"times_s": times, "late_s": late}


if __name__ == "__main__":
    run_fast(main())
