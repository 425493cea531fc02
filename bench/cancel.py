"""How soon every node has freed a session after its client left, over HTTP as a client would leave."""

from __future__ import annotations

import asyncio
import time

import httpx

from app.serving import run_gateway
from app.settings import GatewaySettings
from bench.local_swarm import MODEL, LocalSwarm, local_swarm
from bench.report import Report, quartiles
from cli.membership import read_membership
from cli.options import DEFAULT_NETWORK
from cli.survey import survey

REPEATS = 20


async def measure_cancel(report: Report) -> None:
    """At most 250 ms."""
    report.section("cancel")
    async with local_swarm(2) as local:
        ready: asyncio.Future[str] = asyncio.get_running_loop().create_future()

        def hear(event: dict[str, object]) -> None:
            if event["event"] == "ready":
                ready.set_result(str(event["url"]))

        settings = GatewaySettings(port=0)
        serving = asyncio.create_task(
            run_gateway(settings, local.settings.member, local.settings.library, on_event=hear)
        )
        try:
            url = await ready
            times = [1000 * await _leave(local, url, after) for after in range(1, REPEATS + 1)]
        finally:
            serving.cancel()
            await asyncio.gather(serving, return_exceptions=True)
    report.add(
        "cancel", f"from the client leaving to the last node free, {REPEATS} answers", quartiles(times), "ms"
    )
    report.add("cancel", "worst", max(times), "ms", "<= 250")


async def _leave(local: LocalSwarm, url: str, after: int) -> float:
    """Leave after `after` chunks; seconds until no node holds a session."""
    body = {
        "model": MODEL,
        "stream": True,
        "max_tokens": 200,
        "messages": [{"role": "user", "content": "Hello"}],
    }
    async with httpx.AsyncClient(timeout=60) as client:
        async with client.stream("POST", f"{url}/chat/completions", json=body) as answer:
            lines, seen = answer.aiter_lines(), 0
            async for line in lines:
                seen += line.startswith("data:")
                if seen > after:
                    break
        left = time.perf_counter()
        while await _num_sessions(local):
            pass
        return time.perf_counter() - left


async def _num_sessions(local: LocalSwarm) -> int:
    """Ask each node anew: the directory's own record is up to 15 s old. Takes some milliseconds by itself."""
    reports = await survey(local.settings.nodes, read_membership(DEFAULT_NETWORK, None))
    return sum(report.description.load for report in reports if report.description)
