"""What is wrong with an answer, in words: nothing, for all that a gateway may say to whoever sends it anything."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from urllib.parse import unquote_to_bytes

from tests.storms.wire import Came, Sent

MAX_MESSAGE = 500
MAX_REFUSAL = 2000  # bytes
ENVELOPE = {"message", "type", "param", "code"}
# What a storm by itself can bring about: every place taken, more videos than are kept waiting.
BY_DESIGN = {"overloaded", "queue_timeout"}
# A path of a machine, and what Python says of objects and errors.
LEAKS = re.compile(
    r"/(?:root|home|tmp|usr|work|proc|etc|opt|var)/|\.py\b|site-packages|Traceback|File \"|<class|<function|"
    r"<\w+(?:\.\w+)+|object at 0x|\b0x[0-9a-f]{6,}|\w+Error\b|\w+Exception\b|errno|pydantic|starlette|None\b|"
    r"\bTrue\b|\bFalse\b|dict\[|list\[|NoneType|further information",
)


def faults(sent: Sent, came: Came) -> Iterator[str]:
    """Yield what is wrong."""
    if came.status == 0:
        yield "no answer"
        return
    if "x-request-id" not in came.headers:
        yield "no request id"
    if came.status < 400:
        yield from _success(sent, came)
    elif sent.method != b"HEAD":
        yield from _refusal(sent, came)
    if came.status == 405 and "allow" not in came.headers:
        yield "405 without Allow"


def _success(sent: Sent, came: Came) -> Iterator[str]:
    if came.status not in (200, 204, 206, 304):
        yield f"status {came.status}"
    kind = came.headers.get("content-type", "")
    if kind.startswith("application/json") and sent.method != b"HEAD":
        try:
            json.loads(came.body)
        except ValueError:
            yield "no JSON"
    elif kind.startswith("text/event-stream"):
        yield from _stream(sent, came)


def _stream(sent: Sent, came: Came) -> Iterator[str]:
    """Each block is comments, or one event; an error in it is one that a status could be."""
    text = came.body.decode()
    for block in text.removesuffix("\n\n").split("\n\n"):
        lines = [line for line in block.split("\n") if not line.startswith(":")]
        held = [line for line in lines if line.startswith("data: ")]
        if lines and len(held) != 1:
            yield f"an event with {len(held)} data lines"
        elif lines and held[0] != "data: [DONE]":
            event = json.loads(held[0].removeprefix("data: "))
            error = event.get("error") if isinstance(event, dict) else None
            if error and "message" in error:
                yield from _error(sent, error, is_server=error.get("type") == "server_error")


def _refusal(sent: Sent, came: Came) -> Iterator[str]:
    if not came.headers.get("content-type", "").startswith("application/json"):
        yield "a refusal that is no JSON"
        return
    if len(came.body) > MAX_REFUSAL:
        yield f"a refusal of {len(came.body)} bytes"
    told = json.loads(came.body)
    if set(told) != {"error"} or set(told["error"]) != ENVELOPE:
        yield "no envelope"
        return
    yield from _error(sent, told["error"], is_server=came.status >= 500)


def _error(sent: Sent, error: dict[str, object], *, is_server: bool) -> Iterator[str]:
    if is_server and error.get("code") not in BY_DESIGN:
        yield f"a server error: {error}"
    message, param = str(error["message"]), error.get("param")
    if len(message) > MAX_MESSAGE or not message:
        yield f"a message of {len(message)} characters"
    for leak in LEAKS.finditer(message):
        if not _is_said(leak.group(), sent):
            yield f"{leak.group()!r} in the message {message!r}"
    if param is not None and len(str(param)) > MAX_MESSAGE:
        yield f"a param of {len(str(param))} characters"


def _is_said(words: str, sent: Sent) -> bool:
    """Whether they are the client's own: names of fields and schemas are told back."""
    return words.encode() in sent.body or words in unquote_to_bytes(sent.target).decode("latin-1")
