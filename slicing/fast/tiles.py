"""The product that everything rests on: rows times panels of 16 outputs, as LLVM IR.

Every output is `fma(x[k], w[k], sum)` over k in order, so its bits depend neither on the rows beside it, the tile, the
thread nor the vector width. Knows addresses and strides, nothing of models.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils

from slicing.fast.compiling import emitted, has_feature, inner
from slicing.fast.lanes import (
    F32,
    I8,
    I16,
    I32,
    VECTOR,
    at,
    constant,
    load,
    prefetch,
    spread,
    store,
    vector_function,
)
from slicing.fast.linking import linked
from slicing.fast.records import BF16, FP32, GROUP, INT8, LANES

WEIGHT_BYTES = {FP32: 4, BF16: 2, INT8: 1}
LINE = 64  # bytes that the processor fetches at a time
INTO_L2 = 2  # LLVM's locality of a prefetch that leaves the first-level cache alone

# (rows, panels, columns unrolled) of each tile, measured on Zen 4: sums that fill the registers without spilling.
# A host with 32 vector registers of 16 floats takes up to 24 sums, one with 16 registers of 8 floats 6 sums.
WIDE_TILES = ((1, 4, 4), (2, 4, 4), (4, 4, 4), (8, 3, 1))
NARROW_TILES = ((1, 4, 4), (2, 2, 4), (4, 1, 4), (6, 1, 1))
WIDE_ORDER = (1, 2, 4, 4, 4, 4, 8)  # the tile for 1, 2, 3 ... rows that are left; the last for all above
NARROW_ORDER = (1, 2, 4, 4, 6, 6, 4, 4, 6)


IS_WIDE = has_feature("avx512f")
TILES = WIDE_TILES if IS_WIDE else NARROW_TILES
ORDER = WIDE_ORDER if IS_WIDE else NARROW_ORDER
TALLEST, TALLEST_PANELS = TILES[-1][:2]  # what many rows are cut into
PANELS_AT_ONCE = 12  # a multiple of every tile's panels


class _Tile:
    """Emits the product of up to `num_rows` rows and `num_panels` panels: all sums in registers, all of K."""

    def __init__(
        self, builder: Any, form: int, num_rows: int, num_panels: int, fetches: bool, args: Any
    ) -> None:
        x, x_stride, rows, w, panel_stride, scales, scale_stride, panels, columns, out, out_stride, begin = (
            args
        )
        self.builder, self.form, self.columns = builder, form, columns
        self.out, self.out_stride, self.begin = out, out_stride, begin
        self.rows, self.panels, self.num_panels = rows, panels, num_panels
        # Rows and panels past the last read the last one again; their sums are dropped.
        self.inputs = [at(builder, x, self._clamped(i, rows), x_stride) for i in range(num_rows)]
        self.weights = [at(builder, w, self._clamped(i, panels), panel_stride) for i in range(num_panels)]
        self.scales = [at(builder, scales, self._clamped(i, panels), scale_stride) for i in range(num_panels)]
        self.ahead: tuple[Any, Any] | None = None  # bytes to what the next tile reads: weights, scales
        if fetches:
            count = constant(num_panels)
            self.ahead = (builder.mul(count, panel_stride), builder.mul(count, scale_stride))
        zero = ir.Constant(VECTOR, [0.0] * LANES)
        self.sums = [cgutils.alloca_once(builder, VECTOR) for _ in range(num_rows * num_panels)]
        for place in self.sums:
            builder.store(zero, place)

    def emit(self, unroll: int) -> None:
        builder = self.builder
        with builder.if_then(builder.icmp_signed("!=", self.begin, constant(0))):
            self._each_kept(lambda place, address: builder.store(load(builder, address, VECTOR, 4), place))
        if self.form == INT8:
            self._groups(unroll)
        else:
            self._span(constant(0), self.columns, [None] * self.num_panels, unroll)
        self._each_kept(lambda place, address: store(builder, builder.load(place), address))

    def _clamped(self, index: int, count: Any) -> Any:
        if index == 0:
            return constant(0)
        last = self.builder.sub(count, constant(1))
        is_past = self.builder.icmp_signed(">", constant(index), last)
        return self.builder.select(is_past, last, constant(index))

    def _groups(self, unroll: int) -> None:
        builder = self.builder
        groups = builder.sdiv(builder.add(self.columns, constant(GROUP - 1)), constant(GROUP))
        with cgutils.for_range(builder, groups) as loop:
            places = [at(builder, s, loop.index, LANES * 4) for s in self.scales]
            scales = [load(builder, place, VECTOR, 4) for place in places]
            if self.ahead is not None:
                self._fetch(places, self.ahead[1])
            first = builder.mul(loop.index, constant(GROUP))
            after = builder.add(first, constant(GROUP))
            is_short = builder.icmp_signed(">", after, self.columns)
            self._span(first, builder.select(is_short, self.columns, after), scales, unroll)

    def _span(self, first: Any, after: Any, scales: list[Any], unroll: int) -> None:
        """Columns [first, after), `unroll` of them in a turn of the loop."""
        builder = self.builder
        blocks = builder.sdiv(builder.sub(after, first), constant(unroll))
        with cgutils.for_range(builder, blocks) as loop:
            k = at(builder, first, loop.index, unroll)
            for i in range(unroll):
                begins_line = i * LANES * WEIGHT_BYTES[self.form] % LINE == 0
                self._column(builder.add(k, constant(i)), scales, begins_line)
        if unroll > 1:
            done = at(builder, first, blocks, unroll)
            with cgutils.for_range(builder, builder.sub(after, done)) as loop:
                self._column(builder.add(done, loop.index), scales, False)

    def _column(self, k: Any, scales: list[Any], begins_line: bool) -> None:
        builder = self.builder
        fma = vector_function(builder, "fma", 3)
        size = LANES * WEIGHT_BYTES[self.form]
        places = [at(builder, w, k, size) for w in self.weights]
        if begins_line and self.ahead is not None:
            self._fetch(places, self.ahead[0])
        weights = [_weights(builder, self.form, w, s) for w, s in zip(places, scales, strict=True)]
        for i, row in enumerate(self.inputs):
            value = spread(builder, load(builder, at(builder, row, k, 4), F32, 4))
            for j, weight in enumerate(weights):
                place = self.sums[i * self.num_panels + j]
                builder.store(builder.call(fma, [value, weight, builder.load(place)]), place)

    def _fetch(self, places: list[Any], ahead: Any) -> None:
        """Have the lines fetched that the tile after this one reads in these places."""
        for place in places:
            prefetch(self.builder, self.builder.add(place, ahead), INTO_L2)

    def _each_kept(self, act: Callable[[Any, Any], object]) -> None:
        builder = self.builder
        for i in range(len(self.inputs)):
            for j in range(self.num_panels):
                has_row = builder.icmp_signed("<", constant(i), self.rows)
                has_panel = builder.icmp_signed("<", constant(j), self.panels)
                with builder.if_then(builder.and_(has_row, has_panel)):
                    row = at(builder, self.out, constant(i), self.out_stride)
                    act(self.sums[i * self.num_panels + j], builder.add(row, constant(j * LANES * 4)))


def _weights(builder: Any, form: int, address: Any, scale: Any) -> Any:
    """Load 16 weights as float32. int8: the product with the scale is rounded once."""
    if form == FP32:
        return load(builder, address, VECTOR, 4)
    wide = ir.VectorType(I32, LANES)
    if form == BF16:
        bits = builder.zext(load(builder, address, ir.VectorType(I16, LANES), 2), wide)
        return builder.bitcast(builder.shl(bits, ir.Constant(wide, [16] * LANES)), VECTOR)
    whole = builder.sext(load(builder, address, ir.VectorType(I8, LANES), 1), wide)
    return builder.fmul(builder.sitofp(whole, VECTOR), scale)


@cache
def tile(form: int, num_rows: int, num_panels: int, unroll: int, fetches: bool = False) -> Any:
    """Return the product of up to `num_rows` rows and `num_panels` panels, all of K, as compiled code calls it.

    Arguments, all int64: x, bytes from row to row, rows, weights, bytes from panel to panel, scales, the same of them,
    panels, K, out, bytes from row to row, begin. out[row, panel * 16 ...] is set; begin 1: the sums start from what is
    there. `fetches`: while it computes, have the next tile's weights fetched. The processor's own look-ahead ends at a
    page and begins anew at each panel, so that a few rows would wait for memory instead.
    """

    @emitted
    def product(
        typing_context: Any, x: Any, xs: Any, rows: Any, w: Any, ps: Any, s: Any, ss: Any, panels: Any, k: Any, o: Any,
        os: Any, begin: Any,
    ) -> Any:  # fmt: skip
        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            _Tile(builder, form, num_rows, num_panels, fetches, args).emit(unroll)
            return context.get_dummy_value()

        return types.void(*[types.int64] * 12), generate

    # Its name where numba makes the key of what it keeps: a new one in every process, unless told.
    product._set_uuid(f"diffuse-tile-{form}-{num_rows}-{num_panels}-{unroll}-{fetches}")
    return product


def _product(form: int) -> Any:
    """Return the compiled product of any rows and panels, cut into tiles."""
    tile_1, tile_2, tile_4, tile_n = (tile(form, *shape, fetches=shape[0] < TALLEST) for shape in TILES)
    panels_1, panels_2, panels_4, panels_n = (shape[1] for shape in TILES)
    most = len(ORDER) - 1
    order = ORDER

    def product(
        x: int,
        xs: int,
        rows: int,
        w: int,
        ps: int,
        s: int,
        ss: int,
        panels: int,
        k: int,
        out: int,
        os: int,
        begin: int,
    ) -> None:
        row = 0
        while row < rows:
            left = rows - row
            num_rows = order[min(left - 1, most)]
            xr = x + row * xs
            to = out + row * os
            if num_rows == 1:
                for p in range(0, panels, panels_1):
                    tile_1(
                        xr, xs, left, w + p * ps, ps, s + p * ss, ss, panels - p, k, to + p * 64, os, begin
                    )
            elif num_rows == 2:
                for p in range(0, panels, panels_2):
                    tile_2(
                        xr, xs, left, w + p * ps, ps, s + p * ss, ss, panels - p, k, to + p * 64, os, begin
                    )
            elif num_rows == 4:
                for p in range(0, panels, panels_4):
                    tile_4(
                        xr, xs, left, w + p * ps, ps, s + p * ss, ss, panels - p, k, to + p * 64, os, begin
                    )
            else:
                for p in range(0, panels, panels_n):
                    tile_n(
                        xr, xs, left, w + p * ps, ps, s + p * ss, ss, panels - p, k, to + p * 64, os, begin
                    )
            row += num_rows

    product.__qualname__ = f"product_{form}"  # the symbol
    return linked(product)


product_fp32 = _product(FP32)
product_bf16 = _product(BF16)
product_int8 = _product(INT8)


@emitted
def _widened(typing_context: Any, data: Any, scales: Any, columns: Any, out: Any) -> Any:
    """Write int8 columns of a panel as float32, the same values as inside a tile; out [columns, 16]."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        data, scales, columns, out = args
        with cgutils.for_range(builder, columns) as loop:
            group = builder.sdiv(loop.index, constant(GROUP))
            scale = load(builder, at(builder, scales, group, LANES * 4), VECTOR, 4)
            value = _weights(builder, INT8, at(builder, data, loop.index, LANES), scale)
            store(builder, value, at(builder, out, loop.index, LANES * 4))
        return context.get_dummy_value()

    return types.void(*[types.int64] * 4), generate


@inner
def widen_int8(
    data: int, stride: int, scales: int, scale_stride: int, panels: int, columns: int, out: int
) -> None:
    """Write int8 columns of some panels as float32 panels [panels, columns, 16] at `out`."""
    for p in range(panels):
        _widened(data + p * stride, scales + p * scale_stride, columns, out + p * columns * LANES * 4)
