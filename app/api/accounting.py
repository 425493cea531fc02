"""One accepted request from its admission to its only end: finished, failed, or aborted because the client left."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator
from contextlib import aclosing, contextmanager
from typing import Protocol, TypeVar

from app.api.errors import from_exception
from app.api.recording import note_event
from app.engine.merge import merge
from app.gateway import Gateway
from app.records import RequestRecord

Event = TypeVar("Event")


class Meter(Protocol):
    """Counts one request."""

    def begin(self) -> None: ...

    def count_answered(self) -> None: ...

    def count_aborted(self) -> None: ...

    def end(self) -> None: ...


async def accounted_events(
    gateway: Gateway,
    meter: Meter,
    answers: Iterable[AsyncGenerator[Event, None]],
    *,
    num_answers: int,
    silence_s: float,
    count: Callable[[int, Event], None],
    tell: Callable[[str], None],
    record: RequestRecord | None = None,
) -> AsyncGenerator[tuple[int, Event] | None, None]:
    """Admit a request, then yield (index of the answer, event), each counted, and None after silence; see `merge`.

    `answers` are begun once there are places for them. Raises what `accounted` does.
    """
    with accounted(gateway, meter, num_answers, tell, record):
        merging = merge(
            list(answers),
            silence_s=silence_s,
            stop=gateway.stop,
            time_limit_s=gateway.settings.request_timeout_s,
        )
        async with aclosing(merging) as events:
            async for item in events:
                if item is not None:
                    count(*item)
                    if record is not None:
                        note_event(record, *item)
                yield item


@contextmanager
def accounted(
    gateway: Gateway,
    meter: Meter,
    num_answers: int,
    tell: Callable[[str], None],
    record: RequestRecord | None = None,
) -> Iterator[None]:
    """Hold places for the answers, count and record how it ends, and `tell` that word.

    Raises `ApiError` 503 without places.
    """
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
        except Exception as error:
            if record is not None:
                record.end("failed", from_exception(error).code)
            raise
        finally:
            meter.end()
            if record is not None:
                record.end("finished" if outcome == "finished" else "aborted")
            tell(outcome)
