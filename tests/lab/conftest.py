"""What every lab test stands on: the lab itself, a small model, what the whole of it answers, and a list of figures."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.chaos.model import WholeAnswers, write_model
from tests.lab.lab import Lab, open_lab, why_not

FIGURES: pytest.StashKey[list[str]] = pytest.StashKey()


@pytest.fixture(scope="module")
def lab() -> Iterator[Lab]:
    """One lab for the tests of a module, which choose names and addresses that do not clash."""
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


@pytest.fixture
def figure(request: pytest.FixtureRequest) -> Callable[[str], None]:
    """Note what was measured; told at the end of the run."""
    return request.config.stash.setdefault(FIGURES, []).append


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if figures := terminalreporter.config.stash.get(FIGURES, None):
        terminalreporter.section("measured in the lab")
        for line in figures:
            terminalreporter.line(line)
