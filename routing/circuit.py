"""A circuit: a way to a node through a sentinel that looks like a websocket to the session inside.

Each frame of the inner session is the body of one DATA frame on a channel of the link to the sentinel; the first
one rides in the message that opens the circuit. Knows nothing of what the frames hold.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Protocol

from routing.errors import ErrorCode, LinkError, RemoteError, remote_error
from routing.mux import HEADER, Channel
from routing.pace import START_WINDOW
from routing.side_channels import SideChannels
from routing.transport import CLOSE_TIMEOUT_S, FrameReceiver
from routing.types import Buffer, Message, NodeId

MAX_INNER_RECORD = 32 << 10  # B sealed: circuits take fair turns in chunks of this size
MAX_BODY = HEADER.size + MAX_INNER_RECORD
WRITE_LIMIT = 16 << 10  # B that wait here before frames are held back: small ones, or one full one


class OuterLink(Protocol):
    """What a circuit needs of the link to the sentinel."""

    @property
    def peer_id(self) -> NodeId: ...

    @property
    def side(self) -> SideChannels: ...

    def pump(self) -> None: ...

    def give_back(self, channel: Channel, size: int) -> None: ...

    def watch(self) -> AbstractContextManager[None]: ...


class Circuit:
    """One end of a circuit, with the interface of `transport.WebSocket`. `receiver` may be replaced.

    The dialling end opens it with its first frame, by `announce(channel number, frame)`; the accepting end
    `join`s a channel that the sentinel has announced.
    """

    def __init__(self, link: OuterLink, announce: Callable[[int, bytes], Message] | None = None) -> None:
        self._loop = asyncio.get_running_loop()
        self._link = link
        self._announce = announce
        self._channel: Channel | None = None
        self._queue: deque[Buffer] = deque()
        self._queued_bytes = 0
        self._close_timer: asyncio.TimerHandle | None = None
        self._is_held = False  # the writer was told to wait
        self._is_closing = False
        self._is_over = False
        self._opened_at = self._loop.time()
        self.closed: asyncio.Future[None] = self._loop.create_future()
        self.receiver: FrameReceiver | None = None
        self.loss: RemoteError | None = None  # why it is over, if not by our own end
        self.relay_id: NodeId | None = link.peer_id
        self.peer_host = ""  # the sentinel's address would stand for everybody behind it
        self.peer_port = 0

    @property
    def is_writable(self) -> bool:
        """Whether a frame can be written now."""
        is_writable = not self._is_over and not self._is_closing and self._queued_bytes < WRITE_LIMIT
        self._is_held = not is_writable
        return is_writable

    @property
    def age_s(self) -> float:
        """Seconds since the circuit was made here."""
        return self._loop.time() - self._opened_at

    def watch(self) -> AbstractContextManager[None]:
        """Ask for signs of life of the sentinel too: one that stopped is then not tried again."""
        return self._link.watch()

    def join(self, number: int) -> None:
        """Accepting end: take the announced channel."""
        self._attach(self._link.side.claim(number, self))

    def begin(self, first: bytes) -> None:
        """Accepting end: deliver the frame that came with the announcement."""
        if self.receiver is not None:
            self.receiver.on_frame(first)

    def write(self, frame: Buffer) -> None:
        """Send one frame. Only while `is_writable`, or for a last word."""
        if self._is_over or self._is_closing:
            return
        if self._channel is None:
            self._open(bytes(frame))
            return
        self._queue.append(frame)
        self._queued_bytes += len(frame)
        self._link.pump()

    def close(self) -> None:
        """End it once everything written has left; cut it when that takes longer than CLOSE_TIMEOUT_S."""
        if self._is_over or self._is_closing:
            return
        self._is_closing = True
        if not self._queue:
            self._end(None)
        else:
            self._close_timer = self._loop.call_later(CLOSE_TIMEOUT_S, self.abort)

    def abort(self) -> None:
        """Cut it at once; the other end hears LINK_LOST."""
        if not self._is_over:
            self._end(int(ErrorCode.LINK_LOST))

    async def wait_closed(self) -> None:
        """Wait until the circuit is over."""
        await asyncio.shield(self.closed)

    def refused(self, code: int, retry_ms: int) -> None:
        """The sentinel does not pass us on, and says why."""
        self.loss = remote_error(code, "the sentinel opens no circuit to the node", retry_ms=retry_ms)
        self._finish(self.loss)

    # mux.RecordSource: what goes out

    def next_size(self) -> int | None:
        return len(self._queue[0]) if self._queue else None

    def seal_next(self, out: memoryview) -> None:
        frame = self._queue.popleft()
        self._queued_bytes -= len(frame)
        out[:] = frame
        if not self._queue and self._is_closing:
            self._loop.call_soon(self._end, None)
        elif self._is_held and self._queued_bytes < WRITE_LIMIT:
            self._is_held = False
            self._loop.call_soon(self._tell_writable)

    # mux.ChannelTaker: what comes in

    def on_body(self, body: memoryview) -> None:
        size = len(body)
        if self.receiver is not None and not self._is_closing:
            self.receiver.on_frame(body)
        if self._channel is not None:
            self._link.give_back(self._channel, size)

    def on_channel_over(self, code: int | None) -> None:
        self._channel = None
        if code is None or code == ErrorCode.LINK_LOST:
            self.loss = LinkError(
                ErrorCode.LINK_LOST, "the other end closed the circuit without a sealed end"
            )
        else:
            self.loss = remote_error(code, "the circuit through the sentinel ended")
        self._finish(self.loss)

    def _open(self, first: bytes) -> None:
        announce = self._announce
        assert announce is not None, "the accepting end joins before it writes"
        self._attach(self._link.side.open(lambda number: announce(number, first), self))
        self._link.pump()

    def _attach(self, channel: Channel) -> None:
        self._channel = channel
        channel.source = self
        channel.send_credit = START_WINDOW

    def _tell_writable(self) -> None:
        if self.receiver is not None and self.is_writable:
            self.receiver.on_writable()

    def _end(self, code: int | None) -> None:
        if self._is_over:
            return
        if self._channel is not None:
            self._link.side.end(self._channel, code)
            self._channel = None
            self._link.pump()
        self._finish(LinkError(ErrorCode.LINK_LOST, "the circuit was closed"))

    def _finish(self, error: RemoteError) -> None:
        if self._is_over:
            return
        self._is_over = True
        if self._close_timer is not None:
            self._close_timer.cancel()
        self._queue.clear()
        self._queued_bytes = 0
        if not self.closed.done():
            self.closed.set_result(None)
        receiver, self.receiver = self.receiver, None
        if receiver is not None:
            receiver.on_lost(error)
