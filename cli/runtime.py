"""Running a command's coroutine: the fast event loop for services, and signals that end them cleanly.

Knows nothing of what runs.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import signal
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager, suppress
from typing import Any, Literal, TypeVar

from cli.failures import DEBUG_VARIABLE

T = TypeVar("T")

STOP_SIGNALS = tuple(
    getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name)
)


def start_logging(
    level: int | str, log_format: Literal["text", "json"] = "text", *, is_service: bool = False
) -> None:
    """Log to standard error from this level on; everything of ours with DIFFUSE_DEBUG=1.

    A service also logs what Python would print by itself. transformers speaks only of errors.
    """
    from cli import logs

    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")  # read once, when it is imported
    least = logs.LEVELS[level] if isinstance(level, str) else level
    logs.configure(logging.DEBUG if os.environ.get(DEBUG_VARIABLE) else least, log_format)
    if is_service:
        logs.catch_the_uncaught()


@contextmanager
def heavy_imports() -> Iterator[None]:
    """Import torch and its like with the garbage collector out of the way, now and later.

    What they leave behind lives as long as we do: looking at it once, at the end, saves an eighth of the import, and
    not looking at it again spares a running answer pauses.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.collect()  # 11 MB that the load which follows can use
        gc.freeze()
        gc.enable()


def run_fast(main: Coroutine[Any, Any, T]) -> T:
    """Run on uvloop where there is one."""
    try:
        import uvloop
    except ImportError:
        return asyncio.run(main)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(main)


def run_asking(main: Coroutine[Any, Any, T]) -> T:
    """Run a command that asks. Told to end, it cancels what it asked for on every node before it goes.

    Ctrl+C raises KeyboardInterrupt, any other signal SystemExit with the code that shells expect.
    """
    ended_by: list[int] = []

    async def interruptible() -> T:
        loop, task = asyncio.get_running_loop(), asyncio.current_task()

        def end(number: int) -> None:
            ended_by.append(number)
            if task is not None:
                task.cancel()

        for number in set(STOP_SIGNALS) - {signal.SIGINT}:  # asyncio.run itself takes care of Ctrl+C
            with suppress(NotImplementedError):
                loop.add_signal_handler(number, end, number)
        return await main

    try:
        return asyncio.run(interruptible())
    except asyncio.CancelledError:
        if not ended_by:
            raise
        raise SystemExit(128 + ended_by[0]) from None


async def run_until_signal(
    work: Coroutine[Any, Any, None], on_second: Callable[[], None] | None = None
) -> None:
    """Run a service until it ends or a signal asks it to; then cancel it and wait for its clean-up.

    Being asked to stop is a service's normal end. `on_second` is called when someone asks again.
    """
    task = asyncio.ensure_future(work)
    asked = False

    def stop() -> None:
        nonlocal asked
        if asked and on_second is not None:
            on_second()
        asked = True
        task.cancel()

    with _handlers(stop):
        try:
            await task
        except asyncio.CancelledError:
            if not asked:
                raise


@contextmanager
def _handlers(stop: Callable[[], None]) -> Iterator[None]:
    loop = asyncio.get_running_loop()
    for number in STOP_SIGNALS:
        with suppress(
            NotImplementedError
        ):  # an event loop without signal handlers: Ctrl+C cancels us instead
            loop.add_signal_handler(number, stop)
    try:
        yield
    finally:
        for number in STOP_SIGNALS:
            with suppress(NotImplementedError):
                loop.remove_signal_handler(number)
