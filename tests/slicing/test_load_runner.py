"""Which runner a model gets, and what is said about it."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch

from slicing.checkpoint import Checkpoint
from slicing.ends import Parts
from slicing.fast import compiling
from slicing.fast.compiling import KernelsUnusable
from slicing.load_runner import CannotRun, load_runner
from slicing.model_source import open_checkpoint
from tests.support.families import tiny_config, tiny_model

PARTS = Parts(((1, 3),))


def saved(folder: Path, family: str, dtype: torch.dtype = torch.float32) -> Checkpoint:
    tiny_model(tiny_config(family)).to(dtype).save_pretrained(folder)
    return open_checkpoint(str(folder))


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return saved(tmp_path_factory.mktemp("llama"), "llama")


@pytest.fixture(scope="module")
def bloom(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return saved(tmp_path_factory.mktemp("bloom"), "bloom")


def test_a_composable_model_is_run_fast_on_a_cpu(llama: Checkpoint) -> None:
    assert load_runner(llama, PARTS).form == "fast/fp32"


def test_weights_of_a_bfloat16_checkpoint_stay_as_they_are(tmp_path: Path) -> None:
    checkpoint = saved(tmp_path, "llama", torch.bfloat16)
    forms = [load_runner(checkpoint, PARTS, weights=weights).form for weights in ("auto", "fp32", "int8")]
    assert forms == ["fast/bf16", "fast/fp32", "fast/int8"]


@pytest.mark.parametrize("name", ["fast", "invariant", "plain"])
def test_the_runner_that_is_asked_for_is_taken(llama: Checkpoint, name: str) -> None:
    assert load_runner(llama, PARTS, runner=name).form.startswith(f"{name}/fp32")  # type: ignore[arg-type]


def test_what_is_not_composed_falls_back_and_says_why(
    bloom: Checkpoint, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, logger="slicing.load_runner"):
        runner = load_runner(bloom, PARTS)
    assert not runner.form.startswith("fast/")
    assert "not fast: a layer calls transformers' attention 0 times" in caplog.text


def test_what_cannot_be_had_is_refused_with_the_reason(bloom: Checkpoint, llama: Checkpoint) -> None:
    with pytest.raises(CannotRun, match="not fast: a layer calls"):
        load_runner(bloom, PARTS, runner="fast")
    with pytest.raises(CannotRun, match="int8 weights need the fast runner"):
        load_runner(bloom, PARTS, weights="int8")
    with pytest.raises(CannotRun, match="computes in float32, not in bfloat16"):
        load_runner(llama, PARTS, runner="fast", dtype=torch.bfloat16)


def test_another_dtype_means_stock_layers(llama: Checkpoint) -> None:
    assert load_runner(llama, PARTS, dtype=torch.bfloat16).dtype == torch.bfloat16


def test_kernels_that_do_not_pass_their_test_are_not_used(
    llama: Checkpoint, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail() -> None:
        raise KernelsUnusable("the kernels give other bits on this machine")

    monkeypatch.setattr(compiling, "load_kernels", fail)
    with caplog.at_level(logging.INFO, logger="slicing.load_runner"):
        runner = load_runner(llama, PARTS)
    assert runner.form.startswith("invariant/")
    assert "other bits on this machine" in caplog.text
