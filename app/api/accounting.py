"""One accepted request from its admission to its only end: finished, failed, or aborted because the client left."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol

from app.gateway import Gateway


class Meter(Protocol):
    """Counts one request."""

    def begin(self) -> None: ...

    def count_answered(self) -> None: ...

    def count_aborted(self) -> None: ...

    def end(self) -> None: ...


@contextmanager
def accounted(
    gateway: Gateway, meter: Meter, num_answers: int, tell: Callable[[str], None]
) -> Iterator[None]:
    """Hold places for the answers, count how it ends, and `tell` that word. Raises `ApiError` 503 without places."""
    with gateway.admit(num_answers):
        meter.begin()
        outcome = "failed"
        try:
            yield
            outcome = "finished"
            meter.count_answered()
        except (asyncio.CancelledError, GeneratorExit):
            outcome = "aborted"
            meter.count_aborted()
            raise
        finally:
            meter.end()
            tell(outcome)
