"""The three forms of state, and a Redis for them."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from app.state.opening import open_state
from app.state.state import State
from tests.support.redis_server import RedisProcess, redis_process

FORMS = ("memory", "sqlite", "redis")


@pytest.fixture(scope="session")
def one_redis() -> Iterator[RedisProcess]:
    with redis_process() as server:
        yield server


@pytest.fixture
def redis(one_redis: RedisProcess) -> RedisProcess:
    """A server with nothing in it. It must be running at the end, too."""
    one_redis.flush()
    return one_redis


@pytest.fixture
def own_redis() -> Iterator[RedisProcess]:
    """A server that a test may stop."""
    with redis_process() as server:
        yield server


@pytest.fixture(params=FORMS)
def state_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    match request.param:
        case "sqlite":
            return f"sqlite://{tmp_path}/state/gateway.sqlite"
        case "redis":
            return str(request.getfixturevalue("redis").url)
    return "memory:"


@pytest.fixture
async def state(state_url: str) -> AsyncIterator[State]:
    async with open_state(state_url) as opened:
        yield opened
