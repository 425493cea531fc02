"""TLS between a connection and the protocol on it: to the protocol it looks like the transport itself.

OpenSSL works in memory here, and not asyncio's or uvloop's own TLS, for three reasons: the protocol sees a connection,
and may refuse it, before a key is touched; what waits to be written stays countable, with one write for what leaves
together; and a peer that does not speak TLS is told so in words.
"""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from collections.abc import Callable, Iterable
from typing import Any, Final, TypeVar, cast

from routing.errors import ErrorCode, SecurityError
from routing.tls_words import not_tls, told_by
from routing.types import Buffer

HANDSHAKE: Final = 0x16  # first byte of whoever begins to speak TLS
ALERT: Final = 0x15
LINGER_S: Final = (
    1.0  # for a last word to arrive; closed at once it would be lost with what the peer sent meanwhile
)
_RECORD: Final = 16 << 10  # B: what one record of TLS holds

OnFault = Callable[[str, SecurityError], None]
T = TypeVar("T")


class TlsTransport(asyncio.Transport, asyncio.Protocol):
    """One connection under TLS, either side, with `inner` on it.

    `inner` may write at once; that is held until the handshake is done, which has `timeout_s`. `plain_reply` is what a
    listener answers to one that speaks without TLS. `on_fault` hears of handshakes that fail, with the peer's host;
    `inner` finds the same `SecurityError` in `connection_lost`.
    """

    def __init__(
        self,
        inner: asyncio.Protocol,
        context: ssl.SSLContext,
        *,
        is_server: bool,
        timeout_s: float,
        plain_reply: bytes = b"",
        on_fault: OnFault | None = None,
    ) -> None:
        super().__init__()
        self._inner = inner
        self._context = context
        self._is_server = is_server
        self._plain_reply = plain_reply
        self._on_fault = on_fault
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = context.wrap_bio(self._incoming, self._outgoing, server_side=is_server)
        self._transport: asyncio.Transport | None = None
        self._held: list[Buffer] = []
        self._has_heard = False  # anything at all
        self._is_up = False
        self._has_ended = False  # we have; nothing more is written
        self._is_over = False  # nothing more is read
        self._fault: SecurityError | None = None
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(timeout_s, self._time_out)

    # --- what the connection tells (asyncio.Protocol)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)  # uvloop's is no subclass
        self._inner.connection_made(self)
        if not self._is_server and not self._transport.is_closing():
            self._advance()

    def data_received(self, data: bytes) -> None:
        if self._is_over or self._is_foreign(data):
            return
        self._incoming.write(data)
        if not self._is_up:
            self._advance()
        if self._is_up:
            self._deliver()

    def eof_received(self) -> bool:
        if not self._is_up and not self._is_over:
            self._fail(not_tls(b"", is_server=self._is_server))
        elif not self._is_over:
            self._inner.eof_received()
        return False

    def pause_writing(self) -> None:
        self._inner.pause_writing()

    def resume_writing(self) -> None:
        self._inner.resume_writing()

    def connection_lost(self, exc: Exception | None) -> None:
        self._timer.cancel()
        self._is_over = True
        self._inner.connection_lost(self._fault or exc)

    # --- the handshake

    def _is_foreign(self, data: bytes) -> bool:
        """Whether the first bytes show that the peer does not speak TLS; then it is told so."""
        if self._has_heard:
            return False
        self._has_heard = True
        if data[0] in (HANDSHAKE, ALERT):
            return False
        if self._is_server and self._transport is not None:
            self._transport.write(self._plain_reply)
        self._fail(not_tls(data, is_server=self._is_server))
        return True

    def _advance(self) -> None:
        try:
            is_shaken = self._shake()
        except ssl.SSLError as error:
            self._flush()  # the alert
            self._fail(told_by(error))
            return
        if not is_shaken:
            self._flush()
            return
        self._is_up = True
        self._timer.cancel()
        held, self._held = self._held, []
        self.writelines(held)
        self._flush()

    def _shake(self) -> bool:
        """Take the handshake as far as it goes; whether it is done. Raises `ssl.SSLError`."""
        try:
            return self._is_shaken()
        except ssl.SSLWantReadError:
            return False
        except ssl.SSLError as error:
            return bool(_again(self._is_shaken, error))

    def _is_shaken(self) -> bool:
        self._tls.do_handshake()
        return True

    def _fail(self, fault: SecurityError) -> None:
        """End it, with time for the last word."""
        if self._is_over:
            return
        self._is_over = True
        self._fault = fault
        self._timer.cancel()
        if self._on_fault is not None and not self._is_up:
            self._on_fault(str((self.get_extra_info("peername") or ("",))[0]), fault)
        if self._transport is not None and not self._transport.is_closing():
            self._transport.resume_reading()
            with contextlib.suppress(OSError, RuntimeError):
                self._transport.write_eof()
            self._timer = asyncio.get_running_loop().call_later(LINGER_S, self.abort)

    def _time_out(self) -> None:
        self._fail(SecurityError(ErrorCode.TLS, "the peer did not finish its TLS handshake in time"))
        self.abort()

    # --- what comes

    def _deliver(self) -> None:
        tls, incoming, receive = self._tls, self._incoming, self._inner.data_received
        while not self._is_over and (incoming.pending or tls.pending()):
            try:
                piece: bytes | None = tls.read(_RECORD)
            except ssl.SSLWantReadError:
                break
            except ssl.SSLError as error:
                piece = self._read_again(error)
                if piece is None:
                    break
            if not piece:  # the peer's end, under TLS
                self._inner.eof_received()
                self.close()
                return
            receive(piece)
        if self._outgoing.pending:  # a change of keys is answered
            self._flush()

    def _read_again(self, error: ssl.SSLError) -> bytes | None:
        """What is read where the first try failed; None where nothing is there, or the error is ours: that is told."""
        try:
            return _again(self._read, error)
        except ssl.SSLError:
            self._flush()
            self._fail(told_by(error))
            return None

    def _read(self) -> bytes:
        return self._tls.read(_RECORD)

    # --- what the inner protocol asks for (asyncio.Transport)

    def write(self, data: Buffer) -> None:
        self.writelines((data,))

    def writelines(self, list_of_data: Iterable[Any]) -> None:
        """Seal and send; small pieces in one record, all of them in one write."""
        pieces = [piece for piece in list_of_data if piece]
        if not self._is_up:
            self._held += pieces
        elif pieces and not self._has_ended and not self.is_closing():
            if len(pieces) > 1 and sum(map(len, pieces)) <= _RECORD:
                pieces = [b"".join(pieces)]
            self._seal(pieces)

    def _seal(self, pieces: list[Buffer]) -> None:
        try:
            for piece in pieces:
                self._tls.write(piece)
        except ssl.SSLError as error:
            self._fail(told_by(error))
            return
        self._flush()

    def can_write_eof(self) -> bool:
        return True

    def write_eof(self) -> None:
        """Say that nothing more comes; what the peer still sends is read."""
        if self._transport is not None and not self.is_closing():
            self._say_end()
            self._transport.write_eof()

    def close(self) -> None:
        """Say that this was the end, and close when everything has left."""
        transport = self._transport
        if transport is None or transport.is_closing():
            return
        self._say_end()
        self._is_over = True
        with contextlib.suppress(ssl.SSLError):
            self._tls.read(1)  # takes an error with it that would meet another connection, see `_again`
        transport.close()

    def _say_end(self) -> None:
        if not self._is_up or self._has_ended or self._fault is not None:
            return
        self._has_ended = True
        with contextlib.suppress(ssl.SSLError):  # it does not wait for the peer's own end
            self._tls.unwrap()
        self._flush()

    def abort(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    def is_closing(self) -> bool:
        return self._fault is not None or self._transport is None or self._transport.is_closing()

    def get_write_buffer_size(self) -> int:
        waiting = 0 if self._transport is None else self._transport.get_write_buffer_size()
        return waiting + sum(map(len, self._held))

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        if self._transport is not None:
            self._transport.set_write_buffer_limits(high, low)

    def pause_reading(self) -> None:
        if self._transport is not None:
            self._transport.pause_reading()

    def resume_reading(self) -> None:
        if self._transport is not None:
            self._transport.resume_reading()

    def is_reading(self) -> bool:
        return self._transport is not None and self._transport.is_reading()

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        own = {"sslcontext": self._context, "ssl_object": self._tls}
        if name in own:
            return own[name]
        return default if self._transport is None else self._transport.get_extra_info(name, default)

    def _flush(self) -> None:
        if self._outgoing.pending and self._transport is not None and not self._transport.is_closing():
            self._transport.write(self._outgoing.read())


def _again(call: Callable[[], T], error: ssl.SSLError) -> T | None:
    """Ask OpenSSL a second time; None where more bytes must come first. Raises the first error where it stays.

    OpenSSL keeps errors by thread, and Python's `ssl` leaves one there when a connection is shut down whose peer sent
    an alert: the next one that only waits for bytes is taken for broken. What is wrong with this one stays wrong.
    """
    try:
        if result := call():
            return result
    except ssl.SSLWantReadError:
        return None
    except ssl.SSLError:
        pass
    raise error
