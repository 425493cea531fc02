"""Several ways to one node, tried one after the other without waiting long for any: the first that works wins.

As in RFC 8305 (happy eyeballs). Knows nothing of what an address means; the caller has put them in order.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, TypeVar

from routing.errors import RemoteError

STAGGER_S = 0.25  # RFC 8305 section 8: the recommended delay between two attempts

_Result = TypeVar("_Result")


async def race(
    attempts: Sequence[Callable[[], Coroutine[Any, Any, _Result]]], stagger_s: float = STAGGER_S
) -> _Result:
    """Return the first result; begin the next attempt when one has failed, or after `stagger_s`.

    Raises the error of the last attempt that failed when all have. Attempts that lose are cancelled.
    """
    assert attempts, "there is nothing to try"
    running: list[asyncio.Task[_Result]] = []
    waiting = list(reversed(attempts))
    try:
        while True:
            if waiting:
                running.append(asyncio.ensure_future(waiting.pop()()))
            timeout_s = stagger_s if waiting else None
            await asyncio.wait(running, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
            for task in [task for task in running if task.done()]:
                running.remove(task)
                try:
                    return task.result()
                except RemoteError:
                    if not running and not waiting:
                        raise
    finally:
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
