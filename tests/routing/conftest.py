"""Fixtures of the routing tests."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest_asyncio

from tests.routing.peers import Rig, open_rig


@pytest_asyncio.fixture
async def rig() -> AsyncIterator[Rig]:
    async with open_rig() as opened:
        yield opened
