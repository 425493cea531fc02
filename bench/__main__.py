"""`python -m bench [--only NAME …] [--pairs N] [--picture-model FOLDER]`: every section of the bench, or some."""

from __future__ import annotations

import argparse
import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

from bench.cancel import measure_cancel
from bench.diffusion_bytes import measure_diffusion_bytes
from bench.diffusion_quality import WITH_BARS, find_model, measure_diffusion_quality
from bench.diffusion_speed import measure_diffusion_speed
from bench.failover import measure_failover
from bench.gateway import measure_gateway
from bench.hops import measure_hops
from bench.kernels import measure_kernels
from bench.ledger import measure_ledger
from bench.memory import measure_memory
from bench.nodes import measure_nodes
from bench.peers import measure_peers
from bench.placement import measure_placement
from bench.plain import measure_plain
from bench.prefill import measure_prefill
from bench.quality import measure_quality
from bench.relay import measure_relay
from bench.report import Report
from bench.scheduler import measure_scheduler
from bench.served import measure_served
from bench.songs import measure_songs
from bench.split import measure_split
from bench.streams import measure_streams
from bench.wan import measure_wan
from cli.runtime import run_fast

SECTIONS = (
    "ledger",
    "nodes",
    "memory",
    "hops",
    "cancel",
    "gateway",
    "failover",
    "relay",
    "wan",
    "placement",
    "split",
    "plain",
    "scheduler",
    "kernels",
    "quality",
    "streams",
    "songs",
    "prefill",
    "peers",
    "served",
    "diffusion-speed",
    "diffusion-bytes",
    "diffusion-quality",
)


async def _run(only: list[str], pairs: int, picture_model: str | None) -> None:
    model = find_model(picture_model) if "diffusion-quality" in only else ""
    report = Report()
    if "ledger" in only:
        measure_ledger(report)
    if "nodes" in only:
        await measure_nodes(report)
    if "memory" in only:
        await measure_memory(report)
    if "hops" in only:
        await measure_hops(report, repeats=max(3, pairs // 2))
    if "cancel" in only:
        await measure_cancel(report)
    if "gateway" in only:
        measure_gateway(report)
    if "failover" in only:
        await measure_failover(report)
    if "relay" in only:
        await measure_relay(report)
    if "wan" in only:
        await measure_wan(report)
    if "placement" in only:
        await measure_placement(report)
    if "split" in only:
        await measure_split(report, pairs)
    if "plain" in only:
        measure_plain(report)
    if "scheduler" in only:
        await measure_scheduler(report)
    if "kernels" in only:
        measure_kernels(report)
    if "quality" in only:
        measure_quality(report)
    if "streams" in only:
        await measure_streams(report)
    if "songs" in only:
        measure_songs(report)
    if "prefill" in only:
        await measure_prefill(report)
    if "peers" in only:
        measure_peers(report)
    if "served" in only:
        await measure_served(report)
    if "diffusion-speed" in only:
        await measure_diffusion_speed(report)
    if "diffusion-bytes" in only:
        measure_diffusion_bytes(report)
    if "diffusion-quality" in only:
        measure_diffusion_quality(report, model, WITH_BARS)
    report.write()


def main() -> None:
    """Parse the flags and measure."""
    parser = argparse.ArgumentParser(prog="bench", description=__doc__)
    parser.add_argument("--only", nargs="*", choices=SECTIONS, default=list(SECTIONS))
    parser.add_argument("--pairs", type=int, default=10, help="alternated pairs of the split cost")
    parser.add_argument("--picture-model", help="a pipeline folder, for diffusion-quality")
    options = parser.parse_args()
    run_fast(_run(options.only, options.pairs, options.picture_model))


if __name__ == "__main__":
    main()
