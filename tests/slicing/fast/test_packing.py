"""Packed weights hold what they were given, as exactly as their form allows."""

import numpy as np
import pytest
import torch

from slicing.fast.packing import pack, unpack

SHAPES = [(16, 32), (1, 1), (33, 50), (48, 95), (5000, 3)]


@pytest.mark.parametrize("shape", SHAPES)
def test_fp32_is_the_weight_itself(shape: tuple[int, int]) -> None:
    weight = torch.randn(shape)
    assert torch.equal(unpack(pack(weight, "fp32")), weight)


@pytest.mark.parametrize("shape", SHAPES)
def test_bf16_is_exact_for_a_bfloat16_weight(shape: tuple[int, int]) -> None:
    weight = torch.randn(shape).to(torch.bfloat16)
    assert torch.equal(unpack(pack(weight, "bf16")), weight.float())


@pytest.mark.parametrize("shape", SHAPES)
def test_int8_is_within_half_a_step_of_its_group(shape: tuple[int, int]) -> None:
    weight = torch.randn(shape)
    groups = torch.nn.functional.pad(weight, (0, -shape[1] % 32)).reshape(shape[0], -1, 32)
    steps = (groups.abs().amax(-1) / 127).repeat_interleave(32, 1)[:, : shape[1]]
    assert torch.all((unpack(pack(weight, "int8")) - weight).abs() <= steps * 0.5001)


def test_a_group_of_zeros_stays_zero_in_int8() -> None:
    weight = torch.randn(16, 64)
    weight[3, 32:] = 0
    assert torch.equal(unpack(pack(weight, "int8"))[3, 32:], torch.zeros(32))


def test_a_panel_holds_sixteen_outputs_of_each_column() -> None:
    weight = torch.arange(32 * 4).reshape(32, 4).float()
    packed = pack(weight, "fp32")
    assert packed.data.shape == (2, 4, 16)
    assert np.array_equal(packed.data[1, 2], weight[16:, 2].numpy())


@pytest.mark.parametrize(("form", "num_bytes"), [("fp32", 4), ("bf16", 2), ("int8", 1 + 4 / 32)])
def test_a_form_takes_as_many_bytes_as_it_says(form, num_bytes) -> None:
    packed = pack(torch.randn(64, 128), form)
    assert packed.nbytes == 64 * 128 * num_bytes
    assert packed.data.ctypes.data % 64 == 0
