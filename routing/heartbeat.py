"""When to ask a silent peer for a sign of life, and when to give it up. Time is passed in; no clock, no socket."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Literal

_TOKEN = struct.Struct(">Q")
_LATE_S = 1.0  # a check this late means that we were stopped ourselves: the peer gets a new chance


@dataclass(frozen=True, slots=True)
class HeartbeatTiming:
    """Seconds; the defaults are transport.md 5.6."""

    idle_s: float = 5.0  # ping a link that was silent for so long
    dead_s: float = 10.0  # give up a link that was silent for so long
    watch_s: float = 0.5  # ping this often while a step is outstanding
    carry_s: float = 1.0  # ping a link that carries circuits and was silent for so long: see `is_carrying`


class Heartbeat:
    """Silence, pings and round trips of one link."""

    def __init__(self, now: float, timing: HeartbeatTiming) -> None:
        self._timing = timing
        self._pings: dict[bytes, float] = {}
        self._num_pings = 0
        self._asked_at: float | None = None  # the first ping since the peer was last heard
        self._last_ping = now
        self._next_check = now + timing.idle_s
        self.last_heard = now
        self.num_watchers = 0
        # A NAT box that forgets tells only who is outside. The node behind it is not found until it speaks again.
        self.is_carrying = False
        self.rtt_ms: float | None = None

    def heard(self, now: float) -> None:
        """Note that a frame came in."""
        self.last_heard = now
        self._asked_at = None

    def ping(self, now: float) -> bytes:
        """Return the token of a PING that leaves now; tokens grow."""
        self._num_pings += 1
        token = _TOKEN.pack(self._num_pings)
        while len(self._pings) >= 32:  # only the latest are answered, see mux
            del self._pings[next(iter(self._pings))]
        self._pings[token] = now
        self._last_ping = now
        if self._asked_at is None:
            self._asked_at = now
        return token

    def pong(self, token: bytes, now: float) -> float | None:
        """Return the round trip of a PONG in ms; None when it answers no PING of ours."""
        sent_at = self._pings.pop(token, None)
        if sent_at is None:
            return None
        for older in [ping for ping in self._pings if ping < token]:
            del self._pings[older]
        self.rtt_ms = (now - sent_at) * 1000
        return self.rtt_ms

    def silent_for_s(self, now: float) -> float:
        """Seconds that a PING has been waiting for any sign of life; 0 when nobody was asked."""
        return 0.0 if self._asked_at is None else now - self._asked_at

    def check(self, now: float) -> Literal["fine", "ping", "dead"]:
        """Say what is due at `now`; call again at `next_check`."""
        if now - self._next_check > _LATE_S:
            self.last_heard = max(self.last_heard, now - self._timing.dead_s / 2)
            self._asked_at = None
        if now >= self.last_heard + self._timing.dead_s:
            return "dead"
        is_due = now >= self._ping_due
        next_ping = now + self._interval_s if is_due else self._ping_due
        self._next_check = min(next_ping, self.last_heard + self._timing.dead_s)
        return "ping" if is_due else "fine"

    @property
    def next_check(self) -> float:
        """When `check` wants to be called; look again after watching or carrying began."""
        is_brisk = self.num_watchers or self.is_carrying
        return min(self._next_check, self._ping_due) if is_brisk else self._next_check

    @property
    def _ping_due(self) -> float:
        return max(self.last_heard, self._last_ping) + self._interval_s

    @property
    def _interval_s(self) -> float:
        if self.num_watchers:
            return self._timing.watch_s
        return min(self._timing.carry_s, self._timing.idle_s) if self.is_carrying else self._timing.idle_s
