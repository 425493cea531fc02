"""A websocket (or a circuit) with the mux over it and the counts of what passes: what a handshake hands on to its link.

Knows nothing of sessions: bytes of frames only.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from routing.counters import LinkCounters
from routing.mux import Event, Mux, frame_name
from routing.transport import FrameSocket
from routing.types import Buffer

BURST = 4  # frames written before the loop gets a turn: 256 KiB, transport.md 3.4


@dataclass(slots=True)
class Carrier:
    """Writes the mux's frames and counts both directions."""

    websocket: FrameSocket
    mux: Mux
    counters: LinkCounters = field(default_factory=LinkCounters)

    def receive(self, frame: Buffer) -> Event | None:
        """Count a frame and take it; raises what `Mux.receive` raises."""
        self.counters.frames_received[frame_name(frame)] += 1
        self.counters.payload_bytes_received += len(frame)
        return self.mux.receive(frame)

    def write_burst(self) -> bool:
        """Write what may be written, up to a burst; say whether there may be more."""
        for _ in range(BURST):
            if not self.websocket.is_writable:
                return False
            frame = self.mux.next_frame()
            if frame is None and self.mux.may_owe_credit:
                frame = self.mux.next_credit()
            if frame is None:
                return False
            self._write(frame)
        return True

    def write_last(self) -> None:
        """Write what is left to say, full buffer or not: the connection is about to be closed."""
        while (frame := self.mux.next_frame()) is not None:
            self._write(frame)

    def _write(self, frame: bytearray) -> None:
        self.counters.frames_sent[frame_name(frame)] += 1
        self.counters.payload_bytes_sent += len(frame)
        self.websocket.write(frame)
