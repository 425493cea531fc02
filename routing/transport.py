"""Frames over websockets: a thin asyncio shell around the sans-I/O protocol objects of the `websockets` library.

With `dialling.py` and `listening.py`, its two sides, the only one that imports `websockets`, and where its exceptions
and the system's become ours. Compression is never offered; the library's own keep-alive is not used (`heartbeat.py`
is). Knows nothing of what frames hold.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import struct
import time
from collections import deque
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol, cast

from websockets.client import ClientProtocol
from websockets.exceptions import PayloadTooBig, WebSocketException
from websockets.frames import CloseCode, Frame, Opcode
from websockets.protocol import Side, State
from websockets.server import ServerProtocol

from routing.errors import ErrorCode, LinkError, ProtocolError, RemoteError
from routing.maps import malformed
from routing.types import Buffer, NodeId

try:
    from websockets.speedups import apply_mask
except ImportError:  # the library was built without them
    from websockets.utils import apply_mask

CLOSE_TIMEOUT_S = 1.0  # a peer that does not answer a close is cut off after this
# What waits below the mux no token can pass, so little may. Measured through a sentinel at 6.25 MB/s and 50 ms: a small
# round trip beside 1 MiB of prefill takes 80 ms; 354 with 256 KiB here and the kernel's own limit. Bulk is no slower.
WRITE_LIMIT = 32 << 10  # B waiting in user space before frames are held back; a full frame
_UNSENT = 32 << 10  # B that the kernel may hold and has not sent yet
_GATHERED = 16 << 10  # B of small frames that leave together, at the end of the loop's turn
_MAX_UNREAD = (
    1 << 20
)  # B: what we write stops at WRITE_LIMIT, but the library answers every PING of a websocket
_PARSED_AT_ONCE = 16 << 10  # B: some hundred small frames at most
_SHORT, _MIDDLE, _LONG = struct.Struct(">BB"), struct.Struct(">BBH"), struct.Struct(">BBQ")
_BINARY = 0x80 | int(Opcode.BINARY)  # of a header: a whole message
TURN_S = 0.002  # for what one connection brought, before others have a turn: a few large frames, or many small ones


class FrameReceiver(Protocol):
    """Whoever owns a transport. Called on the event loop, in wire order."""

    def on_frame(self, frame: Buffer) -> None: ...

    def on_writable(self) -> None:
        """Frames may be written again."""

    def on_violation(self, error: ProtocolError) -> None:
        """The peer broke the rules of the websocket; nothing more will be read."""

    def on_lost(self, error: RemoteError) -> None:
        """The connection is gone. Called once, last, also after our own `close`."""


class FrameSocket(Protocol):
    """What a session runs over: a `WebSocket`, or a `circuit.Circuit` that looks like one."""

    receiver: FrameReceiver | None
    closed: asyncio.Future[None]
    relay_id: NodeId | None
    peer_host: str
    peer_port: int

    @property
    def is_writable(self) -> bool: ...

    @property
    def age_s(self) -> float: ...

    def write(self, frame: Buffer) -> None: ...

    def close(self) -> None: ...

    def abort(self) -> None: ...

    async def wait_closed(self) -> None: ...

    def watch(self) -> AbstractContextManager[None]:
        """While inside, watch what the connection itself runs over."""


class WebSocket(asyncio.Protocol):
    """One connection, either side. `receiver` may be replaced between two frames."""

    def __init__(self, protocol: ClientProtocol | ServerProtocol) -> None:
        self._protocol = protocol
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._pieces: bytearray | None = None  # of a message that something on the way cut into fragments
        self._close_timer: asyncio.TimerHandle | None = None
        self._is_client = protocol.side is Side.CLIENT  # then what we send is masked
        self._gathered: list[bytes] = []  # frames that leave with the turn's end
        self._gathered_bytes = 0
        self._will_flush = False
        self._unparsed: deque[bytes] = deque()  # bytes that came
        self._backlog: deque[object] = deque()  # events that they held and nobody has taken yet
        self._turn: asyncio.Handle | None = None  # to take more of them
        self._reason = "the connection was lost"
        self._is_paused = False
        self._is_read_paused = False
        self._is_open = False  # as the library says, see `_flush`
        self._is_closing = False  # by us: nothing more is read
        self._is_over = False
        self.closed: asyncio.Future[None] = self._loop.create_future()
        self.receiver: FrameReceiver | None = None
        self.relay_id: NodeId | None = None
        self.peer_host = ""
        self.peer_port = 0
        self._opened_at = self._loop.time()

    @property
    def is_writable(self) -> bool:
        """Whether a frame can be written now: the connection is open and its buffer has room."""
        return self._is_open and not self._is_paused and not self._is_over

    @property
    def age_s(self) -> float:
        """Seconds since the connection was made."""
        return self._loop.time() - self._opened_at

    def write(self, frame: Buffer) -> None:
        """Send one frame as one binary message. Only while `is_writable`, or for a last word.

        Small frames of one turn of the loop leave, and arrive, together: a node computes their steps in one batch.
        """
        if self._is_over or not self._is_open:
            return
        self._gathered.append(_binary(frame, is_masked=self._is_client))
        self._gathered_bytes += len(frame)
        if self._gathered_bytes >= _GATHERED:
            self._flush()
        elif not self._will_flush:
            self._will_flush = True
            self._loop.call_soon(self._flush_gathered)

    def close(self) -> None:
        """Send a websocket close and let the peer answer it for CLOSE_TIMEOUT_S, then abort."""
        if self._is_over or self._is_closing:
            return
        self._is_closing = True
        if self._protocol.state is State.OPEN:
            self._protocol.send_close(CloseCode.NORMAL_CLOSURE)
            self._flush()
        self._expect_close()

    def abort(self) -> None:
        """Cut the connection at once."""
        if self._transport is not None:
            self._transport.abort()

    async def wait_closed(self) -> None:
        """Wait until the connection is gone."""
        await asyncio.shield(self.closed)

    def watch(self) -> AbstractContextManager[None]:
        return nullcontext()

    # asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        self._transport.set_write_buffer_limits(high=WRITE_LIMIT)
        peer = transport.get_extra_info("peername")
        self.peer_host, self.peer_port = (peer[0], peer[1]) if peer else ("", 0)
        raw = transport.get_extra_info("socket")
        with contextlib.suppress(OSError):
            raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if (unsent := getattr(socket, "TCP_NOTSENT_LOWAT", None)) is not None:
                raw.setsockopt(socket.IPPROTO_TCP, unsent, _UNSENT)

    def data_received(self, chunk: bytes) -> None:
        step = _PARSED_AT_ONCE
        if len(chunk) <= step:
            self._unparsed.append(chunk)
        else:
            self._unparsed.extend(chunk[at : at + step] for at in range(0, len(chunk), step))
        if self._turn is None:
            self._take_turn()

    def _parse(self) -> None:
        self._protocol.receive_data(self._unparsed.popleft())
        self._backlog += self._protocol.events_received()
        transport = self._transport
        if self._flush() and transport is not None and transport.get_write_buffer_size() > _MAX_UNREAD:
            self.abort()  # a flood of PINGs by one that does not read

    def _take_next(self) -> None:
        if self._backlog:
            self._take(self._backlog.popleft())
        else:
            self._parse()

    def _take_turn(self) -> None:
        """Take what came, for as long as a turn is; read on when all is taken.

        One read may bring thousands of small frames: without turns, a peer that floods would hold up all others.
        """
        self._turn = None
        ends_at = time.perf_counter() + TURN_S
        while self._backlog or self._unparsed:
            self._take_next()
            if (self._backlog or self._unparsed) and time.perf_counter() > ends_at:
                self._turn = self._loop.call_soon(self._take_turn)
                self._read(is_paused=True)
                return
        if self._is_read_paused:
            self._read(is_paused=False)
        if not self._is_open and self._protocol.close_expected():
            self._report_violation()
            self._expect_close()

    def _read(self, *, is_paused: bool) -> None:
        transport = self._transport
        if transport is None or transport.is_closing() or is_paused is self._is_read_paused:
            return
        self._is_read_paused = is_paused
        if is_paused:
            transport.pause_reading()
        else:
            transport.resume_reading()

    def eof_received(self) -> None:
        self._protocol.receive_eof()
        self._flush()

    def pause_writing(self) -> None:
        self._is_paused = True

    def resume_writing(self) -> None:
        self._is_paused = False
        if self.receiver is not None and self.is_writable:
            self.receiver.on_writable()

    def connection_lost(self, error: Exception | None) -> None:
        if self._turn is not None:
            self._turn.cancel()
        while self._backlog or self._unparsed:  # it came before the end, and is one read at most
            self._take_next()
        self._is_over = True
        self._protocol.receive_eof()
        if self._close_timer is not None:
            self._close_timer.cancel()
        if error is not None:
            self._reason = f"the connection was lost: {said(error)}"
        if not self.closed.done():
            self.closed.set_result(None)
        receiver, self.receiver = self.receiver, None
        if receiver is not None:
            receiver.on_lost(LinkError(ErrorCode.LINK_LOST, self._reason))

    def _take(self, event: object) -> None:
        if isinstance(event, Frame) and not self._is_over:
            match event.opcode:
                case Opcode.BINARY if event.fin and self._pieces is None:
                    self._deliver(event.data)
                case Opcode.BINARY | Opcode.CONT:
                    self._take_piece(event)
                case Opcode.TEXT:
                    self._protocol.fail(CloseCode.UNSUPPORTED_DATA)
                    self._flush()
                    self._violated(malformed("a text message on a link"))
                case Opcode.CLOSE:
                    self._reason = "the peer closed the connection without a sealed end"

    def _take_piece(self, frame: Frame) -> None:
        whole = bytearray() if self._pieces is None else self._pieces
        whole += frame.data  # the library bounds their sum
        self._pieces = None if frame.fin else whole
        if frame.fin:
            self._deliver(whole)

    def _deliver(self, frame: Buffer) -> None:
        if self.receiver is not None and not self._is_closing:
            self.receiver.on_frame(frame)

    def _report_violation(self) -> None:
        error = self._protocol.parser_exc
        if error is not None and not isinstance(error, EOFError):
            code = ErrorCode.TOO_BIG if isinstance(error, PayloadTooBig) else ErrorCode.MALFORMED
            self._violated(ProtocolError(code, f"the websocket protocol was broken: {type(error).__name__}"))

    def _violated(self, error: ProtocolError) -> None:
        if self.receiver is not None:
            self.receiver.on_violation(error)

    def _expect_close(self) -> None:
        if self._close_timer is None and not self._is_over:
            self._close_timer = self._loop.call_later(CLOSE_TIMEOUT_S, self.abort)

    def _flush_gathered(self) -> None:
        self._will_flush = False
        if self._gathered:
            self._flush()

    def _flush(self) -> bool:
        """Write our frames and what the library has to say; whether that was anything.

        Whatever makes the library change its state ends here.
        """
        transport = self._transport
        chunks = [*self._gathered, *self._protocol.data_to_send()]
        self._gathered.clear()
        self._gathered_bytes = 0
        self._is_open = self._protocol.state is State.OPEN
        if not chunks or transport is None or transport.is_closing():
            return False
        is_end = not chunks[-1]
        transport.writelines(chunks)
        if is_end:
            transport.close()  # what is buffered still leaves; both ends have said all they will
            self._expect_close()
        return True


def _binary(payload: Buffer, *, is_masked: bool) -> bytes:
    """One whole binary message of a websocket (RFC 6455, section 5.2).

    The library's own way is a dozen calls, most of a small frame's cost. A client's mask is fresh and strong.
    """
    size = len(payload)
    mask_bit = 0x80 if is_masked else 0
    if size < 126:
        header = _SHORT.pack(_BINARY, mask_bit | size)
    elif size < 1 << 16:
        header = _MIDDLE.pack(_BINARY, mask_bit | 126, size)
    else:
        header = _LONG.pack(_BINARY, mask_bit | 127, size)
    if not is_masked:
        return b"".join((header, payload))
    mask = os.urandom(4)
    return b"".join((header, mask, apply_mask(payload, mask)))


def said(error: BaseException) -> str:
    """What an exception says, in a few words that hold nothing of what travels."""
    if isinstance(error, RemoteError):
        return error.text
    if isinstance(error, OSError) and error.errno is not None and not isinstance(error, socket.gaierror):
        return os.strerror(error.errno)
    if isinstance(error, WebSocketException):
        return str(error)
    return getattr(error, "strerror", None) or type(error).__name__
