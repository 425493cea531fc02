"""What every lab test stands on: the lab itself, a small model, and what the whole of it answers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.chaos.model import WholeAnswers, write_model
from tests.lab.lab import Lab, open_lab, why_not


@pytest.fixture
def lab() -> Iterator[Lab]:
    if reason := why_not():
        pytest.skip(reason)
    with open_lab() as opened:
        yield opened


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("lab") / "tiny")


@pytest.fixture(scope="session")
def whole(model: Path) -> WholeAnswers:
    return WholeAnswers(model)
