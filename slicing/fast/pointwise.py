"""Operations on rows by themselves: norms, rotary embedding, gates, sums, copies.

Each takes a row sixteen floats at a time, a sum over a row in sixteen lanes by column and a fixed tree, so a row's bits
depend on that row alone. Threads take rows, or heads of rows.
"""

from __future__ import annotations

from slicing.fast import elementary
from slicing.fast import records as r
from slicing.fast.compiling import inner
from slicing.fast.elementary import first_lanes, number
from slicing.fast.linking import linked
from slicing.fast.records import LANES, WORD, field, load_f32, load_i64, real, row_address, share, store_f32
from slicing.fast.vectors import (
    evens,
    fma,
    load_part,
    odds,
    spread,
    sqrt,
    store_part,
    sum_lanes,
    where_less,
)

FLOAT = 4  # bytes


@linked
def op_rms_norm(op: int, step: int, t: int, num_threads: int) -> None:
    """dst = src / sqrt(mean(src^2) + eps) * weight, per head."""
    width, heads = field(op, r.NORM_WIDTH), field(op, r.NORM_HEADS)
    weight, eps = field(op, r.NORM_WEIGHT), spread(real(op, r.NORM_EPS))
    first, last = share(field(step, r.STEP_ROWS) * heads, t, num_threads)
    for item in range(first, last):
        source, target = _head(op, step, item // heads, item % heads * width)
        total = number(0.0)
        for i in range(0, width, LANES):
            x = load_part(source + i * FLOAT, min(LANES, width - i))
            total = fma(x, x, total)
        mean = spread(sum_lanes(total)) / spread(float(width))
        factor = number(1.0) / sqrt(mean + eps)
        for i in range(0, width, LANES):
            size = min(LANES, width - i)
            x = load_part(source + i * FLOAT, size) * factor
            if weight:
                x = x * load_part(weight + i * FLOAT, size)
            store_part(x, target + i * FLOAT, size)


@linked
def op_layer_norm(op: int, step: int, t: int, num_threads: int) -> None:
    """dst = (src - mean) / sqrt(variance + eps) * weight + bias, per head."""
    width, heads = field(op, r.NORM_WIDTH), field(op, r.NORM_HEADS)
    first, last = share(field(step, r.STEP_ROWS) * heads, t, num_threads)
    for item in range(first, last):
        source, target = _head(op, step, item // heads, item % heads * width)
        _layer_norm(op, source, target, width)


@inner
def _layer_norm(op: int, source: int, target: int, width: int) -> None:
    weight, bias, eps = field(op, r.NORM_WEIGHT), field(op, r.NORM_BIAS), spread(real(op, r.NORM_EPS))
    count = spread(float(width))
    total = number(0.0)
    for i in range(0, width, LANES):
        total = total + load_part(source + i * FLOAT, min(LANES, width - i))
    mean = spread(sum_lanes(total)) / count
    total = number(0.0)
    for i in range(0, width, LANES):
        size = min(LANES, width - i)
        apart = load_part(source + i * FLOAT, size) - first_lanes(mean, size, number(0.0))
        total = fma(apart, apart, total)
    factor = number(1.0) / sqrt(spread(sum_lanes(total)) / count + eps)
    for i in range(0, width, LANES):
        size = min(LANES, width - i)
        x = (load_part(source + i * FLOAT, size) - mean) * factor
        if weight:
            x = x * load_part(weight + i * FLOAT, size)
        if bias:
            x = x + load_part(bias + i * FLOAT, size)
        store_part(x, target + i * FLOAT, size)


@linked
def op_rotary(op: int, step: int, t: int, num_threads: int) -> None:
    """Turn the first columns of each head by the row's position: x * cos + rotated(x) * sin, rounded as torch does."""
    heads, head_dim = field(op, r.ROTARY_HEADS), field(op, r.ROTARY_HEAD_DIM)
    dim = field(op, r.ROTARY_DIM)
    positions = field(step, r.STEP_ROW_POSITION)
    first, last = share(field(step, r.STEP_ROWS), t, num_threads)
    for row in range(first, last):
        at = load_i64(positions + row * WORD) * dim * FLOAT
        cos, sin = field(op, r.ROTARY_COS) + at, field(op, r.ROTARY_SIN) + at
        start = row_address(step, field(op, r.SRC), field(op, r.SRC_COLUMN), row)
        for head in range(heads):
            if field(op, r.ROTARY_STYLE) == r.HALF:
                _turn_halves(start + head * head_dim * FLOAT, cos, sin, dim // 2)
            else:
                _turn_pairs(start + head * head_dim * FLOAT, cos, sin, dim)


@inner
def _turn_halves(x: int, cos: int, sin: int, half: int) -> None:
    """Turn (x[i], x[i + half])."""
    for i in range(0, half, LANES):
        size = min(LANES, half - i)
        low, high = i * FLOAT, (i + half) * FLOAT
        a, b = load_part(x + low, size), load_part(x + high, size)
        turned = a * load_part(cos + low, size) + -b * load_part(sin + low, size)
        other = b * load_part(cos + high, size) + a * load_part(sin + high, size)
        store_part(turned, x + low, size)
        store_part(other, x + high, size)


@inner
def _turn_pairs(x: int, cos: int, sin: int, dim: int) -> None:
    """Turn (x[2i], x[2i + 1])."""
    for i in range(0, dim * FLOAT, 2 * FLOAT):
        a, b = load_f32(x + i), load_f32(x + i + FLOAT)
        store_f32(x + i, a * load_f32(cos + i) + -b * load_f32(sin + i))
        store_f32(x + i + FLOAT, b * load_f32(cos + i + FLOAT) + a * load_f32(sin + i + FLOAT))


@linked
def gate_columns(
    source: int, target: int, first: int, last: int, inter: int, activation: int, layout: int, reals: int
) -> None:
    """target[i] = activation(gate[i]) * up[i] for columns [first, last) of one row; first is a multiple of 16.

    `reals` is the address of alpha and limit, which follow each other in a record.
    """
    factor, limit = spread(real(reals, 0)), real(reals, 1)
    most = spread(limit)
    for i in range(first, last, LANES):
        size = min(LANES, last - i)
        if layout == r.HALVES:
            gate = load_part(source + i * FLOAT, size)
            up = load_part(source + (inter + i) * FLOAT, size)
        else:
            low = load_part(source + 2 * i * FLOAT, min(LANES, 2 * size))
            high = load_part(source + (2 * i + LANES) * FLOAT, max(0, 2 * size - LANES))
            gate, up = evens(low, high), odds(low, high)
        if limit > 0.0:
            gate = where_less(most, gate, most, gate)
            up = where_less(most, up, most, up)
            up = where_less(up, -most, -most, up)
        if activation == r.OSS_SWIGLU:
            up = up + number(1.0)
        store_part(up * elementary.activated(gate, activation, factor), target + i * FLOAT, size)


@linked
def op_gate(op: int, step: int, t: int, num_threads: int) -> None:
    """dst = activation(gate) * up."""
    inter = field(op, r.GATE_INTER)
    blocks = (inter + LANES - 1) // LANES
    first, last = share(field(step, r.STEP_ROWS) * blocks, t, num_threads)
    item = first
    while item < last:  # threads share the blocks of a row, as a step may have but one
        row, block = item // blocks, item % blocks
        until = min(blocks, block + last - item)
        source, target = _head(op, step, row, 0)
        gate_columns(
            source,
            target,
            block * LANES,
            min(until * LANES, inter),
            inter,
            field(op, r.GATE_ACTIVATION),
            field(op, r.GATE_LAYOUT),
            op + r.GATE_ALPHA * WORD,
        )
        item += until - block


@linked
def op_activate(op: int, step: int, t: int, num_threads: int) -> None:
    """dst = activation(src)."""
    width, activation = field(op, r.POINT_WIDTH), field(op, r.POINT_ACTIVATION)
    first, last = share(field(step, r.STEP_ROWS), t, num_threads)
    for row in range(first, last):
        source, target = _head(op, step, row, 0)
        for i in range(0, width, LANES):
            size = min(LANES, width - i)
            x = elementary.activated(load_part(source + i * FLOAT, size), activation, number(1.0))
            store_part(x, target + i * FLOAT, size)


@linked
def op_add(op: int, step: int, t: int, num_threads: int) -> None:
    """dst += src * factor."""
    width, factor = field(op, r.POINT_WIDTH), spread(real(op, r.POINT_REAL))
    first, last = share(field(step, r.STEP_ROWS), t, num_threads)
    for row in range(first, last):
        source, target = _head(op, step, row, 0)
        for i in range(0, width, LANES):
            size = min(LANES, width - i)
            x = load_part(target + i * FLOAT, size) + load_part(source + i * FLOAT, size) * factor
            store_part(x, target + i * FLOAT, size)


@linked
def op_scale(op: int, step: int, t: int, num_threads: int) -> None:
    """buf *= factor."""
    width, factor = field(op, r.POINT_WIDTH), spread(real(op, r.POINT_REAL))
    first, last = share(field(step, r.STEP_ROWS), t, num_threads)
    for row in range(first, last):
        place = row_address(step, field(op, r.SRC), field(op, r.SRC_COLUMN), row)
        for i in range(0, width, LANES):
            size = min(LANES, width - i)
            store_part(load_part(place + i * FLOAT, size) * factor, place + i * FLOAT, size)


@linked
def op_softcap(op: int, step: int, t: int, num_threads: int) -> None:
    """buf = tanh(buf / cap) * cap."""
    width, cap = field(op, r.POINT_WIDTH), spread(real(op, r.POINT_REAL))
    first, last = share(field(step, r.STEP_ROWS), t, num_threads)
    for row in range(first, last):
        place = row_address(step, field(op, r.SRC), field(op, r.SRC_COLUMN), row)
        for i in range(0, width, LANES):
            size = min(LANES, width - i)
            store_part(elementary.capped(load_part(place + i * FLOAT, size), cap), place + i * FLOAT, size)


@linked
def op_copy(op: int, step: int, t: int, num_threads: int) -> None:
    """dst = src."""
    first, last = share(field(step, r.STEP_ROWS), t, num_threads)
    for row in range(first, last):
        source, target = _head(op, step, row, 0)
        copy_row(source, target, field(op, r.POINT_WIDTH))


@linked
def op_gather(op: int, step: int, t: int, num_threads: int) -> None:
    """dst's first rows = the kept rows of src."""
    kept = field(step, r.STEP_KEPT)
    first, last = share(field(step, r.STEP_NUM_KEPT), t, num_threads)
    for row in range(first, last):
        source = row_address(step, field(op, r.SRC), field(op, r.SRC_COLUMN), load_i64(kept + row * WORD))
        target = row_address(step, field(op, r.DST), field(op, r.DST_COLUMN), row)
        copy_row(source, target, field(op, r.POINT_WIDTH))


@inner
def copy_row(source: int, target: int, width: int) -> None:
    """Copy so many floats."""
    for i in range(0, width, LANES):
        size = min(LANES, width - i)
        store_part(load_part(source + i * FLOAT, size), target + i * FLOAT, size)


@inner
def _head(op: int, step: int, row: int, column: int) -> tuple[int, int]:
    """Return the addresses of a row's `column` in src and in dst, after the operation's own offsets."""
    source = row_address(step, field(op, r.SRC), field(op, r.SRC_COLUMN) + column, row)
    target = row_address(step, field(op, r.DST), field(op, r.DST_COLUMN) + column, row)
    return source, target
