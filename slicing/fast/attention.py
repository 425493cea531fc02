"""Causal attention over pages, and writing a step's keys and values into them.

All query heads of one kv head and a few rows of one work are taken together, as the rows of the panel product. A row
sees exactly the positions that it may see, in order, so its bits depend neither on the rows beside it, nor on how
a prompt was cut, nor on what lies in later positions or in which page; scores are summed in 16 lanes by position.
"""

from __future__ import annotations

from numba import float32

from slicing.fast import elementary
from slicing.fast import records as r
from slicing.fast.compiling import inner
from slicing.fast.linking import linked
from slicing.fast.pages import PAGE
from slicing.fast.records import (
    LANES,
    WORD,
    field,
    load_f32,
    load_i64,
    real,
    row_address,
    scratch,
    store_f32,
)
from slicing.fast.tiles import IS_WIDE, tile
from slicing.fast.vectors import (
    first_lane,
    larger,
    largest_lane,
    load,
    load_part,
    spread,
    store,
    store_part,
    sum_lanes,
)

FLOAT = 4  # bytes
LANE_BYTES = LANES * FLOAT
MOST_ROWS = 32  # query rows taken together: five passes over a page that stays in the first-level cache
SCORE_BYTES = 512 << 10  # of the scores of rows taken together: half a second-level cache
# (rows, panels) of the products' tiles, measured on Zen 4: a page has 4 panels of keys, a head of 64 has 4 of values.
SHAPES = ((6, 4), (4, 4), (2, 4), (1, 4)) if IS_WIDE else ((6, 1), (4, 1), (2, 2), (1, 4))
MINUS_INFINITY = float("-inf")


# Few rows wait for memory: while they compute, the next head's part of the page is fetched.
_tall, _middle, _low, _single = (
    tile(r.FP32, rows, panels, 2, fetches=rows < SHAPES[0][0]) for rows, panels in SHAPES
)
(TALLEST, TALL_PANELS), (_, MIDDLE_PANELS), (_, LOW_PANELS), (_, SINGLE_PANELS) = SHAPES


@linked
def _dot(
    x: int, x_stride: int, rows: int, w: int, stride: int, panels: int, k: int, out: int, out_stride: int, begin: int
) -> None:  # fmt: skip
    """Set out [rows, panels * 16] to x @ panels of float32, or add to it; cut into tiles, see `tiles`."""
    row = 0
    while row < rows:
        left = rows - row
        xr, to = x + row * x_stride, out + row * out_stride
        if left >= TALLEST - 1:
            for p in range(0, panels, TALL_PANELS):
                at, o = w + p * stride, to + p * LANE_BYTES
                _tall(xr, x_stride, left, at, stride, 0, 0, panels - p, k, o, out_stride, begin)
            row += TALLEST
        elif left >= 3:
            for p in range(0, panels, MIDDLE_PANELS):
                at, o = w + p * stride, to + p * LANE_BYTES
                _middle(xr, x_stride, left, at, stride, 0, 0, panels - p, k, o, out_stride, begin)
            row += 4
        elif left == 2:
            for p in range(0, panels, LOW_PANELS):
                at, o = w + p * stride, to + p * LANE_BYTES
                _low(xr, x_stride, left, at, stride, 0, 0, panels - p, k, o, out_stride, begin)
            row += 2
        else:
            for p in range(0, panels, SINGLE_PANELS):
                at, o = w + p * stride, to + p * LANE_BYTES
                _single(xr, x_stride, left, at, stride, 0, 0, panels - p, k, o, out_stride, begin)
            row += 1


@linked
def op_append(op: int, step: int, t: int, num_threads: int) -> None:
    """Write the rows' keys and values into their works' pages, thread t those of its (work, kv head) pairs."""
    kv_heads = field(op, r.APPEND_KV_HEADS)
    for pair in range(t, field(step, r.STEP_NUM_WORKS) * kv_heads, num_threads):
        _append(op, step, pair // kv_heads, pair % kv_heads)


@inner
def _append(op: int, step: int, work: int, head: int) -> None:
    k_dim, v_dim = field(op, r.APPEND_K_DIM), field(op, r.APPEND_V_DIM)
    keys_at, values_at = _places(
        field(op, r.APPEND_KEYS_AT), field(op, r.APPEND_VALUES_AT), k_dim, v_dim, head
    )
    work_record = field(step, r.STEP_WORKS) + work * r.WORK_WORDS * WORD
    table = _page_table(work_record, field(op, r.APPEND_GROUP))
    first_row = field(work_record, r.WORK_FIRST_ROW)
    for i in range(field(work_record, r.WORK_ROWS)):
        position = field(work_record, r.WORK_POSITION) + i
        page = load_i64(table + position // PAGE * WORD)
        offset = position % PAGE
        column = field(op, r.SRC_COLUMN) + head * k_dim
        source = row_address(step, field(op, r.SRC), column, first_row + i)
        target = page + keys_at + (offset // LANES * k_dim * LANES + offset % LANES) * FLOAT
        for d in range(k_dim):
            store_f32(target + d * LANE_BYTES, load_f32(source + d * FLOAT))
        column = field(op, r.APPEND_VALUES_COLUMN) + head * v_dim
        source = row_address(step, field(op, r.APPEND_VALUES), column, first_row + i)
        target = page + values_at + offset * LANE_BYTES
        for d in range(0, v_dim, LANES):
            # What lies past v_dim in the last panel is set to zeros, and never read as a result.
            store(
                load_part(source + d * FLOAT, min(LANES, v_dim - d)), target + d // LANES * PAGE * LANE_BYTES
            )


@linked
def op_attention(op: int, step: int, t: int, num_threads: int) -> None:
    """Attend for thread t's share of (work, rows taken together, kv head, its query heads taken together)."""
    heads, kv_heads = field(op, r.ATTENTION_HEADS), field(op, r.ATTENTION_KV_HEADS)
    group = heads // kv_heads
    some_heads = min(group, MOST_ROWS)
    parts = (group + some_heads - 1) // some_heads
    item = 0
    for work in range(field(step, r.STEP_NUM_WORKS)):
        work_record = field(step, r.STEP_WORKS) + work * r.WORK_WORDS * WORD
        rows, position = field(work_record, r.WORK_ROWS), field(work_record, r.WORK_POSITION)
        at_once = _rows_at_once(some_heads, position + rows, field(op, r.ATTENTION_WINDOW))
        for row in range(0, rows, at_once):
            count = min(at_once, rows - row)
            for part in range(kv_heads * parts):
                if item % num_threads == t:
                    first_head = part % parts * some_heads
                    num_heads = min(some_heads, group - first_head)
                    _attend(op, step, work_record, row, count, part // parts, first_head, num_heads, t)
                item += 1


@inner
def _rows_at_once(heads: int, length: int, window: int) -> int:
    """Return how many positions to take together; it decides only the speed."""
    seen = min(length, window + MOST_ROWS) if window else length
    rows = min(MOST_ROWS // heads, SCORE_BYTES // (FLOAT * heads * seen))
    if window:
        rows = min(rows, window)  # so that there are positions which all of them see
    return max(rows, 1)


@inner
def _attend(
    op: int, step: int, work: int, row: int, count: int, kv_head: int, first_head: int, heads: int, t: int
) -> None:
    """Rows [row, row + count) of a work, for some query heads of one kv head; of a row, the heads follow each other."""
    k_dim, v_dim = field(op, r.ATTENTION_K_DIM), field(op, r.ATTENTION_V_DIM)
    window = field(op, r.ATTENTION_WINDOW)
    keys_at, values_at = _places(
        field(op, r.ATTENTION_KEYS_AT), field(op, r.ATTENTION_VALUES_AT), k_dim, v_dim, kv_head
    )
    table = _page_table(work, field(op, r.ATTENTION_GROUP))
    position = field(work, r.WORK_POSITION) + row
    end = position + count
    base = _first_seen(position, window) // LANES * LANES
    width = (end - base + LANES - 1) // LANES * LANES
    rows = count * heads
    v_panels = (v_dim + LANES - 1) // LANES
    # Scratch: queries, outputs, sums of a row, scores (an odd number of cache lines apart, to use all of the cache).
    queries = scratch(step, t) + r.LINEAR_SCRATCH
    outputs = queries + (rows * k_dim + LANES - 1) // LANES * LANE_BYTES
    sums = outputs + rows * v_panels * LANE_BYTES
    scores = sums + (rows + LANES - 1) // LANES * LANE_BYTES
    stride = (width // LANES | 1) * LANE_BYTES
    head = kv_head * (field(op, r.ATTENTION_HEADS) // field(op, r.ATTENTION_KV_HEADS)) + first_head
    source_row = field(work, r.WORK_FIRST_ROW) + row

    _take_queries(op, step, source_row, count, head, heads, k_dim, queries)
    _score(queries, rows, k_dim, table, keys_at, base, base + width, scores, stride)
    for i in range(rows):
        at = position + i // heads
        begin = _first_seen(at, window)
        total = _softmax(
            scores + i * stride,
            base,
            begin,
            at + 1,
            real(op, r.ATTENTION_SOFTCAP),
            _sink(op, head + i % heads),
        )
        store_f32(sums + i * FLOAT, total)
    for i in range(rows * v_panels):
        store(spread(0.0), outputs + i * LANE_BYTES)
    # What all rows see is taken together, what only some see row by row, both in the order of the positions.
    common, after = _first_seen(end - 1, window), position + 1
    for part in range(2 * count):
        i = part % count
        some, begin, until = heads, _first_seen(position + i, window), common
        if part == count:
            some, begin, until = rows, common, after
        elif part > count:
            begin, until = after, position + i + 1
        to = outputs + i * heads * v_panels * LANE_BYTES
        _gather_values(
            scores + i * heads * stride, stride, some, base, begin, until, table, values_at, v_panels, to
        )
    _finish(op, step, source_row, rows, head, heads, v_dim, v_panels, outputs, sums)


@inner
def _first_seen(position: int, window: int) -> int:
    return max(position - window + 1, 0) if window else 0


@inner
def _page_table(work: int, group: int) -> int:
    return load_i64(field(work, r.WORK_TABLES) + group * WORD)


@inner
def _places(keys_at: int, values_at: int, k_dim: int, v_dim: int, head: int) -> tuple[int, int]:
    """Return the bytes from a page's start to a kv head's keys [PAGE/16][k_dim][16] and values [v_dim/16][PAGE][16]."""
    keys = (keys_at + head * PAGE * k_dim) * FLOAT
    values = values_at * FLOAT + head * PAGE * ((v_dim + LANES - 1) // LANES) * LANE_BYTES
    return keys, values


@inner
def _sink(op, head):  # type: ignore[no-untyped-def]
    sinks = field(op, r.ATTENTION_SINKS)
    return load_f32(sinks + head * FLOAT) if sinks else float32(MINUS_INFINITY)


@inner
def _take_queries(
    op: int, step: int, source_row: int, count: int, head: int, heads: int, k_dim: int, queries: int
) -> None:
    """Copy the queries [count * heads, k_dim], multiplied by the scale."""
    scale = spread(real(op, r.ATTENTION_SCALE))
    column = field(op, r.SRC_COLUMN) + head * k_dim
    for i in range(count * heads):
        source = row_address(step, field(op, r.SRC), column + i % heads * k_dim, source_row + i // heads)
        target = queries + i * k_dim * FLOAT
        for d in range(0, k_dim, LANES):
            size = min(LANES, k_dim - d)
            store_part(load_part(source + d * FLOAT, size) * scale, target + d * FLOAT, size)


@inner
def _score(
    queries: int,
    rows: int,
    k_dim: int,
    table: int,
    keys_at: int,
    begin: int,
    end: int,
    scores: int,
    stride: int,
) -> None:
    """scores [rows, end - begin] = queries @ keys; begin and end are multiples of 16."""
    position = begin
    while position < end:
        page = load_i64(table + position // PAGE * WORD)
        offset = position % PAGE
        panels = min(PAGE - offset, end - position) // LANES
        keys = page + keys_at + offset * k_dim * FLOAT
        out = scores + (position - begin) * FLOAT
        _dot(queries, k_dim * FLOAT, rows, keys, k_dim * LANE_BYTES, panels, k_dim, out, stride, 0)
        position += panels * LANES


@inner
def _softmax(scores: int, base: int, begin: int, end: int, cap: float, sink: float) -> float:
    """Turn the scores of positions [begin, end) into e**(score - largest), in place; return their sum."""
    first = scores + (begin - base) // LANES * LANE_BYTES
    last = scores + (end - base + LANES - 1) // LANES * LANE_BYTES
    if cap != 0.0:
        for at in range(first, last, LANE_BYTES):
            store(elementary.capped(load(at), spread(cap)), at)
    for at in range(first, scores + (begin - base) * FLOAT, FLOAT):
        store_f32(at, float32(MINUS_INFINITY))
    for at in range(scores + (end - base) * FLOAT, last, FLOAT):
        store_f32(at, float32(MINUS_INFINITY))
    most = spread(float32(sink))
    for at in range(first, last, LANE_BYTES):
        most = larger(load(at), most)
    largest = spread(largest_lane(most))
    total = spread(0.0)
    for at in range(first, last, LANE_BYTES):
        share = elementary.exp(load(at) - largest)
        store(share, at)
        total = total + share
    return sum_lanes(total) + first_lane(elementary.exp(spread(float32(sink)) - largest))


@inner
def _gather_values(
    scores: int,
    stride: int,
    rows: int,
    base: int,
    begin: int,
    end: int,
    table: int,
    values_at: int,
    panels: int,
    out: int,
) -> None:
    """out [rows, panels * 16] += scores @ the values of positions [begin, end), one position after the other."""
    position = begin
    while position < end:
        page = load_i64(table + position // PAGE * WORD)
        offset = position % PAGE
        count = min(PAGE - offset, end - position)
        values = page + values_at + offset * LANE_BYTES
        shares = scores + (position - base) * FLOAT
        _dot(shares, stride, rows, values, PAGE * LANE_BYTES, panels, count, out, panels * LANE_BYTES, 1)
        position += count


@inner
def _finish(
    op: int,
    step: int,
    row: int,
    rows: int,
    head: int,
    heads: int,
    v_dim: int,
    v_panels: int,
    outputs: int,
    sums: int,
) -> None:
    """dst = outputs / sums."""
    column = field(op, r.DST_COLUMN) + head * v_dim
    for i in range(rows):
        target = row_address(step, field(op, r.DST), column + i % heads * v_dim, row + i // heads)
        source = outputs + i * v_panels * LANE_BYTES
        total = spread(load_f32(sums + i * FLOAT))
        for d in range(0, v_dim, LANES):
            store_part(load(source + d * FLOAT) / total, target + d * FLOAT, min(LANES, v_dim - d))
