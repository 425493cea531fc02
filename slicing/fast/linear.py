"""Linear layers over packed weights: any number of rows, cut so that weights are read from memory once.

A row's bits depend on its own values alone, see `tiles`; the cuts decide only the speed.
"""

from __future__ import annotations

from slicing.fast import records as r
from slicing.fast.compiling import inner
from slicing.fast.linking import linked
from slicing.fast.records import LANES, field, load_f32, row_address, scratch, store_f32, stride_bytes
from slicing.fast.tiles import (
    PANELS_AT_ONCE,
    TALLEST,
    TALLEST_PANELS,
    product_bf16,
    product_fp32,
    product_int8,
    widen_int8,
)

LANE_BYTES = LANES * 4
SUM_STRIDE = PANELS_AT_ONCE * LANE_BYTES
ROWS_AT_ONCE = 256  # their sums (192 KiB) stay in the second-level cache
COLUMNS_AT_ONCE = (
    128  # of the weights: a tile's panels (24 KiB) stay in the first-level cache; a multiple of GROUP
)
MANY_ROWS = 2 * TALLEST  # from here on weights are taken block by block
WIDENED_ROWS = (
    6 * TALLEST
)  # from here on int8 is widened once for all rows: that costs as much as five tiles save
SUMS_BYTES = ROWS_AT_ONCE * SUM_STRIDE
assert SUMS_BYTES + TALLEST_PANELS * COLUMNS_AT_ONCE * LANE_BYTES <= r.LINEAR_SCRATCH


@linked
def linear_share(
    weight: int, x: int, x_stride: int, rows: int, out: int, out_stride: int, bias: int, add: int, t: int,
    num_threads: int, sums: int,
) -> None:  # fmt: skip
    """Thread t's outputs of a linear layer; `sums` is LINEAR_SCRATCH bytes of its own. Strides in bytes."""
    panels = (field(weight, r.WEIGHT_ROWS) + LANES - 1) // LANES
    unit = 4 if panels >= 16 * num_threads else 1  # whole tiles, where there are enough of them
    units = (panels + unit - 1) // unit
    first = units * t // num_threads * unit
    last = min(panels, units * (t + 1) // num_threads * unit)
    for panel in range(first, last, PANELS_AT_ONCE):
        count = min(PANELS_AT_ONCE, last - panel)
        for row in range(0, rows, ROWS_AT_ONCE):
            some = min(ROWS_AT_ONCE, rows - row)
            _sums(weight, x + row * x_stride, x_stride, some, panel, count, sums)
            _finish(weight, sums, some, panel, count, out + row * out_stride, out_stride, bias, add)


@linked
def op_linear(op: int, step: int, t: int, num_threads: int) -> None:
    """Thread t's panels of dst = src @ weight.T (+ bias), or dst += that."""
    weight = field(op, r.LINEAR_WEIGHT)
    src, dst = field(op, r.SRC), field(op, r.DST)
    linear_share(
        weight,
        row_address(step, src, field(op, r.SRC_COLUMN), 0),
        stride_bytes(step, src),
        field(step, r.STEP_ROWS),
        row_address(step, dst, field(op, r.DST_COLUMN), 0),
        stride_bytes(step, dst),
        field(op, r.LINEAR_BIAS),
        field(op, r.LINEAR_ADD),
        t,
        num_threads,
        scratch(step, t),
    )


@inner
def _sums(weight: int, x: int, x_stride: int, rows: int, panel: int, count: int, sums: int) -> None:
    """sums [rows, PANELS_AT_ONCE * 16] = x @ the panels.T."""
    many = rows // TALLEST * TALLEST if rows >= MANY_ROWS else 0
    if many:
        columns = field(weight, r.WEIGHT_COLUMNS)
        strip = sums + SUMS_BYTES if many >= WIDENED_ROWS else 0
        for k in range(0, columns, COLUMNS_AT_ONCE):
            for p in range(0, count, TALLEST_PANELS):
                num = min(TALLEST_PANELS, count - p)
                span = min(COLUMNS_AT_ONCE, columns - k)
                to = sums + p * LANE_BYTES
                _product(weight, x + k * 4, x_stride, many, panel + p, num, k, span, to, strip)
    if many < rows:
        columns = field(weight, r.WEIGHT_COLUMNS)
        to = sums + many * SUM_STRIDE
        _product(weight, x + many * x_stride, x_stride, rows - many, panel, count, 0, columns, to, 0)


@inner
def _product(
    weight: int, x: int, x_stride: int, rows: int, panel: int, count: int, k: int, span: int, sums: int,
    strip: int,
) -> None:  # fmt: skip
    """Continue the sums (begin them at k = 0) by columns [k, k + span) of the weight; x starts at column k.

    strip: room to widen int8 in, or 0 where it does not pay.
    """
    form = field(weight, r.WEIGHT_FORM)
    columns = field(weight, r.WEIGHT_COLUMNS)
    begin = 1 if k > 0 else 0
    size = LANES * (4 if form == r.FP32 else 2 if form == r.BF16 else 1)
    stride = columns * size
    data = field(weight, r.WEIGHT_DATA) + panel * stride + k * size
    if form == r.FP32:
        product_fp32(x, x_stride, rows, data, stride, 0, 0, count, span, sums, SUM_STRIDE, begin)
    elif form == r.BF16:
        product_bf16(x, x_stride, rows, data, stride, 0, 0, count, span, sums, SUM_STRIDE, begin)
    else:
        groups = (columns + r.GROUP - 1) // r.GROUP * LANE_BYTES
        scales = field(weight, r.WEIGHT_SCALES) + panel * groups + k // r.GROUP * LANE_BYTES
        if strip:
            widen_int8(data, stride, scales, groups, count, span, strip)
            product_fp32(
                x, x_stride, rows, strip, span * LANE_BYTES, 0, 0, count, span, sums, SUM_STRIDE, begin
            )
        else:
            product_int8(
                x, x_stride, rows, data, stride, scales, groups, count, span, sums, SUM_STRIDE, begin
            )


@inner
def _finish(
    weight: int, sums: int, rows: int, panel: int, count: int, out: int, out_stride: int, bias: int, add: int
) -> None:
    """Bring the sums to their place: one addition for the bias, then one for what is there."""
    first = panel * LANES
    width = min(count * LANES, field(weight, r.WEIGHT_ROWS) - first)
    bias += first * 4
    for row in range(rows):
        source = sums + row * SUM_STRIDE
        target = out + row * out_stride + first * 4
        if bias != first * 4:
            for i in range(0, width * 4, 4):
                store_f32(source + i, load_f32(source + i) + load_f32(bias + i))
        if add:
            for i in range(0, width * 4, 4):
                store_f32(target + i, load_f32(target + i) + load_f32(source + i))
        else:
            for i in range(0, width * 4, 4):
                store_f32(target + i, load_f32(source + i))
