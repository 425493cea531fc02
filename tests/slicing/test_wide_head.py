"""A head shared among threads: the same bits, and only where it helps."""

from __future__ import annotations

import threading

import pytest
import torch
from torch import nn

from slicing import wide_head
from slicing.runner import Parts, PlainRunner
from slicing.wide_head import widen
from tests.support.families import tiny_config, tiny_model


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("outputs", [49_152, 50_257])
@pytest.mark.parametrize("num_threads", [2, 3])
def test_single_rows_have_the_bits_of_one_thread(bias: bool, outputs: int, num_threads: int) -> None:
    head = nn.Linear(128, outputs, bias=bias)
    plain = nn.Linear(128, outputs, bias=bias)
    plain.load_state_dict(head.state_dict())
    assert widen(head, num_threads)
    with torch.inference_mode():
        for _ in range(4):
            row = torch.randn(1, 1, 128)
            assert torch.equal(head(row), plain(row))


def test_several_rows_go_the_usual_way() -> None:
    head = nn.Linear(128, 49_152)
    rows = torch.randn(1, 3, 128)
    with torch.inference_mode():
        expected = head(rows)
        assert widen(head, 2)
        assert torch.equal(head(rows), expected)


def test_a_single_row_is_really_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    head = nn.Linear(128, 49_152)
    assert widen(head, 2)
    threads: set[str] = set()
    plain = wide_head.functional.linear

    def linear(*arguments: torch.Tensor | None) -> torch.Tensor:
        threads.add(threading.current_thread().name)
        return plain(*arguments)

    monkeypatch.setattr(wide_head.functional, "linear", linear)
    head(torch.randn(1, 1, 128))
    assert len(threads) == 2


def test_a_small_head_is_left_alone() -> None:
    assert not widen(nn.Linear(64, 1000), 4)


def test_a_runner_widens_its_own_head_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wide_head, "MIN_SHARE_BYTES", 1)
    model = tiny_model(tiny_config("llama"))
    num_layers = model.config.num_hidden_layers
    whole = PlainRunner.from_model(model, Parts.whole(num_layers))
    ends = PlainRunner.from_model(model, Parts(opening=True, closing=True))
    assert not PlainRunner.from_model(model, Parts(((0, 1),))).widen_head(2)
    ends.widen_head(2)
    hidden_states = torch.randn(1, whole.hidden_size)
    plain = whole.run_closing(whole.new_cache(), hidden_states, 0, start=num_layers)
    assert torch.equal(ends.run_closing(ends.new_cache(), hidden_states, 0, start=num_layers), plain)
