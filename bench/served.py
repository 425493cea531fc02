"""Two servers asked the same way: `transformers serve` with continuous batching, and `diffuse up` with two nodes.

Streamed chat completions over HTTP, 1 and 8 at once, in turn; tokens are counted as the servers count them in `usage`,
or by the pieces that came where a server tells none.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import json
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx

from bench.children import free_port
from bench.report import Report
from bench.streams import PROMPTS
from slicing.model_source import open_checkpoint

SECTION = "served"
MODEL = "smollm2"
STREAMS = (1, 8)
NUM_TOKENS = 48
START_S = 180.0


async def measure_served(report: Report, *, rounds: int = 3, weights: str = "int8") -> None:
    """Tokens/s of whole answers, the prompt's time included, as a user sees them."""
    report.section(SECTION)
    if importlib.util.find_spec("accelerate") is None:  # `transformers serve` does not start without it
        report.add(SECTION, "transformers serve", "left out: `make bench-peers` installs accelerate for it")
        return
    folder = str(open_checkpoint(MODEL).folder)
    theirs, ours = free_port(), free_port()
    scripts = Path(sys.executable).parent
    serve = [str(scripts / "transformers"), "serve", folder, "--port", str(theirs), "--dtype", "float32"]
    up = [str(scripts / "diffuse"), "up", "--nodes", "2", "--port", str(ours), "--weights", weights]
    with _running([*serve, "--continuous-batching"]), _running([*up, "--draft", "off"]):
        servers = {"transformers serve": (theirs, folder), f"diffuse up, {weights}": (ours, MODEL)}
        for port, _ in servers.values():
            await _until_up(port)
        speeds: dict[tuple[str, int], list[float]] = {}
        for number in range(rounds + 1):  # the first warms up
            for streams in STREAMS:
                for name, (port, model) in servers.items():
                    speed = await _ask(port, model, streams)
                    if number:
                        speeds.setdefault((name, streams), []).append(speed)
    for (name, streams), taken in speeds.items():
        report.add(SECTION, f"{name}: {streams} stream(s)", statistics.median(taken), "tokens/s")
    first, second = servers
    for streams in STREAMS:
        pairs = zip(speeds[second, streams], speeds[first, streams], strict=True)
        ratio = statistics.median(one / other for one, other in pairs)
        report.add(SECTION, f"{streams} stream(s): ours over transformers serve", ratio, "x")


async def _ask(port: int, model: str, streams: int) -> float:
    """Tokens/s over all answers."""
    async with httpx.AsyncClient(timeout=300) as client:
        begun = time.perf_counter()
        counts = await asyncio.gather(*(_count(client, port, model, PROMPTS[n]) for n in range(streams)))
        return sum(counts) / (time.perf_counter() - begun)


async def _count(client: httpx.AsyncClient, port: int, model: str, prompt: str) -> int:
    body = {
        "model": model,
        "messages": [{"role": "user", "content": prompt}],
        "max_tokens": NUM_TOKENS,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    pieces, told = 0, 0
    url = f"http://127.0.0.1:{port}/v1/chat/completions"
    async with client.stream("POST", url, json=body) as response:
        response.raise_for_status()
        async for line in response.aiter_lines():
            if not line.startswith("data: {"):
                continue
            event = json.loads(line.removeprefix("data: "))
            told = (event.get("usage") or {}).get("completion_tokens", told)
            pieces += any(choice.get("delta", {}).get("content") for choice in event.get("choices", ()))
    return told or pieces


async def _until_up(port: int) -> None:
    until = time.monotonic() + START_S
    async with httpx.AsyncClient() as client:
        while time.monotonic() < until:
            with contextlib.suppress(httpx.HTTPError):
                if (await client.get(f"http://127.0.0.1:{port}/v1/models")).status_code == 200:
                    return
            await asyncio.sleep(0.5)
    raise RuntimeError(f"the server on port {port} did not come up")


@contextlib.contextmanager
def _running(command: list[str]) -> Iterator[None]:
    child = subprocess.Popen(
        command,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env=os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
    )
    try:
        yield
    finally:
        child.send_signal(signal.SIGINT)
        try:
            child.wait(timeout=20)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()
