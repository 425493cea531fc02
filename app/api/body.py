"""Reads a request's body, JSON whatever its Content-Type says, and refuses the hostile ones before they cost much."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NoReturn

from starlette.requests import Request

from app.api.errors import ApiError, invalid

PARSE_APART_BYTES = 256 << 10  # beyond this, parsing would hold up other answers for milliseconds
CLOSE = {"connection": "close"}  # the rest of the body is not worth reading


@dataclass(frozen=True, slots=True)
class BodyLimits:
    """How much body is read, and how long the whole of it may take to come."""

    size_bytes: int
    timeout_s: float


async def read_json_object(request: Request, limits: BodyLimits) -> dict[str, Any]:
    """Return the body as a JSON object. Raises `ApiError` 400, 408, 413 or 415."""
    raw = await read_body(request, limits)
    return parse_object(raw) if len(raw) < PARSE_APART_BYTES else await asyncio.to_thread(parse_object, raw)


async def read_body(request: Request, limits: BodyLimits) -> bytes:
    """Return the body as it is. Raises `ApiError` 400, 408, 413 or 415."""
    body = bytearray()
    await take_body(request, limits, body.extend)
    return bytes(body)


async def take_body(request: Request, limits: BodyLimits, take: Callable[[bytes], object]) -> None:
    """Hand over the body in pieces, as they come. Raises `ApiError` 400, 408, 413 or 415, and what `take` does."""
    if {"content-length", "transfer-encoding"} <= set(request.headers):  # what smuggled requests look like
        raise invalid(None, "the body has two lengths", code="invalid_http", headers=CLOSE)
    if request.headers.get("content-encoding", "identity").strip().lower() not in ("", "identity"):
        raise ApiError(415, "unsupported_encoding", "send the body uncompressed", headers=CLOSE)
    try:
        async with asyncio.timeout(limits.timeout_s):
            await _take(request, limits.size_bytes, take)
    except TimeoutError:
        message = f"the body did not arrive within {limits.timeout_s:g} s"
        raise ApiError(408, "request_timeout", message, headers=CLOSE) from None


def parse_object(raw: bytes) -> dict[str, Any]:
    """Parse strict JSON: UTF-8, no NaN, no key twice, no half of a surrogate pair, an object at the top."""
    try:
        body = json.loads(raw.decode("utf-8-sig"), parse_constant=_refuse_constant, object_pairs_hook=_unique)
        if b"\\ud" in raw or b"\\uD" in raw:
            json.dumps(body, ensure_ascii=False).encode("utf-8")
    except UnicodeError:
        raise invalid(None, "the body is not valid Unicode text", code="invalid_json") from None
    except RecursionError:
        raise invalid(None, "the JSON is nested too deeply", code="invalid_json") from None
    except json.JSONDecodeError as error:
        message = f"the body is not valid JSON: {error.msg} at character {error.pos}"
        raise invalid(None, message, code="invalid_json") from None
    except ValueError as error:  # our own hooks, and integers of absurd length
        raise invalid(None, f"the body is not valid JSON: {_reason(error)}", code="invalid_json") from None
    if not isinstance(body, dict):
        raise invalid(None, "the body must be a JSON object", code="invalid_json")
    return body


async def _take(request: Request, limit: int, take: Callable[[bytes], object]) -> None:
    """Count bytes as they come, so an endless body costs no more than the limit."""
    stated = request.headers.get("content-length", "")
    is_too_large = stated.isdecimal() and int(stated[:20]) > limit
    size = 0
    chunks = request.stream()
    while not is_too_large and (chunk := await anext(chunks, None)) is not None:
        size += len(chunk)
        is_too_large = size > limit
        if not is_too_large:
            take(chunk)
    if is_too_large:
        raise ApiError(413, "request_too_large", f"the body is larger than {limit} bytes", headers=CLOSE)


class _HookError(ValueError):
    """What our own parsing hooks refuse; the text quotes nothing."""


def _refuse_constant(_: str) -> NoReturn:
    raise _HookError("NaN and Infinity are not numbers in JSON")


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) != len(pairs):
        raise _HookError("an object holds the same key twice")
    return made


def _reason(error: ValueError) -> str:
    return str(error) if isinstance(error, _HookError) else "a number is too long"
