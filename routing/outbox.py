"""Messages waiting to be sealed, taken record by record in turn, so that a small one never waits behind a bulk.

Messages of one lane stay in order; lanes take turns. Sans I/O: `mux.py` asks for the next record when there is
credit for it, and it is sealed at that moment, so nonce order is wire order.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence

from routing.errors import ErrorCode, ProtocolError
from routing.records import (
    MAX_IN_FLIGHT,
    MAX_OPEN_MESSAGES,
    OVERHEAD,
    TOTAL,
    WHOLE,
    RecordFlag,
    Sealer,
)
from routing.types import Buffer

_LAST = int(RecordFlag.END | RecordFlag.ABORT)
_MAX_OPEN_BYTES = MAX_IN_FLIGHT // 2  # of one link: two links stay within what a peer accepts from us
# Messages that wait in one lane. Answers, gossip and the like: a peer that asks and does not read must not fill our
# memory. A session's: a replay, one step for each position of a long text.
MAX_QUEUED = 1024
MAX_QUEUED_OF_SESSION = 1 << 16
_SESSION_LANE = 16  # B: a session's lane is its id
YIELDING_LANE = (
    b"\0yields"  # goes only when nothing else may: what measures the line must not be in anybody's way
)
YIELDING_RECORD = 8 << 10  # B at most of one of its records, once sealed: so long a step may wait for it


class Outgoing:
    """One message on its way: how much of it is sealed, and whom to tell when all of it is."""

    __slots__ = (
        "_buffers",
        "gone",
        "is_aborted",
        "is_done",
        "is_whole",
        "kind",
        "lane",
        "max_payload",
        "message_id",
        "seal_ns",
        "sent",
        "size",
    )

    def __init__(
        self,
        kind: int,
        lane: bytes,
        buffers: Sequence[Buffer],
        gone: Callable[[], object] | None,
        max_payload: int,
    ) -> None:
        self.max_payload = max_payload
        self.kind = kind
        self.lane = lane
        self._buffers = deque([memoryview(buffer).cast("B") for buffer in buffers])
        self.size = sum(map(len, self._buffers))
        self.is_whole = self.size <= max_payload  # it fits one record
        self.sent = 0
        self.message_id = 0
        self.gone = gone
        self.is_done = False
        self.is_aborted = False
        self.seal_ns = 0

    @property
    def is_begun(self) -> bool:
        return self.sent > 0

    def next_size(self) -> int:
        """Payload bytes of its next record, the announced total included, padding not."""
        if self.is_aborted:
            return 0
        announced = 0 if self.is_whole or self.is_begun else TOTAL.size
        return min(self.max_payload, announced + self.size - self.sent)

    def take(self, size: int) -> list[Buffer]:
        """Return the next `size` bytes as views."""
        if size == self.size:
            self.sent = size
            return list(self._buffers)
        pieces: list[Buffer] = []
        self.sent += size
        while size:
            head = self._buffers[0]
            if len(head) <= size:
                pieces.append(self._buffers.popleft())
            else:
                pieces.append(head[:size])
                self._buffers[0] = head[size:]
            size -= len(pieces[-1])
        return pieces

    def finish(self) -> None:
        """Mark it as gone, or given up, and drop what it holds."""
        self.is_done = True
        self._buffers.clear()
        gone, self.gone = self.gone, None
        if gone is not None:
            gone()


class Outbox:
    """The sending half of a session: a `mux.RecordSource`."""

    def __init__(self, sealer: Sealer, max_message: int) -> None:
        self._sealer = sealer
        self._max_message = max_message
        self._lanes: dict[bytes, deque[Outgoing]] = {}
        self._turns: deque[bytes] = deque()
        self._next_id = 0
        self._open: set[Outgoing] = set()
        self._open_bytes = 0
        self.waiting_bytes = 0
        self.num_waiting = 0  # messages
        self.may_be_overrun = False  # ask `num_overrun`
        self._next: tuple[Outgoing, int, int] | None = None  # see `_find_next`: known until something changes

    def push(
        self, kind: int, lane: bytes, buffers: Sequence[Buffer], gone: Callable[[], object] | None = None
    ) -> Outgoing:
        """Queue a message; `gone` is called once its last record is sealed, or it is given up.

        Raises `ProtocolError` TOO_BIG when the peer said that it takes no message of this size.
        """
        max_payload = self._sealer.max_payload
        if lane == YIELDING_LANE:
            max_payload = min(max_payload, YIELDING_RECORD - OVERHEAD)
        outgoing = Outgoing(kind, lane, buffers, gone, max_payload)
        if outgoing.size > self._max_message:
            raise ProtocolError(
                ErrorCode.TOO_BIG,
                f"a message of {outgoing.size} B; the peer takes {self._max_message} B at most",
            )
        outgoing.message_id = self._next_id
        self._next_id = (self._next_id + 1) & 0xFFFFFFFF
        queue = self._lanes.get(lane)
        if queue is None:
            queue = self._lanes[lane] = deque()
            self._turns.append(lane)
        queue.append(outgoing)
        self.waiting_bytes += outgoing.size
        self.num_waiting += 1
        if len(queue) > MAX_QUEUED and _is_too_long(lane, queue):
            self.may_be_overrun = True
        self._next = None
        return outgoing

    @property
    def num_overrun(self) -> int:
        """Messages in lanes where more of them wait than any peer that reads lets wait for long."""
        if not self.may_be_overrun:
            return 0
        number = sum(len(queue) for lane, queue in self._lanes.items() if _is_too_long(lane, queue))
        self.may_be_overrun = number > 0
        return number

    def cancel(self, outgoing: Outgoing) -> None:
        """Give a message up: forget it, or tell the peer when part of it has left."""
        if outgoing.is_done or outgoing.is_aborted:
            return
        self._next = None
        self.waiting_bytes -= outgoing.size - outgoing.sent
        if outgoing.is_begun:
            outgoing.is_aborted = True
            return
        self._remove(outgoing)
        outgoing.finish()

    def clear(self) -> None:
        """Give up everything, without a word to the peer: the session is over."""
        queues = list(self._lanes.values())
        self._next = None
        self._lanes.clear()
        self._turns.clear()
        self._open.clear()
        self._open_bytes = self.waiting_bytes = self.num_waiting = 0
        for queue in queues:
            for outgoing in queue:
                outgoing.finish()

    def next_size(self) -> int | None:
        """Sealed size of the record whose turn it is; None when nothing is waiting."""
        if not self._turns:
            return None
        self._next = self._find_next()
        if self._next is None:
            return None
        _, size, pad = self._next
        return OVERHEAD + size + pad

    def seal_next(self, out: memoryview) -> None:
        """Seal the record whose turn it is into `out`, of `next_size()` bytes, and pass the turn on."""
        started = time.perf_counter_ns()
        found = self._next or self._find_next()
        assert found is not None, "nothing is waiting"
        self._next = None
        outgoing, size, pad = found
        flags, pieces = self._next_record(outgoing, size)
        self._sealer.seal_into(out, outgoing.kind, flags, outgoing.message_id, pieces, pad)
        outgoing.seal_ns += time.perf_counter_ns() - started
        is_last = bool(int(flags) & _LAST)
        self._pass_turn(outgoing, is_last=is_last)

    def _find_next(self) -> tuple[Outgoing, int, int] | None:
        """The message whose turn it is, with the sizes of its next record's payload and padding."""
        outgoing = self._turn()
        if outgoing is None:
            return None
        size = outgoing.size if outgoing.is_whole else outgoing.next_size()
        return outgoing, size, self._pad(outgoing, size) if self._sealer.is_padded else 0

    def _next_record(self, outgoing: Outgoing, size: int) -> tuple[int, list[Buffer]]:
        if outgoing.is_aborted:
            return RecordFlag.ABORT, []
        if outgoing.is_whole:
            self.waiting_bytes -= size
            return WHOLE, outgoing.take(size)
        if not outgoing.is_begun:
            self._open.add(outgoing)
            self._open_bytes += outgoing.size
            self.waiting_bytes -= size - TOTAL.size
            return RecordFlag.FIRST, [TOTAL.pack(outgoing.size), *outgoing.take(size - TOTAL.size)]
        self.waiting_bytes -= size
        pieces = outgoing.take(size)
        return (RecordFlag.END if outgoing.sent == outgoing.size else 0), pieces

    def _pad(self, outgoing: Outgoing, size: int) -> int:
        if outgoing.is_aborted or (not outgoing.is_whole and outgoing.sent + size < outgoing.size):
            return 0
        return self._sealer.pad_for(size, is_whole=outgoing.is_whole)

    def _turn(self) -> Outgoing | None:
        """The first message in turn that may go: small, begun, or within what may be open at once."""
        for _ in range(len(self._turns)):
            outgoing = self._lanes[self._turns[0]][0]
            if (outgoing.is_whole or self._may_go(outgoing)) and outgoing.lane != YIELDING_LANE:
                return outgoing
            self._turns.rotate(-1)
        return self._yielding_turn() if YIELDING_LANE in self._lanes else None

    def _yielding_turn(self) -> Outgoing | None:
        """What goes last, where it may go; what waits for open messages to end waits for this one, too."""
        outgoing = self._lanes[YIELDING_LANE][0]
        if not self._may_go(outgoing):
            return None
        self._turns.remove(YIELDING_LANE)
        self._turns.appendleft(YIELDING_LANE)
        return outgoing

    def _may_go(self, outgoing: Outgoing) -> bool:
        return outgoing.is_whole or outgoing.is_begun or self._may_begin(outgoing)

    def _may_begin(self, outgoing: Outgoing) -> bool:
        if not self._open:
            return True
        return len(self._open) < MAX_OPEN_MESSAGES and self._open_bytes + outgoing.size <= _MAX_OPEN_BYTES

    def _pass_turn(self, outgoing: Outgoing, *, is_last: bool) -> None:
        if not is_last:
            self._turns.rotate(-1)
            return
        if outgoing in self._open:
            self._open.discard(outgoing)
            self._open_bytes -= outgoing.size
        self.num_waiting -= 1
        lane = self._turns.popleft()
        self._lanes[lane].popleft()
        if self._lanes[lane]:
            self._turns.append(lane)
        else:
            del self._lanes[lane]
        outgoing.finish()

    def _remove(self, outgoing: Outgoing) -> None:
        self.num_waiting -= 1
        queue = self._lanes[outgoing.lane]
        queue.remove(outgoing)
        if not queue:
            del self._lanes[outgoing.lane]
            self._turns.remove(outgoing.lane)


def _is_too_long(lane: bytes, queue: deque[Outgoing]) -> bool:
    return len(queue) > (MAX_QUEUED_OF_SESSION if len(lane) == _SESSION_LANE else MAX_QUEUED)
