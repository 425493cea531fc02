"""Machine code is kept between processes, and kernels that cannot be trusted say so."""

import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from slicing.fast import compiling, self_test
from slicing.fast.compiling import KernelsUnusable

PROGRAM = """
import slicing.fast.tiles
from slicing.fast.linking import load_linked
print(load_linked())
"""


def num_compiled(cache: Path) -> int:
    environment = {**os.environ, "DIFFUSE_KERNEL_CACHE": str(cache)}
    told = subprocess.run(
        [sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True, check=True
    )
    return int(told.stdout)


def test_a_second_process_compiles_nothing(tmp_path: Path) -> None:
    assert num_compiled(tmp_path) == 3  # the products of three forms
    assert num_compiled(tmp_path) == 0


def test_a_wrong_sum_makes_the_kernels_unusable(monkeypatch: pytest.MonkeyPatch) -> None:
    product = self_test._product
    monkeypatch.setattr(self_test, "_product", lambda *args: product(*args) * np.float32(1.001))
    with pytest.raises(KernelsUnusable, match="wrong sums"):
        self_test.check_products()


def test_bits_that_depend_on_the_neighbours_make_the_kernels_unusable(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    product = self_test._product

    def nudged(executor, packed, x):
        return product(executor, packed, x) + np.float32(1e-6 if len(x) == 3 else 0)

    monkeypatch.setattr(self_test, "_product", nudged)
    with pytest.raises(KernelsUnusable, match="rows beside it"):
        self_test.check_products()


def test_a_processor_without_fused_multiply_add_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiling, "has_feature", lambda name: False)
    monkeypatch.setattr(compiling.platform, "machine", lambda: "x86_64")
    with pytest.raises(KernelsUnusable, match="multiply-add"):
        compiling.compile_kernels.__wrapped__()


def test_code_of_versions_long_unused_is_deleted(tmp_path: Path) -> None:
    ours, old, other = (tmp_path / name for name in ("a" * 16, "b" * 16, "c" * 16))
    for folder in (ours, old, other):
        folder.mkdir()
    long_ago = time.time() - compiling.KEPT_S - 1
    os.utime(old, (long_ago, long_ago))
    compiling._forget_others(ours)
    assert sorted(tmp_path.iterdir()) == [ours, other]


def test_the_kernels_pass_their_own_test() -> None:
    compiling.load_kernels()
