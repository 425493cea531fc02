"""Where a node computes: what is not there is said before anything is loaded."""

from __future__ import annotations

import pytest
import torch

from node.device import check_device
from routing.errors import SettingsError


def test_the_cores_are_always_there() -> None:
    check_device("cpu")


def test_a_gpu_that_is_not_there_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SettingsError, match=r"--device cuda: torch .* finds no GPU"):
        check_device("cuda")


def test_gpus_are_counted_from_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    check_device("cuda")
    check_device("cuda:1")
    with pytest.raises(SettingsError, match="there are 2 GPUs"):
        check_device("cuda:2")
