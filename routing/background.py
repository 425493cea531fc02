"""Tasks that run beside a part, owned by it and ended with it.

What a peer or the network does to a task is its end, no more; a bug is told. Knows nothing of what tasks do.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from contextvars import Context
from typing import Any

from routing.errors import RemoteError
from routing.link import log_receiver_failure


class Background:
    """A set of tasks; `close` leaves none behind. They run in a context of their own: nobody's request is theirs."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[None]] = set()
        self._is_closed = False

    def __len__(self) -> int:
        return len(self._tasks)

    def spawn(self, job: Coroutine[Any, Any, Any], occasion: str) -> None:
        """Run a job; nothing happens any more after `close`."""
        if self._is_closed:
            job.close()
            return
        task = asyncio.create_task(_guarded(job, occasion), context=Context())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        task.add_done_callback(lambda _: job.close())  # one that was cancelled before it began

    async def close(self) -> None:
        """Cancel what runs and wait until it has ended."""
        self._is_closed = True
        tasks = tuple(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _guarded(job: Coroutine[Any, Any, Any], occasion: str) -> None:
    try:
        await job
    except RemoteError:
        return
    except Exception as error:
        log_receiver_failure(occasion, error)
