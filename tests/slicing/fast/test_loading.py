"""What loading a fast runner leaves behind."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path
from typing import Any

import pytest

from slicing.ends import Parts
from slicing.fast.loading import CheckpointTensors, load_fast
from slicing.model_source import open_checkpoint
from slicing.runner import PlainRunner
from tests.support.families import NUM_LAYERS, tiny_config, tiny_model


def test_no_stock_layer_that_a_load_compared_with_stays_in_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny_model(tiny_config("gemma2")).save_pretrained(tmp_path)
    compared: list[weakref.ref[Any]] = []
    plain = CheckpointTensors.plain

    def noted(self: Any, parts: Parts) -> PlainRunner:
        made = plain(self, parts)
        compared.append(weakref.ref(made._slice.model))
        return made

    monkeypatch.setattr(CheckpointTensors, "plain", noted)
    gc.disable()  # only what the load itself collects counts: nothing else may come by for long
    try:
        load_fast(open_checkpoint(str(tmp_path)), Parts.whole(NUM_LAYERS))
        left = [model for model in compared if model() is not None]
    finally:
        gc.enable()
    assert compared
    assert not left
