"""How log lines look: one line each, as text or JSON, whoever of this process's libraries wrote them.

The one place that configures logging. Everything below `cli` logs with the standard library's loggers, names what a
line is about in `extra`, and binds what a whole request is about with structlog's contextvars. Nothing that was said
comes through here: of errors, warnings and asyncio's complaints only types and places are told, never their texts.
"""

from __future__ import annotations

import json
import logging
import math
import re
import sys
import threading
import warnings
from collections.abc import Mapping, MutableMapping
from datetime import UTC, datetime
from types import TracebackType
from typing import Any, Final, Literal, TextIO

import structlog
from structlog.stdlib import ProcessorFormatter

from routing.describing import describe

LogFormat = Literal["text", "json"]
Event = MutableMapping[str, Any]

LEVELS: Final = {
    "debug": logging.DEBUG,
    "info": logging.INFO,
    "warning": logging.WARNING,
    "error": logging.ERROR,
}
OURS: Final = ("app", "cli", "node", "routing", "slicing")
MAX_TEXT: Final = 1000  # characters of one value
# Others speak of warnings only: below that, HTTP and socket libraries tell URLs, headers and what was sent.
TALKATIVE: Final = {"uvicorn": logging.INFO}
HOLD_OWN_HANDLERS: Final = ("transformers", "diffusers", "huggingface_hub")
WORDS: Final = re.compile(r"[\w ,.-]*")
FIRST: Final = ("timestamp", "level", "logger", "event")
_STANDARD: Final = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}

logger = logging.getLogger(__name__)


def configure(level: int, log_format: LogFormat, stream: TextIO | None = None) -> None:
    """Send every log line of this process to standard error, or to `stream`, from this level on."""
    handler = LineHandler(stream or sys.stderr)
    handler.setFormatter(LineFormatter(log_format))
    root = logging.getLogger()
    for old in root.handlers[:]:
        if isinstance(old, LineHandler):
            root.removeHandler(old)
    root.addHandler(handler)
    root.setLevel(max(level, logging.WARNING))
    for name in OURS:
        logging.getLogger(name).setLevel(level)
    for name, least in TALKATIVE.items():
        logging.getLogger(name).setLevel(max(level, least))
    for name in HOLD_OWN_HANDLERS:
        library = logging.getLogger(name)
        library.handlers.clear()
        library.__class__ = ForwardingLogger
    structlog.configure(
        processors=[structlog.stdlib.filter_by_level, ProcessorFormatter.wrap_for_formatter],
        logger_factory=structlog.stdlib.LoggerFactory(),
        cache_logger_on_first_use=True,
    )


def catch_the_uncaught() -> None:
    """Log, as types and places, what Python would print with its text: warnings, and errors that nobody caught."""
    warnings.showwarning = _log_warning
    sys.excepthook = _log_uncaught
    threading.excepthook = _log_thread_death
    sys.unraisablehook = _log_unraisable


def told_as_json(text: str, level: int = logging.INFO, error: BaseException | None = None) -> bool:
    """Write a line, whatever the level, where JSON was asked for; returns false where people read standard error."""
    exc_info = None if error is None else (type(error), error, error.__traceback__)
    for handler in logging.getLogger().handlers:
        if isinstance(handler.formatter, LineFormatter) and handler.formatter.is_json:
            handler.handle(logger.makeRecord("cli", level, __file__, 0, text, (), exc_info))
            return True
    return False


class LineHandler(logging.StreamHandler[TextIO]):
    """Writes lines; where nobody reads them any more, or the disk is full, it loses them without a word."""

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802 - logging's own name
        """Say nothing: logging would print the message's arguments."""


class ForwardingLogger(logging.Logger):
    """A library's logger that takes no handlers of the library's own: its lines go where all go."""

    def addHandler(self, hdlr: logging.Handler) -> None:  # noqa: N802 - logging's own name
        """Take none."""

    @property
    def propagate(self) -> bool:
        """Always, whatever the library sets."""
        return True

    @propagate.setter
    def propagate(self, value: bool) -> None:
        pass


class LineFormatter(ProcessorFormatter):
    """Makes one line of any record. It never raises, and never quotes what it could not format."""

    def __init__(self, log_format: LogFormat) -> None:
        self.is_json = log_format == "json"
        super().__init__(
            foreign_pre_chain=[_add_extra],
            processors=[
                structlog.contextvars.merge_contextvars,
                _scrub,
                _add_origin,
                ProcessorFormatter.remove_processors_meta,
                _as_json if self.is_json else _as_text,
            ],
        )

    def format(self, record: logging.LogRecord) -> str:
        try:
            return super().format(record)
        except Exception as error:
            place = f"{record.filename}:{record.lineno}"
            text = f"a line from {place} could not be formatted: {type(error).__name__}"
            return super().format(logging.makeLogRecord({**_origin(record), "msg": text}))


def _origin(record: logging.LogRecord) -> dict[str, Any]:
    names = ("name", "levelname", "levelno", "created")
    return {name: getattr(record, name) for name in names}


def _add_extra(_: Any, __: str, event: Event) -> Event:
    """Take over what our own loggers say in `extra`; others might put anything there."""
    record: logging.LogRecord = event["_record"]
    if record.name.partition(".")[0] in OURS:
        for name, value in vars(record).items():
            if name not in _STANDARD and not name.startswith("_"):
                event[name] = value
    return event


def _scrub(_: Any, __: str, event: Event) -> Event:
    """Leave of errors and warnings what they are and where; of other values what a line can hold."""
    record: logging.LogRecord = event["_record"]
    if record.name == "asyncio":  # what follows is the repr of tasks and arguments, with all that is in them
        words = WORDS.match(str(event["event"]))
        event["event"] = words[0].strip() if words else ""
    if error := _error_of(event.pop("exc_info", None)):
        event["error"] = describe(error)
    event.pop("stack_info", None)
    for name, value in list(event.items()):
        if value is None:
            del event[name]
        elif name not in ("_record", "_from_structlog"):
            event[name] = _plain(value)
    return event


def _error_of(exc_info: Any) -> BaseException | None:
    if exc_info is True:
        exc_info = sys.exc_info()
    if isinstance(exc_info, tuple) and len(exc_info) == 3:
        exc_info = exc_info[1]
    return exc_info if isinstance(exc_info, BaseException) else None


def _plain(value: object) -> object:
    """Numbers, flags and short text as they are; floats that JSON has no word for as text; of all else the type."""
    match value:
        case bool() | int():
            return value
        case float():
            return round(value, 6) if math.isfinite(value) else str(value)
        case str():
            return value if len(value) <= MAX_TEXT else value[:MAX_TEXT] + "..."
    return f"<{type(value).__name__}>"


def _add_origin(_: Any, __: str, event: Event) -> Event:
    record: logging.LogRecord = event["_record"]
    moment = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")
    event["timestamp"] = moment.replace("+00:00", "Z")
    event["level"] = record.levelname.lower()
    event["logger"] = record.name
    return event


def _as_json(_: Any, __: str, event: Mapping[str, Any]) -> str:
    first = {name: event[name] for name in FIRST}
    return json.dumps({**first, **{name: event[name] for name in sorted(event) if name not in first}})


def _as_text(_: Any, __: str, event: Mapping[str, Any]) -> str:
    fields = [f"{name}={_word(event[name])}" for name in sorted(event) if name not in FIRST]
    head = f"{event['timestamp']} {event['level'].upper()} {event['logger']}: {_visible(str(event['event']))}"
    return " ".join([head, *fields])


def _word(value: object) -> str:
    """A value as one word; in quotes where it holds blanks."""
    text = _visible(str(value))
    return json.dumps(text) if not text or any(char in text for char in ' "=') else text


def _visible(text: str) -> str:
    """One line, and nothing that a terminal would obey."""
    return "".join(char if char.isprintable() else ascii(char)[1:-1] for char in text)


def _log_warning(
    message: Warning | str,
    category: type[Warning],
    filename: str,
    lineno: int,
    file: TextIO | None = None,
    line: str | None = None,
) -> None:
    """Its text may quote values, as pydantic's do."""
    logging.getLogger("py.warnings").warning("%s at %s:%d", category.__name__, filename, lineno)


def _log_uncaught(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
    if isinstance(error, KeyboardInterrupt):
        sys.__excepthook__(kind, error, traceback)
        return
    logger.critical("an error was not caught", exc_info=error)


def _log_thread_death(args: threading.ExceptHookArgs) -> None:
    if args.exc_type is not SystemExit:
        logger.error("a thread ended with an error", exc_info=args.exc_value or args.exc_type())


def _log_unraisable(args: Any) -> None:
    """What is raised where nobody can catch it: finalizers, and callbacks from C."""
    owner = type(args.object).__name__
    logger.error("an error could not be raised", exc_info=args.exc_value, extra={"owner": owner})
