"""A 405 names every method of its path: a route knows only its own, and a path may have several."""

from __future__ import annotations

from starlette.exceptions import HTTPException
from starlette.routing import BaseRoute, Match
from starlette.types import ASGIApp, Receive, Scope, Send

METHOD_NOT_ALLOWED = 405


class AllowedMethods:
    """Completes the `Allow` header of what the router refuses."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await self._app(scope, receive, send)
        except HTTPException as error:
            if error.status_code == METHOD_NOT_ALLOWED:
                error.headers = {"allow": ", ".join(_methods(scope, scope["app"].routes))}
            raise


def _methods(scope: Scope, routes: list[BaseRoute]) -> list[str]:
    """The methods of all routes that the path fits."""
    plain = {"type": "http", "path": scope["path"], "root_path": scope.get("root_path", ""), "method": "GET"}
    fitting = (route for route in routes if route.matches(plain)[0] is not Match.NONE)
    return sorted({method for route in fitting for method in getattr(route, "methods", None) or ()})
