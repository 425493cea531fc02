"""Words for writing LLVM IR over addresses: sixteen float32 lanes at once. Knows nothing of what is computed."""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba.core import cgutils

from slicing.fast.records import LANES

F32, I8, I16, I32, I64 = ir.FloatType(), ir.IntType(8), ir.IntType(16), ir.IntType(32), ir.IntType(64)
VECTOR = ir.VectorType(F32, LANES)


def constant(value: int) -> ir.Constant:
    """Return an int64 of IR."""
    return ir.Constant(I64, value)


def load(builder: Any, address: Any, kind: Any, align: int) -> Any:
    """Load a value of a type from an address."""
    return builder.load(builder.inttoptr(address, kind.as_pointer()), align=align)


def store(builder: Any, value: Any, address: Any) -> None:
    """Store float32 values at an address."""
    builder.store(value, builder.inttoptr(address, value.type.as_pointer()), align=4)


def prefetch(builder: Any, address: Any, locality: int) -> None:
    """Have the line at an address fetched, to be read soon; any address will do. Locality 3: into every cache."""
    kind = ir.FunctionType(ir.VoidType(), [I8.as_pointer(), I32, I32, I32])
    function = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0i8")
    told = [ir.Constant(I32, value) for value in (0, locality, 1)]  # to be read; data, not code
    builder.call(function, [builder.inttoptr(address, I8.as_pointer()), *told])


def at(builder: Any, address: Any, index: Any, size: Any) -> Any:
    """Return address + index * size."""
    size = constant(size) if isinstance(size, int) else size
    return builder.add(address, builder.mul(index, size))


def vector_function(builder: Any, name: str, num_args: int) -> Any:
    """Return LLVM's own function of 16 lanes by its name."""
    kind = ir.FunctionType(VECTOR, [VECTOR] * num_args)
    return cgutils.get_or_insert_function(builder.module, kind, f"llvm.{name}.v16f32")


def spread(builder: Any, value: Any) -> Any:
    """Return 16 lanes of one float32."""
    empty = ir.Constant(VECTOR, ir.Undefined)
    one = builder.insert_element(empty, value, ir.Constant(I32, 0))
    return builder.shuffle_vector(one, empty, ir.Constant(ir.VectorType(I32, LANES), [0] * LANES))
