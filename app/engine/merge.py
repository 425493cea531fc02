"""Reads several answers side by side as one stream of events, noticing silence, lateness and an order to stop.

Knows events only as things that come. Whoever stops reading, for whatever reason, ends every answer.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterable, Sequence
from math import inf
from typing import TypeVar

from app.engine.watch import NO_DEADLINES, Deadlines, Watch

Event = TypeVar("Event")


class StoppedError(Exception):
    """The answers were told to stop."""


async def merge(
    generators: Sequence[AsyncGenerator[Event, None]],
    *,
    silence_s: float,
    stop: asyncio.Event,
    time_limit_s: float | None = None,
    deadlines: Deadlines = NO_DEADLINES,
) -> AsyncGenerator[tuple[int, Event] | None, None]:
    """Yield (index of the generator, event) as events come, and None whenever nothing came for `silence_s`.

    Raises what a generator raises, `StoppedError` once `stop` is set, TimeoutError after `time_limit_s`, and
    `LateError` once an answer is late by its `deadlines`.
    """
    loop = asyncio.get_running_loop()
    ends_at = loop.time() + time_limit_s if time_limit_s else inf
    watches = [Watch(deadlines, loop.time()) for _ in generators]
    stopping = asyncio.create_task(stop.wait())
    pending = {asyncio.create_task(_next(generator)): index for index, generator in enumerate(generators)}
    try:
        while pending:
            late_at = min(watches[index].due_at for index in pending.values())
            timeout_s = max(0.0, min(silence_s, min(ends_at, late_at) - loop.time()))
            watched = {stopping, *pending}
            await asyncio.wait(watched, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
            if stopping.done():
                raise StoppedError
            if (now := loop.time()) >= ends_at:
                raise TimeoutError
            if now >= late_at:
                _check(watches, [index for task, index in pending.items() if not task.done()], now)
            done = sorted((task for task in pending if task.done()), key=pending.__getitem__)
            if not done:
                yield None
            for task in done:
                event = task.result()
                index = pending.pop(task)
                if event is not None:  # the next one is made while this one is written
                    watches[index].note(event, loop.time())
                    pending[asyncio.create_task(_next(generators[index]))] = index
                    yield index, event
    finally:
        await _end([stopping, *pending])
        await _close(generators)


def _check(watches: Sequence[Watch], pending: Iterable[int], now: float) -> None:
    """Raise `LateError` if one of those that are pending is late."""
    for index in pending:
        if now >= watches[index].due_at:
            raise watches[index].error()


async def _close(generators: Sequence[AsyncGenerator[Event, None]]) -> None:
    """Close every one, also where another fails at it. Raises the first failure."""
    failures: list[BaseException] = []
    for generator in generators:
        try:
            await generator.aclose()
        except BaseException as error:
            failures.append(error)
    if failures:
        raise failures[0]


async def _next(generator: AsyncGenerator[Event, None]) -> Event | None:
    return await anext(generator, None)


async def _end(tasks: Sequence[asyncio.Task[object]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
