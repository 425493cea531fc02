"""How much credit a sentinel gives back as it passes bytes on: enough to keep the next leg busy, and no more.

What waits at the sentinel, a token of the same circuit cannot pass. So a circuit begins with a small window; it
grows while the queue runs dry at a rate that fills the leg's bandwidth times delay, and shrinks while bytes stand
in the queue. No clock: times are passed in.
"""

from __future__ import annotations

from routing.mux import WINDOW

START_WINDOW = 128 << 10  # B from an end towards its sentinel, at first; it doubles each round trip as needed
_MIN_WINDOW = 64 << 10
_TARGET = 32 << 10  # B that may stand in the queue: a full body


class Pace:
    """The window of one direction of one circuit."""

    def __init__(self, now: float) -> None:
        self.window = START_WINDOW
        self._debt = 0  # credit that is not given back: the window has shrunk
        self._passed = 0  # bytes since the last look
        self._least_queued = WINDOW
        self._looked_at = now

    def passed_on(self, size: int, queued: int, now: float, rtt_s: float) -> int:
        """Note `size` bytes passed on with `queued` left behind them; return the credit to give back.

        `rtt_s` is the round trip to the end that the credit goes to.
        """
        self._passed += size
        self._least_queued = min(self._least_queued, queued)
        if self._passed >= self.window // 2:
            size += self._look(now - self._looked_at, rtt_s)
            self._passed = 0
            self._least_queued = WINDOW
            self._looked_at = now
        kept_back = min(self._debt, size)
        self._debt -= kept_back
        return size - kept_back

    def _look(self, took_s: float, rtt_s: float) -> int:
        """Half a window has passed: return what the window grows by."""
        if self._least_queued == 0 and took_s < 2 * rtt_s:
            grown = min(self.window, WINDOW - self.window)
            self.window += grown
            return grown
        if self._least_queued > _TARGET:
            cut = max(0, min(self._least_queued - _TARGET, self.window - _MIN_WINDOW))
            self.window -= cut
            self._debt += cut
        return 0
