"""What our middleware and endpoints note in a request's ASGI scope."""

from __future__ import annotations

from starlette.types import Scope

REQUEST_ID = "diffuse.request_id"
TENANT = "diffuse.tenant"
OTHER = "other"  # the endpoint label of a path that no route knows


def request_id_of(scope: Scope) -> str:
    """Return the id that the response carries."""
    return str(scope.get(REQUEST_ID, ""))


def tenant_of(scope: Scope) -> bytes:
    """Return a digest of the API key that asks; b"" where none is needed: then all are one."""
    return bytes(scope.get(TENANT, b""))


def endpoint_of(scope: Scope) -> str:
    """Return the path template of the route, so that labels stay few."""
    return str(getattr(scope.get("route"), "path", OTHER))
