"""Frames, channels and credits over one websocket: one frame in, at most one event out; frames out in fair turns.

Frame: type u8 | flags u8 | credit u16 | channel u32 | body, big endian. `credit` (units of 256 B, with the flag
CREDIT set) returns window to the peer for free on a DATA frame; otherwise it is zero. Sans I/O: knows no session,
no socket and no clock.
"""

from __future__ import annotations

import struct
from collections import deque
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Protocol

from routing.errors import ErrorCode, ProtocolError
from routing.maps import malformed
from routing.records import MAX_SEALED
from routing.types import Buffer

HEADER = struct.Struct(">BBHI")
MAX_FRAME = HEADER.size + MAX_SEALED  # 65,543 B: the hard limit of one websocket message
MAX_HANDSHAKE = 1024  # B, transport.md 2.1
WINDOW = 1 << 20  # B a sender may have unacknowledged in a channel (transport.md, section 4)
MAX_WINDOW = 4 << 20
MAX_CHANNELS = 64
_CIRCUIT_GRANT = 16 << 10  # B; with a full body, less than the smallest window of a circuit, see `pace.py`
CREDIT_FLAG = 1
_CREDIT_UNIT = 256  # B
_CRITICAL = 0x80  # unknown frame types from here on close the link
_U32 = struct.Struct(">I")
_U16 = struct.Struct(">H")


class FrameType(IntEnum):
    """Types of frames on a direct link (transport.md 5.2 lists the relay's too)."""

    HS = 0x01
    DATA = 0x02
    CREDIT = 0x03
    FIN = 0x04
    RESET = 0x05
    PING = 0x18
    PONG = 0x19


_TYPES = {int(kind): kind for kind in FrameType}
_NAMES = {int(kind): kind.name for kind in FrameType}
_BODY_SIZES = {
    FrameType.CREDIT: 4,
    FrameType.FIN: 0,
    FrameType.RESET: 2,
    FrameType.PING: 8,
    FrameType.PONG: 8,
}


class RecordSource(Protocol):
    """Where a channel's records come from."""

    def next_size(self) -> int | None: ...

    def seal_next(self, out: memoryview) -> None: ...


class ChannelTaker(Protocol):
    """Whoever a circuit's channel is for."""

    def on_body(self, body: memoryview) -> None:
        """A DATA frame's body; its credit goes back to the peer only with `Mux.give_back`."""

    def on_channel_over(self, code: int | None) -> None:
        """The channel is over, by the peer, an overrun or the end of the link. Called once, not for our own end."""


@dataclass(slots=True, eq=False)
class Channel:
    """One session's path through the link, with what each side may still send.

    A circuit's channel (`is_circuit`) carries opaque bodies: a wrong credit ends it and nothing else.
    """

    number: int
    source: RecordSource | None = None
    is_circuit: bool = False
    taker: ChannelTaker | None = None
    send_credit: int = WINDOW
    receive_credit: int = WINDOW
    consumed: int = 0  # bytes taken from the peer and not yet given back as credit
    handshakes: deque[bytes] = field(default_factory=deque)


@dataclass(slots=True)
class HandshakeFrame:
    channel: Channel
    body: memoryview = field(repr=False)


@dataclass(slots=True)
class DataFrame:
    channel: Channel
    record: memoryview = field(repr=False)


@dataclass(slots=True)
class ChannelEnd:
    """The peer ended a channel: `code` is None for a plain end."""

    channel: Channel
    code: int | None


@dataclass(slots=True)
class PongFrame:
    token: bytes


Event = HandshakeFrame | DataFrame | ChannelEnd | PongFrame


class Mux:
    """Both directions of one link. The dialler opens odd channels, the acceptor even ones, as in yamux."""

    def __init__(self, *, is_dialler: bool, max_channels: int = MAX_CHANNELS) -> None:
        self._next_number = 1 if is_dialler else 2
        self._peer_parity = 0 if is_dialler else 1
        self._last_peer_number = 0
        self._max_channels = max_channels
        self.channels: dict[int, Channel] = {}
        self._turns: deque[Channel] = deque()
        self._pong: bytes | None = None  # the latest PING only: a flood costs the flooder, not us
        self._ping: bytes | None = None
        self._ends: deque[tuple[int, int | None]] = deque()
        self.may_owe_credit = False  # ask `next_credit`

    @property
    def has_own_words(self) -> bool:
        """Whether there may be a frame to write that holds no record."""
        return self.may_owe_credit or bool(self._ends) or self._pong is not None or self._ping is not None

    def open_channel(self) -> Channel:
        """Open a channel of our own; raise `ProtocolError` TOO_BIG when there are too many."""
        if len(self.channels) >= self._max_channels:
            raise ProtocolError(ErrorCode.TOO_BIG, f"a link carries {self._max_channels} channels at most")
        return self._open()

    def open_circuit(self) -> Channel:
        """Open a channel of our own for a circuit; a sealed message must tell the peer before its first frame."""
        return self._open(is_circuit=True)

    def adopt(self, number: int) -> Channel:
        """Register a circuit's channel that the peer has announced; raise `ProtocolError` STATE for a bad number."""
        self._check_new(number)
        return self._add(number, is_circuit=True)

    def give_back(self, channel: Channel, size: int) -> None:
        """Let the peer send `size` more bytes on a circuit's channel: they are taken, here or further on."""
        channel.consumed += size
        self.may_owe_credit = True

    def forget(self, channel: Channel) -> None:
        """Drop a channel that the peer does not know, or has ended, without a word."""
        if self.channels.pop(channel.number, None) is not None:
            self._turns.remove(channel)

    def end(self, channel: Channel, code: int | None = None) -> None:
        """End a channel: FIN, or RESET with an error code."""
        if self.channels.pop(channel.number, None) is not None:
            self._turns.remove(channel)
            self._ends.append((channel.number, code))

    def reset(self, number: int, code: int) -> None:
        """Queue a RESET for a channel that is not kept here."""
        self._ends.append((number, code))

    def ping(self, token: bytes) -> None:
        """Queue a PING with an 8-byte token."""
        self._ping = token

    def receive(self, frame: Buffer) -> Event | None:
        """Take one frame; return what it means for the caller, if anything.

        Raises `ProtocolError`: MALFORMED, TOO_BIG, FLOW (the peer overran its window) or STATE.
        """
        view = memoryview(frame)
        kind, flags, credit, number = _parse(view)
        if kind is None:
            return None
        body = view[HEADER.size :]
        if kind is FrameType.DATA:
            return self._receive_data(number, flags, credit, body)
        if flags or credit or len(body) != _BODY_SIZES.get(kind, len(body)):
            raise malformed(f"a {kind.name} frame has a wrong size or flag")
        match kind:
            case FrameType.PING:
                self._pong = bytes(body)
                return None
            case FrameType.PONG:
                return PongFrame(bytes(body))
            case FrameType.HS:
                return self._receive_handshake(number, body)
        return self._receive_control(kind, number, body)

    def next_frame(self) -> bytearray | None:
        """Return the next frame to write: control frames first, then one record of each channel in turn."""
        if self._pong is not None or self._ping is not None or self._ends:
            return self._next_control()
        for _ in range(len(self._turns)):
            channel = self._turns[0]
            self._turns.rotate(-1)
            if channel.handshakes:
                return bytearray(
                    HEADER.pack(FrameType.HS, 0, 0, channel.number) + channel.handshakes.popleft()
                )
            size = None if channel.source is None else channel.source.next_size()
            if size is not None and size <= channel.send_credit:
                return self._data_frame(channel, size)
        return None

    def next_credit(self) -> bytearray | None:
        """Return a CREDIT frame for a channel whose peer has used half of its smallest window, if there is one."""
        for channel in self._turns:
            if channel.consumed >= (_CIRCUIT_GRANT if channel.is_circuit else WINDOW // 2):
                granted, channel.consumed = channel.consumed, 0
                channel.receive_credit += granted
                return bytearray(HEADER.pack(FrameType.CREDIT, 0, 0, channel.number) + _U32.pack(granted))
        self.may_owe_credit = False
        return None

    def _next_control(self) -> bytearray:
        if self._pong is not None:
            token, self._pong = self._pong, None
            return bytearray(HEADER.pack(FrameType.PONG, 0, 0, 0) + token)
        if self._ping is not None:
            token, self._ping = self._ping, None
            return bytearray(HEADER.pack(FrameType.PING, 0, 0, 0) + token)
        number, code = self._ends.popleft()
        if code is None:
            return bytearray(HEADER.pack(FrameType.FIN, 0, 0, number))
        return bytearray(HEADER.pack(FrameType.RESET, 0, 0, number) + _U16.pack(code))

    def _data_frame(self, channel: Channel, size: int) -> bytearray:
        assert channel.source is not None
        frame = bytearray(HEADER.size + size)
        units = min(channel.consumed // _CREDIT_UNIT, 0xFFFF)
        HEADER.pack_into(frame, 0, FrameType.DATA, CREDIT_FLAG if units else 0, units, channel.number)
        channel.consumed -= units * _CREDIT_UNIT
        channel.receive_credit += units * _CREDIT_UNIT
        channel.send_credit -= size
        channel.source.seal_next(memoryview(frame)[HEADER.size :])
        return frame

    def _receive_data(
        self, number: int, flags: int, credit: int, body: memoryview
    ) -> DataFrame | ChannelEnd | None:
        if flags & ~CREDIT_FLAG or bool(credit) != bool(flags):
            raise malformed("a DATA frame has unknown flags or an uncalled-for credit")
        channel = self.channels.get(number) or self._channel(number)
        if channel is None:
            return None
        size = len(body)
        is_over = (credit and not _grant(channel, credit * _CREDIT_UNIT)) or size > channel.receive_credit
        if is_over:
            return self._overrun(channel)
        channel.receive_credit -= size
        if not channel.is_circuit:
            channel.consumed += size
            self.may_owe_credit |= channel.consumed >= WINDOW // 2
        return DataFrame(channel, body)

    def _overrun(self, channel: Channel) -> ChannelEnd:
        """A circuit ends alone when its credits are broken; a session that breaks its own ends the link."""
        if not channel.is_circuit:
            raise ProtocolError(ErrorCode.FLOW, "the peer sent, or granted, more than its window")
        self.end(channel, int(ErrorCode.FLOW))
        return ChannelEnd(channel, int(ErrorCode.FLOW))

    def _receive_handshake(self, number: int, body: memoryview) -> HandshakeFrame:
        if len(body) > MAX_HANDSHAKE:
            raise ProtocolError(ErrorCode.TOO_BIG, "a handshake message is too long")
        channel = self.channels.get(number)
        if channel is None:
            if len(self.channels) >= self._max_channels:
                raise ProtocolError(ErrorCode.TOO_BIG, "the peer opened too many channels")
            self._check_new(number)
            channel = self._add(number)
        return HandshakeFrame(channel, body)

    def _check_new(self, number: int) -> None:
        """A number is used once, in rising order, by the side whose parity it has."""
        if number % 2 != self._peer_parity or number <= self._last_peer_number:
            raise ProtocolError(
                ErrorCode.STATE, "the peer opened a channel with a number that is not its own"
            )
        self._last_peer_number = number

    def _receive_control(self, kind: FrameType, number: int, body: memoryview) -> ChannelEnd | None:
        channel = self._channel(number)
        if channel is None:
            return None
        if kind is FrameType.CREDIT:
            return None if _grant(channel, _U32.unpack(body)[0]) else self._overrun(channel)
        del self.channels[number]
        self._turns.remove(channel)
        return ChannelEnd(channel, _U16.unpack(body)[0] if kind is FrameType.RESET else None)

    def _channel(self, number: int) -> Channel | None:
        """A live channel; None for one that is over (frames were on their way); STATE for one that never was."""
        channel = self.channels.get(number)
        if channel is not None:
            return channel
        is_peers = number % 2 == self._peer_parity
        if number == 0 or number > (self._last_peer_number if is_peers else self._next_number - 2):
            raise ProtocolError(ErrorCode.STATE, "the peer used a channel that was never opened")
        return None

    def _open(self, *, is_circuit: bool = False) -> Channel:
        channel = self._add(self._next_number, is_circuit=is_circuit)
        self._next_number += 2
        return channel

    def _add(self, number: int, *, is_circuit: bool = False) -> Channel:
        channel = self.channels[number] = Channel(number, is_circuit=is_circuit)
        self._turns.append(channel)
        return channel


def frame_name(frame: Buffer) -> str:
    """Return the type name of a frame, for counters."""
    return _NAMES.get(frame[0], "UNKNOWN") if frame else "UNKNOWN"


def _parse(view: memoryview) -> tuple[FrameType | None, int, int, int]:
    if len(view) < HEADER.size:
        raise malformed("a frame is cut short")
    if len(view) > MAX_FRAME:
        raise ProtocolError(ErrorCode.TOO_BIG, "a frame is too long")
    kind, flags, credit, number = HEADER.unpack_from(view)
    if kind not in _TYPES and kind >= _CRITICAL:
        raise malformed(f"unknown critical frame type {kind}")
    return _TYPES.get(kind), flags, credit, number


def _grant(channel: Channel, size: int) -> bool:
    """Add credit; whether it stays within the largest window."""
    channel.send_credit += size
    return channel.send_credit <= MAX_WINDOW
