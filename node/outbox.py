"""Sends without waiting, and gives up a peer that takes nothing. Links keep order, lanes and credit themselves."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from routing.errors import RemoteError
from routing.link import Link
from routing.types import Message

logger = logging.getLogger(__name__)

# A peer that lets this much wait is too slow to serve, and its link is closed: twice what one session may have
# pending (step_flow.MAX_PENDING_BYTES), so that a single busy session never gets there.
MAX_WAITING_BYTES = 256 << 20

Gone = Callable[[], None]


class Outbox:
    """Posts messages on links; `tasks` runs the closing of overrun ones."""

    def __init__(self, tasks: asyncio.TaskGroup) -> None:
        self._tasks = tasks

    def put(self, link: Link, message: Message, gone: Gone | None = None) -> None:
        """Send; `gone` is called when the message has left, or never will."""
        try:
            link.post(message, gone)
        except RemoteError as error:
            logger.debug("peer %s: %s", link.peer_id.hex()[:8], error.code.name)
            if gone is not None:
                gone()
            return
        if link.waiting_bytes > MAX_WAITING_BYTES:
            logger.warning("peer %s takes nothing; its link is closed", link.peer_id.hex()[:8])
            self._tasks.create_task(link.close())
