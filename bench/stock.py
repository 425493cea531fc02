"""The other side of a comparison: the whole model in one process, through transformers' own `generate`.

Run as a child (`python -m bench.stock FOLDER THREADS`): a line of JSON in, a line of JSON out, so that it takes turns
with the swarm inside one run.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

from bench.children import JsonChild


class StockProcess(JsonChild):
    """A child that holds the whole model. Use as a context manager."""

    def __init__(self, folder: Path, threads: int) -> None:
        command = [sys.executable, "-W", "ignore", "-m", "bench.stock", str(folder), str(threads)]
        super().__init__(command, threads=threads)

    def generate(self, prompt_ids: list[int], num_tokens: int) -> dict[str, Any]:
        """Greedy: {"seconds", "ids"}."""
        return self.ask(prompt_ids=prompt_ids, num_tokens=num_tokens)


def main() -> None:
    """Answer requests until standard input ends."""
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(int(sys.argv[2]))
    model = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.float32)
    print(json.dumps({"ready": True}), flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        ids = torch.tensor([request["prompt_ids"]])
        begun = time.perf_counter()
        out = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=request["num_tokens"],
            min_new_tokens=request["num_tokens"],
            do_sample=False,
        )
        seconds = time.perf_counter() - begun
        print(json.dumps({"seconds": seconds, "ids": out[0, ids.shape[1] :].tolist()}), flush=True)


if __name__ == "__main__":
    main()
