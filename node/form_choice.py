"""Which dtype and how many threads a slice is computed with: settings first, then a short measurement.

A measured choice is stored per model, slice, runner and machine, and used again at the next start. Torch's threads are
those of the calling thread (OpenMP keeps them per thread), so measure where the computing will be done; a fast runner
has its own. Which runner and which form of the weights are flags alone: what an answer is must not hang on a stopwatch.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import platform
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil
import torch

from node.settings import NodeSettings
from routing.errors import SettingsError
from routing.types import SliceSpec
from slicing.buffers import DTYPES
from slicing.diffusion.source import compute_dtype

logger = logging.getLogger(__name__)

FEWER_THREADS_GAIN = (
    1.1  # fewer threads win unless more are faster than this: nodes share machines (performance.md 8)
)
CLEARLY_FASTER = (
    1.3  # bfloat16 costs exactness against float32 peers; machine noise alone reaches 1.3 (performance.md)
)
MEASUREMENTS = 2  # each is a median already; the better one is the less disturbed
PROBE_ROWS = (
    1,
    16,
)  # decode, and a small prefill: bfloat16 kernels without hardware support collapse at the latter
PROBE_WIDTH = 1024  # large enough not to fit a core's private cache in float32 (4 MiB)


@dataclass(frozen=True, slots=True)
class FormChoice:
    """A dtype's name and a number of threads."""

    dtype: str
    threads: int


class ChoiceStore:
    """Remembers one choice in a small JSON file of the cache."""

    def __init__(
        self, cache_dir: Path, model_digest: bytes, spec: SliceSpec, device: str, runner: str = ""
    ) -> None:
        """`runner` says which one and with which weights: each has its own best number of threads."""
        key = f"{model_digest.hex()} {spec} {device} {runner} {describe_machine()}"
        name = hashlib.sha256(key.encode()).hexdigest()[:24] + ".json"
        self._path = cache_dir / "forms" / name

    def load(self) -> FormChoice | None:
        """The stored choice; None where there is none, or the file is not one of ours."""
        try:
            stored = json.loads(self._path.read_text(encoding="utf-8"))
            choice = FormChoice(str(stored["dtype"]), int(stored["threads"]))
        except (OSError, ValueError, KeyError, TypeError):
            return None
        return choice if choice.dtype in DTYPES and 1 <= choice.threads <= num_cores() else None

    def save(self, choice: FormChoice) -> None:
        """Store a choice; a folder that cannot be written only costs the next start a measurement."""
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile(
                "w", encoding="utf-8", dir=self._path.parent, delete=False
            ) as file:
                json.dump(asdict(choice), file)
            Path(file.name).replace(self._path)
        except OSError as error:
            logger.warning("the measured form could not be stored: %s", error.strerror)


def choose_dtype(settings: NodeSettings, stored: torch.dtype, remembered: FormChoice | None) -> torch.dtype:
    """The compute dtype: as set, as remembered, the checkpoint's own on a GPU, else by measuring on the CPU.

    Where a fast runner may be used on a CPU it is float32: that is what its rows are, whatever the weights.
    """
    if settings.dtype != "auto":
        return DTYPES[settings.dtype]
    if not settings.device.startswith("cpu"):
        return stored
    if settings.runner in ("auto", "fast"):
        return torch.float32
    if remembered is not None:
        return DTYPES[remembered.dtype]
    return torch.bfloat16 if stored == torch.bfloat16 and _is_bfloat16_faster() else torch.float32


def choose_block_dtype(settings: NodeSettings, stored: torch.dtype) -> torch.dtype:
    """The compute dtype of a diffusion model's blocks: as set, else float32 on a CPU, the checkpoint's own elsewhere.

    Blocks are run as they are in stock: raises SettingsError where another runner, or packed weights, are asked for.
    """
    if settings.runner not in ("auto", "plain"):
        raise SettingsError(
            f"a diffusion model's blocks are run as they are in stock, not by the {settings.runner} runner: "
            "leave --runner out"
        )
    if settings.weights == "int8":
        raise SettingsError("a diffusion model's blocks hold their weights as bf16 or fp32, not as int8")
    if settings.dtype != "auto":
        return DTYPES[settings.dtype]
    if settings.weights != "auto":
        return torch.bfloat16 if settings.weights == "bf16" else torch.float32
    return compute_dtype(stored, settings.device)


def choose_threads(
    settings: NodeSettings,
    measure_ms: Callable[[], float],
    remembered: FormChoice | None,
    set_threads: Callable[[int], None] = torch.set_num_threads,
) -> int:
    """The number of threads, set when this returns; `measure_ms` times one decode row."""
    threads = settings.threads or (remembered.threads if remembered is not None else None)
    if threads is None and not settings.device.startswith("cpu"):
        threads = 1
    if threads is None:
        candidates = thread_candidates(num_cores())
        times_ms = {threads: _measure_with(threads, measure_ms, set_threads) for threads in candidates}
        threads = fewest_good_threads(times_ms)
        logger.info("ms per layer by threads: %s", {n: round(ms, 3) for n, ms in times_ms.items()})
    set_threads(threads)
    return threads


def use_threads(runner: object, threads: int) -> None:
    """Let a runner compute with so many threads, in the calling thread. Those of a fast runner are its own."""
    set_own = getattr(runner, "set_threads", None)
    torch.set_num_threads(threads if set_own is None else 1)
    if set_own is not None:
        set_own(threads)


def fewest_good_threads(times_ms: dict[int, float]) -> int:
    """The smallest number of threads that is within `FEWER_THREADS_GAIN` of the best time."""
    limit_ms = min(times_ms.values()) * FEWER_THREADS_GAIN
    return min(threads for threads, ms in times_ms.items() if ms <= limit_ms)


def thread_candidates(cores: int) -> list[int]:
    """1, 2, 4, ... and all of the cores."""
    powers = [2**power for power in range(cores.bit_length()) if 2**power < cores]
    return [*powers, cores]


def num_cores() -> int:
    """Physical cores that this process may use."""
    physical = psutil.cpu_count(logical=False) or os.cpu_count() or 1
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else physical
    return max(1, min(physical, allowed))


def describe_machine() -> str:
    """What a measurement holds for: processor, cores, torch."""
    return f"{platform.machine()} {_processor_name()} {num_cores()} torch-{torch.__version__}"


def _processor_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")


def _measure_with(threads: int, measure_ms: Callable[[], float], set_threads: Callable[[int], None]) -> float:
    set_threads(threads)
    return min(measure_ms() for _ in range(MEASUREMENTS))


def _is_bfloat16_faster() -> bool:
    """Whether matrix products are, at every probed number of rows; a few milliseconds and megabytes."""
    return all(
        _probe_s(torch.float32, rows) > CLEARLY_FASTER * _probe_s(torch.bfloat16, rows) for rows in PROBE_ROWS
    )


def _probe_s(dtype: torch.dtype, rows: int) -> float:
    weight = torch.ones(PROBE_WIDTH, PROBE_WIDTH, dtype=dtype)
    states = torch.ones(rows, PROBE_WIDTH, dtype=dtype)
    times = []
    for _ in range(8):
        started = time.perf_counter()
        torch.nn.functional.linear(states, weight)
        times.append(time.perf_counter() - started)
    return min(times[1:])
