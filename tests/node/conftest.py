"""Fixtures for node tests."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest_asyncio

from tests.node.rig import Rig, fake_rig


@pytest_asyncio.fixture
async def rig() -> AsyncIterator[Rig]:
    """A gateway and no nodes yet, over in-memory links."""
    async with fake_rig() as made:
        yield made
