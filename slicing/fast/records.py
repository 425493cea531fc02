"""The records that compiled kernels read: operations, steps, works and packed weights, as rows of int64.

A field is an int64, an address, or a float64 whose bits lie in an int64. Compiled code sees memory by address; whoever
makes a record keeps the arrays alive. Knows what lies where, not what is done with it.
"""

from __future__ import annotations

from typing import Any

import numba
from llvmlite import ir
from numba import types

from slicing.fast.compiling import emitted, inner

carray: Any = numba.carray  # type: ignore[attr-defined]  # public, but exported without a stub

WORD = 8  # bytes of a field
LANES = 16  # float32 values of a panel, and what widths are padded to
GROUP = 32  # columns of an int8 weight that share a scale

# Operations. The number is field 0 of an operation's record.
OP_WORDS = 16
LAYER, RMS_NORM, LAYER_NORM, LINEAR, ROTARY, APPEND, ATTENTION, GATE = range(1, 9)
ACTIVATE, ADD, SCALE, COPY, SOFTCAP, ROUTE, EXPERTS, GATHER = range(9, 17)

# Fields that many operations share: buffer numbers and the first column in them.
SRC, SRC_COLUMN, DST, DST_COLUMN = 1, 2, 3, 4

LAYER_NUMBER = 1

# RMS_NORM, LAYER_NORM: per head of `width` values that follow each other. bias 0: none; weight 0: ones.
NORM_WEIGHT, NORM_BIAS, NORM_EPS, NORM_WIDTH, NORM_HEADS = 5, 6, 7, 8, 9

# LINEAR: address of a weight record, address of float32 bias or 0, whether to add to dst.
LINEAR_WEIGHT, LINEAR_BIAS, LINEAR_ADD = 5, 6, 7

# ROTARY: in place at SRC; tables of float32 [positions, rotary_dim].
ROTARY_HEADS, ROTARY_HEAD_DIM, ROTARY_DIM, ROTARY_COS, ROTARY_SIN, ROTARY_STYLE = 5, 6, 7, 8, 9, 10
HALF, INTERLEAVED = 0, 1

# APPEND: keys at SRC, values at APPEND_VALUES; group and offsets (in floats) are the slot's place inside a page.
APPEND_VALUES, APPEND_VALUES_COLUMN, APPEND_KV_HEADS, APPEND_K_DIM, APPEND_V_DIM = 3, 4, 5, 6, 7
APPEND_GROUP, APPEND_KEYS_AT, APPEND_VALUES_AT = 8, 9, 10

# ATTENTION: queries at SRC. softcap and window 0: none; sinks: address of float32 [heads] or 0.
ATTENTION_HEADS, ATTENTION_KV_HEADS, ATTENTION_K_DIM, ATTENTION_V_DIM = 5, 6, 7, 8
ATTENTION_GROUP, ATTENTION_KEYS_AT, ATTENTION_VALUES_AT = 9, 10, 11
ATTENTION_SCALE, ATTENTION_SOFTCAP, ATTENTION_WINDOW, ATTENTION_SINKS = 12, 13, 14, 15

# GATE: gate and up at SRC, `inter` of each. LIMIT: real, 0: none.
GATE_INTER, GATE_ACTIVATION, GATE_LAYOUT, GATE_ALPHA, GATE_LIMIT = 5, 6, 7, 8, 9
HALVES, ALTERNATING = 0, 1  # gate | up; gate0 up0 gate1 up1 ...
SILU, GELU_TANH, GELU, RELU, RELU2, SIGMOID, OSS_SWIGLU, TANH, QUICK_GELU = range(9)

# ACTIVATE, ADD, SCALE, COPY, SOFTCAP, GATHER: `width` columns; the real is the factor or the cap.
POINT_WIDTH, POINT_REAL, POINT_ACTIVATION = 5, 6, 7

# ROUTE: logits at SRC; a row of dst is top_k expert numbers (as float32), then top_k weights. BIAS: what is added to
# the scores for the choice only (float32 [experts]), or 0.
ROUTE_EXPERTS, ROUTE_TOP_K, ROUTE_MODE, ROUTE_NORMALISE, ROUTE_FACTOR, ROUTE_BIAS = 5, 6, 7, 8, 9, 10
ROUTE_GROUPS, ROUTE_TOP_GROUPS = 11, 12
SOFTMAX_THEN_TOP_K, TOP_K_THEN_SOFTMAX, SIGMOID_THEN_TOP_K = 0, 1, 2

# EXPERTS: ROUTES is a buffer that ROUTE wrote; TABLE is the address of EXPERT_WORDS fields per expert; WORK is the
# first of five buffers that only this operation uses (see `program`). ADD: dst += the sum, as one addition.
EXPERTS_ROUTES, EXPERTS_TABLE, EXPERTS_COUNT, EXPERTS_TOP_K, EXPERTS_INTER = 5, 6, 7, 8, 9
EXPERTS_ACTIVATION, EXPERTS_LAYOUT, EXPERTS_ALPHA, EXPERTS_LIMIT, EXPERTS_WORK, EXPERTS_ADD = (
    10,
    11,
    12,
    13,
    14,
    15,
)
EXPERT_WORDS = 4
EXPERT_GATE_UP, EXPERT_GATE_UP_BIAS, EXPERT_DOWN, EXPERT_DOWN_BIAS = 0, 1, 2, 3  # weight records; biases or 0
# The work buffers, in floats per row of the step. Seen as [rows * top_k, width], as all widths are multiples of LANES.
EXPERT_ORDER, EXPERT_INPUTS, EXPERT_GATE_UPS, EXPERT_HIDDEN, EXPERT_OUTPUTS = 0, 1, 2, 3, 4

# Weights: a record that LINEAR and EXPERTS point to.
WEIGHT_WORDS = 8
WEIGHT_FORM, WEIGHT_ROWS, WEIGHT_COLUMNS, WEIGHT_DATA, WEIGHT_SCALES = 0, 1, 2, 3, 4
FP32, BF16, INT8 = 0, 1, 2

# The first bytes of a thread's scratch, which `linear` uses. What follows them is free to any operation, at least
# OTHER_SCRATCH bytes and SCRATCH_PER_POSITION more for each position of the longest work.
LINEAR_SCRATCH = 256 << 10
OTHER_SCRATCH = 256 << 10
SCRATCH_PER_POSITION = 256

# A step: what differs from call to call.
STEP_WORDS = 32
STEP_ROWS, STEP_BUFFERS, STEP_NUM_WORKS, STEP_ROW_POSITION, STEP_ROW_WORK = 0, 1, 2, 3, 4
STEP_WORKS, STEP_CANCEL, STEP_NUM_KEPT, STEP_KEPT, STEP_BARRIER = 5, 6, 7, 8, 9
STEP_SCRATCH, STEP_SCRATCH_BYTES, STEP_STRIDES = 10, 11, 12  # strides: floats from row to row, per buffer

# A work's row in the table of works. TABLES: address of int64 per page group, each the address of that group's page
# table (int64 per page: its address, 0 where freed).
WORK_WORDS = 8
WORK_POSITION, WORK_ROWS, WORK_FIRST_ROW, WORK_TABLES = 0, 1, 2, 3


def _load_of(kind: Any, llvm: Any) -> Any:
    @emitted
    def load(typing_context: Any, address: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            return builder.load(builder.inttoptr(args[0], llvm.as_pointer()))

        return kind(types.int64), generate

    return load


def _store_of(kind: Any, llvm: Any) -> Any:
    @emitted
    def store(typing_context: Any, address: Any, value: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            builder.store(args[1], builder.inttoptr(args[0], llvm.as_pointer()))
            return context.get_dummy_value()

        return types.void(types.int64, kind), generate

    return store


load_i64 = _load_of(types.int64, ir.IntType(64))
load_u8 = _load_of(types.uint8, ir.IntType(8))
load_f32 = _load_of(types.float32, ir.FloatType())
store_i64 = _store_of(types.int64, ir.IntType(64))
store_f32 = _store_of(types.float32, ir.FloatType())


def _field_of(kind: Any, llvm: Any) -> Any:
    @emitted
    def read(typing_context: Any, record: Any, index: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            offset = builder.mul(args[1], ir.Constant(ir.IntType(64), WORD))
            return builder.load(builder.inttoptr(builder.add(args[0], offset), llvm.as_pointer()))

        return kind(types.int64, types.int64), generate

    return read


field = _field_of(types.int64, ir.IntType(64))  # field(record, index): a field as int64
real = _field_of(types.float64, ir.DoubleType())  # real(record, index): the float64 whose bits lie in a field


def _pointer_of(kind: Any) -> Any:
    @emitted
    def pointer(typing_context: Any, address: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            return builder.inttoptr(args[0], context.get_value_type(types.CPointer(kind)))

        return types.CPointer(kind)(types.int64), generate

    return pointer


_f32_pointer = _pointer_of(types.float32)
_i64_pointer = _pointer_of(types.int64)


@inner
def f32(address: int, count: int) -> Any:
    """View `count` float32 at an address as an array."""
    return carray(_f32_pointer(address), count)


@inner
def i64(address: int, count: int) -> Any:
    """View `count` int64 at an address as an array."""
    return carray(_i64_pointer(address), count)


@inner
def stride_bytes(step: int, buffer: int) -> int:
    """Return the bytes from one row of a buffer to the next."""
    return field(field(step, STEP_STRIDES), buffer) * 4


@inner
def row_address(step: int, buffer: int, column: int, row: int) -> int:
    """Return the address of float `column` of a row of a buffer."""
    return field(field(step, STEP_BUFFERS), buffer) + row * stride_bytes(step, buffer) + column * 4


@inner
def scratch(step: int, t: int) -> int:
    """Return the address of thread t's own scratch, STEP_SCRATCH_BYTES bytes; the first LINEAR_SCRATCH are linear's."""
    return field(field(step, STEP_SCRATCH), t)


@inner
def share(count: int, t: int, num_threads: int) -> tuple[int, int]:
    """Return thread t's part [first, last) of `count` things, as even as can be."""
    return count * t // num_threads, count * (t + 1) // num_threads
