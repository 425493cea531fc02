"""Our runner over a whole model in one process, asked as its peers are (see `padded_batch`).

Run as a child (`python -m bench.runner_child MODEL WEIGHTS THREADS`).
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any


def main() -> None:
    """Answer requests until standard input ends."""
    import torch

    from slicing.batch import Work
    from slicing.ends import Parts
    from slicing.load_runner import load_runner
    from slicing.model_kind import shape_of
    from slicing.model_source import open_checkpoint

    model, weights, threads = sys.argv[1], sys.argv[2], int(sys.argv[3])
    torch.set_num_threads(1)
    checkpoint = open_checkpoint(model)
    parts = Parts.whole(shape_of(checkpoint.config).num_layers)
    runner: Any = load_runner(checkpoint, parts, weights=weights, threads=threads)  # type: ignore[arg-type]
    end = runner.num_layers

    def feed(caches: list[Any], ids: list[torch.Tensor], position: int) -> torch.Tensor:
        """One step of all sessions: the greedy token of each."""
        works = [Work(cache, rows, position) for cache, rows in zip(caches, ids, strict=True)]
        states = runner.run_opening_batch(works, end=end)
        after = position + len(ids[0])
        last = [Work(cache, rows[-1:], after) for cache, rows in zip(caches, states, strict=True)]
        return torch.cat(runner.run_closing_batch(last, start=end)).argmax(-1)

    def some_tokens(seed: int, rows: int) -> torch.Tensor:
        return (torch.arange(rows) * 104729 + seed * 7919) % 20000 + 100

    def decode(sessions: int, past: int, tokens: int) -> float:
        caches = [runner.new_cache() for _ in range(sessions)]
        drawn = torch.stack([feed([cache], [some_tokens(n, past)], 0)[0] for n, cache in enumerate(caches)])
        begun = time.perf_counter()
        for step in range(tokens):
            drawn = feed(caches, list(drawn.unsqueeze(1)), past + step)
        seconds = time.perf_counter() - begun
        for cache in caches:
            cache.close()
        return seconds

    def prefill(rows: int) -> float:
        cache = runner.new_cache()
        begun = time.perf_counter()
        feed([cache], [some_tokens(1, rows)], 0)
        seconds = time.perf_counter() - begun
        cache.close()
        return seconds

    with torch.inference_mode():
        print(json.dumps({"ready": True, "form": runner.form}), flush=True)
        for line in sys.stdin:
            request = json.loads(line)
            seconds = decode(**request["decode"]) if "decode" in request else prefill(**request["prefill"])
            print(json.dumps({"seconds": seconds}), flush=True)


if __name__ == "__main__":
    main()
