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
    async with local_swarm(2) as at_home, local_swarm(2, ends="remote") as thin:
        prompt_ids = chat_prompt(at_home.swarm, PROMPT)
        folder = at_home.swarm.checkpoint.folder
        speeds = {threads: await _stock_speed(folder, threads, prompt_ids) for threads in (1, 2)}
        for threads, speed in speeds.items():
            report.add("split cost", f"stock generate, {threads} thread(s), best of 3", speed, "tokens/s")
        faster = max(speeds, key=lambda threads: speeds[threads])
        sides = {"ends local": at_home, "ends remote": thin}
        ours: dict[str, list[float]] = {name: [] for name in sides}
        theirs: dict[str, list[float]] = {name: [] for name in sides}
        same = True
        with StockProcess(folder, faster) as stock:
            await asyncio.to_thread(stock.generate, prompt_ids, 8)
            for local in sides.values():
                await answer(local.swarm, greedy_request(prompt_ids, 8))
            for _ in range(pairs):
                for name, local in sides.items():
                    whole = await asyncio.to_thread(stock.generate, prompt_ids, NUM_TOKENS)
                    seconds, text = await _timed(local, prompt_ids)
                    theirs[name].append(NUM_TOKENS / whole["seconds"])
                    ours[name].append(NUM_TOKENS / seconds)
                    same = same and text == local.swarm.engine.tokenizer.decode(whole["ids"])
        for name in sides:
            ratios = [one / other for one, other in zip(ours[name], theirs[name], strict=True)]
            report.add(
                "split cost",
                f"{name}: stock generate, {faster} thread(s)",
                quartiles(theirs[name]),
                "tokens/s",
            )
            report.add("split cost", f"{name}: two slices", quartiles(ours[name]), "tokens/s")
            report.add(
                "split cost", f"{name}: ratio over {pairs} alternated pairs", quartiles(ratios), "", ">= 0.97"
            )
        report.add("split cost", "greedy text equal to stock in every pair", same, "", "True")


async def _stock_speed(folder: Path, threads: int, prompt_ids: list[int]) -> float:
    with StockProcess(folder, threads) as stock:
        await asyncio.to_thread(stock.generate, prompt_ids, 8)
        runs = [await asyncio.to_thread(stock.generate, prompt_ids, NUM_TOKENS) for _ in range(3)]
    return max(NUM_TOKENS / run["seconds"] for run in runs)


async def _timed(local: LocalSwarm, prompt_ids: list[int]) -> tuple[float, str]:
    begun = time.perf_counter()
    text, _ = await answer(local.swarm, greedy_request(prompt_ids, NUM_TOKENS))
    return time.perf_counter() - begun, text
