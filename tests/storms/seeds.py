"""Valid requests of every route: what mutations begin from."""

from __future__ import annotations

import io
import json
import wave
from collections.abc import Mapping
from typing import Any

from tests.storms.wire import Sent

JSON = (b"Content-Type", b"application/json")
HOST = (b"Host", b"localhost")
BOUNDARY = b"storm-boundary"

PAGES: tuple[tuple[bytes, bytes], ...] = (
    (b"GET", b"/v1/models"),
    (b"GET", b"/v1/models/scripted"),
    (b"GET", b"/v1/models/org%2Fname"),
    (b"GET", b"/v1/route?model=scripted"),
    (b"GET", b"/v1/requests/req_1"),
    (b"GET", b"/health"),
    (b"GET", b"/ready?model=scripted"),
    (b"GET", b"/version"),
    (b"GET", b"/metrics"),
    (b"GET", b"/openapi.json"),
    (b"GET", b"/docs"),
    (b"GET", b"/"),
    (b"GET", b"/page/page.js"),
    (b"GET", b"/v1/images/content/a.png"),
    (b"GET", b"/v1/videos?limit=5&order=desc&after=video_1"),
    (b"GET", b"/v1/videos/video_1"),
    (b"DELETE", b"/v1/videos/video_1"),
    (b"GET", b"/v1/videos/video_1/content?variant=thumbnail"),
    (b"GET", b"/v1/videos/video_1/events"),
    (b"HEAD", b"/v1/models"),
    (b"OPTIONS", b"/v1/chat/completions"),
)


def wav(seconds: float = 0.3, rate: int = 16_000) -> bytes:
    """A silent recording."""
    out = io.BytesIO()
    with wave.open(out, "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(rate)
        file.writeframes(bytes(2 * int(seconds * rate)))
    return out.getvalue()


Part = tuple[bytes, bytes | None, bytes]  # name, file name, content


def form(path: str, *parts: Part, boundary: bytes = BOUNDARY) -> Sent:
    """A multipart form."""
    lines = []
    for name, file_name, content in parts:
        shown = b'form-data; name="' + name + b'"'
        shown += b'; filename="' + file_name + b'"' if file_name is not None else b""
        lines += [b"--" + boundary, b"Content-Disposition: " + shown, b"", content]
    body = b"\r\n".join([*lines, b"--" + boundary + b"--", b""])
    content_type = (b"Content-Type", b"multipart/form-data; boundary=" + boundary)
    return Sent(b"POST", path.encode(), (HOST, content_type), body)


FORMS: tuple[tuple[str, tuple[Part, ...]], ...] = (
    (
        "/v1/audio/transcriptions",
        (
            (b"model", None, b"scribe"),
            (b"file", b"a.wav", wav()),
            (b"response_format", None, b"verbose_json"),
            (b"timestamp_granularities[]", None, b"segment"),
            (b"language", None, b"en"),
            (b"temperature", None, b"0"),
        ),
    ),
    (
        "/v1/audio/transcriptions",
        ((b"model", None, b"scribe"), (b"file", b"a.wav", wav(1.5)), (b"stream", None, b"true")),
    ),
    (
        "/v1/audio/translations",
        ((b"model", None, b"scribe"), (b"file", b"a.wav", wav()), (b"response_format", None, b"srt")),
    ),
    (
        "/v1/videos",
        (
            (b"model", None, b"filmer"),
            (b"prompt", None, b"a fox"),
            (b"seconds", None, b"1"),
            (b"size", None, b"64x48"),
            (b"steps", None, b"2"),
            (b"diffuse[max_hops]", None, b"3"),
        ),
    ),
)


def posted(path: str, body: Mapping[str, Any]) -> Sent:
    """A JSON request."""
    return Sent(b"POST", path.encode(), (HOST, JSON), json.dumps(body).encode())


def page(method: bytes, target: bytes) -> Sent:
    return Sent(method, target, (HOST,))
