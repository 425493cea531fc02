"""Bytes of several sessions as rows, and whether all of them are numbers."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from slicing.buffers import all_finite, float_array, float_rows, to_buffer

WIDTH = 3


def payload(rows: int, first: float = 0.0) -> bytes:
    return (np.arange(rows * WIDTH, dtype="<f4") + first).tobytes()


def test_rows_of_several_payloads_are_theirs_bit_for_bit() -> None:
    payloads = [payload(2), memoryview(payload(1, 0.1)), bytearray(payload(3, -7))]
    made = float_rows(payloads, WIDTH)
    assert made is not None
    assert [rows.shape for rows in made] == [(2, WIDTH), (1, WIDTH), (3, WIDTH)]
    assert [bytes(to_buffer(rows, torch.float32)) for rows in made] == list(map(bytes, payloads))


@pytest.mark.parametrize("number", [float("nan"), float("inf"), float("-inf")])
def test_one_number_that_is_none_spoils_all_and_is_seen(number: float) -> None:
    poisoned = np.array([[1, 2, 3], [4, 5, number]], "<f4")
    assert float_rows([payload(1), poisoned.tobytes()], WIDTH) is None
    assert not all_finite(torch.from_numpy(poisoned))
    assert all_finite(torch.from_numpy(poisoned)[:1])


def test_bytes_that_are_no_whole_rows_are_refused() -> None:
    with pytest.raises(ValueError, match="reshape"):
        float_rows([payload(1) + bytes(4)], WIDTH)


def test_floats_are_seen_where_they_lie_and_others_are_converted() -> None:
    floats = torch.arange(6.0).reshape(2, WIDTH)
    assert np.shares_memory(float_array(floats), floats.numpy())
    for other in (floats.bfloat16(), floats.clone().requires_grad_(), floats.int()):
        assert np.array_equal(float_array(other), floats.numpy())


def test_columns_that_do_not_lie_together_become_rows_of_bytes() -> None:
    columns = torch.arange(12.0).reshape(3, 4)[:, 1:3]
    assert bytes(to_buffer(columns, torch.float32)) == columns.contiguous().numpy().tobytes()
