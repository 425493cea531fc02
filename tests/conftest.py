"""For every test: kernels are compiled once for all, and what tests of several folders use is made here."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from slicing.cache import cache_root
from tests.support.nursery import Nursery

if TYPE_CHECKING:
    from tests.support.certificates import Authority
    from tests.support.tiny_pipelines import TinyPipelines

os.environ.setdefault("DIFFUSE_KERNEL_CACHE", str(cache_root() / "kernels"))
os.environ["DIFFUSE_CONFIG"] = "none"  # what this machine's user set up is none of the tests' business


@pytest.fixture(scope="session")
def nursery() -> Iterator[Nursery]:
    """Where processes of tests are forked, for those that are not about how a process starts."""
    with Nursery() as opened:
        yield opened


@pytest.fixture(scope="session")
def tiny_pipelines(tmp_path_factory: pytest.TempPathFactory) -> TinyPipelines:
    """Tiny stock pipelines, each built at its first use in this session."""
    from tests.support.tiny_pipelines import TinyPipelines

    return TinyPipelines(tmp_path_factory.mktemp("tiny-pipelines"))


@pytest.fixture
def ca(tmp_path: Path) -> Authority:
    """An authority whose certificates lie in the test's own folder."""
    from tests.support.certificates import Authority

    return Authority(tmp_path)
