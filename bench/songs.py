"""Songs in company: tokens/s of several songs that share a runner's calls, over one song alone, in one run.

A music model of stock classes with random weights, as wide as a small real one's middle layers; guidance makes two
branches of every song. The plain runner, which computes every branch by itself, is measured beside it. One thread, by
its own time, so that a busy machine's other work does not count.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from typing import Any

import torch
from transformers import EncodecConfig, MusicgenConfig, T5Config
from transformers.models.musicgen.configuration_musicgen import MusicgenDecoderConfig

from bench.report import Report
from slicing.batch import Work
from slicing.branches import BranchedCache
from slicing.ends import Parts
from slicing.invariant import InvariantRunner
from slicing.runner import PlainRunner
from slicing.stacks import new_model

SECTION = "songs"
SONGS = (1, 2, 4)
BRANCHES = 2
STREAMS = 4
NUM_LAYERS, WIDTH, CODES = 6, 512, 2048
PROMPT_ROWS = (12, 20, 31, 9)  # of encoder states, of each song
FRAMES = 32
ROUNDS = 3


def measure_songs(report: Report) -> None:
    """Four songs together at least twice as fast as one alone."""
    report.section(SECTION)
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        model = _model()
        runners = {
            "shared calls": InvariantRunner.from_model(model, Parts.whole(NUM_LAYERS)),
            "plain": PlainRunner.from_model(model, Parts.whole(NUM_LAYERS)),
        }
        speeds: dict[tuple[str, int], list[float]] = {}
        for number in range(ROUNDS + 1):  # the first warms up
            for name, runner in runners.items():
                for songs in SONGS:
                    speed = _frames_per_s(runner, songs)
                    if number:
                        speeds.setdefault((name, songs), []).append(speed * STREAMS)
    finally:
        torch.set_num_threads(before)
    for (name, songs), measured in speeds.items():
        report.add(SECTION, f"{name}: {songs} song(s)", statistics.median(measured), "tokens/s")
    for name, bar in (("shared calls", ">= 2"), ("plain", "")):
        ratio = _ratio(speeds[name, SONGS[-1]], speeds[name, 1])
        report.add(SECTION, f"{name}: {SONGS[-1]} songs over 1", ratio, "x", bar)
    together = _ratio(speeds["shared calls", SONGS[-1]], speeds["plain", SONGS[-1]])
    report.add(SECTION, f"{SONGS[-1]} songs: shared calls over plain", together, "x")


def _frames_per_s(runner: PlainRunner, songs: int) -> float:
    """Frames of all songs by second of the thread's own time; the first, which makes keys of the prompts, left out."""
    caches = [_cache(runner, song) for song in range(songs)]
    frame = torch.full((BRANCHES, STREAMS), CODES)
    _step(runner, caches, frame, 0)
    begun = time.thread_time()
    for position in range(1, FRAMES):
        _step(runner, caches, frame, position)
    return (FRAMES - 1) * songs / (time.thread_time() - begun)


def _step(runner: PlainRunner, caches: Sequence[Any], frame: torch.Tensor, position: int) -> None:
    works = [Work(cache, frame, position, range(BRANCHES)) for cache in caches]
    states = runner.run_opening_batch(works, end=NUM_LAYERS)
    closing = [Work(work.cache, rows, position, work.keep) for work, rows in zip(works, states, strict=True)]
    runner.run_closing_batch(closing, start=NUM_LAYERS)


def _cache(runner: PlainRunner, song: int) -> BranchedCache:
    cache = BranchedCache([runner.new_cache() for _ in range(BRANCHES)])
    cache.add_memory(torch.randn(PROMPT_ROWS[song] * BRANCHES, WIDTH))
    return cache


def _model() -> Any:
    decoder = MusicgenDecoderConfig(
        vocab_size=CODES,
        hidden_size=WIDTH,
        num_hidden_layers=NUM_LAYERS,
        ffn_dim=4 * WIDTH,
        num_attention_heads=8,
        num_codebooks=STREAMS,
        max_position_embeddings=512,
        pad_token_id=CODES,
        bos_token_id=CODES,
    )
    text = T5Config(vocab_size=50, d_model=16, d_kv=8, d_ff=32, num_layers=1, num_heads=2)
    codec = EncodecConfig(codebook_size=CODES, num_filters=4, hidden_size=16, codebook_dim=16)
    config = MusicgenConfig(
        text_encoder=text.to_dict(), audio_encoder=codec.to_dict(), decoder=decoder.to_dict()
    )
    torch.manual_seed(0)
    return new_model(config, torch.float32).eval().requires_grad_(False)


def _ratio(ones: Sequence[float], others: Sequence[float]) -> float:
    return statistics.median(one / other for one, other in zip(ones, others, strict=True))
