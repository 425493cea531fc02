"""What a hop costs beyond its compute, what it carries, and what the client's link sees."""

from __future__ import annotations

import time
from collections import Counter

from app.engine.swarm import Swarm
from bench.local_swarm import LocalSwarm, answer, chat_prompt, greedy_request, local_swarm
from bench.report import Report, quartiles

PROMPT = "Explain how rivers shape valleys."
NUM_TOKENS = 48
LONG_PROMPT_TOKENS = 500


async def measure_hops(report: Report, repeats: int) -> None:
    """Hop cost, the ladder, bytes per hop and frames on the client's links, over two nodes."""
    report.section("hops")
    async with local_swarm(2) as local:
        await _measure_time(report, local, repeats)
        await _measure_bytes(report, local, "local ends")
    async with local_swarm(2, ends="remote") as local:
        await _measure_bytes(report, local, "thin mode")
    async with local_swarm(2, pad=True) as local:
        await _measure_bytes(report, local, "local ends, --pad")


async def _measure_time(report: Report, local: LocalSwarm, repeats: int) -> None:
    swarm = local.swarm
    prompt_ids = chat_prompt(swarm, PROMPT)
    await answer(swarm, greedy_request(prompt_ids, 4))
    num_hops = len(local.nodes)
    ladders: dict[str, list[float]] = {}
    for _ in range(repeats):
        begun = time.perf_counter()
        _, finished = await answer(swarm, greedy_request(prompt_ids, NUM_TOKENS))
        total_s = time.perf_counter() - begun
        told = finished.timings
        per_token = 1000 / NUM_TOKENS
        steps = {
            "total": total_s,
            "compute on nodes": told.compute_s,
            "ends and sampler": told.local_s,
            "queue": told.queue_s,
            "crypto and codec": told.crypto_s,
            "links, loops and wake-ups": told.network_s,
        }
        for name, seconds in steps.items():
            ladders.setdefault(name, []).append(seconds * per_token)
        outside = (told.queue_s + told.crypto_s + told.network_s) * per_token / num_hops
        ladders.setdefault("outside compute, per hop", []).append(outside)
    for name, values in ladders.items():
        bar = "median <= 1" if name.startswith("outside") else ""
        report.add("hops", f"ladder: {name}", quartiles(values), "ms per token", bar)


async def _measure_bytes(report: Report, local: LocalSwarm, label: str) -> None:
    swarm = local.swarm
    prompt_ids = chat_prompt(swarm, PROMPT)
    handshakes = _handshakes(swarm)
    before, bytes_before = _frames(swarm), _bytes(swarm)
    await answer(swarm, greedy_request(prompt_ids, NUM_TOKENS))
    after, bytes_after = _frames(swarm), _bytes(swarm)
    spent = after - before
    report.add(
        "hops", f"{label}: client messages for {NUM_TOKENS} tokens", dict(spent), "", "one step, one answer"
    )
    report.add("hops", f"{label}: bytes sent per token", (bytes_after[0] - bytes_before[0]) / NUM_TOKENS, "B")
    report.add(
        "hops", f"{label}: bytes received per token", (bytes_after[1] - bytes_before[1]) / NUM_TOKENS, "B"
    )
    report.add("hops", f"{label}: handshakes during a warm answer", _handshakes(swarm) - handshakes, "", "0")
    long_prompt = (prompt_ids * (LONG_PROMPT_TOKENS // len(prompt_ids) + 1))[:LONG_PROMPT_TOKENS]
    bytes_before = _bytes(swarm)
    await answer(swarm, greedy_request(long_prompt, 1))
    bytes_after = _bytes(swarm)
    name = f"{label}: prefill of {LONG_PROMPT_TOKENS}, received"
    report.add("hops", name, bytes_after[1] - bytes_before[1], "B", "one row of answer")


def _frames(swarm: Swarm) -> Counter[str]:
    counters = swarm.endpoint.counters
    return Counter({f"{n} sent": c for n, c in counters.messages_sent.items()}) + Counter(
        {f"{n} received": c for n, c in counters.messages_received.items()}
    )


def _bytes(swarm: Swarm) -> tuple[int, int]:
    counters = swarm.endpoint.counters
    return counters.payload_bytes_sent, counters.payload_bytes_received


def _handshakes(swarm: Swarm) -> int:
    return int(swarm.endpoint.counters.handshakes_done)
