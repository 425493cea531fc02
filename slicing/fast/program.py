"""A program: what a step of a model does to its rows, as a table of operation records.

Knows the operations' fields, not how they are computed nor which model they come from.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from slicing.fast import records as r
from slicing.fast.packing import PackedWeight

Array = NDArray[Any]
Activation = Literal[
    "silu", "gelu_tanh", "gelu", "relu", "relu2", "sigmoid", "oss_swiglu", "tanh", "quick_gelu"
]
ACTIVATIONS: dict[str, int] = {
    "silu": r.SILU,
    "gelu_tanh": r.GELU_TANH,
    "gelu": r.GELU,
    "relu": r.RELU,
    "relu2": r.RELU2,
    "sigmoid": r.SIGMOID,
    "oss_swiglu": r.OSS_SWIGLU,
    "tanh": r.TANH,
    "quick_gelu": r.QUICK_GELU,
}
ROUTE_MODES: dict[str, int] = {
    "softmax_then_topk": r.SOFTMAX_THEN_TOP_K,
    "topk_then_softmax": r.TOP_K_THEN_SOFTMAX,
    "sigmoid_then_topk": r.SIGMOID_THEN_TOP_K,
}


class Layout(Protocol):
    """Where a layer's keys and values lie (see `pages.KVLayout`)."""

    def place(self, layer_slot: int) -> tuple[int, int, int]:
        """Return a slot's page group, and the first float of its keys and of its values inside a page."""


@dataclass(frozen=True, slots=True)
class Columns:
    """Some columns of a buffer, from `column` on. Where a buffer is asked for, its number alone means all of it."""

    buffer: int
    column: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class Expert:
    """One expert's weights: gate and up stacked [2 * inter, hidden], down [hidden, inter]."""

    gate_up: PackedWeight
    down: PackedWeight
    gate_up_bias: Array | None = None
    down_bias: Array | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Program:
    """Operations ready to run, with everything whose addresses they hold."""

    table: NDArray[np.int64]  # [num_ops, OP_WORDS]
    widths: tuple[int, ...]  # floats per row of each buffer, padded
    layers: dict[int, int]  # layer number -> the index of its mark in the table
    kept: tuple[Any, ...] = field(repr=False)

    @property
    def num_ops(self) -> int:
        """Operations in the table."""
        return self.table.shape[0]

    @property
    def address(self) -> int:
        """Where the table lies."""
        return int(self.table.ctypes.data)


class ProgramBuilder:
    """Writes operations one after another. Every method that takes a buffer takes its number or `Columns` of it."""

    def __init__(self, layout: Layout | None = None) -> None:
        self._layout = layout
        self._records: list[NDArray[np.int64]] = []
        self._widths: list[int] = []
        self._layers: dict[int, int] = {}
        self._kept: list[Any] = []
        self._expert_firsts: dict[tuple[int, ...], int] = {}
        self._weights: dict[int, int] = {}  # id of a packed weight -> address of its record

    def buffer(self, width: int) -> int:
        """Add a buffer of float32 [rows, width], the width padded with zeros to a multiple of 16; return its number."""
        self._widths.append(_padded(width))
        return len(self._widths) - 1

    def build(self) -> Program:
        """Return what was written."""
        table = np.zeros((len(self._records), r.OP_WORDS), np.int64)
        for index, record in enumerate(self._records):
            table[index] = record
        return Program(table, tuple(self._widths), dict(self._layers), tuple(self._kept))

    def layer(self, number: int) -> None:
        """Mark where a layer starts: a cancelled step ends here."""
        self._layers[number] = len(self._records)
        self._add(r.LAYER, {r.LAYER_NUMBER: number})

    def rms_norm(
        self,
        src: int | Columns,
        dst: int | Columns,
        weight: Array | None,
        eps: float,
        width: int,
        heads: int = 1,
    ) -> None:
        """dst = src / sqrt(mean(src^2) + eps) * weight, per head of `width` values; weight float32 [width]."""
        self._norm(r.RMS_NORM, src, dst, weight, None, eps, width, heads)

    def layer_norm(
        self,
        src: int | Columns,
        dst: int | Columns,
        weight: Array | None,
        bias: Array | None,
        eps: float,
        width: int,
        heads: int = 1,
    ) -> None:
        """dst = (src - mean) / sqrt(variance + eps) * weight + bias, per head of `width` values."""
        self._norm(r.LAYER_NORM, src, dst, weight, bias, eps, width, heads)

    def linear(
        self,
        src: int | Columns,
        dst: int | Columns,
        weight: PackedWeight,
        bias: Array | None = None,
        add: bool = False,
    ) -> None:
        """dst = src @ weight.T (+ bias); with `add`, dst += that, as one addition. bias float32 [weight.rows].

        src's and dst's columns must not overlap.
        """
        fields = {
            r.LINEAR_WEIGHT: self._weight(weight),
            r.LINEAR_BIAS: self._array(bias),
            r.LINEAR_ADD: int(add),
        }
        self._add(r.LINEAR, {**_pair(src, dst), **fields})

    def rotary(
        self,
        buf: int | Columns,
        heads: int,
        head_dim: int,
        rotary_dim: int,
        cos: Array,
        sin: Array,
        style: Literal["half", "interleaved"] = "half",
    ) -> None:
        """Turn the first `rotary_dim` of each head, in place; cos and sin float32 [positions, rotary_dim]."""
        fields = {
            r.ROTARY_HEADS: heads,
            r.ROTARY_HEAD_DIM: head_dim,
            r.ROTARY_DIM: rotary_dim,
            r.ROTARY_COS: self._array(cos),
            r.ROTARY_SIN: self._array(sin),
            r.ROTARY_STYLE: r.INTERLEAVED if style == "interleaved" else r.HALF,
        }
        self._add(r.ROTARY, {**_one(buf), **fields})

    def append(
        self,
        keys: int | Columns,
        values: int | Columns,
        kv_heads: int,
        k_dim: int,
        v_dim: int,
        layer_slot: int,
    ) -> None:
        """Write the rows' keys and values into their works' pages."""
        where = _columns(values)
        fields = {
            r.APPEND_VALUES: where.buffer,
            r.APPEND_VALUES_COLUMN: where.column,
            r.APPEND_KV_HEADS: kv_heads,
            r.APPEND_K_DIM: k_dim,
            r.APPEND_V_DIM: v_dim,
        }
        places = (r.APPEND_GROUP, r.APPEND_KEYS_AT, r.APPEND_VALUES_AT)
        self._add(r.APPEND, {**_one(keys), **fields, **self._place(places, layer_slot)})

    def attention(
        self,
        queries: int | Columns,
        dst: int | Columns,
        heads: int,
        kv_heads: int,
        k_dim: int,
        v_dim: int,
        layer_slot: int,
        scale: float,
        softcap: float = 0.0,
        window: int = 0,
        sinks: Array | None = None,
    ) -> None:
        """dst [heads * v_dim] = attention of the rows over their works' pages; sinks float32 [heads]."""
        fields = {
            r.ATTENTION_HEADS: heads,
            r.ATTENTION_KV_HEADS: kv_heads,
            r.ATTENTION_K_DIM: k_dim,
            r.ATTENTION_V_DIM: v_dim,
            r.ATTENTION_SCALE: float(scale),
            r.ATTENTION_SOFTCAP: float(softcap),
            r.ATTENTION_WINDOW: window,
            r.ATTENTION_SINKS: self._array(sinks),
        }
        places = (r.ATTENTION_GROUP, r.ATTENTION_KEYS_AT, r.ATTENTION_VALUES_AT)
        self._add(r.ATTENTION, {**_pair(queries, dst), **fields, **self._place(places, layer_slot)})

    def gate(
        self,
        src: int | Columns,
        dst: int | Columns,
        inter: int,
        activation: Activation,
        layout: Literal["halves", "alternating"] = "halves",
        alpha: float = 0.0,
        limit: float = 0.0,
    ) -> None:
        """dst [inter] = activation(gate) * up, both taken from src [2 * inter] in either layout. limit 0: none."""
        fields = {
            r.GATE_INTER: inter,
            r.GATE_ACTIVATION: ACTIVATIONS[activation],
            r.GATE_LAYOUT: r.ALTERNATING if layout == "alternating" else r.HALVES,
            r.GATE_ALPHA: float(alpha),
            r.GATE_LIMIT: float(limit),
        }
        self._add(r.GATE, {**_pair(src, dst), **fields})

    def activate(self, src: int | Columns, dst: int | Columns, width: int, activation: Activation) -> None:
        """dst = activation(src)."""
        fields = {r.POINT_WIDTH: width, r.POINT_ACTIVATION: ACTIVATIONS[activation]}
        self._add(r.ACTIVATE, {**_pair(src, dst), **fields})

    def add(self, src: int | Columns, dst: int | Columns, width: int, factor: float = 1.0) -> None:
        """dst += src * factor, the product rounded before it is added."""
        self._add(r.ADD, {**_pair(src, dst), r.POINT_WIDTH: width, r.POINT_REAL: float(factor)})

    def scale(self, buf: int | Columns, width: int, factor: float) -> None:
        """buf *= factor."""
        self._add(r.SCALE, {**_one(buf), r.POINT_WIDTH: width, r.POINT_REAL: float(factor)})

    def copy(self, src: int | Columns, dst: int | Columns, width: int) -> None:
        """dst = src."""
        self._add(r.COPY, {**_pair(src, dst), r.POINT_WIDTH: width})

    def softcap(self, buf: int | Columns, width: int, cap: float) -> None:
        """buf = tanh(buf / cap) * cap."""
        self._add(r.SOFTCAP, {**_one(buf), r.POINT_WIDTH: width, r.POINT_REAL: float(cap)})

    def route(
        self,
        logits: int | Columns,
        dst: int | Columns,
        num_experts: int,
        top_k: int,
        mode: Literal["softmax_then_topk", "topk_then_softmax", "sigmoid_then_topk"],
        normalise: bool = False,
        factor: float = 1.0,
        bias: Array | None = None,
        groups: int = 1,
        top_groups: int = 1,
    ) -> None:
        """dst [2 * top_k]: the numbers of the chosen experts (as float32), then their weights, in order of rank.

        `bias` float32 [num_experts] counts for the choice only; the weights are multiplied by `factor` in the end.
        """
        fields = {
            r.ROUTE_EXPERTS: num_experts,
            r.ROUTE_TOP_K: top_k,
            r.ROUTE_MODE: ROUTE_MODES[mode],
            r.ROUTE_NORMALISE: int(normalise),
            r.ROUTE_FACTOR: float(factor),
            r.ROUTE_BIAS: self._array(bias),
            r.ROUTE_GROUPS: groups,
            r.ROUTE_TOP_GROUPS: top_groups,
        }
        self._add(r.ROUTE, {**_pair(logits, dst), **fields})

    def experts(
        self,
        src: int | Columns,
        dst: int | Columns,
        routes: int,
        experts: Sequence[Expert],
        top_k: int,
        inter: int,
        activation: Activation,
        layout: Literal["halves", "alternating"] = "halves",
        alpha: float = 0.0,
        limit: float = 0.0,
        add: bool = False,
    ) -> None:
        """dst = the sum over a row's experts, in order of rank, of weight * down(act(gate) * up); `add`: dst += it."""
        fields = {
            r.EXPERTS_ROUTES: routes,
            r.EXPERTS_TABLE: self._expert_table(experts),
            r.EXPERTS_COUNT: len(experts),
            r.EXPERTS_TOP_K: top_k,
            r.EXPERTS_INTER: inter,
            r.EXPERTS_ACTIVATION: ACTIVATIONS[activation],
            r.EXPERTS_LAYOUT: r.ALTERNATING if layout == "alternating" else r.HALVES,
            r.EXPERTS_ALPHA: float(alpha),
            r.EXPERTS_LIMIT: float(limit),
            r.EXPERTS_WORK: self._expert_buffers(experts, top_k, inter),
            r.EXPERTS_ADD: int(add),
        }
        self._add(r.EXPERTS, {**_pair(src, dst), **fields})

    def gather(self, src: int | Columns, dst: int | Columns, width: int) -> None:
        """dst's first rows = the step's kept rows of src; what follows works on as many rows as were kept."""
        self._add(r.GATHER, {**_pair(src, dst), r.POINT_WIDTH: width})

    def _norm(
        self,
        opcode: int,
        src: int | Columns,
        dst: int | Columns,
        weight: Array | None,
        bias: Array | None,
        eps: float,
        width: int,
        heads: int,
    ) -> None:
        fields = {
            r.NORM_WEIGHT: self._array(weight),
            r.NORM_BIAS: self._array(bias),
            r.NORM_EPS: float(eps),
            r.NORM_WIDTH: width,
            r.NORM_HEADS: heads,
        }
        self._add(opcode, {**_pair(src, dst), **fields})

    def _expert_table(self, experts: Sequence[Expert]) -> int:
        table = np.zeros((len(experts), r.EXPERT_WORDS), np.int64)
        for row, expert in zip(table, experts, strict=True):
            row[r.EXPERT_GATE_UP] = self._weight(expert.gate_up)
            row[r.EXPERT_GATE_UP_BIAS] = self._array(expert.gate_up_bias)
            row[r.EXPERT_DOWN] = self._weight(expert.down)
            row[r.EXPERT_DOWN_BIAS] = self._array(expert.down_bias)
        self._kept.append(table)
        return int(table.ctypes.data)

    def _expert_buffers(self, experts: Sequence[Expert], top_k: int, inter: int) -> int:
        """Return the first of the buffers that hold rows sorted by expert; layers of the same sizes share them."""
        weights = experts[0]
        widths = (
            2 * _padded(2 * top_k) + 2 * _padded(len(experts) + 1),  # EXPERT_ORDER, int64
            top_k * _padded(weights.gate_up.columns),
            top_k * _padded(2 * inter),
            top_k * _padded(inter),
            top_k * _padded(weights.down.rows),
        )
        if widths not in self._expert_firsts:
            self._expert_firsts[widths] = len(self._widths)
            for width in widths:
                self.buffer(width)
        return self._expert_firsts[widths]

    def _place(self, places: tuple[int, int, int], layer_slot: int) -> dict[int, int | float]:
        if self._layout is None:
            raise ValueError("a program with attention needs the layout of its keys and values")
        return dict(zip(places, self._layout.place(layer_slot), strict=True))

    def _weight(self, weight: PackedWeight) -> int:
        if id(weight) not in self._weights:
            record = weight.record()
            self._kept += [weight, record]
            self._weights[id(weight)] = int(record.ctypes.data)
        return self._weights[id(weight)]

    def _array(self, array: Array | None) -> int:
        """Keep a float32 array and return its address; 0 for none."""
        if array is None:
            return 0
        kept = np.ascontiguousarray(array, np.float32)
        self._kept.append(kept)
        return int(kept.ctypes.data)

    def _add(self, opcode: int, fields: dict[int, int | float]) -> None:
        record = np.zeros(r.OP_WORDS, np.int64)
        record[0] = opcode
        for index, value in fields.items():
            if isinstance(value, float):
                record[index : index + 1].view(np.float64)[0] = value
            else:
                record[index] = value
        self._records.append(record)


def _columns(buffer: int | Columns) -> Columns:
    return buffer if isinstance(buffer, Columns) else Columns(buffer)


def _one(buffer: int | Columns) -> dict[int, int | float]:
    where = _columns(buffer)
    return {r.SRC: where.buffer, r.SRC_COLUMN: where.column}


def _pair(src: int | Columns, dst: int | Columns) -> dict[int, int | float]:
    where = _columns(dst)
    return {**_one(src), r.DST: where.buffer, r.DST_COLUMN: where.column}


def _padded(width: int) -> int:
    return -(-width // r.LANES) * r.LANES
