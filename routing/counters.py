"""What went over a link or an endpoint, in numbers that tests and metrics read."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field


@dataclass(slots=True)
class LinkCounters:
    """Frames by type name, messages by class name, and websocket payload bytes."""

    frames_sent: Counter[str] = field(default_factory=Counter)
    frames_received: Counter[str] = field(default_factory=Counter)
    messages_sent: Counter[str] = field(default_factory=Counter)
    messages_received: Counter[str] = field(default_factory=Counter)
    payload_bytes_sent: int = 0
    payload_bytes_received: int = 0

    def add(self, other: LinkCounters) -> None:
        """Add another's numbers to ours."""
        self.frames_sent.update(other.frames_sent)
        self.frames_received.update(other.frames_received)
        self.messages_sent.update(other.messages_sent)
        self.messages_received.update(other.messages_received)
        self.payload_bytes_sent += other.payload_bytes_sent
        self.payload_bytes_received += other.payload_bytes_received


@dataclass(slots=True)
class EndpointCounters(LinkCounters):
    """The sum over all links, past and present, and the handshakes."""

    handshakes_done: int = 0
    handshakes_failed: Counter[str] = field(default_factory=Counter)  # by error code name
    connections_refused: int = 0  # before the first byte: rate limits and half-open caps
