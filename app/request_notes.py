"""What is noted beside a request while it runs, wherever its tasks go: whether its line is written, and its trace.

One for each request, in a context variable, so that tasks which a request begins find it. Knows nothing of HTTP.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING

import structlog

if TYPE_CHECKING:
    from app.tracing import RequestTrace


@dataclass(slots=True)
class RequestNotes:
    """Of one request."""

    is_logged: bool = False  # its end has a line in the log
    trace: RequestTrace | None = None  # None: nobody traces it


_CURRENT: ContextVar[RequestNotes | None] = ContextVar("request_notes", default=None)


def begin_notes(request_id: str) -> RequestNotes:
    """Begin a request in this task: lines that are logged from here on carry its id."""
    structlog.contextvars.clear_contextvars()
    structlog.contextvars.bind_contextvars(request_id=request_id)
    notes = RequestNotes()
    _CURRENT.set(notes)
    return notes


def current_notes() -> RequestNotes | None:
    """Those of the request that this task answers; None for one that answers none."""
    return _CURRENT.get()


def current_trace() -> RequestTrace | None:
    """That of the request that this task answers, if it is traced."""
    notes = _CURRENT.get()
    return None if notes is None else notes.trace


def traced_part(name: str) -> AbstractContextManager[None]:
    """A span for what is inside, where the request is traced."""
    trace = current_trace()
    return nullcontext() if trace is None else trace.part(name)


def name_in_log(**names: str) -> None:
    """Have lines that this task logs from here on, and tasks that it begins, carry these too."""
    structlog.contextvars.bind_contextvars(**names)
