"""What one node costs to start: seconds, peak memory, bytes read. The node itself reports them when it is ready."""

from __future__ import annotations

from bench.local_swarm import local_swarm
from bench.report import Report


async def measure_nodes(report: Report) -> None:
    """Peak memory beyond the imports: at most 1.2 of the slice; bytes asked for: at most 1.05."""
    report.section("nodes")
    async with local_swarm(3) as local:
        for event in local.ready:
            name = f"layers {event['layers'][0]}:{event['layers'][1]}"
            report.add("nodes", f"{name}: load", event["load_s"], "s")
            report.add("nodes", f"{name}: slice", event["slice_bytes"], "B")
            ratio = event["bytes_read"] / event["slice_bytes"]
            report.add("nodes", f"{name}: bytes asked for over slice", ratio, "", "<= 1.05")
            grown = (event["peak_rss_bytes"] - event["import_rss_bytes"]) / event["slice_bytes"]
            report.add("nodes", f"{name}: peak memory beyond imports over slice", grown, "", "<= 1.2")
