"""Split cost: tokens/s of two slices against one process that runs the whole model through `generate`.

The two take turns inside one run; what counts is the ratio of each pair.
"""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

from bench.local_swarm import LocalSwarm, answer, chat_prompt, greedy_request, local_swarm
from bench.report import Report, quartiles
from bench.stock import StockProcess

PROMPT = "Tell me a story about a lighthouse keeper who learns to talk with the gulls."
NUM_TOKENS = 64


async def measure_split(report: Report, pairs: int) -> None:
    """At least 0.97 of stock generate at its faster thread count, with the ends at home and on the nodes."""
    report.section("split cost")
    faster = 0
    for ends in ("local", "remote"):
        async with local_swarm(2, ends=ends) as local:
            prompt_ids = chat_prompt(local.swarm, PROMPT)
            faster = faster or await _faster_thread_count(report, local.swarm.checkpoint.folder, prompt_ids)
            await _measure_pairs(report, local, ends, faster, pairs)


async def _measure_pairs(report: Report, local: LocalSwarm, ends: str, threads: int, pairs: int) -> None:
    prompt_ids = chat_prompt(local.swarm, PROMPT)
    ours: list[float] = []
    theirs: list[float] = []
    same = True
    with StockProcess(local.swarm.checkpoint.folder, threads) as stock:
        await asyncio.to_thread(stock.generate, prompt_ids, 8)
        await answer(local.swarm, greedy_request(prompt_ids, 8))
        for _ in range(pairs):
            whole = await asyncio.to_thread(stock.generate, prompt_ids, NUM_TOKENS)
            seconds, text = await _timed(local, prompt_ids)
            theirs.append(NUM_TOKENS / whole["seconds"])
            ours.append(NUM_TOKENS / seconds)
            same = same and text == local.swarm.engine.tokenizer.decode(whole["ids"])
    ratios = [one / other for one, other in zip(ours, theirs, strict=True)]
    name = f"ends {ends}"
    report.add("split cost", f"{name}: stock generate, {threads} thread(s)", quartiles(theirs), "tokens/s")
    report.add("split cost", f"{name}: two slices", quartiles(ours), "tokens/s")
    report.add("split cost", f"{name}: ratio over {pairs} alternated pairs", quartiles(ratios), "", ">= 0.97")
    report.add("split cost", f"{name}: greedy text equal to stock in every pair", same, "", "True")


async def _faster_thread_count(report: Report, folder: Path, prompt_ids: list[int]) -> int:
    speeds = {threads: await _stock_speed(folder, threads, prompt_ids) for threads in (1, 2)}
    for threads, speed in speeds.items():
        report.add("split cost", f"stock generate, {threads} thread(s), best of 3", speed, "tokens/s")
    return max(speeds, key=lambda threads: speeds[threads])


async def _stock_speed(folder: Path, threads: int, prompt_ids: list[int]) -> float:
    with StockProcess(folder, threads) as stock:
        await asyncio.to_thread(stock.generate, prompt_ids, 8)
        runs = [await asyncio.to_thread(stock.generate, prompt_ids, NUM_TOKENS) for _ in range(3)]
    return float(max(NUM_TOKENS / run["seconds"] for run in runs))


async def _timed(local: LocalSwarm, prompt_ids: list[int]) -> tuple[float, str]:
    begun = time.perf_counter()
    text, _ = await answer(local.swarm, greedy_request(prompt_ids, NUM_TOKENS))
    return time.perf_counter() - begun, text
