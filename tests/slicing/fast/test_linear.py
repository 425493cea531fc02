"""A linear layer's bits: one fused multiply-add per column, in order, whatever stands beside a row."""

import os
import platform
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from slicing.fast.execute import Executor, StepWork, Workspace
from slicing.fast.packing import PackedWeight, pack, unpack
from slicing.fast.program import Columns, ProgramBuilder

FORMS = ("fp32", "bf16", "int8")

# Compiles the linear kernel alone, for whatever processor the environment names, and prints its bits.
BITS = """
import hashlib
import numpy as np
from numba import njit
import torch
from slicing.fast.linear import linear_share
from slicing.fast.packing import aligned_zeros, pack

@njit(nogil=True)
def run(weight, x, x_stride, rows, out, out_stride, scratch):
    linear_share(weight, x, x_stride, rows, out, out_stride, 0, 0, 0, 1, scratch)

generator = torch.Generator().manual_seed(5)
weight, x = torch.randn(200, 300, generator=generator), torch.randn(70, 300, generator=generator).numpy()
scratch = aligned_zeros((256 << 10,), np.uint8)
digest = hashlib.sha256()
for form in ("fp32", "bf16", "int8"):
    packed = pack(weight, form)
    record = packed.record()
    for rows in (1, 2, 4, 7, 8, 70):
        out = np.zeros((rows, 208), np.float32)
        run(record.ctypes.data, x.ctypes.data, 1200, rows, out.ctypes.data, 832, scratch.ctypes.data)
        digest.update(out.tobytes())
print(digest.hexdigest())
"""
HASWELL = "+avx,+avx2,+fma,+bmi,+bmi2,+sse4.2,+popcnt,+lzcnt,+f16c,+movbe"


@pytest.fixture(scope="module")
def executor():
    made = Executor(2)
    yield made
    made.close()


@settings(max_examples=80, deadline=None)
@given(
    rows=st.integers(1, 60),
    outputs=st.integers(1, 130),
    columns=st.integers(1, 150),
    form=st.sampled_from(FORMS),
    threads=st.integers(1, 2),
    has_bias=st.booleans(),
    add=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_every_output_is_a_sum_in_order_of_columns(
    executor, rows, outputs, columns, form, threads, has_bias, add, seed
) -> None:
    generator = torch.Generator().manual_seed(seed)
    packed = pack(torch.randn(outputs, columns, generator=generator), form)
    x = torch.randn(rows, columns, generator=generator).numpy()
    bias = torch.randn(outputs, generator=generator).numpy() if has_bias else None
    before = torch.randn(rows, outputs, generator=generator).numpy()
    expected = sum_in_order(packed, x)
    expected = expected + bias if bias is not None else expected
    expected = before + expected if add else expected
    assert np.array_equal(run_linear(executor, packed, x, before, bias, add, threads), expected)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("threads", [1, 2])
def test_blocks_of_rows_columns_and_panels_change_no_bit(executor, form, threads) -> None:
    packed = pack(torch.randn(456, 300), form)
    x = torch.randn(300, 300).numpy()
    expected = sum_in_order(packed, x)
    assert np.array_equal(run_linear(executor, packed, x, None, None, False, threads), expected)


@pytest.mark.parametrize("form", FORMS)
def test_a_row_that_is_not_a_number_leaves_its_neighbours_alone(executor, form) -> None:
    packed = pack(torch.randn(40, 64), form)
    x = torch.randn(5, 64).numpy()
    expected = run_linear(executor, packed, x, None, None, False, 1)
    x[2] = np.nan
    result = run_linear(executor, packed, x, None, None, False, 1)
    assert np.isnan(result[2]).all()
    assert np.array_equal(np.delete(result, 2, 0), np.delete(expected, 2, 0))


def test_columns_beside_the_output_are_left_alone(executor) -> None:
    packed = pack(torch.randn(20, 24), "fp32")
    builder = ProgramBuilder()
    src, dst = builder.buffer(40), builder.buffer(64)
    builder.linear(Columns(src, 16), Columns(dst, 9), packed)
    workspace = Workspace(builder.build())
    workspace.begin([StepWork(0, 3)])
    workspace.buffer(src)[:3] = torch.randn(3, 48).numpy()
    workspace.buffer(dst)[:] = 7
    executor.run(workspace)
    result = workspace.buffer(dst)[:3]
    assert np.array_equal(result[:, 9:29], sum_in_order(packed, workspace.buffer(src)[:3, 16:40]))
    assert np.all(result[:, :9] == 7)
    assert np.all(result[:, 29:] == 7)


@pytest.mark.long
@pytest.mark.skipif(platform.machine() != "x86_64", reason="compiles for another x86-64 processor")
def test_another_processor_gets_the_same_bits(tmp_path: Path) -> None:
    other = {
        "NUMBA_CPU_NAME": "haswell",
        "NUMBA_CPU_FEATURES": HASWELL,
        "DIFFUSE_KERNEL_CACHE": str(tmp_path),
    }
    with ThreadPoolExecutor(2) as pool:
        ours, theirs = pool.map(bits_of, ({}, other))
    assert ours == theirs


def bits_of(environment: dict[str, str]) -> str:
    told = subprocess.run(
        [sys.executable, "-c", BITS],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=True,
    )
    return told.stdout.strip()


def sum_in_order(packed: PackedWeight, x: np.ndarray) -> np.ndarray:
    """One rounding a column: a product of float32 is exact in float64, and so is nearly every sum of it with one."""
    weight = unpack(packed).numpy().astype(np.float64)
    total = np.zeros((len(x), packed.rows), np.float32)
    for k in range(packed.columns):
        total = (x[:, k, None].astype(np.float64) * weight[None, :, k] + total).astype(np.float32)
    return total


def run_linear(executor, packed, x, before, bias, add, threads) -> np.ndarray:
    builder = ProgramBuilder()
    src, dst = builder.buffer(packed.columns), builder.buffer(packed.rows)
    builder.linear(src, dst, packed, bias, add)
    workspace = Workspace(builder.build(), max_threads=threads)
    workspace.begin([StepWork(0, len(x))])
    workspace.buffer(src)[: len(x), : packed.columns] = x
    if before is not None:
        workspace.buffer(dst)[: len(x), : packed.rows] = before
    assert executor.run(workspace, threads=threads)
    assert not workspace.buffer(dst)[:, packed.rows :].any()
    return workspace.buffer(dst)[: len(x), : packed.rows].copy()
