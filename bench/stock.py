"""The other side of a comparison: the whole model in one process, through transformers' own `generate`.

Run as a child (`python -m bench.stock FOLDER THREADS`): a line of JSON in, a line of JSON out, so that it takes turns
with the swarm inside one run.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any


class StockProcess:
    """A child that holds the whole model. Use as a context manager."""

    def __init__(self, folder: Path, threads: int) -> None:
        env = os.environ | {"OMP_NUM_THREADS": str(threads)}
        self._child = subprocess.Popen(
            [sys.executable, "-W", "ignore", "-m", "bench.stock", str(folder), str(threads)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env=env,
        )

    def __enter__(self) -> StockProcess:
        self._read()
        return self

    def __exit__(self, *_: object) -> None:
        assert self._child.stdin is not None
        self._child.stdin.close()
        self._child.wait(timeout=30)

    def generate(self, prompt_ids: list[int], num_tokens: int) -> dict[str, Any]:
        """Greedy: {"seconds", "ids"}."""
        assert self._child.stdin is not None
        self._child.stdin.write(json.dumps({"prompt_ids": prompt_ids, "num_tokens": num_tokens}) + "\n")
        self._child.stdin.flush()
        return self._read()

    def _read(self) -> dict[str, Any]:
        assert self._child.stdout is not None
        line = self._child.stdout.readline()
        if not line:
            raise RuntimeError("the stock process ended")
        answer: dict[str, Any] = json.loads(line)
        return answer


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
