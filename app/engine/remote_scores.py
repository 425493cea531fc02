"""The scores that a last node sends with each token that it draws: read and checked, for nodes are not trusted.

A row is pairs of (u32 id, f32 number), as candidates are: the drawn token with its logit, a pair of no id with the
log-sum-exp of all logits, then the likeliest tokens with theirs. A node that knows nothing of this sends other rows.
"""

from __future__ import annotations

import numpy as np

from app.engine.request import RequestError
from routing.answers import CANDIDATE_BYTES
from routing.errors import ErrorCode, ProtocolError, WorkError
from routing.types import NO_TOKEN, Answer, AnswerKind
from slicing.token_scores import TokenScore

PAIR = np.dtype([("id", "<u4"), ("logit", "<f4")])
SLACK = 1e-3  # of a sum in float32: no token is likelier than certain


def read_scores(answer: Answer, vocab_size: int, num_top: int) -> tuple[TokenScore, ...]:
    """Return the score of each row's token.

    Raises RequestError for a node that sends none, WorkError or ProtocolError for what can be none.
    """
    width = 2 + min(num_top, vocab_size)
    is_scored = len(answer.payload) == answer.rows * width * CANDIDATE_BYTES
    if answer.kind is not AnswerKind.CANDIDATES or not is_scored:
        raise _unknown()
    pairs = np.frombuffer(answer.payload, dtype=PAIR).reshape(answer.rows, width)
    if (pairs["id"][:, 1] != NO_TOKEN).any():
        raise _unknown()
    if not np.isfinite(pairs["logit"][:, :2]).all() or np.isnan(pairs["logit"]).any():
        raise WorkError(ErrorCode.COMPUTE, "the last node returned numbers that are not finite")
    ids = np.delete(pairs["id"], 1, axis=1)
    logprobs = np.delete(pairs["logit"], 1, axis=1).astype(np.float64) - pairs["logit"][:, 1:2]
    if ids.max() >= vocab_size or logprobs.max() > SLACK:
        raise ProtocolError(ErrorCode.MALFORMED, "the last node drew a token that cannot be")
    rows = zip(ids.tolist(), np.minimum(logprobs, 0.0).tolist(), strict=True)
    return tuple(
        TokenScore(row_ids[0], own[0], tuple(zip(row_ids[1:], own[1:], strict=True))) for row_ids, own in rows
    )


def _unknown() -> RequestError:
    text = "the last node of the route does not tell probabilities of tokens: it runs an older version"
    return RequestError("logprobs", "unsupported_by_route", text)
