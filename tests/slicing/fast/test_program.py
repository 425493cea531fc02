"""The builder writes records that say what it was told, and keeps what they point to."""

import numpy as np
import pytest
import torch

from slicing.fast import records as r
from slicing.fast.packing import pack
from slicing.fast.program import Columns, Expert, ProgramBuilder


class FakeLayout:
    """Two slots in one group."""

    def place(self, layer_slot: int) -> tuple[int, int, int]:
        return 0, layer_slot * 1000, layer_slot * 1000 + 500


def test_buffers_are_padded_to_sixteen_floats() -> None:
    builder = ProgramBuilder()
    assert [builder.buffer(width) for width in (1, 16, 17)] == [0, 1, 2]
    assert builder.build().widths == (16, 16, 32)


def test_layers_are_marked_by_number() -> None:
    builder = ProgramBuilder()
    buffer = builder.buffer(16)
    for number in (4, 5):
        builder.layer(number)
        builder.scale(buffer, 16, 2.0)
    program = builder.build()
    assert program.layers == {4: 0, 5: 2}
    assert program.table[:, 0].tolist() == [r.LAYER, r.SCALE, r.LAYER, r.SCALE]


def test_reals_are_the_bits_of_a_float64() -> None:
    builder = ProgramBuilder()
    builder.rms_norm(builder.buffer(16), builder.buffer(16), None, 1e-5, 16)
    record = builder.build().table[0]
    assert record[r.NORM_EPS : r.NORM_EPS + 1].view(np.float64)[0] == 1e-5


def test_columns_say_where_in_a_buffer() -> None:
    builder = ProgramBuilder(FakeLayout())
    qkv, out = builder.buffer(96), builder.buffer(32)
    builder.append(Columns(qkv, 32), Columns(qkv, 64), 2, 16, 16, layer_slot=1)
    builder.attention(qkv, out, 2, 2, 16, 16, layer_slot=1, scale=0.25)
    append, attention = builder.build().table
    assert append[r.SRC : r.APPEND_VALUES_COLUMN + 1].tolist() == [qkv, 32, qkv, 64]
    assert append[[r.APPEND_GROUP, r.APPEND_KEYS_AT, r.APPEND_VALUES_AT]].tolist() == [0, 1000, 1500]
    assert attention[[r.ATTENTION_GROUP, r.ATTENTION_KEYS_AT, r.ATTENTION_VALUES_AT]].tolist() == [
        0,
        1000,
        1500,
    ]


def test_attention_without_a_layout_is_refused() -> None:
    builder = ProgramBuilder()
    with pytest.raises(ValueError, match="layout"):
        builder.attention(builder.buffer(16), builder.buffer(16), 1, 1, 16, 16, layer_slot=0, scale=1.0)


def test_arrays_become_float32_and_are_kept() -> None:
    builder = ProgramBuilder()
    builder.rms_norm(builder.buffer(16), builder.buffer(16), np.arange(16, dtype=np.float64), 1e-5, 16)
    program = builder.build()
    kept = next(array for array in program.kept if array.ctypes.data == program.table[0, r.NORM_WEIGHT])
    assert kept.dtype == np.float32
    assert kept.tolist() == list(range(16))


def test_a_weight_used_twice_has_one_record() -> None:
    builder = ProgramBuilder()
    src, dst = builder.buffer(8), builder.buffer(8)
    weight = pack(torch.randn(8, 8), "bf16")
    builder.linear(src, dst, weight)
    builder.linear(src, dst, weight, add=True)
    first, second = builder.build().table
    assert first[r.LINEAR_WEIGHT] == second[r.LINEAR_WEIGHT]
    assert (first[r.LINEAR_ADD], second[r.LINEAR_ADD]) == (0, 1)


def test_layers_of_experts_share_their_work_buffers() -> None:
    builder = ProgramBuilder()
    src, dst, routes = builder.buffer(32), builder.buffer(32), builder.buffer(4)
    for _ in range(2):
        experts = [
            Expert(pack(torch.randn(80, 32), "fp32"), pack(torch.randn(32, 40), "fp32")) for _ in range(3)
        ]
        builder.experts(src, dst, routes, experts, top_k=2, inter=40, activation="silu")
    program = builder.build()
    assert program.table[0, r.EXPERTS_WORK] == program.table[1, r.EXPERTS_WORK]
    assert program.widths[3 + r.EXPERT_INPUTS :] == (64, 160, 96, 64)
