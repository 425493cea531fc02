"""What our middleware and endpoints note in a request's ASGI scope."""

from __future__ import annotations

from math import inf

from starlette.datastructures import Headers
from starlette.types import Scope

from app.keys import ANYONE, ApiKey, Caller

REQUEST_ID = "diffuse.request_id"
TENANT = "diffuse.tenant"
CALLER = "diffuse.caller"  # an `ApiKey`
EXTRA_HEADERS = "diffuse.extra_headers"  # of the response, whatever it will be
PATIENCE_HEADER = "x-stainless-read-timeout"
OTHER = "other"  # the endpoint label of a path that no route knows


def request_id_of(scope: Scope) -> str:
    """Return the id that the response carries."""
    return str(scope.get(REQUEST_ID, ""))


def tenant_of(scope: Scope) -> bytes:
    """Return a digest of the API key that asks; b"" where none is needed: then all are one."""
    return bytes(scope.get(TENANT, b""))


def key_of(scope: Scope) -> ApiKey:
    """Return the key that asks."""
    key = scope.get(CALLER, ANYONE)
    assert isinstance(key, ApiKey)
    return key


def caller_of(scope: Scope) -> Caller:
    """Return who asks, and how long OpenAI's clients say that they wait for a byte."""
    told = Headers(scope=scope).get(PATIENCE_HEADER, "")
    try:
        patience_s = float(told)
    except ValueError:
        patience_s = inf
    return Caller(key_of(scope), patience_s if patience_s > 0 else inf)


def endpoint_of(scope: Scope) -> str:
    """Return the path template of the route, so that labels stay few."""
    return str(getattr(scope.get("route"), "path", OTHER))
