"""A refusal waits until its request was sent: most clients read only then, and a connection closed before is reset.

Whatever is raised further in, before the body was read, finds the rest of it read here; nothing is kept.
"""

from __future__ import annotations

import asyncio
import contextlib

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from app.api.errors import is_client_gone

DISCARD_S = 1.0  # an endless body may go


class UnreadBody:
    """Reads what an endpoint left unread when it raises."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        is_over = False

        async def watched() -> Message:
            nonlocal is_over
            message = await receive()
            is_over = not message.get("more_body", False)
            return message

        try:
            await self._app(scope, watched, send)
        except Exception as error:
            if not is_over and not is_client_gone(error) and not _asks_first(scope):
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(DISCARD_S):
                        while not is_over:
                            await watched()
            raise


def _asks_first(scope: Scope) -> bool:
    """Such a client has sent nothing yet, and sends nothing to one who refuses."""
    return any(name == b"expect" for name, _ in scope["headers"])
