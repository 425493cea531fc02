"""Sealed records: one Noise message each, with a kind, a message id and a piece of a message.

Plaintext: kind u8 | flags u8 | pad u16 | message id u32 | payload | zeros. The first record of a message that
needs several begins with the whole size (u32), so that a receiver can refuse before it allocates.
Sans I/O. Knows nothing of frames, channels or what a message means.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import IntFlag

from routing.errors import ErrorCode, ProtocolError
from routing.maps import malformed
from routing.noise import MAX_MESSAGE_SIZE, TAG_SIZE, CipherState
from routing.types import Buffer

HEADER = struct.Struct(">BBHI")
TOTAL = struct.Struct(">I")
MAX_SEALED = MAX_MESSAGE_SIZE
MAX_PAYLOAD = MAX_SEALED - TAG_SIZE - HEADER.size  # 65,511 B
OVERHEAD = HEADER.size + TAG_SIZE
REKEY_AFTER = 1 << 16  # records per direction, transport.md 2.1
PAD_STEP = 256  # transport.md 5.6: with --pad, sizes of short messages come in these steps
MAX_OPEN_MESSAGES = 64
MAX_IN_FLIGHT = 128 << 20  # per peer, transport.md 5.6

KIND_READY = 0xF0  # the acceptor's first record: the handshake holds on both sides
KIND_CLOSE = 0xF1  # the end of a session, with an error code (0 = normal)


class RecordFlag(IntFlag):
    """Bits of a record header."""

    END = 1  # the last record of its message
    FIRST = 2  # the first one
    ABORT = 4  # the sender gave up on a message that it had begun


WHOLE = RecordFlag.FIRST | RecordFlag.END
_WHOLE = int(WHOLE)  # to compare plain numbers is quicker
_FLAG_SETS = frozenset({0, 1, 2, 3, 4})


@dataclass(slots=True)
class Record:
    """An opened record."""

    kind: int
    flags: int
    message_id: int
    payload: memoryview = field(repr=False)


class Sealer:
    """Seals records in the order in which they go to the wire; the order is the nonce."""

    __slots__ = ("_cipher", "_num_records", "is_padded", "max_payload")

    def __init__(
        self, cipher: CipherState, *, is_padded: bool = False, max_payload: int = MAX_PAYLOAD
    ) -> None:
        self._cipher = cipher
        self._num_records = 0
        self.is_padded = is_padded
        self.max_payload = max_payload

    def pad_for(self, size: int, *, is_whole: bool) -> int:
        """Zeros to add to the last payload of a message: to a step of 256 B, or to a full record."""
        if not self.is_padded:
            return 0
        return min(-size % PAD_STEP if is_whole else self.max_payload, self.max_payload - size)

    def seal_into(
        self, out: memoryview, kind: int, flags: int, message_id: int, pieces: Sequence[Buffer], pad: int = 0
    ) -> None:
        """Seal `pieces` as one record into `out`, whose size is theirs + `pad` + OVERHEAD."""
        plain = b"".join((HEADER.pack(kind, flags, pad, message_id), *pieces, bytes(pad)))
        self._cipher.encrypt_into(plain, out)
        self._num_records += 1
        if self._num_records % REKEY_AFTER == 0:
            self._cipher.rekey()


class Opener:
    """Opens records in wire order; anything lost, repeated, swapped or changed fails for good."""

    __slots__ = ("_cipher", "_num_records")

    def __init__(self, cipher: CipherState) -> None:
        self._cipher = cipher
        self._num_records = 0

    def open(self, sealed: Buffer) -> Record:
        """Return the record in `sealed`, its payload in fresh writable memory.

        Raises `SecurityError` DECRYPT, or `ProtocolError` MALFORMED for bad headers and padding.
        """
        size = len(sealed) - TAG_SIZE
        if size < HEADER.size or len(sealed) > MAX_SEALED:
            raise malformed("a record has an impossible size")
        plain = memoryview(bytearray(size))
        self._cipher.decrypt_into(sealed, plain)
        self._num_records += 1
        if self._num_records % REKEY_AFTER == 0:
            self._cipher.rekey()
        kind, flags, pad, message_id = HEADER.unpack_from(plain)
        if flags not in _FLAG_SETS or pad > size - HEADER.size:
            raise malformed("a record has an impossible header")
        if pad and any(plain[size - pad :]):
            raise malformed("a record's padding is not zero")
        return Record(kind, flags, message_id, plain[HEADER.size : size - pad])


class Quota:
    """Bytes that may be in flight; a child's bytes count for its parent too."""

    __slots__ = ("_limit", "_parent", "used")

    def __init__(self, limit: int, parent: Quota | None = None) -> None:
        self._limit = limit
        self._parent = parent
        self.used = 0

    def reserve(self, size: int) -> bool:
        """Take `size` bytes if they are there."""
        if self.used + size > self._limit or (self._parent is not None and not self._parent.reserve(size)):
            return False
        self.used += size
        return True

    def release(self, size: int) -> None:
        """Give `size` bytes back."""
        self.used -= size
        assert self.used >= 0, "a quota gave back more than it took"
        if self._parent is not None:
            self._parent.release(size)


@dataclass(slots=True)
class _Partial:
    kind: int
    content: memoryview = field(repr=False)
    filled: int = 0


class Reassembler:
    """Puts messages together from records, within a quota that is asked before memory is taken."""

    def __init__(self, max_message: int, quota: Quota) -> None:
        self._max_message = max_message
        self._quota = quota
        self._partials: dict[int, _Partial] = {}

    @property
    def num_partial(self) -> int:
        """Messages that are begun and not finished."""
        return len(self._partials)

    def push(self, record: Record) -> tuple[int, memoryview] | None:
        """Take the next record; return (kind, content) when it completes a message.

        Raises `ProtocolError` MALFORMED for a record out of place, TOO_BIG for one over a limit.
        """
        if record.flags == _WHOLE:
            if len(record.payload) > self._max_message:
                raise ProtocolError(ErrorCode.TOO_BIG, "a message is larger than announced")
            return record.kind, record.payload
        if record.flags & RecordFlag.FIRST:
            self._begin(record)
            return None
        if record.flags & RecordFlag.ABORT:
            self._release(self._partial(record))
            del self._partials[record.message_id]
            return None
        return self._continue(record)

    def close(self) -> None:
        """Drop what is unfinished and give its quota back."""
        for partial in self._partials.values():
            self._release(partial)
        self._partials.clear()

    def _begin(self, record: Record) -> None:
        if record.message_id in self._partials or len(record.payload) <= TOTAL.size:
            raise malformed("a message begins twice or with nothing")
        (total,) = TOTAL.unpack_from(record.payload)
        first = record.payload[TOTAL.size :]
        if total <= len(first):
            raise malformed("a message begins with more than its whole size")
        if total > self._max_message or len(self._partials) >= MAX_OPEN_MESSAGES:
            raise ProtocolError(ErrorCode.TOO_BIG, "a message, or the number of open ones, is over the limit")
        if not self._quota.reserve(total):
            raise ProtocolError(ErrorCode.TOO_BIG, "too many bytes are in flight from this peer")
        partial = _Partial(record.kind, memoryview(bytearray(total)))
        partial.content[: len(first)] = first
        partial.filled = len(first)
        self._partials[record.message_id] = partial

    def _continue(self, record: Record) -> tuple[int, memoryview] | None:
        partial = self._partial(record)
        end = partial.filled + len(record.payload)
        is_last = bool(record.flags & RecordFlag.END)
        if not record.payload or end > len(partial.content) or is_last != (end == len(partial.content)):
            raise malformed("a message's records do not add up to its size")
        partial.content[partial.filled : end] = record.payload
        partial.filled = end
        if not is_last:
            return None
        del self._partials[record.message_id]
        self._release(partial)
        return partial.kind, partial.content

    def _partial(self, record: Record) -> _Partial:
        partial = self._partials.get(record.message_id)
        if partial is None or partial.kind != record.kind:
            raise malformed("a record continues a message that was not begun")
        return partial

    def _release(self, partial: _Partial) -> None:
        self._quota.release(len(partial.content))
