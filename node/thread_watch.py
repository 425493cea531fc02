"""Notices that several threads are slower than one, and computes with one for a while.

Threads that share a product wait for the last of them. Where another process has that one's core, everybody waits for
its turn: a pass of 20 ms was seen to take 2 s on a busy machine. What was measured at the load, in a quiet moment,
does not tell. Runs on the compute thread.
"""

from __future__ import annotations

import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable

import torch

logger = logging.getLogger(__name__)

MUCH_SLOWER = (
    4.0  # than the quickest of its kind; a neighbour that takes half of a core makes it twice as slow
)
SLOW_STEPS = 3  # within the last few: one alone says nothing
FIRST_PAUSE_S = 60.0  # then the threads are tried again
LAST_PAUSE_S = 3600.0
MAX_KINDS = 256


class ThreadWatch:
    """Sets the number of torch's threads in the calling thread, at most `threads`, by what steps take."""

    def __init__(
        self,
        threads: int,
        set_threads: Callable[[int], None] = torch.set_num_threads,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.threads = threads  # that compute now
        self._wanted = threads
        self._set_threads = set_threads
        self._clock = clock
        self._quickest: OrderedDict[Hashable, float] = OrderedDict()  # seconds, by kind of step
        self._num_slow = 0
        self._pause_s = FIRST_PAUSE_S
        self._again_at = 0.0

    def note(self, kind: Hashable, took_s: float) -> None:
        """A step took so long; steps of one kind cost the same."""
        if self._wanted == 1:
            return
        quickest = min(took_s, self._quickest.pop(kind, took_s))
        self._quickest[kind] = quickest
        if len(self._quickest) > MAX_KINDS:
            self._quickest.popitem(last=False)
        if self.threads == 1:
            self._return()
            return
        self._num_slow = self._num_slow + 1 if took_s > MUCH_SLOWER * quickest else max(0, self._num_slow - 1)
        if self._num_slow >= SLOW_STEPS:
            self._withdraw()

    def _withdraw(self) -> None:
        logger.info("%d threads wait for each other on this busy machine: one computes now", self._wanted)
        self.threads, self._num_slow = 1, 0
        self._set_threads(1)
        self._again_at = self._clock() + self._pause_s
        self._pause_s = min(2 * self._pause_s, LAST_PAUSE_S)

    def _return(self) -> None:
        if self._clock() >= self._again_at:
            self.threads = self._wanted
            self._set_threads(self._wanted)
