"""Where the threads of a step wait for each other, inside compiled code.

Spins for a moment, as operations are short, then gives its core away at every turn, so that two processes that share a
core do not wait for each other's time slices.
"""

from __future__ import annotations

import ctypes
import platform
import sys
from typing import Any

from llvmlite import binding, ir
from numba import types
from numba.core import cgutils

from slicing.fast.compiling import emitted, inner
from slicing.fast.lanes import I32, I64
from slicing.fast.records import STEP_BARRIER, field

# A barrier, on cache lines of its own: threads arrived, rounds completed, whether to stop (for `execute`).
BARRIER_WORDS = 24
ARRIVED, ROUND, STOP = 0, 8, 16
SPINS = 1000  # turns of about 40 ns on Zen 4; the longest operation of a small model takes some hundred microseconds

VOID = ir.VoidType()
_YIELD = "diffuse_yield"
_is_windows = sys.platform == "win32"
_library = ctypes.CDLL("kernel32" if _is_windows else None)
_yield = _library.SwitchToThread if _is_windows else _library.sched_yield
binding.add_symbol(_YIELD, ctypes.cast(_yield, ctypes.c_void_p).value)


def _pointer(builder: Any, args: Any) -> Any:
    address = builder.add(args[0], builder.mul(args[1], ir.Constant(I64, 8)))
    return builder.inttoptr(address, I64.as_pointer())


@emitted
def atomic_add(typing_context: Any, record: Any, index: Any, amount: Any) -> Any:
    """Add to a field of a record as one step, and return what was there before."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.atomic_rmw("add", _pointer(builder, args), args[2], "seq_cst")

    return types.int64(types.int64, types.int64, types.int64), generate


@emitted
def atomic_load(typing_context: Any, record: Any, index: Any) -> Any:
    """Read a field of a record that other threads write."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.load_atomic(_pointer(builder, args), "acquire", 8)

    return types.int64(types.int64, types.int64), generate


@emitted
def atomic_store(typing_context: Any, record: Any, index: Any, value: Any) -> Any:
    """Write a field of a record that other threads read."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        builder.store_atomic(args[2], _pointer(builder, args), "release", 8)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64), generate


@emitted
def _pause(typing_context: Any) -> Any:
    """Tell the core that this is a loop that waits."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        machine = platform.machine().lower()
        if machine in {"x86_64", "amd64"}:
            hint = cgutils.get_or_insert_function(
                builder.module, ir.FunctionType(VOID, []), "llvm.x86.sse2.pause"
            )
            builder.call(hint, [])
        elif machine in {"aarch64", "arm64"}:
            kind = ir.FunctionType(VOID, [I32])
            hint = cgutils.get_or_insert_function(builder.module, kind, "llvm.aarch64.hint")
            builder.call(hint, [ir.Constant(I32, 1)])  # YIELD
        return context.get_dummy_value()

    return types.void(), generate


@emitted
def _give_way(typing_context: Any) -> Any:
    """Let another thread run on this core."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        function = cgutils.get_or_insert_function(builder.module, ir.FunctionType(I32, []), _YIELD)
        builder.call(function, [])
        return context.get_dummy_value()

    return types.void(), generate


@inner
def wait(step: int, num_threads: int) -> None:
    """Return once all threads of the step have come here; what each wrote before is then seen by all."""
    if num_threads == 1:
        return
    barrier = field(step, STEP_BARRIER)
    current = atomic_load(barrier, ROUND)
    if atomic_add(barrier, ARRIVED, 1) == num_threads - 1:
        atomic_store(barrier, ARRIVED, 0)
        atomic_store(barrier, ROUND, current + 1)
        return
    spins = 0
    while atomic_load(barrier, ROUND) == current:
        if spins < SPINS:
            spins += 1
            _pause()
        else:
            _give_way()
