"""Log lines as a service writes them, caught in this process; logging is left as it was found."""

from __future__ import annotations

import io
import json
import logging
import sys
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import structlog

from cli import logs


class Lines:
    """What was written so far."""

    def __init__(self) -> None:
        self.stream = io.StringIO()

    @property
    def text(self) -> str:
        return self.stream.getvalue()

    @property
    def objects(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.text.splitlines()]


@contextmanager
def written(log_format: logs.LogFormat = "json", level: int = logging.DEBUG) -> Iterator[Lines]:
    """Log as services do, into memory."""
    lines = Lines()
    with unchanged_logging():
        logging.getLogger().handlers.clear()  # pytest's raises what a record cannot be formatted of
        logs.configure(level, log_format, lines.stream)
        logs.catch_the_uncaught()
        yield lines


@contextmanager
def unchanged_logging() -> Iterator[None]:
    """Whatever configures logging inside: afterwards it is as before."""
    names = (*logs.OURS, *logs.TALKATIVE, *logs.HOLD_OWN_HANDLERS)
    loggers = [logging.getLogger(), *map(logging.getLogger, names)]
    before = [(it.level, it.handlers[:], it.__class__, it.__dict__.get("propagate", True)) for it in loggers]
    hooks = warnings.showwarning, sys.excepthook, threading.excepthook, sys.unraisablehook
    try:
        yield
    finally:
        warnings.showwarning, sys.excepthook, threading.excepthook, sys.unraisablehook = hooks
        for logger, (old_level, handlers, kind, propagates) in zip(loggers, before, strict=True):
            logger.setLevel(old_level)
            logger.handlers[:] = handlers
            logger.__class__ = kind
            logger.propagate = propagates
        structlog.reset_defaults()
        structlog.contextvars.clear_contextvars()
