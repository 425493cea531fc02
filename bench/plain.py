"""The plain runner against transformers' own loop, over the same weights in one process: their bits, and their time.

Rounds take turns; what counts is the ratio of each pair, in time of the processor.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from transformers import AutoModelForCausalLM
from transformers.cache_utils import DynamicCache

from bench.local_swarm import MODEL
from bench.report import Report, quartiles
from slicing.ends import Parts
from slicing.model_kind import shape_of
from slicing.model_source import open_checkpoint
from slicing.runner import PlainRunner

SECTION = "plain"
PROMPT_ROWS = 128
NUM_STEPS = 64
ROUNDS = 9
# Of one call: token ids [rows] at a position -> logits [1, vocab] of the last row.
Call = Callable[[torch.Tensor, int], torch.Tensor]


@dataclass(frozen=True)
class Run:
    """One prompt and its answer, greedily."""

    logits: list[torch.Tensor]  # [1, vocab] of every call
    prefill_s: float  # of the processor
    decode_s: float
    prefill_wall_s: float
    decode_wall_s: float


@torch.inference_mode()
def measure_plain(report: Report, *, rounds: int = ROUNDS) -> None:
    """At least as fast as transformers for the same calls, and bit for bit the same."""
    report.section(SECTION)
    torch.set_num_threads(1)
    checkpoint = open_checkpoint(MODEL)
    model: Any = AutoModelForCausalLM.from_pretrained(checkpoint.folder, dtype=torch.float32)
    runner = PlainRunner.from_model(model, Parts.whole(shape_of(checkpoint.config).num_layers))
    ours: list[Run] = []
    theirs: list[Run] = []
    for number in range(rounds + 1):  # the first one warms up, and is not counted
        pair = [(theirs, _stock), (ours, _plain)]
        for runs, begin in pair if number % 2 else reversed(pair):
            runs.append(_run(begin(runner if begin is _plain else model)))
    same = all(
        torch.equal(one, other)
        for mine, stock in zip(ours, theirs, strict=True)
        for one, other in zip(mine.logits, stock.logits, strict=True)
    )
    report.add(
        SECTION, f"logits of {rounds + 1} x {NUM_STEPS + 1} calls equal to transformers'", same, "", "True"
    )
    _add(report, "prefill", "transformers' time over ours", theirs, ours, lambda run: run.prefill_s, ">= 1")
    _add(report, "decode", "transformers' time over ours", theirs, ours, lambda run: run.decode_s, ">= 1")
    _add(report, "prefill", "the same by wall clock", theirs, ours, lambda run: run.prefill_wall_s)
    _add(report, "decode", "the same by wall clock", theirs, ours, lambda run: run.decode_wall_s)
    report.add(
        SECTION, "decode: our step", quartiles([run.decode_s / NUM_STEPS * 1000 for run in ours[1:]]), "ms"
    )


def _add(
    report: Report,
    part: str,
    name: str,
    theirs: list[Run],
    ours: list[Run],
    seconds: Callable[[Run], float],
    bar: str = "",
) -> None:
    rows = f"{PROMPT_ROWS} rows" if part == "prefill" else f"{NUM_STEPS} steps"
    ratios = [seconds(stock) / seconds(mine) for stock, mine in zip(theirs[1:], ours[1:], strict=True)]
    report.add(SECTION, f"{part} of {rows}: {name}", quartiles(ratios), "", bar)


def _plain(runner: PlainRunner) -> Call:
    cache = runner.new_cache()
    return lambda token_ids, position: runner.run_whole(cache, token_ids, position)


def _stock(model: Any) -> Call:
    cache = DynamicCache(config=model.config)

    def call(token_ids: torch.Tensor, position: int) -> torch.Tensor:
        made = model(token_ids.unsqueeze(0), past_key_values=cache, logits_to_keep=1)
        return made.logits[0]  # type: ignore[no-any-return]

    return call


def _run(call: Call) -> Run:
    begun = time.thread_time(), time.perf_counter()
    logits = [call(torch.arange(PROMPT_ROWS) * 7919 % 20000 + 100, 0)]
    prefilled = time.thread_time(), time.perf_counter()
    for step in range(NUM_STEPS):
        logits.append(call(logits[-1].argmax(-1), PROMPT_ROWS + step))
    ended = time.thread_time(), time.perf_counter()
    return Run(
        logits,
        prefilled[0] - begun[0],
        ended[0] - prefilled[0],
        prefilled[1] - begun[1],
        ended[1] - prefilled[1],
    )
