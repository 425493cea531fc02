"""Sends without waiting, and gives up a peer that takes nothing. Links keep order, lanes and credit themselves."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from routing.errors import RemoteError
from routing.link import Link
from routing.types import Message

logger = logging.getLogger(__name__)

# A peer that lets this much wait is too slow to serve, and its link is closed: as much as all sessions of a node may
# have pending (step_flow.MAX_PENDING_IN_ALL), so that slow but honest links never get there by steps alone.
MAX_WAITING_BYTES = 1 << 30

Gone = Callable[[], None]


class Outbox:
    """Posts messages on links; `tasks` runs the closing of overrun ones."""

    def __init__(self, tasks: asyncio.TaskGroup) -> None:
        self._tasks = tasks
        self.call_bytes = (
            0  # of calls that wait to leave: they are counted by the memory budget, and may be many
        )

    def put(self, link: Link, message: Message, gone: Gone | None = None) -> RemoteError | None:
        """Send; `gone` is called when the message has left, or never will. Returns why it cannot be sent at all."""
        try:
            link.post(message, gone)
        except RemoteError as error:
            logger.debug("peer %s: %s", link.peer_id.hex()[:8], error.code.name)
            if gone is not None:
                gone()
            return error
        if link.waiting_bytes > MAX_WAITING_BYTES + self.call_bytes:
            peer = link.peer_id.hex()[:8]
            logger.warning("peer %s takes nothing; its link is closed", peer, extra={"peer": peer})
            self._tasks.create_task(link.close())
        return None
