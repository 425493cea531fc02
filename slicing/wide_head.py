"""Computes a single row of a large linear layer in several threads, with the bits of one.

The head is read once per token, as fast as memory gives it, and the math library keeps single-row products to one
core. Nothing spins: where no core is free, it takes as long as before. Knows nothing of models.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise

import torch
from torch import nn
from torch.nn import functional

MIN_SHARE_BYTES = 8 << 20  # a smaller share costs more in waking a thread (some 50 us) than it saves
ALIGNMENT = 64  # outputs; a share begins where kernels like to begin


def widen(linear: nn.Linear, num_threads: int) -> bool:
    """Give `linear` a forward that shares single rows among threads; tell whether it was done.

    It is not done where the layer is small, not on a CPU, or where a trial row shows other bits.
    """
    shares = _shares(linear, num_threads)
    if len(shares) < 2:
        return False
    plain = linear.forward
    pool = ThreadPoolExecutor(
        len(shares) - 1, thread_name_prefix="head", initializer=torch.set_num_threads, initargs=(1,)
    )

    def run(row: torch.Tensor, share: tuple[int, int]) -> torch.Tensor:
        begin, end = share
        bias = None if linear.bias is None else linear.bias[begin:end]
        with torch.inference_mode():
            return functional.linear(row, linear.weight[begin:end], bias)

    def forward(rows: torch.Tensor) -> torch.Tensor:
        if rows.numel() != linear.in_features:
            return plain(rows)
        others = [pool.submit(run, rows, share) for share in shares[1:]]
        return torch.cat([run(rows, shares[0]), *(other.result() for other in others)], dim=-1)

    with torch.inference_mode():
        trial = torch.randn(1, 1, linear.in_features).to(linear.weight.dtype)
        is_same = torch.equal(plain(trial), forward(trial))
    if is_same:
        linear.forward = forward  # type: ignore[method-assign, assignment]
    return is_same


def _shares(linear: nn.Linear, num_threads: int) -> list[tuple[int, int]]:
    if linear.weight.device.type != "cpu":
        return []
    num = min(num_threads, linear.weight.nbytes // MIN_SHARE_BYTES)
    width = -(-linear.out_features // (max(num, 1) * ALIGNMENT)) * ALIGNMENT
    return list(pairwise([*range(0, linear.out_features, width), linear.out_features]))
