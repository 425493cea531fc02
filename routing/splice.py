"""One circuit at the sentinel: two channels of two links, joined so that the bodies of each go out on the other.

Nothing piles up: a side's credit goes back to it only as the other side's link takes its bytes, so a direction
holds a window at most, and a small one (see `pace.py`). Knows no sockets, and cannot read what passes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Protocol

from routing.circuit import MAX_BODY
from routing.errors import ErrorCode
from routing.mux import HEADER, WINDOW, Channel
from routing.pace import START_WINDOW, Pace
from routing.types import Buffer

MAX_QUEUED_BODIES = WINDOW // 64  # no honest body is smaller on average: bounds what bookkeeping costs
_KEPT_AS_VIEW = 4096  # B; a smaller body is copied out of the frame that it came in


class Port(Protocol):
    """A link as a circuit uses it."""

    def end_channel(self, channel: Channel, code: int | None) -> None:
        """End a channel, and write that soon."""

    def give_back(self, channel: Channel, size: int) -> None:
        """Let the peer send `size` more bytes, when its quota allows."""

    def pump(self) -> None:
        """Write what can be written."""

    def now(self) -> float:
        """Seconds on a clock that only goes forward."""

    @property
    def rtt_s(self) -> float:
        """The round trip to the peer."""


class Splice:
    """Joins `near`, the dialler's channel, to `far`, the node's. `on_over` is called once, when it ends.

    `tap` is shown every body that passes, for tests.
    """

    def __init__(
        self,
        on_over: Callable[[Splice], None],
        *,
        max_bytes: int,
        tap: Callable[[Buffer], None] | None = None,
    ) -> None:
        self._on_over = on_over
        self._max_bytes = max_bytes
        self.tap = tap
        self.near: Half | None = None
        self.far: Half | None = None
        self.is_answered = False  # the node has sent its first body
        self.is_over = False
        self.num_bytes = 0  # both directions

    def join(self, near: Half, far: Half) -> None:
        """Set both sides."""
        self.near, self.far = near, far
        near.other, far.other = far, near

    def fail(self, code: int) -> None:
        """End both sides with a code."""
        for half in (self.near, self.far):
            if half is not None:
                half.end(code)
        self.finish()

    def finish(self) -> None:
        """Tell whoever keeps it that it is over."""
        if not self.is_over:
            self.is_over = True
            self._on_over(self)


class Half:
    """One side: takes what its channel brings (`ChannelTaker`), and holds what goes out there (`RecordSource`)."""

    def __init__(self, splice: Splice, port: Port) -> None:
        self._splice = splice
        self.port = port
        self.channel: Channel | None = None
        self.other: Half | None = None
        self.queue: deque[Buffer] = deque()
        self.queued_bytes = 0
        self._pace = Pace(port.now())  # of what comes from this side
        self._is_last = False  # what is queued is the end of it

    def attach(self, channel: Channel) -> None:
        """Set the channel; bodies flow from now on."""
        self.channel = channel
        channel.source = self
        channel.receive_credit = START_WINDOW

    def end(self, code: int | None) -> None:
        """End this side's channel and drop what is queued for it."""
        channel, self.channel = self.channel, None
        self.queue.clear()
        self.queued_bytes = 0
        if channel is not None:
            self.port.end_channel(channel, code)

    # mux.ChannelTaker

    def on_body(self, body: memoryview) -> None:
        splice, other = self._splice, self.other
        assert other is not None
        if self.channel is None or other.channel is None or other._is_last:
            return  # on its way when the other side ended; the credit is of no use any more
        splice.num_bytes += len(body)
        if splice.num_bytes > splice._max_bytes:
            splice.fail(int(ErrorCode.QUOTA))
        elif not HEADER.size <= len(body) <= MAX_BODY:
            self._break(ErrorCode.MALFORMED)
        elif len(other.queue) >= MAX_QUEUED_BODIES:
            self._break(ErrorCode.FLOW)
        else:
            splice.is_answered = splice.is_answered or self is splice.far
            other.push(body)

    def on_channel_over(self, code: int | None) -> None:
        self.channel = None
        self.queue.clear()
        self.queued_bytes = 0
        other = self.other
        if other is None or other.channel is None:
            self._splice.finish()
        elif code is None and self._splice.is_answered:
            other.push_end()
        else:
            other.end(int(ErrorCode.LINK_LOST if code == ErrorCode.LINK_LOST else ErrorCode.PEER_GONE))
            self._splice.finish()

    def push(self, body: memoryview) -> None:
        """Queue a body for this side and write what can be written."""
        if self._splice.tap is not None:
            self._splice.tap(body)
        self.queue.append(body if len(body) >= _KEPT_AS_VIEW else bytes(body))
        self.queued_bytes += len(body)
        self.port.pump()

    def push_end(self) -> None:
        """End this side's channel as soon as what is queued has left."""
        self._is_last = True
        if not self.queue:
            self._end_last()

    # mux.RecordSource

    def next_size(self) -> int | None:
        if not self.queue or not self._splice.is_answered:
            return None  # before its first answer the node may not have heard of the channel
        return len(self.queue[0])

    def seal_next(self, out: memoryview) -> None:
        body = self.queue.popleft()
        self.queued_bytes -= len(body)
        out[:] = body
        other = self.other
        if other is not None and other.channel is not None:
            other.passed_on(len(body), self.queued_bytes)
        if self._is_last and not self.queue:
            self._end_last()

    def passed_on(self, size: int, queued: int) -> None:
        """The other side's link took bytes that came from here."""
        assert self.channel is not None
        credit = self._pace.passed_on(size, queued, self.port.now(), self.port.rtt_s)
        if credit:
            self.port.give_back(self.channel, credit)

    def _end_last(self) -> None:
        self.end(None)
        self._splice.finish()

    def _break(self, code: ErrorCode) -> None:
        """This side broke the rules: it hears which, the other only that it is gone."""
        assert self.other is not None
        self.end(int(code))
        self.other.end(int(ErrorCode.PEER_GONE))
        self._splice.finish()
