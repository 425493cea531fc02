"""What nodes take at their peak, and that a thousand mixed answers, many of them left early, leave nothing behind."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path

from app.engine.request import GenerationRequest, TextDelta
from bench.local_swarm import MODEL, LocalSwarm, chat_prompt, greedy_request, local_swarm
from bench.nodes import baseline_bytes
from bench.report import Report
from cli.membership import read_membership
from cli.options import DEFAULT_NETWORK
from cli.survey import survey

SECTION = "memory"
NUM_REQUESTS = 1000
WARM_UP = 100  # answers before the baseline is taken: allocators and caches have filled by then
TOGETHER = 8
KV_BUDGET = 64 << 20
LEFT_EARLY = 0.4
# A node's runtime without its weights: the compiled kernels, and what the check of the model's class leaves.
RUNTIME = f"""
from slicing.fast.compiling import load_kernels
from slicing.miniature import check_cut
from slicing.model_source import open_checkpoint
load_kernels()
check_cut(open_checkpoint({MODEL!r}).config)
"""
WORDS = (
    "river",
    "stone",
    "lantern",
    "quiet",
    "market",
    "seven",
    "carry",
    "green",
    "window",
    "slow",
    "bright",
)


async def measure_memory(report: Report, *, num_requests: int = NUM_REQUESTS) -> None:
    """Peak at most 1.2 of the weights + the key/value budget + the bare runtime; afterwards as before."""
    report.section(SECTION)
    bare = await asyncio.to_thread(baseline_bytes, RUNTIME)
    report.add(SECTION, "bare runtime", bare, "B")
    async with local_swarm(2, kv_budget=KV_BUDGET) as local:
        draw = random.Random(4)
        await _ask(local, draw, WARM_UP)
        await _settle(local)
        before, free_before = [_memory(node.pid)[0] for node in local.nodes], await _free_bytes(local)
        left = await _ask(local, draw, num_requests)
        sessions = await _settle(local)
        free_after = await _free_bytes(local)
        report.add(SECTION, f"answers left early, of {num_requests}", left)
        report.add(SECTION, "sessions that nodes hold afterwards", sessions, "", "0")
        for number, (node, event) in enumerate(zip(local.nodes, local.ready, strict=True)):
            now, peak = _memory(node.pid)
            name, allowed = f"layers {event['layers']}", 1.2 * event["weights_bytes"] + KV_BUDGET + bare
            report.add(SECTION, f"{name}: peak over what is allowed", peak / allowed, "", "<= 1")
            report.add(SECTION, f"{name}: memory afterwards over before", now / before[number], "", "<= 1.05")
            report.add(
                SECTION,
                f"{name}: room for sessions afterwards over before",
                free_after[number] / free_before[number],
                "",
                ">= 1",
            )


async def _ask(local: LocalSwarm, draw: random.Random, num_requests: int) -> int:
    """Answers of many lengths, some of them left; returns how many were."""
    requests = iter([_request(local, draw) for _ in range(num_requests)])
    left = 0

    async def worker() -> None:
        nonlocal left
        for request, tokens in requests:
            was_left = await _answer(local, request, tokens)
            left += was_left

    await asyncio.gather(*(worker() for _ in range(TOGETHER)))
    return left


def _request(local: LocalSwarm, draw: random.Random) -> tuple[GenerationRequest, int | None]:
    """A request, and after how many tokens its client leaves; None: never."""
    text = " ".join(draw.choices(WORDS, k=draw.choice((2, 10, 40, 120))))
    num_tokens = draw.choice((1, 4, 12))
    leaves = draw.randrange(num_tokens + 1) if draw.random() < LEFT_EARLY else None
    return greedy_request(chat_prompt(local.swarm, text), num_tokens), leaves


async def _answer(local: LocalSwarm, request: GenerationRequest, leaves_after: int | None) -> bool:
    """Run an answer; tells whether it was left. Leaving after 0 tokens is leaving at the first event."""
    events, tokens = local.swarm.engine.generate(request), 0
    async for event in events:
        tokens += event.num_tokens if isinstance(event, TextDelta) else 0
        if leaves_after is not None and tokens >= leaves_after:
            await events.aclose()
            return True
    return False


async def _settle(local: LocalSwarm) -> int:
    """Wait until nodes hold no session, five seconds at most; returns how many they hold then."""
    for _ in range(50):
        if not (held := sum(load for load, _ in await _survey(local))):
            return 0
        await asyncio.sleep(0.1)
    return held


async def _free_bytes(local: LocalSwarm) -> list[int]:
    return [free for _, free in await _survey(local)]


async def _survey(local: LocalSwarm) -> list[tuple[int, int]]:
    """Sessions and free bytes of every node, asked anew."""
    reports = await survey(local.settings.nodes, read_membership(DEFAULT_NETWORK, None))
    return [
        (report.description.load, report.description.free_bytes) for report in reports if report.description
    ]


def _memory(pid: int) -> tuple[int, int]:
    """Resident memory of a process now and at its peak, in bytes (Linux)."""
    lines = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    return tuple(int(lines[key].split()[0]) << 10 for key in ("VmRSS", "VmHWM"))  # type: ignore[return-value]
