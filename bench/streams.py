"""Many answers at once through the whole system: the engine's own loop, encrypted links, two node processes.

Against one stream through the same system, and against transformers' padded batch in the same run.
"""

from __future__ import annotations

import asyncio
import itertools
import statistics
import sys
import time
from dataclasses import replace

from app.engine.request import Finished, TextDelta
from bench.children import JsonChild
from bench.local_swarm import LocalSwarm, chat_prompt, greedy_request, local_swarm
from bench.report import Report

SECTION = "streams"
STREAMS = (1, 2, 4, 8)
NUM_TOKENS = 48
PROMPTS = (
    "Tell me a story about a lighthouse keeper who learns to talk with the gulls.",
    "Explain why the sky is blue to a child.",
    "Write a letter to the mayor about the broken bench in the park.",
    "What should I pack for a week in the mountains?",
    "Describe the taste of an apple without naming any fruit.",
    "How does a sailing boat move against the wind?",
    "Give me a plan to learn the guitar in three months.",
    "Invent a myth that explains why cats purr.",
)


async def measure_streams(
    report: Report, *, rounds: int = 3, weights: tuple[str, ...] = ("bf16", "int8")
) -> None:
    """Tokens/s and the median gap between tokens at 1 to 8 streams, prefill left out."""
    report.section(SECTION)
    for form in weights:
        async with local_swarm(2, weights=form) as local:
            await _measure(report, local, form, rounds)


async def _measure(report: Report, local: LocalSwarm, form: str, rounds: int) -> None:
    folder = str(local.swarm.checkpoint.folder)
    stock_command = [sys.executable, "-W", "ignore", "-m", "bench.padded_batch", folder, "1"]
    speeds: dict[int, list[float]] = {streams: [] for streams in STREAMS}
    gaps: dict[int, list[float]] = {streams: [] for streams in STREAMS}
    stock: list[float] = []
    request = {"sessions": 8, "past": 64, "tokens": NUM_TOKENS}
    with JsonChild(stock_command) as padded:
        for number in range(rounds + 1):  # the first warms up
            for streams in STREAMS:
                speed, median_gap = await _together(local, streams)
                if number:
                    speeds[streams].append(speed)
                    gaps[streams].append(median_gap)
            taken = await asyncio.to_thread(padded.ask, decode=request)
            if number:
                stock.append(8 * NUM_TOKENS / taken["seconds"])
    for streams in STREAMS:
        report.add(SECTION, f"{form}: {streams} stream(s)", statistics.median(speeds[streams]), "tokens/s")
        report.add(
            SECTION, f"{form}: {streams} stream(s), median gap", statistics.median(gaps[streams]) * 1000, "ms"
        )
    report.add(SECTION, "transformers, padded batch of 8", statistics.median(stock), "tokens/s")
    report.add(SECTION, f"{form}: 8 streams over 1", _ratio(speeds[8], speeds[1]), "x", ">= 4")
    report.add(SECTION, f"{form}: 8 streams over the padded batch", _ratio(speeds[8], stock), "x", ">= 1.8")
    report.add(SECTION, f"{form}: median gap of 8 streams over 1", _ratio(gaps[8], gaps[1]), "x", "<= 2")
    report.add(SECTION, f"{form}: 2 streams over 1 (2 stages)", _ratio(speeds[2], speeds[1]), "x", ">= 1.5")


async def _together(local: LocalSwarm, streams: int) -> tuple[float, float]:
    """Tokens/s of all streams while all of them decode, and the median gap between two tokens of one."""
    answers = [_answer(local, PROMPTS[number]) for number in range(streams)]
    taken = await asyncio.gather(*answers)
    begun = max(times[0] for times in taken)
    ended = min(times[-1] for times in taken)
    inside = sum(sum(begun < moment <= ended for moment in times) for times in taken)
    gaps = [b - a for times in taken for a, b in itertools.pairwise(times) if a >= begun]
    return inside / (ended - begun), statistics.median(gaps)


async def _answer(local: LocalSwarm, prompt: str) -> list[float]:
    """The moments at which tokens came."""
    moments: list[float] = []
    request = replace(greedy_request(chat_prompt(local.swarm, prompt), NUM_TOKENS), draft="off")
    async for event in local.swarm.engine.generate(request):
        if isinstance(event, TextDelta) and event.timings is not None:
            moments.extend([time.perf_counter()] * (event.timings.tokens - len(moments)))
        elif isinstance(event, Finished):
            moments.extend([time.perf_counter()] * (event.completion_tokens - len(moments)))
    return moments


def _ratio(ones: list[float], others: list[float]) -> float:
    return statistics.median(one / other for one, other in zip(ones, others, strict=True))
