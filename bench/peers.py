"""Against what a user would otherwise run: transformers and llama.cpp, same model, same machine, taking turns.

Every program holds the whole model and is asked for the same work in alternation; medians and the ratios of each turn
are printed, whatever the outcome. llama.cpp comes as the npm package `node-llama-cpp`, which carries binaries; where
npm is missing its rows are left out, and that is said.
"""

from __future__ import annotations

import shutil
import statistics
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

from bench.children import JsonChild
from bench.q8_file import write_q8
from bench.report import Report
from slicing.cache import cache_root
from slicing.gguf import packaged_gguf
from slicing.model_source import open_checkpoint

MODEL = "smollm2"
NODE_LLAMA_CPP = "node-llama-cpp@3.21.1"
SESSIONS = (1, 2, 4, 8)
PAST, TOKENS, PREFILL = 128, 24, 512
OURS = ("fp32", "bf16", "int8")
SECTION = "peers"
BARS = {  # tokens/s of ours over theirs, at SESSIONS and at the prefill
    ("int8", "transformers"): (3.0, 3.0, 4.0, 3.0, 1.0),
    ("bf16", "transformers"): (2.0, 2.5, 2.5, 2.0, None),
    ("int8", "llama.cpp"): (0.9, None, 1.3, 1.2, 1.0),
}


def measure_peers(report: Report, *, rounds: int = 5, threads: int = 1) -> None:
    """Decode of 1 to 8 sessions and a prefill of 512 rows, everybody in turn, `rounds` times."""
    report.section(SECTION)
    with ExitStack() as stack:
        children = {
            name: stack.enter_context(JsonChild(command, threads=threads))
            for name, command in _commands(report, threads)
        }
        for number, request in enumerate(_requests()):
            times: dict[str, list[float]] = {name: [] for name in children}
            for _ in range(rounds + 1):  # the first warms up
                for name, child in children.items():
                    times[name].append(child.ask(**request)["seconds"])
            _tell(report, number, {name: taken[1:] for name, taken in times.items()}, threads)


def _requests() -> Iterator[dict[str, dict[str, int]]]:
    for sessions in SESSIONS:
        yield {"decode": {"sessions": sessions, "past": PAST, "tokens": TOKENS}}
    yield {"prefill": {"rows": PREFILL}}


def _tell(report: Report, number: int, times: dict[str, list[float]], threads: int) -> None:
    is_decode = number < len(SESSIONS)
    what = f"{SESSIONS[number]} session(s)" if is_decode else f"prefill {PREFILL}"
    what += f", {threads} thread(s)"
    work = SESSIONS[number] * TOKENS if is_decode else PREFILL
    for name, taken in times.items():
        report.add(SECTION, f"{what}: {name}", work / statistics.median(taken), "tokens/s")
    for ours in OURS:
        for theirs in [name for name in times if name not in OURS]:
            ratios = [one / other for one, other in zip(times[theirs], times[ours], strict=True)]
            bar = BARS.get((ours, theirs), (None,) * (len(SESSIONS) + 1))[number] if threads == 1 else None
            name = f"{what}: {ours} over {theirs}"
            report.add(SECTION, name, statistics.median(ratios), "x", f">= {bar}" if bar else "")


def _commands(report: Report, threads: int) -> Iterator[tuple[str, list[str]]]:
    python = [sys.executable, "-W", "ignore", "-m"]
    folder = open_checkpoint(MODEL).folder
    for weights in OURS:
        yield weights, [*python, "bench.runner_child", MODEL, weights, str(threads)]
    yield "transformers", [*python, "bench.padded_batch", str(folder), str(threads)]
    if (modules := _node_llama_cpp()) is None:
        report.add(SECTION, "llama.cpp", "left out: there is no npm here")
        return
    model = cache_root() / "peers" / "smollm2-q8_0.gguf"
    write_q8(packaged_gguf(MODEL, None), model)
    script = str(Path(__file__).with_name("llama_peer.mjs"))
    yield "llama.cpp", ["node", script, str(modules), str(model), str(threads), str(max(SESSIONS))]


def _node_llama_cpp() -> Path | None:
    """The folder that holds it, installed on first use; its install scripts (which would build) are not run."""
    if shutil.which("npm") is None:
        return None
    folder = cache_root() / "peers"
    if not (folder / "node_modules" / "node-llama-cpp").is_dir():
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "package.json").write_text("{}")
        command = ["npm", "install", "--ignore-scripts", "--no-audit", "--no-fund", NODE_LLAMA_CPP]
        subprocess.run(command, cwd=folder, check=True, stdout=subprocess.DEVNULL)
    return folder
