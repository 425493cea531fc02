"""What a node remembers over a restart: peers that answered, and the sequence of its own announcements.

One small JSON file per identity, written whole and swapped in. A file that cannot be read is started anew.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterable
from pathlib import Path

from routing.addresses import parse_address
from routing.errors import SettingsError
from routing.types import NodeAddress, NodeId

logger = logging.getLogger(__name__)

MAX_PEERS = 64
MAX_SIZE = 64 << 10  # B: 64 addresses take a third of it
MAX_STORED_SEQUENCE = 1 << 62  # they follow the clock in ms; a broken file must not use up all that are left
_ID_DIGITS = 16


class KnownPeers:
    """Peers in the order in which they answered last, and the highest sequence used.

    With no folder everything is kept in memory only. Reading and writing block for well under a millisecond.
    """

    def __init__(self, folder: Path | None, node_id: NodeId) -> None:
        self._path = None if folder is None else folder / f"peers-{node_id.hex()[:_ID_DIGITS]}.json"
        self._peers: dict[NodeId, NodeAddress] = {}
        self._is_writable = True
        self.sequence = -1
        self._read()

    @property
    def addresses(self) -> tuple[NodeAddress, ...]:
        """Where peers answered, the latest first."""
        return tuple(reversed(self._peers.values()))

    def note(self, address: NodeAddress) -> None:
        """A peer answered at this address."""
        self._peers.pop(address.node_id, None)
        self._peers[address.node_id] = address
        while len(self._peers) > MAX_PEERS:
            del self._peers[next(iter(self._peers))]

    def next_sequence(self, now_ms: int, *, above: int = -1) -> int:
        """Return, and keep, a sequence above all used before, `above` included (transport.md 5.5)."""
        self.sequence = max(self.sequence + 1, above + 1, now_ms)
        self.save()
        return self.sequence

    def save(self) -> None:
        """Write the file; say once, and go on, where that is not possible."""
        if self._path is None or not self._is_writable:
            return
        peers = [str(address) for address in self._peers.values()]
        text = json.dumps({"sequence": self.sequence, "peers": peers}, indent=1)
        fresh = self._path.with_suffix(f".{os.getpid()}.tmp")
        try:
            self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            fresh.write_text(text)
            fresh.replace(self._path)
        except OSError as error:
            self._is_writable = False
            logger.warning("cannot keep known peers in %s: %s", self._path, error.strerror)

    def _read(self) -> None:
        if self._path is None:
            return
        try:
            with self._path.open("rb") as file:
                fields = json.loads(file.read(MAX_SIZE))
            sequence, peers = fields["sequence"], fields["peers"]
            if type(sequence) is not int or not -1 <= sequence <= MAX_STORED_SEQUENCE:
                raise ValueError("the sequence is no number that we wrote")
            known = _parse(peers)
        except FileNotFoundError:
            return
        except (OSError, ValueError, KeyError, TypeError, RecursionError, SettingsError) as error:
            logger.warning("%s cannot be read (%s): starting without it", self._path, type(error).__name__)
            return
        self.sequence = sequence
        self._peers = {address.node_id: address for address in known}


def _parse(peers: Iterable[object]) -> list[NodeAddress]:
    return [parse_address(str(text)) for text in peers][-MAX_PEERS:]
