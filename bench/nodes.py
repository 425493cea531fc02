"""What one node costs to start: seconds, peak memory, bytes read. Nodes report these when they are ready."""

from __future__ import annotations

import asyncio
import subprocess
import sys

from bench.local_swarm import local_swarm
from bench.report import Report

# What a node of this model imports before it reads a tensor, in the way `diffuse host` does, and nothing else.
BASELINE = """
import cli.main, cli.host, uvloop
from cli.runtime import heavy_imports
with heavy_imports():
    import node.main
    from transformers import LlamaConfig, LlamaForCausalLM
{more}
print(next(line for line in open("/proc/self/status") if line.startswith("VmHWM")).split()[1])
"""


async def measure_nodes(report: Report) -> None:
    """Peak memory beyond the imports: at most 1.2 of the slice; bytes asked for: at most 1.05."""
    report.section("nodes")
    baseline = await asyncio.to_thread(baseline_bytes)
    report.add("nodes", "peak memory of the same imports", baseline, "B")
    async with local_swarm(3) as local:
        for event in local.ready:
            name, size = f"layers {event['layers']}", event["weights_bytes"]
            report.add("nodes", f"{name}: load", event["load_s"], "s")
            report.add("nodes", f"{name}: slice", size, "B")
            report.add(
                "nodes", f"{name}: bytes asked for over slice", event["bytes_read"] / size, "", "<= 1.05"
            )
            grown = (event["peak_memory_bytes"] - baseline) / size
            report.add("nodes", f"{name}: peak memory beyond imports over slice", grown, "", "<= 1.2")


def baseline_bytes(more: str = "") -> int:
    """Peak memory of a process that imports what a node imports, and does nothing but run `more`."""
    program = BASELINE.format(more=more)
    told = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    return int(told.stdout) << 10
