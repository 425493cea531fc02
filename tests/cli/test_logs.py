"""Log lines, whoever writes them: one each, valid, in UTC, and without a text that might quote something."""

from __future__ import annotations

import asyncio
import datetime
import gc
import io
import json
import logging
import subprocess
import sys
import threading
import timeit
import warnings
from typing import Any

import pytest
import structlog
from hypothesis import given
from hypothesis import strategies as st

from cli import failures, logs, show
from cli.logs import LineFormatter
from tests.support.log_lines import Lines, written

log = logging.getLogger("app.test")


def one(lines: Lines) -> dict[str, Any]:
    (line,) = lines.objects
    return line


def a_record(text: str, **extra: Any) -> logging.LogRecord:
    return log.makeRecord("app.test", logging.INFO, "f.py", 1, text, (), None, extra=extra)


# Lines --------------------------------------------------------------------------------------------------------


def test_a_line_has_time_level_logger_text_and_what_it_is_about() -> None:
    with written() as lines:
        structlog.contextvars.bind_contextvars(request_id="req_1", model="tiny")
        log.info("a %s of %d", "b", 2, extra={"session": "ab", "hop": 1})
    line = one(lines)
    moment = datetime.datetime.fromisoformat(line.pop("timestamp"))
    assert moment.utcoffset() == datetime.timedelta()
    assert abs(moment - datetime.datetime.now(datetime.UTC)) < datetime.timedelta(seconds=60)
    assert line == {
        "level": "info",
        "logger": "app.test",
        "event": "a b of 2",
        "request_id": "req_1",
        "model": "tiny",
        "session": "ab",
        "hop": 1,
    }


@given(text=st.text(), name=st.text(), value=st.one_of(st.text(), st.floats(), st.integers(), st.binary()))
@pytest.mark.parametrize("log_format", ["text", "json"])
def test_any_line_is_one_line(log_format: logs.LogFormat, text: str, name: str, value: object) -> None:
    record = a_record(text)
    record.__dict__["told"] = value
    told = LineFormatter(log_format).format(record)
    told.encode()
    assert len(told.splitlines()) == 1
    if log_format == "json":
        assert json.loads(told, parse_constant=pytest.fail)["event"] == text[:1000] + "..." * (
            len(text) > 1000
        )


def test_what_is_no_number_or_text_is_told_by_its_type() -> None:
    told = json.loads(LineFormatter("json").format(a_record("a", told=b"hush", more=["hush"], at=object())))
    assert (told["told"], told["more"], told["at"]) == ("<bytes>", "<list>", "<object>")


def test_a_line_that_cannot_be_formatted_says_where_it_came_from() -> None:
    with written() as lines:
        log.info("%d tokens", "hush")
        log.info("%s", _Unspeakable())
    assert "hush" not in lines.text
    assert all("could not be formatted" in line["event"] for line in lines.objects)
    assert "test_logs.py:" in lines.objects[0]["event"]


class _Unspeakable:
    def __str__(self) -> str:
        raise ValueError("hush")


def test_text_lines_read_like_a_sentence_with_fields() -> None:
    with written("text") as lines:
        log.warning("a\nb", extra={"hop": 1, "why": "c d"})
    assert lines.text.endswith(' WARNING app.test: a\\nb hop=1 why="c d"\n')


# Errors -------------------------------------------------------------------------------------------------------


def test_an_error_is_told_by_type_and_place() -> None:
    with written() as lines:
        try:
            try:
                raise KeyError("hush")
            except KeyError as error:
                raise ValueError("hush") from error
        except ValueError:
            log.exception("it failed")
    told = one(lines)["error"]
    assert told.startswith("ValueError in test_an_error_is_told_by_type_and_place:")
    assert "from KeyError in" in told
    assert "hush" not in lines.text


def test_errors_of_a_group_are_told_alike() -> None:
    with written() as lines:
        try:
            raise ExceptionGroup("hush", [ValueError("hush"), OSError("hush")])
        except ExceptionGroup:
            log.exception("they failed")
    told = one(lines)["error"]
    assert told.count("holds") == 2
    assert "hush" not in lines.text


async def test_what_asyncio_complains_of_holds_no_values() -> None:
    async def fail(_: str) -> None:
        raise ValueError("hush")

    def cry(_: str) -> None:
        raise ValueError("hush")

    with written() as lines:
        task = asyncio.ensure_future(fail("hush"))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        del task
        gc.collect()
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(None)
        loop.call_soon(cry, "hush")
        await asyncio.sleep(0)
        loop.call_exception_handler({"message": "no exception", "protocol": "hush", "peer": "hush"})
    events = [line["event"] for line in lines.objects]
    assert events[0] == "Task exception was never retrieved"
    assert "no exception" in events
    assert len(events) == 3
    assert "hush" not in lines.text


def test_uvloop_complains_alike() -> None:
    uvloop = pytest.importorskip("uvloop")

    async def main() -> None:
        asyncio.get_running_loop().call_soon(_fail, "hush")
        await asyncio.sleep(0)

    with written() as lines, asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(main())
    assert one(lines)["event"].startswith("Exception in callback")
    assert one(lines)["error"].startswith("ValueError in _fail")
    assert "hush" not in lines.text


def _fail(_: str) -> None:
    raise ValueError("hush")


def test_a_warning_is_told_by_category_and_place() -> None:
    with written() as lines, warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = logs._log_warning
        warnings.warn("hush", stacklevel=1)
    line = one(lines)
    assert (line["level"], line["logger"]) == ("warning", "py.warnings")
    assert line["event"].startswith("UserWarning at ")
    assert "hush" not in lines.text


def test_a_thread_that_dies_and_what_cannot_be_raised_are_lines() -> None:
    with written() as lines:
        thread = threading.Thread(target=_fail, args=("hush",))
        thread.start()
        thread.join()
        _Dying()
        gc.collect()
        sys.excepthook(ValueError, ValueError("hush"), None)
    assert [line["event"] for line in lines.objects] == [
        "a thread ended with an error",
        "an error could not be raised",
        "an error was not caught",
    ]
    assert "hush" not in lines.text


class _Dying:
    def __del__(self) -> None:
        raise ValueError("hush")


# Others -------------------------------------------------------------------------------------------------------


def test_others_speak_of_warnings_only_and_without_fields_of_their_own() -> None:
    with written() as lines:
        for name in ("httpx", "urllib3.connectionpool", "websockets.server", "asyncio", "anything"):
            logging.getLogger(name).info("GET /hush", extra={"hush": "hush"})
            logging.getLogger(name).warning("there is trouble", extra={"hush": "hush"})
        logging.getLogger("uvicorn.error").info("Started")
    assert [line["event"] for line in lines.objects] == ["there is trouble"] * 5 + ["Started"]
    assert "hush" not in lines.text


def test_libraries_with_handlers_of_their_own_write_lines_too() -> None:
    own = io.StringIO()
    with written() as lines:
        library = logging.getLogger("transformers")
        library.addHandler(logging.StreamHandler(own))
        library.propagate = False
        logging.getLogger("transformers.any").error("a complaint")
    assert one(lines)["event"] == "a complaint"
    assert not own.getvalue()


def test_structlogs_own_loggers_are_lines_too() -> None:
    with written() as lines:
        structlog.get_logger("app.other").info("a thing", hop=3)
    line = one(lines)
    assert (line["event"], line["logger"], line["hop"]) == ("a thing", "app.other", 3)


def test_a_reader_that_is_gone_is_no_trouble(capsys: pytest.CaptureFixture[str]) -> None:
    with written() as lines:
        lines.stream.close()
        log.info("hush")
    assert capsys.readouterr().err == ""


# Services -----------------------------------------------------------------------------------------------------


def test_notes_and_failures_of_a_command_are_lines_where_lines_are_json(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with written(level=logging.ERROR) as lines:
        show.note("stopped")
        try:
            raise failures.CommandError("no way")
        except failures.CommandError as error:
            failures.report(error)
    assert lines.objects[1]["error"].startswith("CommandError in ")
    assert [(line["event"], line["level"]) for line in lines.objects] == [
        ("stopped", "info"),
        ("no way", "critical"),
    ]
    with written("text"):
        show.note("stopped")
        failures.report(failures.CommandError("no way"))
    assert capsys.readouterr().err == "stopped\ndiffuse: no way\n"


def test_a_service_logs_what_nobody_caught() -> None:
    program = (
        "from cli.runtime import start_logging; start_logging('error', 'json', is_service=True);"
        "raise ValueError('hush')"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    line = json.loads(done.stderr)
    assert (line["level"], line["event"]) == ("critical", "an error was not caught")
    assert "hush" not in done.stderr


def test_a_line_that_is_not_wanted_costs_next_to_nothing() -> None:
    with written(level=logging.INFO) as lines:
        num = 20_000
        took_s = min(timeit.repeat(lambda: log.debug("a %s", "b"), number=num, repeat=5)) / num
    assert not lines.text
    assert took_s < 20e-6  # it is 0.1 us; a hop's step takes a thousand
