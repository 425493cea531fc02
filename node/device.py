"""Where layers are computed: this machine's cores, or a GPU that torch finds."""

from __future__ import annotations

import torch

from routing.errors import SettingsError


def check_device(device: str) -> None:
    """Raise `SettingsError` for a GPU that is not there; `device` is "cpu", "cuda" or "cuda:N"."""
    if device == "cpu":
        return
    if not torch.cuda.is_available():
        raise SettingsError(
            f"--device {device}: torch {torch.__version__} finds no GPU here: "
            "is its CUDA build installed, and the driver?"
        )
    number, num_found = torch.device(device).index or 0, torch.cuda.device_count()
    if number >= num_found:
        raise SettingsError(f"--device {device}: there are {num_found} GPUs here, counted from cuda:0")
