"""Answers run in a background loop; leaving one cancels it, and links stay open between them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from contextlib import asynccontextmanager, closing

import pytest

from cli.background import BackgroundLoop


@pytest.fixture
def loop() -> Iterator[BackgroundLoop]:
    background = BackgroundLoop()
    yield background
    background.close()


class Source:
    """Counts to three, or for ever."""

    def __init__(self, *, stalls: bool = False) -> None:
        self.was_closed = False
        self._stalls = stalls

    async def count(self) -> AsyncGenerator[int, None]:
        try:
            for number in range(3):
                yield number
            if self._stalls:
                await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)  # clean-up that needs the loop
            self.was_closed = True


def test_items_arrive_in_order(loop: BackgroundLoop) -> None:
    source = Source()
    assert list(loop.iterate(source.count())) == [0, 1, 2]
    assert source.was_closed


def test_leaving_early_closes_the_source_before_going_on(loop: BackgroundLoop) -> None:
    source = Source(stalls=True)
    with closing(loop.iterate(source.count())) as items:
        assert next(items) == 0
    assert source.was_closed


def test_an_interrupt_closes_the_source(loop: BackgroundLoop) -> None:
    source = Source(stalls=True)

    def interrupted() -> None:
        with closing(loop.iterate(source.count())) as items:
            assert next(items) == 0
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert source.was_closed


def test_an_error_reaches_the_caller(loop: BackgroundLoop) -> None:
    async def broken() -> AsyncGenerator[int, None]:
        yield 1
        raise ValueError("broken")

    items = loop.iterate(broken())
    assert next(items) == 1
    with pytest.raises(ValueError, match="broken"):
        next(items)


def test_a_context_is_entered_and_left_by_one_task(loop: BackgroundLoop) -> None:
    tasks: list[asyncio.Task[None] | None] = []

    @asynccontextmanager
    async def connection() -> AsyncIterator[str]:
        tasks.append(asyncio.current_task())
        async with asyncio.TaskGroup():
            yield "open"
        tasks.append(asyncio.current_task())

    with loop.entered(connection()) as value:
        assert value == "open"
    assert len(tasks) == 2
    assert tasks[0] is tasks[1]


def test_a_context_that_cannot_be_entered_says_why(loop: BackgroundLoop) -> None:
    @asynccontextmanager
    async def refused() -> AsyncIterator[None]:
        raise ConnectionError("no")
        yield

    with pytest.raises(ConnectionError, match="no"), loop.entered(refused()):
        pytest.fail("it was entered")
