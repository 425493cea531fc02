"""A link: one authenticated, encrypted connection to one peer that carries messages both ways.

Joins the sans-I/O parts (outbox, records, mux, heartbeat) to a websocket and to the event loop's clock. Knows
nothing of sessions, routes or what a message means.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import math
import struct
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

from routing.bandwidth import BITS, InboundRate
from routing.carrier import Carrier
from routing.circuit import MAX_INNER_RECORD
from routing.errors import ErrorCode, LinkError, ProtocolError, RemoteError, remote_error
from routing.handshake import Secured
from routing.heartbeat import Heartbeat, HeartbeatTiming
from routing.mux import Channel, ChannelEnd, DataFrame, PongFrame
from routing.outbox import Outbox, Outgoing
from routing.records import (
    KIND_CLOSE,
    KIND_READY,
    MAX_PAYLOAD,
    OVERHEAD,
    WHOLE,
    Opener,
    Quota,
    Reassembler,
    RecordFlag,
    Sealer,
)
from routing.side_channels import SideChannels
from routing.types import Buffer, Incoming, Message, NodeId, Refused, RelayOpen
from routing.wire import decode, encode, lane

logger = logging.getLogger(__name__)

_CODE = struct.Struct(">H")
_WHOLE = int(WHOLE)
_CONTROL_LANE = b"\0link"
OVERRUN_S = 1.0  # how long too many messages may wait: more than a loop's turn, less than memory for a flood


class LinkReceiver(Protocol):
    """Whoever a link's messages are for. Called on the event loop, in order; must not block."""

    def on_message(self, link: Link, message: Message) -> None: ...

    def on_link_up(self, link: Link) -> None: ...

    def on_link_closed(self, link: Link, error: RemoteError | None) -> None: ...


@dataclass(frozen=True, slots=True)
class LinkTerms:
    """What a link's own side allows."""

    max_message: int  # B, as announced to the peer
    quota: Quota  # for messages in parts, of all links of this peer
    timing: HeartbeatTiming
    is_padded: bool


class LinkHost(Protocol):
    """Whoever made a link and hears of its two turning points."""

    def on_ready(self, link: Link) -> None: ...

    def on_over(self, link: Link, error: RemoteError | None) -> None: ...

    def on_circuit(self, link: Link, message: Incoming | Refused) -> None:
        """A sentinel speaks of a circuit."""


class Link:
    """One live connection. Messages of one session stay in order; others may overtake a bulky one."""

    def __init__(
        self,
        carrier: Carrier,
        channel: Channel,
        secured: Secured,
        receiver: LinkReceiver,
        host: LinkHost,
        terms: LinkTerms,
        *,
        is_dialler: bool,
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._carrier = carrier
        self._channel = channel
        self._receiver = receiver
        self._host = host
        self.relay_id: NodeId | None = carrier.websocket.relay_id  # the sentinel between, if there is one
        self.is_relayed = self.relay_id is not None
        max_payload = MAX_PAYLOAD if self.relay_id is None else MAX_INNER_RECORD - OVERHEAD
        sealer = Sealer(secured.sending, is_padded=terms.is_padded, max_payload=max_payload)
        self._outbox = Outbox(sealer, secured.capabilities.max_message)
        self.side = SideChannels(carrier.mux, self._announce, self._outbox.cancel)
        self.accepts_circuits = False  # set where we hold, or ask for, a reservation
        self._opener = Opener(secured.receiving)
        self._reassembler = Reassembler(terms.max_message, terms.quota)
        self._inbound = InboundRate()
        self._heartbeat = Heartbeat(time.monotonic(), terms.timing)
        self._timer: asyncio.TimerHandle | None = None
        self._timer_due = 0.0
        self._overrun_timer: asyncio.TimerHandle | None = None
        self._set_timer(self._heartbeat.next_check)
        self._pump_handle: asyncio.Handle | None = None
        self._pongs: dict[bytes, asyncio.Future[float]] = {}
        self.is_closed = False  # the link is over, for whatever reason
        self._over: asyncio.Future[RemoteError | None] = self._loop.create_future()
        self._ready: asyncio.Future[None] = self._loop.create_future()
        self._open_ns = 0
        self.peer_id = secured.peer_id
        self.peer_key = secured.peer_key
        self.peer_host = carrier.websocket.peer_host  # as observed; "" when relayed
        self.peer_port = carrier.websocket.peer_port
        self.capabilities = secured.capabilities
        self.is_dialler = is_dialler
        self.counters = carrier.counters
        self.last_seal_us = 0.0  # encode and seal of the message sent last, microseconds
        self.last_open_us = 0.0  # open and decode of the message delivered last, microseconds
        channel.source = self._outbox
        carrier.websocket.receiver = self

    def __repr__(self) -> str:
        return f"Link({self.peer_id.hex()[:8]}, {'closed' if self.is_closed else 'open'})"

    # --- what callers use

    @property
    def rtt_ms(self) -> float | None:
        """The last measured round trip; None before the first."""
        return self._heartbeat.rtt_ms

    @property
    def mbps(self) -> float | None:
        """Mbit/s that the line brings from the peer, by the large messages of late; None where there were none."""
        rate = self._inbound.bytes_per_s(time.monotonic())
        return None if rate is None else rate * BITS

    @property
    def silent_for_s(self) -> float:
        """Seconds that a PING has been waiting for any sign of life; 0 while the peer is known to live."""
        return self._heartbeat.silent_for_s(time.monotonic())

    @property
    def waiting_bytes(self) -> int:
        """Message bytes that are accepted and not sealed yet."""
        return self._outbox.waiting_bytes

    @property
    def num_waiting(self) -> int:
        """Messages that are accepted and not sealed yet."""
        return self._outbox.num_waiting

    async def send(self, message: Message) -> None:
        """Send a message; return when all of it is on its way to the socket.

        Raises `LinkError` when the link is closed or dies meanwhile, and `ProtocolError` TOO_BIG when the peer
        takes no message of this size. Cancelling takes back what has not left.
        """
        outgoing = self._push(message)
        if not outgoing.is_done:
            await self._wait_gone(outgoing)
        if self.is_closed and outgoing.sent < outgoing.size:
            raise self._closed_error()

    def post(self, message: Message, gone: Callable[[], object] | None = None) -> None:
        """Send without waiting: what there is no credit for is queued. `gone` is called when it has left, or
        never will: at once, or in a later turn of the loop. Watch `waiting_bytes`. Raises like `send`."""
        outgoing = self._push(message)
        if gone is None:
            return
        if outgoing.is_done:
            gone()
        else:
            outgoing.gone = functools.partial(self._loop.call_soon, gone)

    async def ping(self) -> float:
        """Measure and return the round trip in ms; raise `LinkError` when the link dies meanwhile."""
        if self.is_closed:
            raise self._closed_error()
        pong: asyncio.Future[float] = self._loop.create_future()
        token = self._send_ping()
        self._pongs[token] = pong
        try:
            return await pong
        finally:
            self._pongs.pop(token, None)

    @contextlib.contextmanager
    def watch(self) -> Iterator[None]:
        """Ask for signs of life every 0.5 s while inside; look at `silent_for_s` meanwhile."""
        self._heartbeat.num_watchers += 1
        if not self.is_closed and self._timer_due > self._heartbeat.next_check:
            self._set_timer(self._heartbeat.next_check)
        try:
            with self._carrier.websocket.watch():
                yield
        finally:
            self._heartbeat.num_watchers -= 1

    async def wait_closed(self) -> RemoteError | None:
        """Wait for the end of the link; return why it ended, None for a proper close by either side."""
        return await asyncio.shield(self._over)

    async def wait_ready(self) -> None:
        """Wait until the peer has confirmed the handshake; raise what ended the link before."""
        await asyncio.shield(self._ready)

    def refuse(self, code: int) -> None:
        """Accepting side: end the link with an error code instead of confirming it."""
        self._send_end(code)
        self._finish(None)
        self._carrier.websocket.close()

    async def close(self, code: int = 0) -> None:
        """Send a sealed end (with an error code for the peer, if not 0), then close the socket.

        Waits for the peer's close a second at most.
        """
        if not self.is_closed:
            self._send_end(code)
            self._finish(None)
        self._carrier.websocket.close()
        await self._carrier.websocket.wait_closed()

    # --- what circuits use

    def pump(self) -> None:
        """Write what can be written now."""
        self._pump()

    def ask_rtt(self) -> None:
        """Send a PING without waiting for the answer; `rtt_ms` will show it."""
        if not self.is_closed:
            self._send_ping()

    def wake(self) -> None:
        """Write what can be written, soon: safe to call from inside a write."""
        if not self.is_closed and self._pump_handle is None:
            self._pump_handle = self._loop.call_soon(self._pump_on)

    def give_back(self, channel: Channel, size: int) -> None:
        """Let the peer send `size` more bytes on a circuit's channel."""
        self._carrier.mux.give_back(channel, size)
        self.wake()

    def _announce(self, message: Message) -> Outgoing:
        if self.is_closed:
            raise self._closed_error()
        kind, buffers = encode(message)
        self.counters.messages_sent[type(message).__name__] += 1
        outgoing = self._outbox.push(kind, lane(message), buffers)
        if self._outbox.may_be_overrun:
            self._check_overrun()
        return outgoing

    # --- the way out

    def _push(self, message: Message) -> Outgoing:
        if self.is_closed:
            raise self._closed_error()
        started = time.perf_counter_ns()
        kind, buffers = encode(message)
        outgoing = self._outbox.push(kind, lane(message), buffers)
        self.counters.messages_sent[type(message).__name__] += 1
        encode_ns = time.perf_counter_ns() - started
        self._pump()
        if self._outbox.may_be_overrun:
            self._check_overrun()
        self.last_seal_us = (encode_ns + outgoing.seal_ns) / 1000
        return outgoing

    def _check_overrun(self) -> None:
        """Give up a peer that makes us answer and takes no answer; a burst of our own has time to leave."""
        if self._overrun_timer is None and self._outbox.num_overrun:
            self._overrun_timer = self._loop.call_later(OVERRUN_S / 2, self._end_overrun, math.inf)

    def _end_overrun(self, before: float) -> None:
        """Fewer wait than half of the time ago: it is a burst, and leaves as fast as this machine and the peer can."""
        self._overrun_timer = None
        number = self._outbox.num_overrun
        if number >= before:
            self._fail(ProtocolError(ErrorCode.FLOW, "the peer takes nothing of what it makes us send"))
        elif number:
            self._overrun_timer = self._loop.call_later(OVERRUN_S / 2, self._end_overrun, number)

    async def _wait_gone(self, outgoing: Outgoing) -> None:
        gone = asyncio.Event()
        outgoing.gone = gone.set
        try:
            await gone.wait()
        except asyncio.CancelledError:
            self._outbox.cancel(outgoing)
            self._pump()
            raise

    def _pump(self) -> None:
        """Write a burst; go on after the loop had a turn."""
        if not self.is_closed and self._carrier.write_burst() and self._pump_handle is None:
            self._pump_handle = self._loop.call_soon(self._pump_on)

    def _pump_on(self) -> None:
        self._pump_handle = None
        self._pump()

    def _send_end(self, code: int) -> None:
        """Seal a CLOSE as the very last record; what was waiting is given up."""
        self._outbox.clear()
        self._outbox.push(KIND_CLOSE, _CONTROL_LANE, [_CODE.pack(code)])
        self._carrier.write_last()

    def confirm(self) -> None:
        """Accepting side: tell the dialler that the handshake holds here too."""
        self._outbox.push(KIND_READY, _CONTROL_LANE, [])
        self._pump()

    # --- the way in (transport.FrameReceiver)

    def on_frame(self, frame: Buffer) -> None:
        started = time.perf_counter_ns()
        if self.is_closed:
            return
        self._heartbeat.heard(time.monotonic())
        try:
            match self._carrier.receive(frame):
                case DataFrame(channel=channel, record=record) if channel is self._channel:
                    self._take_record(record, started)
                case PongFrame(token=token):
                    self._take_pong(token)
                case ChannelEnd(channel=channel, code=code) if channel is self._channel:
                    self._end_by_peer(code)
                case DataFrame() | ChannelEnd() as event:
                    self.side.take(event)
                case None:
                    pass
                case _:
                    raise ProtocolError(ErrorCode.STATE, "a handshake frame after the handshake")
        except RemoteError as error:
            self._fail(error)
        if self._outbox.num_waiting or self.side.live or self._carrier.mux.has_own_words:
            self._pump()

    def on_writable(self) -> None:
        self._pump()

    def on_violation(self, error: ProtocolError) -> None:
        self._fail(error)

    def on_lost(self, error: RemoteError) -> None:
        if not isinstance(error, LinkError):  # a circuit's end is, to the session inside, a lost connection
            error = LinkError(ErrorCode.LINK_LOST, f"the circuit was lost: {error}")
        self._finish(error)

    def _take_record(self, sealed: memoryview, started: int) -> None:
        record = self._opener.open(sealed)
        whole = self._reassembler.push(record)
        if record.flags != _WHOLE:
            self._note_part(record.flags)
        if whole is None:
            self._open_ns += time.perf_counter_ns() - started
            return
        kind, content = whole
        if kind == KIND_CLOSE:
            self._end_by_peer(_CODE.unpack(content)[0] if len(content) == _CODE.size else None)
            return
        if self.is_dialler and not self._ready.done():
            self._take_ready()  # whatever opens shows that the peer holds the keys
        if kind != KIND_READY and (message := decode(kind, content)) is not None:
            self.last_open_us = (self._open_ns + time.perf_counter_ns() - started) / 1000
            self._open_ns = 0
            self._deliver(message)

    def _note_part(self, flags: int) -> None:
        total, now = self.counters.payload_bytes_received, time.monotonic()
        if flags & RecordFlag.FIRST:
            self._inbound.begun(total, now)
        else:
            is_last = bool(flags & (RecordFlag.END | RecordFlag.ABORT))
            self._inbound.went_on(total, now, is_last=is_last)

    def _deliver(self, message: Message) -> None:
        self.counters.messages_received[type(message).__name__] += 1
        if isinstance(message, (RelayOpen, Incoming)):
            self.side.announced(message.channel)
        try:
            if isinstance(message, (Incoming, Refused)):
                self._host.on_circuit(self, message)
            else:
                self._receiver.on_message(self, message)
        except Exception as error:  # a receiver's bug must not cost everybody the link
            log_receiver_failure(type(message).__name__, error)
        unclaimed = self.side.settle() if self.side.unclaimed is not None else None
        if unclaimed is not None and not self.is_closed:
            self._decline(message, unclaimed)
        if self._heartbeat.is_carrying != bool(self.side.live):
            self._note_carrying()

    def _decline(self, message: Message, channel: Channel) -> None:
        """Nobody here takes the circuit."""
        if isinstance(message, RelayOpen):
            self.post(Refused(channel.number, int(ErrorCode.NO_RESERVATION)))
        else:
            self._carrier.mux.reset(channel.number, int(ErrorCode.PEER_GONE))

    def _take_ready(self) -> None:
        self._ready.set_result(None)
        self._host.on_ready(self)

    def _take_pong(self, token: bytes) -> None:
        rtt_ms = self._heartbeat.pong(token, time.monotonic())
        if rtt_ms is None:
            return
        for asked, waiter in self._pongs.items():
            if (
                asked <= token and not waiter.done()
            ):  # an answer to a later PING will do: only the last is sent
                waiter.set_result(rtt_ms)

    # --- the end

    def _end_by_peer(self, code: int | None) -> None:
        """A sealed CLOSE with 0 is the proper end; any other code, or a bare FIN or RESET, is an error."""
        if code == 0:
            self._finish(None)
        elif code is None:
            self._finish(LinkError(ErrorCode.LINK_LOST, "the peer ended the link without a sealed end"))
        else:
            self._finish(remote_error(code, "the peer ended the link with this code"))
        self._carrier.websocket.close()

    def _fail(self, error: RemoteError) -> None:
        """End the link because of what the peer did, and tell it the code."""
        if self.is_closed:
            return
        self._carrier.mux.end(self._channel, int(error.code))
        self._carrier.write_last()
        self._finish(error)
        self._carrier.websocket.close()

    def _finish(self, error: RemoteError | None) -> None:
        if self.is_closed:
            return
        self.is_closed = True
        self._over.set_result(error)
        if self._timer is not None:
            self._timer.cancel()
        if self._overrun_timer is not None:
            self._overrun_timer.cancel()
        if self._pump_handle is not None:
            self._pump_handle.cancel()
        self._outbox.clear()
        self._reassembler.close()
        self.side.close()
        waiters: list[asyncio.Future[Any]] = [*self._pongs.values(), self._ready]
        for waiter in waiters:
            if not waiter.done():
                waiter.set_exception(self._closed_error())
                waiter.exception()  # nobody need look
        self._host.on_over(self, error)

    def _closed_error(self) -> RemoteError:
        error = self._over.result()
        if error is None:
            return LinkError(ErrorCode.LINK_LOST, "the link is closed")
        return remote_error(error.code, error.text, hop=error.hop)

    # --- the heartbeat

    def _send_ping(self) -> bytes:
        token = self._heartbeat.ping(time.monotonic())
        self._carrier.mux.ping(token)
        self._pump()
        return token

    def _note_carrying(self) -> None:
        """Circuits came or went: look at the peer more often while there are any."""
        if self._heartbeat.is_carrying == bool(len(self.side)):
            return
        self._heartbeat.is_carrying = not self._heartbeat.is_carrying
        if not self.is_closed and self._timer_due > self._heartbeat.next_check:
            self._set_timer(self._heartbeat.next_check)

    def _check_heartbeat(self) -> None:
        self._note_carrying()
        now = time.monotonic()
        match self._heartbeat.check(now):
            case "dead":
                silence_s = now - self._heartbeat.last_heard
                self._finish(LinkError(ErrorCode.KEEPALIVE, f"the peer was silent for {silence_s:.1f} s"))
                self._carrier.websocket.abort()
                return
            case "ping":
                self._send_ping()
        self._set_timer(self._heartbeat.next_check)

    def _set_timer(self, due: float) -> None:
        """Check at `due`, on the monotonic clock: uvloop's own counts whole milliseconds."""
        if self._timer is not None:
            self._timer.cancel()
        self._timer_due = due
        self._timer = self._loop.call_later(max(0.0, due - time.monotonic()), self._check_heartbeat)


def log_receiver_failure(occasion: str, error: Exception) -> None:
    """Log what went wrong and where, but no text of the error: it could quote what the message held."""
    frames = traceback.extract_tb(error.__traceback__)
    place = f"{frames[-1].filename}:{frames[-1].lineno}" if frames else "?"
    logger.error("receiver failed on %s: %s at %s", occasion, type(error).__name__, place)
