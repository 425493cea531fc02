"""Counts the failures of a store, and says so once a minute."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Literal

log = logging.getLogger(__name__)

Part = Literal["limits", "records", "pictures", "jobs", "presence"]
WARN_S = 60.0


class Trouble:
    """What one gateway notes of its store's failures."""

    def __init__(self, count: Callable[[Part], None]) -> None:
        self._count = count
        self._quiet_until = 0.0

    def note(self, part: Part, reason: str) -> None:
        """`reason` is an error's class: its text may hold an address or a secret."""
        self._count(part)
        now = time.monotonic()
        if now >= self._quiet_until:
            self._quiet_until = now + WARN_S
            log.warning("the state store fails (%s: %s): no limits of keys until it is back", part, reason)
