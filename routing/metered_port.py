"""A sentinel's link as its circuits use it: credits go back at the rate of the link's quota, so that a link that
sends more is slowed down, and never cut or lost from."""

from __future__ import annotations

import asyncio
from collections import deque

from routing.link import Link
from routing.mux import Channel

_UNKNOWN_RTT_S = 0.1


class Allowance:
    """Bytes a link may have passed on: `rate` a second, `burst` at most. What is over waits in order. No clock."""

    def __init__(self, rate: float, burst: float, now: float) -> None:
        self._rate = rate
        self._burst = burst
        self._tokens = burst
        self._then = now
        self.owed: deque[tuple[Channel, int]] = deque()

    def owe(self, channel: Channel, size: int) -> None:
        """Queue credit for bytes that were passed on."""
        self.owed.append((channel, size))

    def due(self, now: float) -> list[tuple[Channel, int]]:
        """Return the credit that may be given now."""
        self._tokens = min(self._burst, self._tokens + (now - self._then) * self._rate)
        self._then = now
        given = []
        while self.owed and self._tokens > 0:
            channel, size = self.owed.popleft()
            self._tokens -= size
            given.append((channel, size))
        return given

    @property
    def wait_s(self) -> float | None:
        """Seconds until more may be given; None when nothing waits."""
        return max(0.0, -self._tokens / self._rate) + 0.001 if self.owed else None


class MeteredPort:
    """A `splice.Port` over a link."""

    def __init__(self, link: Link, rate: float, burst: float) -> None:
        self._loop = asyncio.get_running_loop()
        self._allowance = Allowance(rate, burst, self._loop.time())
        self._timer: asyncio.TimerHandle | None = None
        self.link = link
        self.num_delayed = 0  # times that credit had to wait for the quota
        link.ask_rtt()

    def now(self) -> float:
        return self._loop.time()

    @property
    def rtt_s(self) -> float:
        return _UNKNOWN_RTT_S if self.link.rtt_ms is None else self.link.rtt_ms / 1000

    def end_channel(self, channel: Channel, code: int | None) -> None:
        self.link.side.end(channel, code)
        self.link.wake()

    def give_back(self, channel: Channel, size: int) -> None:
        self._allowance.owe(channel, size)
        if self._timer is None:
            self._give()

    def pump(self) -> None:
        self.link.pump()

    def close(self) -> None:
        """Stop the clock."""
        if self._timer is not None:
            self._timer.cancel()
        self._timer = None
        self._allowance.owed.clear()

    def _give(self) -> None:
        self._timer = None
        for channel, size in self._allowance.due(self._loop.time()):
            self.link.give_back(channel, size)
        wait_s = self._allowance.wait_s
        if wait_s is not None and not self.link.is_closed:
            self.num_delayed += 1
            self._timer = self._loop.call_later(wait_s, self._give)
