"""Tries the compiled products before a model rests on them: a wrong one must cost the fast path, never an answer.

Knows nothing of models.
"""

from __future__ import annotations

from typing import get_args

import numpy as np
import torch
from numpy.typing import NDArray

from slicing.fast.compiling import KernelsUnusable
from slicing.fast.execute import Executor, StepWork, Workspace
from slicing.fast.packing import Form, PackedWeight, pack, unpack
from slicing.fast.program import ProgramBuilder

ROWS, OUTPUTS, COLUMNS = 17, 72, 84  # a short panel and a short group at the end of each
ROW_COUNTS = (1, 2, 3, 5, 8)  # every tile, and rows left over
TOLERANCE = 1e-5  # of the sum of the magnitudes: 84 roundings are at most 84 * 2**-24 = 5e-6


def check_products() -> None:
    """Raise `KernelsUnusable` where a linear layer is wrong, or a row's bits depend on the rows beside it."""
    generator = torch.Generator().manual_seed(1)
    weight = torch.randn(OUTPUTS, COLUMNS, generator=generator)
    x = torch.randn(ROWS, COLUMNS, generator=generator).numpy()
    executor = Executor()
    for form in get_args(Form):
        packed = pack(weight, form)
        whole = _product(executor, packed, x)
        _check_sums(form, unpack(packed).numpy(), x, whole)
        for count in ROW_COUNTS:
            if not np.array_equal(_product(executor, packed, x[ROWS - count :]), whole[ROWS - count :]):
                raise KernelsUnusable(f"a row's bits depend on the rows beside it in the {form} kernel")
    executor.close()


def _product(executor: Executor, packed: PackedWeight, x: NDArray[np.float32]) -> NDArray[np.float32]:
    builder = ProgramBuilder()
    src, dst = builder.buffer(packed.columns), builder.buffer(packed.rows)
    builder.linear(src, dst, packed)
    workspace = Workspace(builder.build())
    workspace.begin([StepWork(0, len(x))])
    workspace.buffer(src)[: len(x), : packed.columns] = x
    executor.run(workspace)
    return workspace.buffer(dst)[: len(x), : packed.rows]


def _check_sums(
    form: str, weight: NDArray[np.float32], x: NDArray[np.float32], result: NDArray[np.float32]
) -> None:
    exact = x.astype(np.float64) @ weight.T.astype(np.float64)
    bound = TOLERANCE * (np.abs(x).astype(np.float64) @ np.abs(weight).T.astype(np.float64))
    if not np.all(np.abs(result - exact) <= bound):
        raise KernelsUnusable(f"the {form} kernel computes wrong sums on this machine")
