"""Layers of experts: which experts each row goes to, and their sum.

The rows of an expert go through the linear kernels together, so that its weights are read once; each row's bits are
those that it would have alone, and its experts are summed in the order of rank.
"""

from __future__ import annotations

from numba import float32

from slicing.fast import elementary
from slicing.fast import records as r
from slicing.fast.barrier import wait
from slicing.fast.compiling import inner
from slicing.fast.elementary import number
from slicing.fast.linear import linear_share
from slicing.fast.linking import linked
from slicing.fast.pointwise import copy_row, gate_columns
from slicing.fast.records import (
    LANES,
    WORD,
    field,
    load_f32,
    load_i64,
    real,
    row_address,
    scratch,
    share,
    store_f32,
    store_i64,
)
from slicing.fast.vectors import larger, largest_lane, load, load_part, spread, store_part, sum_lanes

FLOAT = 4  # bytes
LANE_BYTES = LANES * FLOAT
MINUS_INFINITY = float("-inf")
SIGMOID_FLOOR = 1e-20  # what DeepSeek-V3 adds to the sum that it divides sigmoid weights by
GROUP_BEST = (
    2  # experts whose scores make a group's, where scores are sigmoids (DeepSeek-V3); else the best alone
)


@linked
def _softmax(values: int, count: int) -> None:
    """Softmax of so many floats, in place."""
    most = number(MINUS_INFINITY)
    for i in range(0, count, LANES):
        some = load_part(values + i * FLOAT, min(LANES, count - i))
        first = spread(load_f32(values + i * FLOAT))  # lanes past the last repeat one that counts
        most = larger(elementary.first_lanes(some, min(LANES, count - i), first), most)
    largest = spread(largest_lane(most))
    total = number(0.0)
    for i in range(0, count, LANES):
        size = min(LANES, count - i)
        powers = elementary.exp(load_part(values + i * FLOAT, size) - largest)
        store_part(powers, values + i * FLOAT, size)
        total = total + elementary.first_lanes(powers, size, number(0.0))
    total = spread(sum_lanes(total))
    for i in range(0, count, LANES):
        size = min(LANES, count - i)
        store_part(load_part(values + i * FLOAT, size) / total, values + i * FLOAT, size)


@linked
def op_route(op: int, step: int, t: int, num_threads: int) -> None:
    """Choose the experts of thread t's rows and weigh them."""
    first, last = share(field(step, r.STEP_ROWS), t, num_threads)
    for row in range(first, last):
        logits = row_address(step, field(op, r.SRC), field(op, r.SRC_COLUMN), row)
        target = row_address(step, field(op, r.DST), field(op, r.DST_COLUMN), row)
        _route(op, logits, target, scratch(step, t) + r.LINEAR_SCRATCH)


@inner
def _route(op: int, logits: int, target: int, scores: int) -> None:
    """Write a row's expert numbers and weights. `scores` has room for two rows of all experts."""
    count, top_k, mode = field(op, r.ROUTE_EXPERTS), field(op, r.ROUTE_TOP_K), field(op, r.ROUTE_MODE)
    choice = scores + (count + LANES - 1) // LANES * LANE_BYTES
    bias = field(op, r.ROUTE_BIAS)
    copy_row(logits, scores, count)
    if mode == r.SOFTMAX_THEN_TOP_K:
        _softmax(scores, count)
    for i in range(0, count, LANES):
        size = min(LANES, count - i)
        x = load_part(scores + i * FLOAT, size)
        if mode == r.SIGMOID_THEN_TOP_K:
            x = elementary.sigmoid(x)
            store_part(x, scores + i * FLOAT, size)
        if bias:
            x = x + load_part(bias + i * FLOAT, size)
        store_part(x, choice + i * FLOAT, size)
    if field(op, r.ROUTE_GROUPS) > 1:
        _keep_best_groups(op, choice, count // field(op, r.ROUTE_GROUPS))
    weights = target + top_k * FLOAT
    for rank in range(top_k):
        best = _take_best(choice, count)
        store_f32(target + rank * FLOAT, float32(best))
        store_f32(weights + rank * FLOAT, load_f32(scores + best * FLOAT))
    _weigh(op, weights, top_k, mode)


@inner
def _weigh(op: int, weights: int, top_k: int, mode: int) -> None:
    if mode == r.TOP_K_THEN_SOFTMAX:
        _softmax(weights, top_k)
    total = float32(1.0)
    if field(op, r.ROUTE_NORMALISE):
        total = float32(SIGMOID_FLOOR) if mode == r.SIGMOID_THEN_TOP_K else float32(0.0)
        for rank in range(top_k):
            total += load_f32(weights + rank * FLOAT)
    factor = float32(real(op, r.ROUTE_FACTOR))
    for rank in range(top_k):
        store_f32(weights + rank * FLOAT, load_f32(weights + rank * FLOAT) / total * factor)


@inner
def _take_best(choice: int, count: int) -> int:
    """Return the index of the largest score, the lowest of equals, and take it out of the choice.

    What was taken is marked by NaN, as a score may be anything else; where all are NaN, index 0 is returned.
    """
    best = -1
    best_score = float32(0.0)
    for i in range(count):
        score = load_f32(choice + i * FLOAT)
        if score == score and (best < 0 or score > best_score):
            best, best_score = i, score
    best = max(best, 0)
    store_f32(choice + best * FLOAT, float32(float("nan")))
    return best


@inner
def _keep_best_groups(op: int, choice: int, size: int) -> None:
    """Set the scores of the groups of `size` experts that are not among the best to what `ROUTE` never prefers."""
    groups, kept = field(op, r.ROUTE_GROUPS), field(op, r.ROUTE_TOP_GROUPS)
    best_of = GROUP_BEST if field(op, r.ROUTE_MODE) == r.SIGMOID_THEN_TOP_K else 1
    totals = choice + (groups * size + LANES - 1) // LANES * LANE_BYTES
    spare = totals + (groups + LANES - 1) // LANES * LANE_BYTES
    for group in range(groups):
        copy_row(choice + group * size * FLOAT, spare, size)
        total = float32(0.0)
        for _ in range(min(best_of, size)):
            total += load_f32(choice + (group * size + _take_best(spare, size)) * FLOAT)
        store_f32(totals + group * FLOAT, total)
    for _ in range(kept):
        _take_best(totals, groups)
    for group in range(groups):
        total = load_f32(totals + group * FLOAT)
        if total == total:
            for i in range(group * size, (group + 1) * size):
                store_f32(choice + i * FLOAT, float32(MINUS_INFINITY))


@linked
def op_experts(op: int, step: int, t: int, num_threads: int) -> None:
    """dst = sum over a row's experts of weight * down(activation(gate) * up)."""
    if t == 0:
        _sort_rows(op, step)
    wait(step, num_threads)
    _copy_inputs(op, step, t, num_threads)
    wait(step, num_threads)
    _each_expert(op, step, r.EXPERT_GATE_UP, r.EXPERT_INPUTS, r.EXPERT_GATE_UPS, t, num_threads)
    wait(step, num_threads)
    _gate(op, step, t, num_threads)
    wait(step, num_threads)
    _each_expert(op, step, r.EXPERT_DOWN, r.EXPERT_HIDDEN, r.EXPERT_OUTPUTS, t, num_threads)
    wait(step, num_threads)
    _sum(op, step, t, num_threads)


@inner
def _work(op: int, step: int, which: int) -> int:
    """Return the address of one of the operation's own buffers (see `records`)."""
    return row_address(step, field(op, r.EXPERTS_WORK) + which, 0, 0)


@inner
def _first_weight(op: int, which: int) -> int:
    """Return the weight record EXPERT_GATE_UP or EXPERT_DOWN of the first expert; all have the same size."""
    return field(field(op, r.EXPERTS_TABLE), which)


@inner
def _padded_bytes(width: int) -> int:
    return (width + LANES - 1) // LANES * LANE_BYTES


@inner
def _stride(op: int, which: int) -> int:
    """Return the bytes of one (row, expert) in a work buffer."""
    if which == r.EXPERT_INPUTS:
        return _padded_bytes(field(_first_weight(op, r.EXPERT_GATE_UP), r.WEIGHT_COLUMNS))
    if which == r.EXPERT_GATE_UPS:
        return _padded_bytes(2 * field(op, r.EXPERTS_INTER))
    if which == r.EXPERT_HIDDEN:
        return _padded_bytes(field(op, r.EXPERTS_INTER))
    return _padded_bytes(field(_first_weight(op, r.EXPERT_DOWN), r.WEIGHT_ROWS))


@inner
def _expert_of(op: int, step: int, pair: int) -> int:
    """Return the expert of pair row * top_k + rank."""
    top_k = field(op, r.EXPERTS_TOP_K)
    return int(load_f32(row_address(step, field(op, r.EXPERTS_ROUTES), pair % top_k, pair // top_k)))


@inner
def _lists(op: int, step: int) -> tuple[int, int, int]:
    """Return the addresses of: each expert's first slot [experts + 1], the pair in each slot, the slot of each pair."""
    starts = _work(op, step, r.EXPERT_ORDER)
    pairs = starts + (field(op, r.EXPERTS_COUNT) + 1) * WORD
    return starts, pairs, pairs + field(step, r.STEP_ROWS) * field(op, r.EXPERTS_TOP_K) * WORD


@inner
def _sort_rows(op: int, step: int) -> None:
    """Give every pair (row, rank) a slot, so that an expert's pairs follow each other in the order of the rows."""
    starts, pairs, slots = _lists(op, step)
    count = field(op, r.EXPERTS_COUNT)
    num_pairs = field(step, r.STEP_ROWS) * field(op, r.EXPERTS_TOP_K)
    for expert in range(count + 1):
        store_i64(starts + expert * WORD, 0)
    for pair in range(num_pairs):
        place = starts + (_expert_of(op, step, pair) + 1) * WORD
        store_i64(place, load_i64(place) + 1)
    for expert in range(count):
        place = starts + (expert + 1) * WORD
        store_i64(place, load_i64(place) + load_i64(place - WORD))
    for pair in range(num_pairs):  # a start is moved up by each pair, and is its expert's end afterwards
        place = starts + _expert_of(op, step, pair) * WORD
        slot = load_i64(place)
        store_i64(place, slot + 1)
        store_i64(pairs + slot * WORD, pair)
        store_i64(slots + pair * WORD, slot)
    for expert in range(count, 0, -1):
        store_i64(starts + expert * WORD, load_i64(starts + (expert - 1) * WORD))
    store_i64(starts, 0)


@inner
def _copy_inputs(op: int, step: int, t: int, num_threads: int) -> None:
    _, pairs, _ = _lists(op, step)
    top_k, width = field(op, r.EXPERTS_TOP_K), field(_first_weight(op, r.EXPERT_GATE_UP), r.WEIGHT_COLUMNS)
    inputs, stride = _work(op, step, r.EXPERT_INPUTS), _stride(op, r.EXPERT_INPUTS)
    first, last = share(field(step, r.STEP_ROWS) * top_k, t, num_threads)
    for slot in range(first, last):
        row = load_i64(pairs + slot * WORD) // top_k
        source = row_address(step, field(op, r.SRC), field(op, r.SRC_COLUMN), row)
        copy_row(source, inputs + slot * stride, width)


@inner
def _each_expert(op: int, step: int, weight: int, source: int, target: int, t: int, num_threads: int) -> None:
    """One linear layer of all experts on their own rows; a thread takes its share of the outputs of each."""
    starts, _, _ = _lists(op, step)
    x, x_stride = _work(op, step, source), _stride(op, source)
    out, out_stride = _work(op, step, target), _stride(op, target)
    for expert in range(field(op, r.EXPERTS_COUNT)):
        first, last = field(starts, expert), field(starts, expert + 1)
        if first == last:
            continue
        record = field(op, r.EXPERTS_TABLE) + expert * r.EXPERT_WORDS * WORD
        linear_share(
            field(record, weight),
            x + first * x_stride,
            x_stride,
            last - first,
            out + first * out_stride,
            out_stride,
            field(record, weight + 1),  # its bias
            0,
            t,
            num_threads,
            scratch(step, t),
        )


@inner
def _gate(op: int, step: int, t: int, num_threads: int) -> None:
    inter, activation = field(op, r.EXPERTS_INTER), field(op, r.EXPERTS_ACTIVATION)
    layout, reals = field(op, r.EXPERTS_LAYOUT), op + r.EXPERTS_ALPHA * WORD
    sources, source_stride = _work(op, step, r.EXPERT_GATE_UPS), _stride(op, r.EXPERT_GATE_UPS)
    targets, target_stride = _work(op, step, r.EXPERT_HIDDEN), _stride(op, r.EXPERT_HIDDEN)
    first, last = share(field(step, r.STEP_ROWS) * field(op, r.EXPERTS_TOP_K), t, num_threads)
    for slot in range(first, last):
        source, target = sources + slot * source_stride, targets + slot * target_stride
        gate_columns(source, target, 0, inter, inter, activation, layout, reals)


@inner
def _sum(op: int, step: int, t: int, num_threads: int) -> None:
    """dst = (dst +) the rows' outputs, each times its weight, in the order of rank."""
    _, _, slots = _lists(op, step)
    top_k, width = field(op, r.EXPERTS_TOP_K), field(_first_weight(op, r.EXPERT_DOWN), r.WEIGHT_ROWS)
    outputs, stride = _work(op, step, r.EXPERT_OUTPUTS), _stride(op, r.EXPERT_OUTPUTS)
    first, last = share(field(step, r.STEP_ROWS), t, num_threads)
    for row in range(first, last):
        target = row_address(step, field(op, r.DST), field(op, r.DST_COLUMN), row)
        weights = row_address(step, field(op, r.EXPERTS_ROUTES), top_k, row)
        for i in range(0, width, LANES):
            total = number(0.0)
            for rank in range(top_k):
                output = outputs + field(slots, row * top_k + rank) * stride
                total = total + load(output + i * FLOAT) * spread(load_f32(weights + rank * FLOAT))
            size = min(LANES, width - i)
            if field(op, r.EXPERTS_ADD):
                total = load_part(target + i * FLOAT, size) + total
            store_part(total, target + i * FLOAT, size)
