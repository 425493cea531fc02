"""Sixteen float32 as one value of compiled code, with the arithmetic that every machine rounds alike.

`load`, `store`, `+ - * /`, `fma` and a few more, each one IEEE operation a lane. Nothing is reassociated or contracted;
a sum over lanes is a fixed tree. Knows nothing of what is computed.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import models, overload, register_model

from slicing.fast.compiling import emitted
from slicing.fast.records import LANES

F32, I32 = ir.FloatType(), ir.IntType(32)
VECTOR = ir.VectorType(F32, LANES)
INTS = ir.VectorType(I32, LANES)
MASK = ir.VectorType(ir.IntType(1), LANES)
FLOAT_BYTES = 4

MAGIC = 12582912.0  # 1.5 * 2**23: adding it rounds to a whole number, which then stands in the low bits


class VectorType(types.Type):
    """numba's type of sixteen float32 lanes."""

    def __init__(self) -> None:
        super().__init__(name="Float32x16")


vector = VectorType()


@register_model(VectorType)
class _VectorModel(models.PrimitiveModel):
    def __init__(self, manager: Any, kind: Any) -> None:
        super().__init__(manager, kind, VECTOR)


def _emit(result: Any, args: tuple[Any, ...], emit: Callable[..., Any]) -> tuple[Any, Any]:
    """Return what an intrinsic is: its signature, and what emits it. An `emit` that returns None returns nothing."""

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        made = emit(builder, *values)
        return context.get_dummy_value() if made is None else made

    return result(*args), generate


def _constant(value: float) -> ir.Constant:
    return ir.Constant(VECTOR, [value] * LANES)


def _ints(value: int) -> ir.Constant:
    return ir.Constant(INTS, [value] * LANES)


def _call(builder: Any, name: str, *args: Any) -> Any:
    kind = ir.FunctionType(VECTOR, [VECTOR] * len(args))
    return builder.call(cgutils.get_or_insert_function(builder.module, kind, f"llvm.{name}.v16f32"), args)


def _pointer(builder: Any, address: Any) -> Any:
    return builder.inttoptr(address, VECTOR.as_pointer())


def _spread(builder: Any, value: Any, kind: Any = VECTOR) -> Any:
    empty = ir.Constant(kind, ir.Undefined)
    one = builder.insert_element(empty, value, ir.Constant(I32, 0))
    return builder.shuffle_vector(one, empty, _ints(0))


def _below(builder: Any, count: Any) -> Any:
    """Return the mask of the first `count` lanes."""
    lanes = ir.Constant(INTS, list(range(LANES)))
    return builder.icmp_signed("<", lanes, _spread(builder, builder.trunc(count, I32), INTS))


def _store(builder: Any, value: Any, address: Any) -> None:
    builder.store(value, _pointer(builder, address), align=FLOAT_BYTES)


def _store_part(builder: Any, value: Any, address: Any, count: Any) -> None:
    pointer = _pointer(builder, address)
    kind = ir.FunctionType(ir.VoidType(), [VECTOR, pointer.type, I32, MASK])
    function = cgutils.get_or_insert_function(builder.module, kind, "llvm.masked.store.v16f32.p0")
    builder.call(function, [value, pointer, ir.Constant(I32, FLOAT_BYTES), _below(builder, count)])


def _load_part(builder: Any, address: Any, count: Any) -> Any:
    pointer = _pointer(builder, address)
    kind = ir.FunctionType(VECTOR, [pointer.type, I32, MASK, VECTOR])
    function = cgutils.get_or_insert_function(builder.module, kind, "llvm.masked.load.v16f32.p0")
    align = ir.Constant(I32, FLOAT_BYTES)
    return builder.call(function, [pointer, align, _below(builder, count), _constant(0.0)])


def _tree(builder: Any, value: Any, join: Callable[[Any, Any], Any]) -> Any:
    """Join lane i with i + 8, then i + 4, i + 2, i + 1; return the first."""
    for step in (8, 4, 2, 1):
        order = ir.Constant(INTS, [(lane + step) % LANES for lane in range(LANES)])
        value = join(value, builder.shuffle_vector(value, ir.Constant(VECTOR, ir.Undefined), order))
    return builder.extract_element(value, ir.Constant(I32, 0))


def _larger(builder: Any, left: Any, right: Any) -> Any:
    return builder.select(builder.fcmp_ordered(">", left, right), left, right)


def _scaled(builder: Any, value: Any, rounded: Any) -> Any:
    """Return value * 2**n where rounded = n + MAGIC, in two products, so that n may reach below the normal range."""
    whole = builder.sub(builder.bitcast(rounded, INTS), builder.bitcast(_constant(MAGIC), INTS))
    half = builder.ashr(whole, _ints(1))
    for part in (half, builder.sub(whole, half)):
        power = builder.shl(builder.add(part, _ints(127)), _ints(23))
        value = builder.fmul(value, builder.bitcast(power, VECTOR))
    return value


def _copysign(builder: Any, value: Any, sign: Any) -> Any:
    return _call(builder, "copysign", value, sign)


def _picked(builder: Any, first: Any, second: Any, offset: int) -> Any:
    return builder.shuffle_vector(first, second, ir.Constant(INTS, list(range(offset, 2 * LANES, 2))))


@emitted
def load(typing_context, address):  # type: ignore[no-untyped-def]
    """Return the sixteen float32 at an address."""
    return _emit(vector, (types.int64,), lambda b, a: b.load(_pointer(b, a), align=FLOAT_BYTES))


@emitted
def store(typing_context, value, address):  # type: ignore[no-untyped-def]
    """Write sixteen float32."""
    return _emit(types.void, (vector, types.int64), _store)


@emitted
def load_part(typing_context, address, count):  # type: ignore[no-untyped-def]
    """Return the first `count` (0 to 16) float32 at an address, then zeros; nothing behind them is touched."""
    return _emit(vector, (types.int64, types.int64), _load_part)


@emitted
def store_part(typing_context, value, address, count):  # type: ignore[no-untyped-def]
    """Write the first `count` (0 to 16) lanes."""
    return _emit(types.void, (vector, types.int64, types.int64), _store_part)


@emitted
def spread(typing_context, value):  # type: ignore[no-untyped-def]
    """Return sixteen lanes of one number, rounded to float32."""
    if value == types.float32:
        return _emit(vector, (types.float32,), _spread)
    return _emit(vector, (types.float64,), lambda b, v: _spread(b, b.fptrunc(v, F32)))


@emitted
def fma(typing_context, a, b, c):  # type: ignore[no-untyped-def]
    """Return a * b + c, rounded once."""
    return _emit(vector, (vector, vector, vector), lambda builder, *v: _call(builder, "fma", *v))


@emitted
def sqrt(typing_context, value):  # type: ignore[no-untyped-def]
    """Return the root, correctly rounded."""
    return _emit(vector, (vector,), lambda b, v: _call(b, "sqrt", v))


@emitted
def magnitude(typing_context, value):  # type: ignore[no-untyped-def]
    """Return |value|."""
    return _emit(vector, (vector,), lambda b, v: _call(b, "fabs", v))


@emitted
def with_sign(typing_context, value, sign):  # type: ignore[no-untyped-def]
    """Return |value| with the sign of the other."""
    return _emit(vector, (vector, vector), _copysign)


@emitted
def where_less(typing_context, left, right, then, other):  # type: ignore[no-untyped-def]
    """Return `then` where left < right, else `other` (also where one is NaN)."""
    return _emit(
        vector, (vector,) * 4, lambda b, x, y, then, other: b.select(b.fcmp_ordered("<", x, y), then, other)
    )


@emitted
def larger(typing_context, left, right):  # type: ignore[no-untyped-def]
    """Return left where it is larger, else right."""
    return _emit(vector, (vector, vector), _larger)


@emitted
def scaled(typing_context, value, rounded):  # type: ignore[no-untyped-def]
    """Return value * 2**n where rounded = n + MAGIC."""
    return _emit(vector, (vector, vector), _scaled)


@emitted
def sum_lanes(typing_context, value):  # type: ignore[no-untyped-def]
    """Return the sum of the lanes, as a fixed tree."""
    return _emit(types.float32, (vector,), lambda b, v: _tree(b, v, b.fadd))


@emitted
def largest_lane(typing_context, value):  # type: ignore[no-untyped-def]
    """Return the largest lane."""
    return _emit(types.float32, (vector,), lambda b, v: _tree(b, v, lambda x, y: _larger(b, x, y)))


@emitted
def first_lane(typing_context, value):  # type: ignore[no-untyped-def]
    """Return lane 0."""
    return _emit(types.float32, (vector,), lambda b, v: b.extract_element(v, ir.Constant(I32, 0)))


@emitted
def lane_numbers(typing_context):  # type: ignore[no-untyped-def]
    """Return 0.0, 1.0 ... 15.0."""
    return _emit(vector, (), lambda b: ir.Constant(VECTOR, [float(lane) for lane in range(LANES)]))


@emitted
def evens(typing_context, first, second):  # type: ignore[no-untyped-def]
    """Return lanes 0, 2, 4 ... of two vectors that follow each other."""
    return _emit(vector, (vector, vector), lambda b, x, y: _picked(b, x, y, 0))


@emitted
def odds(typing_context, first, second):  # type: ignore[no-untyped-def]
    """Return lanes 1, 3, 5 ... of two vectors that follow each other."""
    return _emit(vector, (vector, vector), lambda b, x, y: _picked(b, x, y, 1))


def _overload_operator(symbol: Any, name: str) -> None:
    @emitted
    def combine(typing_context: Any, left: Any, right: Any) -> Any:
        return _emit(vector, (vector, vector), lambda b, x, y: getattr(b, name)(x, y))

    @overload(symbol, strict=False)
    def typed(left: Any, right: Any) -> Any:
        if isinstance(left, VectorType) and isinstance(right, VectorType):
            return lambda left, right: combine(left, right)  # noqa: PLW0108 - numba wants a plain function
        return None


for _symbol, _name in (
    (operator.add, "fadd"),
    (operator.sub, "fsub"),
    (operator.mul, "fmul"),
    (operator.truediv, "fdiv"),
):
    _overload_operator(_symbol, _name)


@overload(operator.neg, strict=False)
def _negated(value: Any) -> Any:
    if not isinstance(value, VectorType):
        return None

    @emitted
    def negate(typing_context: Any, value: Any) -> Any:
        return _emit(vector, (vector,), lambda b, v: b.fneg(v))

    return lambda value: negate(value)  # noqa: PLW0108 - numba wants a plain function
