"""How many bytes a second a line brings, seen where records arrive; and how many bytes others may make us send.

A message in parts leaves its sender as fast as the line takes it, so the time between its first record and its last
is the line's. A sender that pauses makes the line look slower, a receiver that was busy itself makes it look faster,
and neither does so always: what counts is a high quantile of what was seen of late. No clock: times are passed in.
Knows nothing of links, of what records hold or of whom to ask.
"""

from __future__ import annotations

import math
from collections import deque

from routing.outbox import YIELDING_RECORD
from routing.types import NodeId

LEAST_TRAIN = 64 << 10  # bytes: less fits into the buffers on the way and tells nothing of the line
WINDOW, LEAST_WINDOW_S = (
    256 << 10,
    0.01,
)  # a long train is looked at in such pieces: a pause spoils only one of them
MAX_SAMPLES = 16
FORGET_AFTER_S = 600.0  # lines change: at home with the time of day, for wanderers with the place
QUANTILE = 0.75  # three of four looks may be too slow, one too fast
MAX_RATE = 12.5e9  # bytes/s, 100 Gbit/s: what is faster was in our own buffers
BITS = 8 / 1e6  # bytes/s to Mbit/s

FIRST_BURST = LEAST_TRAIN + YIELDING_RECORD  # what comes after its first record is a train
BURST = (256 << 10) + YIELDING_RECORD
PEER_BYTES = 2 * (FIRST_BURST + BURST)  # of bursts for one peer in `QUOTA_S`: what it needs, and once more
ALL_BYTES = 16 << 20  # that all get together, whatever keys they make: 27 KiB/s
QUOTA_S = FORGET_AFTER_S
MAX_PEERS = 1024


class InboundRate:
    """What one link brings. `total` is always the bytes that came in on it so far, of whatever kind."""

    __slots__ = ("_began_at", "_began_with", "_num_open", "_samples")

    def __init__(self) -> None:
        self._num_open = 0  # messages in parts that are under way
        self._began_at = 0.0
        self._began_with = 0
        self._samples: deque[tuple[float, float]] = deque(maxlen=MAX_SAMPLES)  # (when, bytes/s)

    def begun(self, total: int, now: float) -> None:
        """The first record of a message in parts is here."""
        if self._num_open == 0:
            self._began_at, self._began_with = now, total
        else:
            self._look(total, now, WINDOW, LEAST_WINDOW_S)
        self._num_open += 1

    def went_on(self, total: int, now: float, *, is_last: bool) -> None:
        """One more record of such a message is here."""
        if is_last:
            self._look(total, now, LEAST_TRAIN, 0.0)
            self._num_open = max(0, self._num_open - 1)
        else:
            self._look(total, now, WINDOW, LEAST_WINDOW_S)

    def bytes_per_s(self, now: float) -> float | None:
        """What the line brings; None where nothing told of late."""
        while self._samples and now - self._samples[0][0] > FORGET_AFTER_S:
            self._samples.popleft()
        if not self._samples:
            return None
        rates = sorted(rate for _, rate in self._samples)
        return rates[math.ceil(QUANTILE * len(rates)) - 1]

    def _look(self, total: int, now: float, least: int, least_s: float) -> None:
        size, took_s = total - self._began_with, now - self._began_at
        if size < least or took_s < least_s:
            return
        self._samples.append((now, min(size / took_s, MAX_RATE) if took_s > 0 else MAX_RATE))
        self._began_at, self._began_with = now, total


class BurstQuota:
    """How much we send for nothing: a share for each peer, and one for all of them; they fill up again over time."""

    def __init__(
        self, per_peer: int = PEER_BYTES, in_all: int = ALL_BYTES, period_s: float = QUOTA_S
    ) -> None:
        self._per_peer, self._period_s = per_peer, period_s
        self._all = _Share(in_all, in_all / period_s)
        self._peers: dict[NodeId, _Share] = {}  # who asked longest ago comes first

    def take(self, peer_id: NodeId, size: int, now: float) -> bool:
        """Whether a peer gets `size` bytes now; they are counted if so."""
        share = self._peers.pop(peer_id, None) or _Share(self._per_peer, self._per_peer / self._period_s)
        self._peers[peer_id] = share
        if len(self._peers) > MAX_PEERS:  # a forgotten one begins anew: that is what the share of all is for
            del self._peers[next(iter(self._peers))]
        if size > share.left(now) or size > self._all.left(now):
            return False
        share.spend(size)
        self._all.spend(size)
        return True


class _Share:
    """Bytes that fill up again."""

    __slots__ = ("_at", "_left", "_most", "_per_s")

    def __init__(self, most: float, per_s: float) -> None:
        self._most = self._left = most
        self._per_s = per_s
        self._at: float | None = None

    def left(self, now: float) -> float:
        if self._at is not None:
            self._left = min(self._most, self._left + max(0.0, now - self._at) * self._per_s)
        self._at = now
        return self._left

    def spend(self, size: int) -> None:
        self._left -= size
