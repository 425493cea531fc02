"""How likely tokens are by the model alone: natural logarithms of probabilities, of one token and of the likeliest.

Whoever draws may bend the distribution (bias, penalties, temperature, a grammar); these numbers are of the logits as
they left the head.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch


@dataclass(frozen=True, slots=True)
class TokenScore:
    """A token, its log-probability, and the likeliest tokens of its place with theirs, best first."""

    token_id: int = field(repr=False)
    logprob: float
    top: tuple[tuple[int, float], ...] = field(default=(), repr=False)


def score_of(logits: torch.Tensor, token_id: int, num_top: int) -> TokenScore:
    """Score a token by `logits` [vocab], in float32. Of equal ones the lower id counts as the likelier."""
    return scores_of(logits.reshape(1, -1), (token_id,), num_top)[0]


def scores_of(logits: torch.Tensor, token_ids: Sequence[int], num_top: int) -> tuple[TokenScore, ...]:
    """Score one token for each row of `logits` [tokens, vocab]."""
    rows = logits.detach().to(device="cpu", dtype=torch.float32).log_softmax(dim=-1)
    own = rows[torch.arange(len(token_ids)), torch.tensor(list(token_ids), dtype=torch.int64)].tolist()
    return tuple(
        TokenScore(token_id, logprob, best)
        for token_id, logprob, best in zip(token_ids, own, _best(rows, num_top), strict=True)
    )


def likeliest(logits: torch.Tensor, num: int) -> tuple[list[int], list[float], float]:
    """Return the best ids of `logits` [vocab] with their logits as they are, best first, and the log-sum-exp of all."""
    row = logits.detach().to(device="cpu", dtype=torch.float32)
    best = _best(row.reshape(1, -1), num)[0]
    return [token_id for token_id, _ in best], [value for _, value in best], float(row.logsumexp(dim=-1))


def _best(rows: torch.Tensor, num: int) -> list[tuple[tuple[int, float], ...]]:
    if not num:
        return [()] * len(rows)
    values, ids = rows.topk(min(num, rows.shape[-1]), dim=-1)
    pairs = (
        zip(row_ids, row_values, strict=True)
        for row_ids, row_values in zip(ids.tolist(), values.tolist(), strict=True)
    )
    return [tuple(sorted(row, key=lambda pair: (-pair[1], pair[0]))) for row in pairs]
