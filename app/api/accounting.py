"""One accepted request from its admission to its only end: finished, failed, or aborted because the client left."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator, Mapping
from contextlib import aclosing, contextmanager
from typing import TypeVar

from app.api.errors import from_exception
from app.api.recording import note_event
from app.api.request_line import log_end
from app.api.signs import deadlines_of
from app.engine.merge import merge
from app.gateway import Gateway
from app.keys import Caller
from app.records import RequestRecord
from app.request_meter import RequestMeter
from app.request_notes import current_trace, traced_part

Event = TypeVar("Event")


async def accounted_events(
    gateway: Gateway,
    meter: RequestMeter,
    answers: Iterable[AsyncGenerator[Event, None]],
    *,
    caller: Caller,
    num_answers: int,
    silence_s: float,
    count: Callable[[int, Event], None],
    counts: Mapping[str, int | float],
    record: RequestRecord,
) -> AsyncGenerator[tuple[int, Event] | None, None]:
    """Admit a request, then yield (index of the answer, event), each counted; None after silence, in the queue too.

    `answers` are begun once there are places for them. How it ends is counted, recorded, and logged with `counts`.
    Raises `ApiError` 400, 429 or 503 without places, and what `merge` does.
    """
    trace = current_trace()
    with _ending(meter, counts, record):
        async with gateway.admit(caller, num_answers) as entrance:
            with traced_part("queue"):
                while not await entrance.is_in(silence_s):
                    yield None
            with _running(meter):
                merging = merge(
                    list(answers),
                    silence_s=silence_s,
                    stop=gateway.stop,
                    time_limit_s=gateway.settings.request_timeout_s,
                    deadlines=deadlines_of(gateway.settings),
                )
                async with aclosing(merging) as events:
                    async for item in events:
                        if item is not None:
                            count(*item)
                            note_event(record, *item)
                            if trace is not None:
                                trace.note(*item)
                        yield item


@contextmanager
def _ending(meter: RequestMeter, counts: Mapping[str, int | float], record: RequestRecord) -> Iterator[None]:
    """Count, record and log how a request ends."""
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
        record.end("failed", from_exception(error).code)
        raise
    finally:
        record.end("finished" if outcome == "finished" else "aborted")
        log_end(record, outcome, counts)


@contextmanager
def _running(meter: RequestMeter) -> Iterator[None]:
    """Count a request among those that are answered now."""
    meter.begin()
    try:
        yield
    finally:
        meter.end()
