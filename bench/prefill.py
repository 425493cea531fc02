"""Long prompts beside others: a short prompt behind a long one, decoders beside it, and the next turn of a chat."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import statistics
import time
from collections.abc import AsyncIterator
from dataclasses import replace

from app.engine.request import TextDelta
from bench.local_swarm import LocalSwarm, chat_prompt, greedy_request, local_swarm
from bench.report import Report
from bench.streams import PROMPTS

SECTION = "prefill"
LONG = 8000  # tokens
TURN, NEW = 2000, 40  # a chat's first turn, and what the second adds
SETTLED_S = 2.0  # after the long prompt began


async def measure_prefill(report: Report, *, weights: str = "int8") -> None:
    """Times to the first token, and tokens/s of a decoder, alone and beside a prompt of 8,000 tokens."""
    report.section(SECTION)
    async with local_swarm(2, weights=weights) as local:
        await _first_token_s(local, chat_prompt(local.swarm, PROMPTS[0]))
        await _behind(report, local)
        await _beside(report, local)
        await _next_turn(report, local)


async def _behind(report: Report, local: LocalSwarm) -> None:
    prompts = [chat_prompt(local.swarm, prompt) for prompt in PROMPTS]
    alone = statistics.median([await _first_token_s(local, prompt) for prompt in prompts[:5]])
    gap_s = (await _decode(local, prompts[0], 24))[1]
    async with _long_prompt(local, salt=1):
        behind = [await _first_token_s(local, prompt) for prompt in prompts[5:]]
    report.add(SECTION, "short prompt alone: first token", alone * 1000, "ms")
    report.add(SECTION, f"the same behind {LONG} tokens", statistics.median(behind) * 1000, "ms")
    bar = 1.5 * alone + gap_s
    report.add(SECTION, "of 1.5x alone and one step", statistics.median(behind) / bar, "x", "<= 1")


async def _beside(report: Report, local: LocalSwarm) -> None:
    prompt = chat_prompt(local.swarm, PROMPTS[1])
    alone, _ = await _decode(local, prompt, 64)
    async with _long_prompt(local, salt=2):
        beside, _ = await _decode(local, prompt, 64)
    report.add(SECTION, "a decoder alone", alone, "tokens/s")
    report.add(SECTION, f"the same beside {LONG} tokens", beside, "tokens/s")
    report.add(SECTION, "its speed beside over alone", beside / alone, "x", ">= 0.5")


async def _next_turn(report: Report, local: LocalSwarm) -> None:
    first = _some_tokens(TURN, salt=3)
    begun = time.perf_counter()
    answer = await _answer_ids(local, first)
    cold = await _first_token_s(local, _some_tokens(TURN, salt=4))
    warm = await _first_token_s(local, [*first, *answer, *_some_tokens(NEW - len(answer), salt=5)])
    report.add(SECTION, f"first turn of {TURN} tokens", time.perf_counter() - begun, "s in all")
    report.add(SECTION, f"{TURN} tokens, cold: first token", cold * 1000, "ms")
    report.add(SECTION, f"the next turn, {NEW} new: first token", warm * 1000, "ms")
    report.add(SECTION, "next turn over cold", warm / cold, "x", "<= 0.05")


@contextlib.asynccontextmanager
async def _long_prompt(local: LocalSwarm, salt: int) -> AsyncIterator[None]:
    """An answer to a long prompt is under way, and given up at the end."""
    task = asyncio.create_task(_first_token_s(local, _some_tokens(LONG, salt)))
    await asyncio.sleep(SETTLED_S)
    assert not task.done(), "the long prompt was over too soon to be beside anything"
    try:
        yield
        assert not task.done(), "the long prompt was over too soon to be beside everything"
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def _first_token_s(local: LocalSwarm, prompt_ids: list[int]) -> float:
    begun = time.perf_counter()
    async with contextlib.aclosing(local.swarm.engine.generate(greedy_request(prompt_ids, 2))) as events:
        async for event in events:
            if isinstance(event, TextDelta):
                return time.perf_counter() - begun
    raise RuntimeError("an answer without text")


async def _decode(local: LocalSwarm, prompt_ids: list[int], num_tokens: int) -> tuple[float, float]:
    """Tokens/s and the median gap in seconds."""
    request = replace(greedy_request(prompt_ids, num_tokens), draft="off")
    events = local.swarm.engine.generate(request)
    moments = [time.perf_counter() async for event in events if isinstance(event, TextDelta)]
    gaps = [later - earlier for earlier, later in itertools.pairwise(moments)]
    return (len(moments) - 1) / (moments[-1] - moments[0]), statistics.median(gaps)


async def _answer_ids(local: LocalSwarm, prompt_ids: list[int]) -> list[int]:
    """Ask for a few tokens, to the end, so that what was computed is kept."""
    events = local.swarm.engine.generate(greedy_request(prompt_ids, 8))
    text = [event.text async for event in events if isinstance(event, TextDelta)]
    tokenizer = local.swarm.engine.tokenizer
    return list(tokenizer.encode("".join(text)))


def _some_tokens(count: int, salt: int) -> list[int]:
    return [100 + (salt * 7919 + number * 104729) % 20000 for number in range(max(0, count))]
