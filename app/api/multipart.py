"""Reads a body that is JSON or a multipart form: the official clients send forms to `/v1/videos` even without a file.

A form's fields become the same object that JSON would have been. Files are refused by name where none is taken.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

from python_multipart.exceptions import MultipartParseError
from python_multipart.multipart import MultipartParser, parse_options_header
from starlette.requests import Request

from app.api.body import BodyLimits, parse_object, read_json_object, take_body
from app.api.errors import ApiError, invalid, unsupported

FORM = "multipart/form-data"
MAX_FIELDS = 100
MAX_FIELD_BYTES = 256 << 10  # a prompt of 32,000 characters in the widest script is half of that
MAX_HEADER_BYTES = 4096  # of one part
MAX_BOUNDARY = 256
FIELD = re.compile(r"(?P<name>\w{1,64})(\[(?P<key>\w{1,64})\])?(?P<list>\[\])?")  # pins: diffuse[pin][]


@dataclass(frozen=True, slots=True)
class FieldTypes:
    """Which of a form's fields are not texts; `objects` may also come as one JSON text, `files` are taken as such."""

    numbers: Collection[str] = ()
    flags: Collection[str] = ()
    objects: Collection[str] = ()
    files: Collection[str] = ()


@dataclass(frozen=True, slots=True)
class Upload:
    """A file of a form: the bytes, whatever its name and type claim."""

    content: bytes = field(repr=False)


async def read_fields(
    request: Request,
    limits: BodyLimits,
    types: FieldTypes,
    count: Callable[[int], None] = lambda num_bytes: None,
) -> dict[str, Any]:
    """Return the body's fields, as JSON has them; `count` is told of a form's bytes as they come.

    Raises `ApiError` 400, 408, 413 or 415, and what `count` does.
    """
    content_type, options = parse_options_header(request.headers.get("content-type", ""))
    if content_type.decode("latin-1").strip().lower() != FORM:
        return await read_json_object(request, limits)
    boundary = options.get(b"boundary", b"")
    if not 0 < len(boundary) <= MAX_BOUNDARY:
        raise invalid(None, "the form names no boundary", code="invalid_form")
    parsing = _Parsing(boundary, types)

    def take(piece: bytes) -> None:
        count(len(piece))
        parsing.parser.write(piece)

    with _refused():
        await take_body(request, limits, take)
    return parsing.finished()


def parse_form(raw: bytes, boundary: bytes, types: FieldTypes) -> dict[str, Any]:
    """Read a form as one object. Raises `ApiError` 400."""
    parsing = _Parsing(boundary, types)
    with _refused():
        parsing.parser.write(raw)
    return parsing.finished()


class _Parsing:
    """One form, as its bytes come."""

    def __init__(self, boundary: bytes, types: FieldTypes) -> None:
        self._types = types
        self._reading = _Reading(types.files)
        self.parser = MultipartParser(boundary, self._reading.callbacks())  # type: ignore[arg-type]

    def finished(self) -> dict[str, Any]:
        """Return the form, which must be whole by now."""
        with _refused():
            self.parser.finalize()
        if not self._reading.is_whole:
            raise invalid(None, "the form was cut short", code="invalid_form")
        made: dict[str, Any] = {}
        for name, value in self._reading.fields:
            _put(made, name, value, self._types)
        return made


@contextmanager
def _refused() -> Iterator[None]:
    try:
        yield
    except MultipartParseError:
        raise invalid(None, "the body is not a valid multipart form", code="invalid_form") from None


def _put(made: dict[str, Any], name: str, held: str | Upload, types: FieldTypes) -> None:
    match = FIELD.fullmatch(name)
    if match is None:
        raise invalid(None, "a field of the form has no plain name", code="invalid_form")
    field_name, key = match["name"], match["key"]
    if key is not None:
        inner = made.setdefault(field_name, {})
        if not isinstance(inner, dict):
            raise _twice(field_name)
        made, field_name = inner, key
    value = held if isinstance(held, Upload) else _typed(field_name, held, types, is_inner=key is not None)
    if match["list"]:
        items = made.setdefault(field_name, [])
        if not isinstance(items, list):
            raise _twice(field_name)
        items.append(value)
    elif field_name in made:
        raise _twice(field_name)
    else:
        made[field_name] = value


def _typed(name: str, text: str, types: FieldTypes, *, is_inner: bool) -> Any:
    """Read a text as what its field holds; what it does not look like stays a text, and is refused as one."""
    if name in types.objects and not is_inner:
        return parse_object(text.encode()) if text.strip() else None
    if name in types.numbers or name in types.flags:
        with suppress(ValueError, RecursionError):
            value = json.loads(text, parse_constant=_no_number)
            if isinstance(value, bool) == (name in types.flags) and isinstance(value, bool | int | float):
                return value
        return text if text.strip() else None
    return text


def _no_number(_: str) -> None:
    raise ValueError("not a number")


def _twice(name: str) -> ApiError:
    return invalid(name, f"'{name}' is there twice", code="invalid_form")


@dataclass
class _Reading:
    """What the parser has told so far: one part, and the fields before it."""

    files: Collection[str] = ()  # names of those that are taken
    fields: list[tuple[str, str | Upload]] = field(default_factory=list)
    is_whole: bool = False
    _header: bytearray = field(default_factory=bytearray)
    _value: bytearray = field(default_factory=bytearray)
    _headers: dict[bytes, bytes] = field(default_factory=dict)
    _name: str = ""
    _text: bytearray = field(default_factory=bytearray)
    _is_file: bool = False

    def callbacks(self) -> dict[str, Any]:
        return {
            "on_part_begin": self._begin,
            "on_header_field": self._header_name,
            "on_header_value": self._header_value,
            "on_header_end": self._header_end,
            "on_headers_finished": self._headers_end,
            "on_part_data": self._content,
            "on_part_end": self._end,
            "on_end": self._finish,
        }

    def _begin(self) -> None:
        if len(self.fields) >= MAX_FIELDS:
            raise invalid(None, f"the form has more than {MAX_FIELDS} fields", code="invalid_form")
        self._headers = {}
        self._text = bytearray()

    def _header_name(self, data: bytes, start: int, end: int) -> None:
        self._header += _bounded(self._header, data[start:end])

    def _header_value(self, data: bytes, start: int, end: int) -> None:
        self._value += _bounded(self._value, data[start:end])

    def _header_end(self) -> None:
        self._headers[bytes(self._header).lower()] = bytes(self._value)
        self._header, self._value = bytearray(), bytearray()
        if len(self._headers) > MAX_FIELDS:
            raise invalid(None, "a part of the form has too many headers", code="invalid_form")

    def _headers_end(self) -> None:
        _, options = parse_options_header(self._headers.get(b"content-disposition", b""))
        name = options.get(b"name", b"").decode("utf-8", "replace")
        if not name:
            raise invalid(None, "a part of the form has no name", code="invalid_form")
        self._is_file = b"filename" in options or b"filename*" in options
        if self._is_file and name not in self.files:
            shown = name if FIELD.fullmatch(name) else None
            own = " and ".join(f"'{one}'" for one in self.files)
            why = f"the file goes into {own}" if own else "no model here begins from one"
            raise unsupported(shown or "file", f"files are not taken here: {why}")
        self._name = name

    def _content(self, data: bytes, start: int, end: int) -> None:
        if not self._is_file and len(self._text) + end - start > MAX_FIELD_BYTES:
            shown = self._name if FIELD.fullmatch(self._name) else None
            raise invalid(shown, f"a field of the form has more than {MAX_FIELD_BYTES} bytes")
        self._text += data[start:end]

    def _end(self) -> None:
        if self._is_file:
            self.fields.append((self._name, Upload(bytes(self._text))))
            self._text = bytearray()
            return
        try:
            self.fields.append((self._name, self._text.decode("utf-8")))
        except UnicodeError:
            raise invalid(
                None, "a field of the form is not valid Unicode text", code="invalid_form"
            ) from None

    def _finish(self) -> None:
        self.is_whole = True


def _bounded(so_far: bytearray, more: bytes) -> bytes:
    if len(so_far) + len(more) > MAX_HEADER_BYTES:
        raise invalid(None, "a header of the form is too long", code="invalid_form")
    return more
