"""What the gateway itself costs: processor time per token beside the engine, and whether many streams hold up anybody.

The gateway runs in a process of its own over an engine that computes nothing; clients and a probe in two more. What
the engine takes by itself is measured in the same process and taken off.
"""

from __future__ import annotations

import concurrent.futures
import statistics
import sys

from bench.children import JsonChild
from bench.report import Report, quartiles

SECTION = "gateway"
STREAMS = 200
TOKENS_PER_S = 10
SECONDS = 15
FAST_TOKENS = 5000
SPREAD_S = 2.0  # over which the streams begin: each makes a prompt's tokens in a thread


def measure_gateway(report: Report, *, rounds: int = 3) -> None:
    """200 streams of 10 tokens a second, then one as fast as it goes."""
    report.section(SECTION)
    command = [sys.executable, "-W", "ignore", "-m"]
    with (
        JsonChild([*command, "bench.gateway_child"]) as gateway,
        JsonChild([*command, "bench.gateway_load"]) as clients,
        JsonChild([*command, "bench.gateway_load"]) as probe,
    ):
        _many(report, gateway, clients, probe)
        _one(report, gateway, clients, rounds)
        _together(report, gateway, clients)


def _many(report: Report, gateway: JsonChild, clients: JsonChild, probe: JsonChild) -> None:
    port, tokens, gap_s = gateway.ready["port"], TOKENS_PER_S * SECONDS, 1 / TOKENS_PER_S
    alone = gateway.ask(engine={"streams": STREAMS, "tokens": tokens // 3, "gap_s": gap_s})
    engine_s = alone["cpu_s"] / alone["tokens"]
    before = gateway.ask(gap_s=gap_s)
    with concurrent.futures.ThreadPoolExecutor() as threads:
        probed = threads.submit(probe.ask, probe={"port": port, "seconds": SECONDS + SPREAD_S})
        told = clients.ask(streams={"port": port, "streams": STREAMS, "tokens": tokens, "spread_s": SPREAD_S})
        health = probed.result()
    after = gateway.ask()
    taken = (after["cpu_s"] - before["cpu_s"]) / told["tokens"]
    name = f"{STREAMS} streams of {TOKENS_PER_S} tokens/s"
    report.add(SECTION, f"{name}: tokens that came", told["tokens"], "", f"{STREAMS * tokens}")
    report.add(SECTION, f"{name}: gateway, a token", 1000 * (taken - engine_s), "ms CPU", "<= 0.5")
    report.add(SECTION, f"{name}: engine alone, a token", 1000 * engine_s, "ms CPU")
    report.add(SECTION, f"{name}: first token", quartiles([1000 * one for one in told["first_s"]]), "ms")
    report.add(SECTION, f"{name}: worst gap of a stream", 1000 * told["worst_gap_s"], "ms")
    report.add(SECTION, f"{name}: /health, median", 1000 * statistics.median(health["times_s"]), "ms")
    report.add(SECTION, f"{name}: /health, worst", 1000 * max(health["times_s"]), "ms", "<= 100")
    report.add(SECTION, "the probe's own sleep, worst lateness", 1000 * max(health["late_s"]), "ms")


def _one(report: Report, gateway: JsonChild, clients: JsonChild, rounds: int) -> None:
    port, costs, speeds = gateway.ready["port"], [], []
    for _ in range(rounds):
        alone = gateway.ask(engine={"streams": 1, "tokens": FAST_TOKENS, "gap_s": 0.0})
        before = gateway.ask(gap_s=0.0)
        clients.ask(streams={"port": port, "streams": 1, "tokens": FAST_TOKENS})
        after = gateway.ask()
        taken = after["cpu_s"] - before["cpu_s"]
        costs.append(1000 * (taken - alone["cpu_s"]) / FAST_TOKENS)
        speeds.append(FAST_TOKENS / taken)
    report.add(
        SECTION, "one stream as fast as it goes, a token", statistics.median(costs), "ms CPU", "<= 0.5"
    )
    report.add(SECTION, "one stream as fast as it goes", statistics.median(speeds), "tokens/CPU s")


def _together(report: Report, gateway: JsonChild, clients: JsonChild) -> None:
    """All at the same moment: what the last of them waits for its first token."""
    gateway.ask(gap_s=0.0)
    told = clients.ask(streams={"port": gateway.ready["port"], "streams": STREAMS, "tokens": 2})
    firsts = [1000 * one for one in told["first_s"]]
    report.add(SECTION, f"{STREAMS} requests at the same moment: first token", quartiles(firsts), "ms")
    report.add(SECTION, f"{STREAMS} requests at the same moment: first token, last", max(firsts), "ms")
