"""Split cost: tokens/s of two slices against one process that runs the whole model through `generate`.

The two take turns inside one run; what counts is the ratio of each pair.
"""

from __future__ import annotations

import time

from bench.local_swarm import answer, chat_prompt, greedy_request, local_swarm
from bench.report import Report, quartiles
from bench.stock import StockProcess

PROMPT = "Tell me a story about a lighthouse keeper who learns to talk with the gulls."
NUM_TOKENS = 64


async def measure_split(report: Report, pairs: int) -> None:
    """At least 0.97 of stock generate at its faster thread count."""
    report.section("split cost")
    async with local_swarm(2) as local:
        prompt_ids = chat_prompt(local.swarm, PROMPT)
        folder = local.swarm.checkpoint.folder
        speeds = {}
        for threads in (1, 2):
            with StockProcess(folder, threads) as stock:
                stock.generate(prompt_ids, 8)
                speeds[threads] = max(
                    NUM_TOKENS / stock.generate(prompt_ids, NUM_TOKENS)["seconds"] for _ in range(3)
                )
            report.add(
                "split cost", f"stock generate, {threads} thread(s), best of 3", speeds[threads], "tokens/s"
            )
        faster = max(speeds, key=lambda threads: speeds[threads])
        ratios, ours, theirs, same = [], [], [], True
        with StockProcess(folder, faster) as stock:
            stock.generate(prompt_ids, 8)
            await answer(local.swarm, greedy_request(prompt_ids, 8))
            for pair in range(pairs):
                if pair % 2:
                    whole, split = stock.generate(prompt_ids, NUM_TOKENS), await _timed(local, prompt_ids)
                else:
                    split, whole = await _timed(local, prompt_ids), stock.generate(prompt_ids, NUM_TOKENS)
                theirs.append(NUM_TOKENS / whole["seconds"])
                ours.append(NUM_TOKENS / split[0])
                ratios.append(ours[-1] / theirs[-1])
                same = same and split[1] == local.swarm.engine.tokenizer.decode(whole["ids"])
        report.add("split cost", "stock generate", quartiles(theirs), "tokens/s")
        report.add("split cost", "two slices", quartiles(ours), "tokens/s")
        report.add(
            "split cost", f"ratio over {pairs} alternated pairs", quartiles(ratios), "", "median >= 0.97"
        )
        report.add("split cost", "greedy text equal to stock in every pair", same, "", "True")


async def _timed(local, prompt_ids: list[int]) -> tuple[float, str]:  # type: ignore[no-untyped-def]
    begun = time.perf_counter()
    text, _ = await answer(local.swarm, greedy_request(prompt_ids, NUM_TOKENS))
    return time.perf_counter() - begun, text
