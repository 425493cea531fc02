"""Runs one program on works with given inputs: what the tests of kernels share."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from slicing.fast.execute import Executor, StepWork, Workspace
from slicing.fast.program import ProgramBuilder

Array = np.ndarray
EXECUTOR = Executor(1)


def run(
    workspace: Workspace,
    works: Sequence[StepWork],
    inputs: Mapping[int, Array],
    *,
    threads: int = 1,
    kept: Sequence[int] = (),
) -> int:
    """Run a step with buffers [rows, width] set to the inputs; return its rows."""
    rows = workspace.begin(works, kept)
    for number, values in inputs.items():
        buffer = workspace.buffer(number)
        buffer[:rows] = np.nan  # nothing may depend on what was there
        buffer[:rows, : values.shape[1]] = values
    assert EXECUTOR.run(workspace, threads=threads)
    return rows


def through(
    build: Callable[[ProgramBuilder, int, int], object],
    values: Array,
    width: int | None = None,
    *,
    threads: int = 1,
    position: int = 0,
) -> Array:
    """Build one operation from src [rows, columns] to dst (or in place) and return dst [rows, width]."""
    rows, columns = values.shape
    builder = ProgramBuilder()
    src = builder.buffer(columns)
    dst = builder.buffer(width or columns)
    build(builder, src, dst)
    workspace = Workspace(builder.build(), max_threads=threads)
    run(
        workspace, [StepWork(position, rows)], {src: values, dst: np.full((rows, 1), np.nan)}, threads=threads
    )
    return workspace.buffer(dst if width else src)[:rows, : width or columns].copy()


def normal(*shape: int, seed: int = 0, scale: float = 1.0) -> Array:
    """Return float32 from a normal distribution."""
    return (np.random.default_rng(seed).standard_normal(shape) * scale).astype(np.float32)


def bits(values: Array) -> bytes:
    """Return what two results are compared by."""
    return np.ascontiguousarray(values).tobytes()


def patterned(*shape: int) -> Array:
    """Return float32 between -4 and 4 that are the same on every machine, whatever its library's random numbers are."""
    count = int(np.prod(shape))
    return ((np.arange(count) * 7919 % 1021 - 510) / 128).astype(np.float32).reshape(shape)


def digest(values: Array) -> str:
    """Return a short name of these bits."""
    return hashlib.sha256(bits(values)).hexdigest()[:16]
