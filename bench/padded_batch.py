"""transformers as the other side: one forward a step for a batch of equal lengths, float32, which is its best case.

Run as a child (`python -m bench.padded_batch FOLDER THREADS`): a line of JSON in, a line of JSON out.
    {"decode": {"sessions": 4, "past": 128, "tokens": 32}} -> {"seconds": ...}, the prompts not counted
    {"prefill": {"rows": 512}} -> {"seconds": ...}
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any


def main() -> None:
    """Answer requests until standard input ends."""
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.cache_utils import DynamicCache

    torch.set_num_threads(int(sys.argv[2]))
    model: Any = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.float32)

    def some_tokens(sessions: int, rows: int) -> torch.Tensor:
        return (torch.arange(sessions * rows) * 7919 % 20000 + 100).reshape(sessions, rows)

    def decode(sessions: int, past: int, tokens: int) -> float:
        cache = DynamicCache(config=model.config)
        logits = model(some_tokens(sessions, past), past_key_values=cache, logits_to_keep=1).logits
        begun = time.perf_counter()
        for _ in range(tokens):
            logits = model(logits[:, -1:].argmax(-1), past_key_values=cache, logits_to_keep=1).logits
        return time.perf_counter() - begun

    def prefill(rows: int) -> float:
        begun = time.perf_counter()
        model(some_tokens(1, rows), past_key_values=DynamicCache(config=model.config), logits_to_keep=1)
        return time.perf_counter() - begun

    with torch.inference_mode():
        print(json.dumps({"ready": True}), flush=True)
        for line in sys.stdin:
            request = json.loads(line)
            seconds = decode(**request["decode"]) if "decode" in request else prefill(**request["prefill"])
            print(json.dumps({"seconds": seconds}), flush=True)


if __name__ == "__main__":
    main()
