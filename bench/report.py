"""Figures with their conditions: printed as they come, written as one JSON file at the end.

Knows nothing of what is measured.
"""

from __future__ import annotations

import json
import os
import platform
import statistics
import subprocess
import time
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"


def conditions() -> dict[str, Any]:
    """What a reader must know to compare these figures with others."""
    import torch
    import transformers

    return {
        "date": time.strftime("%Y-%m-%dT%H:%M:%S"),
        "commit": _commit(),
        "cpu": _cpu_model(),
        "cores": os.cpu_count(),
        "load_1min": round(os.getloadavg()[0], 2),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "diffusers": metadata.version("diffusers"),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", ""),
    }


def quartiles(values: Sequence[float]) -> dict[str, float]:
    """Median with the quartiles around it."""
    if len(values) < 2:
        return {"median": values[0], "q1": values[0], "q3": values[0]}
    q1, median, q3 = statistics.quantiles(values, n=4, method="inclusive")
    return {"median": median, "q1": q1, "q3": q3}


class Report:
    """One run of the bench."""

    def __init__(self) -> None:
        self._figures: dict[str, Any] = {"conditions": conditions()}
        print("conditions:", json.dumps(self._figures["conditions"]))

    def section(self, name: str) -> None:
        """Begin a section, with the load under which it runs."""
        load = os.getloadavg()[0]
        self._figures.setdefault(name, {})["load_1min"] = round(load, 2)
        print(f"\n== {name} (load {load:.2f})")

    def add(self, section: str, name: str, value: Any, unit: str = "", bar: str = "") -> None:
        """Note one figure. `bar` says what it should reach."""
        self._figures.setdefault(section, {})[name] = {"value": value, "unit": unit, "bar": bar}
        print(f"  {name}: {_shown(value)} {unit}" + (f"   (bar: {bar})" if bar else ""), flush=True)

    def write(self) -> Path:
        """Write everything under bench/results/."""
        RESULTS.mkdir(exist_ok=True)
        path = RESULTS / f"bench-{time.strftime('%Y%m%d-%H%M%S')}.json"
        path.write_text(json.dumps(self._figures, indent=2))
        print(f"\nwritten to {path}")
        return path


def _shown(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.3f}"
    if isinstance(value, dict):
        return ", ".join(f"{key} {_shown(part)}" for key, part in value.items())
    return str(value)


def _commit() -> str:
    try:
        return subprocess.run(
            ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=True
        ).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next(
        (line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "unknown"
    )
