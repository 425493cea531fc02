"""The gateway in a process of its own over an engine that computes nothing, asked as a `JsonChild`.

The engine says a fixed text, a token every `gap_s` seconds of each answer, or as fast as it is read where that is 0.
`{"tell": true}` is answered by the processor time of this process and the tokens that the engine made;
`{"engine": {"streams": S, "tokens": T, "gap_s": G}}` runs the engine alone and tells what it took by itself.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import itertools
import json
import socket
import sys
import time
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field
from typing import Any

import uvicorn

from app.engine.request import (
    Admitted,
    Finished,
    GenerationEvent,
    GenerationRequest,
    ModelStatus,
    TextDelta,
    Timings,
)
from app.engine.shelf import Shelf
from app.engine.tokenizer import ChatTokenizer
from app.main import create_app, serve_config
from app.metrics import GatewayMetrics
from app.settings import GatewaySettings
from cli.runtime import run_fast
from slicing.model_source import open_checkpoint

MODEL = "smollm2"  # only its tokenizer
SETTINGS = {"host": "127.0.0.1", "max_requests": 1000}
WORDS = (
    "The",
    "keeper",
    "of",
    "the",
    "lighthouse",
    "learned",
    "to",
    "talk",
    "with",
    "all",
    "his",
    "gulls",
    "in",
    "winter",
)


@dataclass
class PacedEngine:
    """Says `WORDS` over and over."""

    tokenizer: ChatTokenizer
    gap_s: float = 0.0
    model_name: str = MODEL
    max_positions: int = 8192
    vocab_size: int = 49152
    num_made: int = 0
    status: ModelStatus = field(default_factory=lambda: ModelStatus("ready", 30))

    def answer_room(self, prompt_tokens: int) -> int:
        return self.max_positions - prompt_tokens

    def coverage(self) -> ModelStatus:
        return self.status

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[GenerationEvent, None]:
        """Each token is due at its own time, so that a late one does not make all that follow late."""
        yield Admitted(len(request.prompt_ids), "fp_bench")
        loop = asyncio.get_running_loop()
        began = loop.time()
        for number, word in zip(range(request.max_tokens), itertools.cycle(WORDS), strict=False):
            await asyncio.sleep(max(0.0, began + (number + 1) * self.gap_s - loop.time()))
            self.num_made += 1
            timings = Timings(total_s=0.1, decode_s=0.1, tokens=number + 1, compute_s=0.05)
            yield TextDelta(f" {word}", timings=timings, token_ids=(number,))
        timings = Timings(total_s=0.1, decode_s=0.1, tokens=request.max_tokens, compute_s=0.05)
        yield Finished("length", len(request.prompt_ids), request.max_tokens, timings, fingerprint="fp_bench")


async def serve() -> None:
    """Serve until standard input ends."""
    engine = PacedEngine(ChatTokenizer.load(open_checkpoint(MODEL).folder))
    settings = GatewaySettings(**SETTINGS)  # type: ignore[arg-type]
    app = create_app(settings, Shelf({engine.model_name: engine}), GatewayMetrics())
    listener = socket.create_server(("127.0.0.1", 0), backlog=1024)
    server = uvicorn.Server(serve_config(app, settings))
    serving = asyncio.create_task(server._serve([listener]))
    while not server.started:  # noqa: ASYNC110 - uvicorn tells it by a flag
        await asyncio.sleep(0.01)
    gc.collect()
    gc.freeze()  # as `diffuse serve` does after its imports
    _say(port=listener.getsockname()[1])
    while line := await asyncio.to_thread(sys.stdin.readline):
        _say(**await _answer(engine, json.loads(line)))
    server.should_exit = True
    with contextlib.suppress(asyncio.CancelledError):
        await serving


async def _answer(engine: PacedEngine, asked: dict[str, Any]) -> dict[str, Any]:
    engine.gap_s = asked.get("gap_s", engine.gap_s)
    if "engine" in asked:
        return await _alone(engine, **asked["engine"])
    return {"cpu_s": time.process_time(), "tokens": engine.num_made}


async def _alone(engine: PacedEngine, streams: int, tokens: int, gap_s: float) -> dict[str, Any]:
    """What the engine costs by itself, read side by side by nobody else."""
    from slicing.sampler import SamplingParams

    engine.gap_s = gap_s
    request = GenerationRequest("r", MODEL, (1, 2, 3), SamplingParams(temperature=0.0), tokens)

    async def read() -> None:
        async for _ in engine.generate(request):
            pass

    began = time.process_time()
    await asyncio.gather(*(read() for _ in range(streams)))
    return {"cpu_s": time.process_time() - began, "tokens": streams * tokens}


def _say(**told: Any) -> None:
    print(json.dumps(told), flush=True)


if __name__ == "__main__":
    run_fast(serve())
