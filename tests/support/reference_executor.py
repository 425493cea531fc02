"""Runs programs with numpy in float64, operation by operation: slow, plain to read, and what kernels are compared with.

It has the interface of `slicing.fast.execute.Executor`.
"""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np

from slicing.fast import fitting
from slicing.fast import records as r
from slicing.fast.execute import Workspace
from slicing.fast.fitting import GateForm
from slicing.fast.packing import FORMS, PackedWeight, unpack
from slicing.fast.pages import PAGE
from slicing.fast.program import ACTIVATIONS, ROUTE_MODES

NAMES = {number: name for name, number in ACTIVATIONS.items()}
MODES: dict[int, Any] = {number: name for name, number in ROUTE_MODES.items()}
FORM_NAMES: dict[int, Any] = {number: name for name, number in FORMS.items()}
STORED: dict[str, Any] = {"fp32": np.float32, "bf16": np.uint16, "int8": np.int8}


class ReferenceExecutor:
    """Runs the operations of a workspace's program."""

    def run(self, workspace: Workspace, *, start: int = 0, end: int | None = None, threads: int = 1) -> bool:
        """Run operations [start, end); `threads` changes nothing."""
        step, table = _Step(workspace), workspace.program.table
        for op in table[start:end]:
            step.run(op)
        return True

    def close(self) -> None:
        """Nothing is held."""


class _Step:
    def __init__(self, workspace: Workspace) -> None:
        self.ws = workspace
        step = workspace.step
        self.rows = int(step[r.STEP_ROWS])
        self.positions = _ints(step[r.STEP_ROW_POSITION], self.rows)
        self.row_work = _ints(step[r.STEP_ROW_WORK], self.rows)
        works = int(step[r.STEP_NUM_WORKS])
        self.works = _ints(step[r.STEP_WORKS], works * r.WORK_WORDS).reshape(works, -1)
        self.kept = _ints(step[r.STEP_KEPT], int(step[r.STEP_NUM_KEPT]))

    def run(self, op: np.ndarray) -> None:
        handlers = {
            r.RMS_NORM: self.norm, r.LAYER_NORM: self.norm, r.LINEAR: self.linear, r.ROTARY: self.rotary,
            r.APPEND: self.append, r.ATTENTION: self.attention, r.GATE: self.gate, r.ACTIVATE: self.activate,
            r.ADD: self.add, r.SCALE: self.scale, r.COPY: self.copy, r.SOFTCAP: self.softcap,
            r.ROUTE: self.route, r.EXPERTS: self.experts, r.GATHER: self.gather,
        }  # fmt: skip
        if op[0] != r.LAYER:
            handlers[int(op[0])](op)

    def get(self, buffer: int, column: int, width: int) -> np.ndarray:
        return self.ws.buffer(int(buffer))[: self.rows, column : column + width].astype(np.float64)

    def put(self, op: np.ndarray, values: np.ndarray) -> None:
        column = int(op[r.DST_COLUMN])
        self.ws.buffer(int(op[r.DST]))[: len(values), column : column + values.shape[1]] = values

    def src(self, op: np.ndarray, width: int) -> np.ndarray:
        return self.get(op[r.SRC], int(op[r.SRC_COLUMN]), width)

    def norm(self, op: np.ndarray) -> None:
        width, heads = int(op[r.NORM_WIDTH]), int(op[r.NORM_HEADS])
        kind: Any = "rms" if op[0] == r.RMS_NORM else "layer"
        form = fitting.NormForm(kind, _real(op, r.NORM_EPS), 0.0, True, True, width)
        values = self.src(op, width * heads).reshape(self.rows, heads, width)
        weight, bias = _floats(op[r.NORM_WEIGHT], width), _floats(op[r.NORM_BIAS], width)
        self.put(op, fitting.apply_norm(form, values, weight, bias).reshape(self.rows, -1))

    def linear(self, op: np.ndarray) -> None:
        weight = _weight(op[r.LINEAR_WEIGHT])
        made = self.src(op, weight.shape[1]) @ weight.T
        bias = _floats(op[r.LINEAR_BIAS], len(weight))
        made = made if bias is None else made + bias
        before = self.get(op[r.DST], int(op[r.DST_COLUMN]), len(weight)) if op[r.LINEAR_ADD] else 0.0
        self.put(op, made + before)

    def rotary(self, op: np.ndarray) -> None:
        heads, head_dim, dim = (int(op[i]) for i in (r.ROTARY_HEADS, r.ROTARY_HEAD_DIM, r.ROTARY_DIM))
        size = (int(self.positions.max()) + 1) * dim
        cos, sin = (_floats(op[i], size).reshape(-1, dim) for i in (r.ROTARY_COS, r.ROTARY_SIN))
        style = "interleaved" if op[r.ROTARY_STYLE] == r.INTERLEAVED else "half"
        values = self.src(op, heads * head_dim).reshape(self.rows, heads, head_dim)
        made = fitting.turn(values, cos[self.positions], sin[self.positions], style).reshape(self.rows, -1)
        self.ws.buffer(int(op[r.SRC]))[: self.rows, op[r.SRC_COLUMN] : op[r.SRC_COLUMN] + made.shape[1]] = (
            made
        )

    def page(self, row: int, group: int, number: int, at: int, size: int) -> np.ndarray:
        tables = int(self.works[self.row_work[row], r.WORK_TABLES])
        address = _ints(int(_ints(tables, group + 1)[group]), number + 1)[number]
        assert address, "a page that is not there"
        return _view(int(address) + at * 4, size, np.float32)

    def append(self, op: np.ndarray) -> None:
        heads, k_dim, v_dim = (int(op[i]) for i in (r.APPEND_KV_HEADS, r.APPEND_K_DIM, r.APPEND_V_DIM))
        keys = self.src(op, heads * k_dim).reshape(-1, heads, k_dim)
        column = int(op[r.APPEND_VALUES_COLUMN])
        values = self.get(op[r.APPEND_VALUES], column, heads * v_dim).reshape(-1, heads, v_dim)
        for row, position in enumerate(self.positions):
            k, v = self.slot(
                row, int(position) // PAGE, op[r.APPEND_GROUP : r.APPEND_GROUP + 3], heads, k_dim, v_dim
            )
            k[:, position % PAGE // 16, :, position % 16] = keys[row]
            v[:, np.arange(v_dim) // 16, position % PAGE, np.arange(v_dim) % 16] = values[row]

    def slot(self, row: int, number: int, place: np.ndarray, heads: int, k_dim: int, v_dim: int) -> Any:
        group, keys_at, values_at = (int(value) for value in place)
        panels = -(-v_dim // 16)
        keys = self.page(row, group, number, keys_at, heads * PAGE * k_dim)
        values = self.page(row, group, number, values_at, heads * PAGE * panels * 16)
        return keys.reshape(heads, PAGE // 16, k_dim, 16), values.reshape(heads, panels, PAGE, 16)

    def attention(self, op: np.ndarray) -> None:
        heads, kv_heads = int(op[r.ATTENTION_HEADS]), int(op[r.ATTENTION_KV_HEADS])
        k_dim, v_dim, window = (
            int(op[r.ATTENTION_K_DIM]),
            int(op[r.ATTENTION_V_DIM]),
            int(op[r.ATTENTION_WINDOW]),
        )
        queries = self.src(op, heads * k_dim).reshape(self.rows, heads, k_dim)
        sinks, cap = _floats(op[r.ATTENTION_SINKS], heads), _real(op, r.ATTENTION_SOFTCAP)
        made = np.zeros((self.rows, heads, v_dim))
        place = op[r.ATTENTION_GROUP : r.ATTENTION_GROUP + 3]
        for row, position in enumerate(self.positions.tolist()):
            seen = np.arange(max(0, position - window + 1) if window else 0, position + 1)
            keys, values = np.zeros((kv_heads, len(seen), k_dim)), np.zeros((kv_heads, len(seen), v_dim))
            for n, at in enumerate(seen.tolist()):
                k, v = self.slot(row, at // PAGE, place, kv_heads, k_dim, v_dim)
                keys[:, n] = k[:, at % PAGE // 16, :, at % 16]
                values[:, n] = v[:, :, at % PAGE, :].reshape(kv_heads, -1)[:, :v_dim]
            for head in range(heads):
                kv = head * kv_heads // heads
                scores = keys[kv] @ queries[row, head] * _real(op, r.ATTENTION_SCALE)
                scores = np.tanh(scores / cap) * cap if cap else scores
                extra = np.append(scores, sinks[head]) if sinks is not None else scores
                shares = np.exp(scores - extra.max()) / np.exp(extra - extra.max()).sum()
                made[row, head] = shares @ values[kv]
        self.put(op, made.reshape(self.rows, -1))

    def gate(self, op: np.ndarray) -> None:
        inter = int(op[r.GATE_INTER])
        layout: Any = "alternating" if op[r.GATE_LAYOUT] == r.ALTERNATING else "halves"
        form = GateForm(
            NAMES[int(op[r.GATE_ACTIVATION])], layout, _real(op, r.GATE_ALPHA), _real(op, r.GATE_LIMIT)
        )
        self.put(op, fitting.apply_gate(form, *fitting.halves_of(self.src(op, 2 * inter), layout)))

    def activate(self, op: np.ndarray) -> None:
        name = NAMES[int(op[r.POINT_ACTIVATION])]
        self.put(op, fitting.activate(name, self.src(op, int(op[r.POINT_WIDTH]))))

    def add(self, op: np.ndarray) -> None:
        width = int(op[r.POINT_WIDTH])
        before = self.get(op[r.DST], int(op[r.DST_COLUMN]), width)
        self.put(op, before + self.src(op, width) * _real(op, r.POINT_REAL))

    def scale(self, op: np.ndarray) -> None:
        self.in_place(op, self.src(op, int(op[r.POINT_WIDTH])) * _real(op, r.POINT_REAL))

    def softcap(self, op: np.ndarray) -> None:
        cap = _real(op, r.POINT_REAL)
        self.in_place(op, np.tanh(self.src(op, int(op[r.POINT_WIDTH])) / cap) * cap)

    def in_place(self, op: np.ndarray, values: np.ndarray) -> None:
        column = int(op[r.SRC_COLUMN])
        self.ws.buffer(int(op[r.SRC]))[: self.rows, column : column + values.shape[1]] = values

    def copy(self, op: np.ndarray) -> None:
        self.put(op, self.src(op, int(op[r.POINT_WIDTH])))

    def gather(self, op: np.ndarray) -> None:
        rows = self.src(op, int(op[r.POINT_WIDTH]))[self.kept]
        self.rows = len(self.kept)
        self.ws.step[r.STEP_ROWS] = self.rows
        self.put(op, rows)

    def route(self, op: np.ndarray) -> None:
        experts, top_k = int(op[r.ROUTE_EXPERTS]), int(op[r.ROUTE_TOP_K])
        form = fitting.RouteForm(MODES[int(op[r.ROUTE_MODE])], bool(op[r.ROUTE_NORMALISE]))
        bias, groups = _floats(op[r.ROUTE_BIAS], experts), int(op[r.ROUTE_GROUPS])
        chosen, weights = fitting.apply_route(
            form, self.src(op, experts), top_k, bias, groups, int(op[r.ROUTE_TOP_GROUPS])
        )
        self.put(op, np.concatenate((chosen, weights * _real(op, r.ROUTE_FACTOR)), axis=1))

    def experts(self, op: np.ndarray) -> None:
        count, top_k, inter = (int(op[i]) for i in (r.EXPERTS_COUNT, r.EXPERTS_TOP_K, r.EXPERTS_INTER))
        table = _ints(op[r.EXPERTS_TABLE], count * r.EXPERT_WORDS).reshape(count, -1)
        layout: Any = "alternating" if op[r.EXPERTS_LAYOUT] == r.ALTERNATING else "halves"
        form = GateForm(
            NAMES[int(op[r.EXPERTS_ACTIVATION])],
            layout,
            _real(op, r.EXPERTS_ALPHA),
            _real(op, r.EXPERTS_LIMIT),
        )
        routes = self.get(op[r.EXPERTS_ROUTES], 0, 2 * top_k)
        width = _weight(table[0, r.EXPERT_DOWN]).shape[0]
        given = self.src(op, _weight(table[0, r.EXPERT_GATE_UP]).shape[1])
        made = (
            self.get(op[r.DST], int(op[r.DST_COLUMN]), width)
            if op[r.EXPERTS_ADD]
            else np.zeros((self.rows, width))
        )
        for row, rank in np.ndindex(self.rows, top_k):
            expert = table[int(routes[row, rank])]
            both = _product(expert, r.EXPERT_GATE_UP, given[row], 2 * inter)
            gated = fitting.apply_gate(form, *fitting.halves_of(both, layout))
            made[row] += routes[row, top_k + rank] * _product(expert, r.EXPERT_DOWN, gated, width)
        self.put(op, made)


def _product(expert: np.ndarray, field: int, given: np.ndarray, width: int) -> np.ndarray:
    bias = _floats(expert[field + 1], width)
    return _weight(expert[field]) @ given + (0.0 if bias is None else bias)


def _weight(address: int) -> np.ndarray:
    record = _ints(address, r.WEIGHT_WORDS)
    form = FORM_NAMES[int(record[r.WEIGHT_FORM])]
    rows, columns = int(record[r.WEIGHT_ROWS]), int(record[r.WEIGHT_COLUMNS])
    panels, groups = -(-rows // 16), -(-columns // 32)
    data = _view(record[r.WEIGHT_DATA], panels * columns * 16, STORED[form]).reshape(panels, columns, 16)
    scales = None
    if form == "int8":
        scales = _view(record[r.WEIGHT_SCALES], panels * groups * 16, np.float32).reshape(panels, groups, 16)
    return unpack(PackedWeight(form, rows, columns, data, scales)).double().numpy()


def _real(op: np.ndarray, field: int) -> float:
    return float(op[field : field + 1].view(np.float64)[0])


def _ints(address: int, count: int) -> np.ndarray:
    return _view(address, count, np.int64)


def _floats(address: int, count: int) -> Any:
    return _view(address, count, np.float32).astype(np.float64) if address else None


def _view(address: int, count: int, kind: Any) -> np.ndarray:
    size = count * np.dtype(kind).itemsize
    return np.frombuffer((ctypes.c_char * size).from_address(int(address)), dtype=kind)
