"""The requests that a key may send in a moving minute, as plain ASGI: refused before their bodies are read.

What asks for work counts (POST), also where it is refused later; looking at things is free. Every answer to a key with
such a limit says how much of it is left.
"""

from __future__ import annotations

import math
from typing import Final

from starlette.types import ASGIApp, Receive, Scope, Send

from app.api.errors import ApiError
from app.api.scope import EXTRA_HEADERS, key_of
from app.gateway import Gateway
from app.state.state import Allowance

CODE: Final = "rate_limit_exceeded"


class RateLimit:
    """Wraps what comes behind the key."""

    def __init__(self, app: ASGIApp, gateway: Gateway) -> None:
        self._app = app
        self._gateway = gateway

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "POST":
            await self._app(scope, receive, send)
            return
        key = key_of(scope)
        if key.requests_per_minute is None:
            await self._app(scope, receive, send)
            return
        allowance = await self._gateway.limits.take(key.digest.hex(), key.requests_per_minute)
        scope[EXTRA_HEADERS] = _headers(key.requests_per_minute, allowance)
        if not allowance.is_granted:
            self._gateway.metrics.admission.count_limited(CODE)
            wait_s = max(1, math.ceil(allowance.wait_s))
            message = (
                f"this key may send {key.requests_per_minute} requests a minute: try again in {wait_s} s"
            )
            raise ApiError(429, CODE, message, headers={"retry-after": str(wait_s)})
        await self._app(scope, receive, send)


def _headers(per_minute: int, allowance: Allowance) -> dict[str, str]:
    """OpenAI's names; the time is theirs too, as in `1.5s`."""
    return {
        "x-ratelimit-limit-requests": str(per_minute),
        "x-ratelimit-remaining-requests": str(allowance.remaining),
        "x-ratelimit-reset-requests": f"{allowance.reset_s:.3f}s",
    }
