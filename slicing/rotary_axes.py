"""Tells how many axes the positions of a model's rows have: time, height and width where it sees, or one.

Tried on a runner of a miniature, since families name it in many ways.
"""

from __future__ import annotations

import torch

from slicing.batch import Work
from slicing.runner import PlainRunner

SEVERAL = 3  # wherever there are more than one
TRIED_ROWS = 5


def rotary_axes(plain: PlainRunner) -> int:
    """Return the most axes: several where a whole model takes them, and equal ones are what it counts by itself."""
    if not plain.max_axes:
        return 0
    token_ids = torch.arange(TRIED_ROWS) + 4
    counted = torch.arange(TRIED_ROWS).expand(SEVERAL, -1)
    expected = _states(plain, Work(plain.new_cache(), token_ids, 0))
    try:
        made = _states(plain, Work(plain.new_cache(), token_ids, 0, places=counted))
    except Exception:  # stock code of any family, given positions that it may not know
        return 1
    return SEVERAL if torch.equal(made, expected) else 1


def _states(plain: PlainRunner, work: Work) -> torch.Tensor:
    return plain.run_opening_batch([work], end=plain.num_layers)[0]
