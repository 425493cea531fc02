"""Fixtures for node tests."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import pytest_asyncio

from tests.node.rig import Rig, fake_rig
from tests.support.tiny_models import small_llama


@pytest_asyncio.fixture
async def rig() -> AsyncIterator[Rig]:
    """A gateway and no nodes yet, over in-memory links."""
    async with fake_rig() as made:
        yield made


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A random llama of four layers, saved as people save models."""
    path = tmp_path_factory.mktemp("tiny")
    with small_llama(256) as llama:
        llama.save_pretrained(path)
        yield path
