"""A route whose requests carry its path in their log lines."""

from __future__ import annotations

from fastapi.routing import APIRoute
from starlette.types import Receive, Scope, Send

from app.request_notes import name_in_log


class NamedRoute(APIRoute):
    """Names the template, not what a client asked for: paths hold ids."""

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        name_in_log(endpoint=self.path)
        await super().handle(scope, receive, send)
