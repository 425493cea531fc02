"""Dtype and threads: settings win, then what was stored, then measuring."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch

from node import form_choice
from node.form_choice import (
    ChoiceStore,
    FormChoice,
    choose_dtype,
    choose_threads,
    thread_candidates,
    use_threads,
)
from routing.types import SliceSpec
from tests.node.rig import DIGEST, node_settings

SPEC = SliceSpec(0, 2)


@pytest.fixture(autouse=True)
def _restore_threads() -> object:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def test_fewer_threads_win_unless_more_are_clearly_faster() -> None:
    assert form_choice.fewest_good_threads({1: 1.05, 2: 1.0, 4: 0.97}) == 1
    assert form_choice.fewest_good_threads({1: 2.0, 2: 1.0, 4: 0.95}) == 2
    assert form_choice.fewest_good_threads({1: 1.0, 2: 5.0}) == 1


def test_every_core_is_tried_once() -> None:
    assert [thread_candidates(cores) for cores in (1, 2, 6, 8)] == [[1], [1, 2], [1, 2, 4, 6], [1, 2, 4, 8]]


def test_threads_are_measured_and_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(form_choice, "num_cores", lambda: 2)
    chosen = choose_threads(node_settings(), lambda: 1.0 / torch.get_num_threads(), None)
    assert (chosen, torch.get_num_threads()) == (2, 2)


def test_a_setting_or_a_stored_choice_is_not_measured_again() -> None:
    def never() -> float:
        raise AssertionError("measured")

    assert choose_threads(node_settings(threads=1), never, FormChoice("float32", 2)) == 1
    assert choose_threads(node_settings(), never, FormChoice("float32", 1)) == 1


def test_float32_is_the_cpus_dtype_unless_bfloat16_is_the_models_and_faster(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    settings = node_settings()
    monkeypatch.setattr(form_choice, "_is_bfloat16_faster", lambda: True)
    assert choose_dtype(settings, torch.float32, None) == torch.float32
    assert choose_dtype(settings, torch.float16, None) == torch.float32
    assert choose_dtype(settings, torch.bfloat16, None) == torch.bfloat16
    monkeypatch.setattr(form_choice, "_is_bfloat16_faster", lambda: False)
    assert choose_dtype(settings, torch.bfloat16, None) == torch.float32
    assert choose_dtype(node_settings(dtype="float16"), torch.bfloat16, None) == torch.float16
    assert choose_dtype(node_settings(device="cuda"), torch.bfloat16, None) == torch.bfloat16


@pytest.mark.parametrize("runner", ["auto", "fast"])
def test_where_a_fast_runner_may_be_used_rows_are_float32(
    monkeypatch: pytest.MonkeyPatch, runner: str
) -> None:
    monkeypatch.setattr(form_choice, "_is_bfloat16_faster", lambda: True)
    settings = node_settings(runner=runner)
    assert choose_dtype(settings, torch.bfloat16, FormChoice("bfloat16", 1)) == torch.float32
    assert (
        choose_dtype(node_settings(runner=runner, dtype="bfloat16"), torch.bfloat16, None) == torch.bfloat16
    )


def test_a_fast_runners_threads_are_its_own() -> None:
    class Fast:
        threads = 0

        def set_threads(self, threads: int) -> None:
            self.threads = threads

    fast = Fast()
    assert choose_threads(node_settings(threads=3), lambda: 1.0, None, partial(use_threads, fast)) == 3
    assert (fast.threads, torch.get_num_threads()) == (3, 1)
    use_threads(object(), 2)
    assert torch.get_num_threads() == 2


def test_a_choice_is_kept_per_model_slice_and_machine(tmp_path: Path) -> None:
    store = ChoiceStore(tmp_path, DIGEST, SPEC, "cpu")
    assert store.load() is None
    store.save(FormChoice("float32", 1))
    assert ChoiceStore(tmp_path, DIGEST, SPEC, "cpu").load() == FormChoice("float32", 1)
    assert ChoiceStore(tmp_path, DIGEST, SliceSpec(0, 3), "cpu").load() is None
    assert ChoiceStore(tmp_path, b"x" * 32, SPEC, "cpu").load() is None
    assert ChoiceStore(tmp_path, DIGEST, SPEC, "cpu", "fast/int8").load() is None
    assert [path.suffix for path in (tmp_path / "forms").iterdir()] == [".json"]


@pytest.mark.parametrize(
    "text", ["", "[]", '{"dtype": "int8", "threads": 1}', '{"dtype": "float32", "threads": 0}']
)
def test_a_file_that_is_not_ours_is_ignored(tmp_path: Path, text: str) -> None:
    store = ChoiceStore(tmp_path, DIGEST, SPEC, "cpu")
    store.save(FormChoice("float32", 1))
    (path,) = (tmp_path / "forms").iterdir()
    path.write_text(text, encoding="utf-8")
    assert store.load() is None


def test_a_cache_that_cannot_be_written_is_no_trouble(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("in the way", encoding="utf-8")
    store = ChoiceStore(tmp_path / "file", DIGEST, SPEC, "cpu")
    store.save(FormChoice("float32", 1))
    assert store.load() is None
    assert "could not be stored" in caplog.text
