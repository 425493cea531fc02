"""`diffuse bench`: measure any swarm, from wherever this client stands.

Asks through the same answerers as `query`; the repository's own harness under bench/ measures the code
instead.
"""

from __future__ import annotations

import asyncio
import os
import platform
import random
import statistics
import time
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Annotated, Any, Final

import typer

from cli import options as opt
from cli import show
from cli.answer import Answerer, End, Piece, Question, Timings
from cli.failures import CommandError
from cli.runtime import run_asking
from cli.target import Target, open_answerer
from routing.tls_files import TlsFiles

# Short common words are one token each in most vocabularies; the real count is read from the answer's usage.
_WORDS: Final = ("time", "year", "people", "way", "day", "man", "thing", "life", "child", "world", "school")


_SHARES: Final = ("compute", "local", "network", "crypto", "queue")


@dataclass(frozen=True, slots=True)
class Load:
    """What to ask, and how often."""

    prompt_tokens: int
    generate: int
    repeats: int
    concurrency: int
    warmup: int


@dataclass(frozen=True, slots=True)
class Sample:
    """One measured answer. `first_s` is from asking to the first piece of text, as the client sees it.

    `prefilled` are the timings told with the first token: what comes after them is the price of the others.
    """

    first_s: float
    end: End
    prefilled: Timings | None = None

    def ms_per_token(self, share: str) -> float | None:
        """Milliseconds per token after the first that went to this share of the time; None where it is not told."""
        before = getattr(self.prefilled, share, None)
        after = getattr(self.end.timings, share)
        if self.prefilled is None or before is None or after is None:
            return None
        num_tokens = self.end.timings.tokens - self.prefilled.tokens
        return 1000 * float(after - before) / num_tokens if num_tokens > 0 else None


@dataclass(frozen=True, slots=True)
class Round:
    """Answers that ran at the same time."""

    wall_s: float
    samples: tuple[Sample, ...]

    @property
    def tokens_per_s(self) -> float:
        """Of all answers together."""
        return sum(sample.end.completion_tokens for sample in self.samples) / self.wall_s


@dataclass(frozen=True, slots=True)
class Quartiles:
    """Median and quartiles of one quantity."""

    q1: float
    median: float
    q3: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Quartiles:
        """Inclusive quartiles: the values are the whole population that was measured."""
        if len(values) == 1:
            return cls(values[0], values[0], values[0])
        return cls(*statistics.quantiles(values, n=4, method="inclusive"))

    def as_map(self, digits: int = 4) -> dict[str, float]:
        """For JSON."""
        return {
            "q1": round(self.q1, digits),
            "median": round(self.median, digits),
            "q3": round(self.q3, digits),
        }


def bench(
    url: opt.UrlOption = None,
    api_key: opt.ApiKeyOption = None,
    node: opt.NodesOption = None,
    model: opt.AskModelOption = None,
    prompt_tokens: Annotated[
        int, typer.Option("--prompt-tokens", min=1, help="Length of each prompt, about.")
    ] = 64,
    generate: Annotated[int, typer.Option("--generate", min=2, help="Tokens to generate each time.")] = 64,
    repeats: Annotated[int, typer.Option("--repeats", min=1, help="Rounds measured.")] = 5,
    concurrency: Annotated[int, typer.Option("--concurrency", min=1, help="Answers at once in a round.")] = 1,
    warmup: Annotated[int, typer.Option("--warmup", min=0, help="Rounds before, not counted.")] = 1,
    ends: opt.EndsOption = opt.Ends.LOCAL,
    local_layers: opt.LocalLayersOption = "1:0",
    wire: opt.WireOption = opt.Wire.AUTO,
    network: opt.NetworkOption = opt.DEFAULT_NETWORK,
    psk_file: opt.PskFileOption = None,
    tls_cert: opt.TlsCertOption = None,
    tls_key: opt.TlsKeyOption = None,
    tls_ca: opt.AskTlsCaOption = None,
    threads: opt.ThreadsOption = None,
    json: opt.JsonOption = False,
) -> None:
    """Measure a gateway (--url) or, running the engine here, nodes (--node): medians with quartiles."""
    target = Target(
        url,
        api_key,
        model,
        tuple(node or ()),
        ends,
        local_layers,
        wire,
        network,
        psk_file,
        threads,
        tls=TlsFiles(tls_cert, tls_key, tls_ca),
    )
    load = Load(prompt_tokens, generate, repeats, concurrency, warmup)
    report = run_asking(_measure(target, load))
    show.print_json(report) if json else _print(report)


async def _measure(target: Target, load: Load) -> dict[str, Any]:
    async with open_answerer(target) as answerer:
        rounds = []
        for number in range(load.warmup + load.repeats):
            measured = await _run_round(answerer, load, number)
            if number >= load.warmup:
                rounds.append(measured)
                show.note(f"round {len(rounds)} of {load.repeats}: {measured.tokens_per_s:.1f} tokens/s")
        return report_of(target, answerer.model, load, rounds)


async def _run_round(answerer: Answerer, load: Load, number: int) -> Round:
    questions = [
        Question(
            opt.messages_of(prompt_of(load.prompt_tokens, seed=number * load.concurrency + index), None),
            max_tokens=load.generate,
            temperature=0.0,
            ignore_eos=True,
        )
        for index in range(load.concurrency)
    ]
    began = time.perf_counter()
    samples = await asyncio.gather(*(_sample(answerer, question) for question in questions))
    return Round(time.perf_counter() - began, tuple(samples))


async def _sample(answerer: Answerer, question: Question) -> Sample:
    began = time.perf_counter()
    first_s, prefilled = 0.0, None
    async with aclosing(answerer.answer(question)) as pieces:
        async for piece in pieces:
            match piece:
                case Piece():
                    prefilled = prefilled or piece.timings
                    first_s = first_s or (time.perf_counter() - began if piece.text else 0.0)
                case End():
                    return Sample(first_s or time.perf_counter() - began, piece, prefilled)
    raise CommandError("an answer ended without saying so")


def prompt_of(num_tokens: int, *, seed: int) -> str:
    """A prompt of about so many tokens that no cache has seen: common words in an order of their own."""
    draw = random.Random(seed)  # noqa: S311 - variety, not secrecy
    return " ".join(draw.choice(_WORDS) for _ in range(num_tokens))


def report_of(target: Target, model: str, load: Load, rounds: Sequence[Round]) -> dict[str, Any]:
    """Conditions first, then medians with quartiles over every answer (or round, for the total pace)."""
    samples = [sample for one in rounds for sample in one.samples]
    return {
        "conditions": {
            "target": target.describe(),
            "model": model,
            "measured_at": datetime.now(UTC).isoformat(timespec="seconds"),
            "client": f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores",
            "prompt_tokens": sorted({sample.end.prompt_tokens for sample in samples}),
            "generated_tokens": sorted({sample.end.completion_tokens for sample in samples}),
            "repeats": load.repeats,
            "concurrency": load.concurrency,
            "warmup": load.warmup,
        },
        "first_token_s": Quartiles.of([sample.first_s for sample in samples]).as_map(),
        "total_tokens_per_s": Quartiles.of([one.tokens_per_s for one in rounds]).as_map(2),
        **_per_token(samples),
        "replays": sum(sample.end.replays for sample in samples),
    }


def _per_token(samples: Sequence[Sample]) -> dict[str, dict[str, float]]:
    """What the other side tells; a quantity it does not tell is left out rather than shown as 0."""
    paces = [sample.end.timings.per_token_s for sample in samples]
    told = {"token_ms": [pace and 1000 * pace for pace in paces]}
    told |= {f"{share}_ms": [sample.ms_per_token(f"{share}_s") for sample in samples] for share in _SHARES}
    known = {name: [value for value in values if value is not None] for name, values in told.items()}
    return {name: Quartiles.of(values).as_map() for name, values in known.items() if values}


def _print(report: dict[str, Any]) -> None:
    for name, value in report["conditions"].items():
        show.out(f"{name:18} {', '.join(map(str, value)) if isinstance(value, list) else value}")
    grid = show.table("measured", "median", "q1", "q3")
    for name, value in report.items():
        if isinstance(value, dict) and "median" in value:
            grid.add_row(name, f"{value['median']:g}", f"{value['q1']:g}", f"{value['q3']:g}")
    show.out("")
    show.console().print(grid)
