"""An event loop in a thread of its own, so that links stay alive while the main thread waits for a person.

The main thread alone hears Ctrl+C; it can leave an answer at any moment, and leaving cancels it in the
loop. Knows nothing of what is answered.
"""

from __future__ import annotations

import asyncio
import contextlib
import queue
import threading
from collections.abc import AsyncGenerator, Generator, Iterator
from concurrent.futures import CancelledError, Future
from contextlib import AbstractAsyncContextManager, contextmanager
from typing import Any, Final, TypeVar

T = TypeVar("T")

CLOSE_TIMEOUT_S: Final = 5.0
_END: Final = object()


class BackgroundLoop:
    """Runs asynchronous work in its thread for callers that block in theirs."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="event loop", daemon=True)
        self._thread.start()

    @contextmanager
    def entered(self, context: AbstractAsyncContextManager[T]) -> Iterator[T]:
        """Keep an asynchronous context open meanwhile, in one task from beginning to end."""
        ready: Future[T] = Future()
        release = asyncio.Event()
        holder = asyncio.run_coroutine_threadsafe(_hold(context, ready, release), self._loop)
        try:
            yield ready.result()
        finally:
            self._loop.call_soon_threadsafe(release.set)
            if not ready.done():
                holder.cancel()  # interrupted while it was still opening
            with contextlib.suppress(TimeoutError, CancelledError):
                holder.result(CLOSE_TIMEOUT_S)

    def iterate(self, source: AsyncGenerator[T, None]) -> Generator[T, None, None]:
        """Yield what `source` yields; leaving early, by an interrupt too, cancels it and waits for that."""
        arrived: queue.SimpleQueue[Any] = queue.SimpleQueue()
        future = asyncio.run_coroutine_threadsafe(_pump(source, arrived), self._loop)
        try:
            while (item := arrived.get()) is not _END:
                yield item
            future.result()
        except (GeneratorExit, KeyboardInterrupt):
            future.cancel()
            _drain(arrived)
            raise

    def close(self) -> None:
        """Stop the loop and its thread."""
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(CLOSE_TIMEOUT_S)
        if not self._thread.is_alive():
            self._loop.close()


async def _hold(context: AbstractAsyncContextManager[T], ready: Future[T], release: asyncio.Event) -> None:
    try:
        async with context as value:
            ready.set_result(value)
            await release.wait()
    except BaseException as error:
        if ready.done():
            raise
        ready.set_exception(error)


async def _pump(source: AsyncGenerator[T, None], arrived: queue.SimpleQueue[Any]) -> None:
    try:
        async with contextlib.aclosing(source):
            async for item in source:
                arrived.put(item)
    finally:
        arrived.put(_END)


def _drain(arrived: queue.SimpleQueue[Any]) -> None:
    with contextlib.suppress(queue.Empty):
        while arrived.get(timeout=CLOSE_TIMEOUT_S) is not _END:
            pass
