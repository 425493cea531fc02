"""What one gossip peer may still do, and what we asked it for.

Knows rates and one pull at a time. Knows no records and no other peers.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from routing.admission import TokenBucket
from routing.network_wire import MAX_RECORDS
from routing.record_table import TableLimits
from routing.types import Pull

ANSWER_S = 5.0  # how long a pull may take
MAX_FORGERIES = 4  # whoever passes records on has verified them: a forgery is its bringer's
BARRED_S = 60.0  # how long one that brought so many is not read
MAX_REPLIES_DUE = 2


@dataclass(frozen=True, slots=True)
class GossipLimits:
    """Rates are per peer and second; bursts let a newcomer fill its table at once."""

    table: TableLimits = field(default_factory=TableLimits)
    record_rate: float = 20.0  # unasked ones that need a signature check (transport.md 5.6)
    record_burst: float = 100.0
    pull_rate: float = 200.0  # records that we ask one peer for, and serve to one peer
    pull_burst: float = 2000.0
    digest_rate: float = 1.0
    digest_burst: float = 10.0
    doubt_rate: float = 2.0  # hints about nodes that we did not find dead ourselves
    doubt_burst: float = 64.0
    author_rate: float = 1.0  # new records of one author, whoever brings them
    author_burst: float = 20.0
    pull_size: int = 96  # ids of one pull: four messages of records
    span_size: int = 1024  # entries of one digest; a larger table is compared a part at a time


class GossipPeer:
    """Buckets and the pull in flight; kept for a while after its last link, so that a new one brings no new burst."""

    def __init__(self, limits: GossipLimits, now: float) -> None:
        self.records = TokenBucket(limits.record_rate, limits.record_burst, now)
        self.digests = TokenBucket(limits.digest_rate, limits.digest_burst, now)
        self.doubts = TokenBucket(limits.doubt_rate, limits.doubt_burst, now)
        self.served = TokenBucket(limits.pull_rate, limits.pull_burst, now)
        self._pulls = TokenBucket(limits.pull_rate, limits.pull_burst, now)
        self._pull_size = limits.pull_size
        self._asked: set[bytes] = set()
        self._asked_until = 0.0
        self.wanted: list[bytes] = []  # id prefixes of which the peer told something newer
        self.has_more = False  # its last digest was full: there may be more that we lack
        self._barred_until = 0.0
        self._num_forgeries = 0  # since it was barred last
        self._replies_due = 0  # digests of ours that it may answer with one of its own

    def is_barred(self, now: float) -> bool:
        """Whether it brought forged records a moment ago."""
        return now < self._barred_until

    def note_forgery(self, now: float) -> None:
        """It brought a forged record; after a few none is taken from it for a while."""
        self._num_forgeries += 1
        if self._num_forgeries >= MAX_FORGERIES:
            self._num_forgeries, self._barred_until = 0, now + BARRED_S
            self.forget_pulls()

    def expect_reply(self) -> None:
        """We told it of our table."""
        self._replies_due = min(self._replies_due + 1, MAX_REPLIES_DUE)

    def take_reply(self) -> bool:
        """Whether a digest in answer to ours was due."""
        if not self._replies_due:
            return False
        self._replies_due -= 1
        return True

    def is_answering(self, now: float) -> bool:
        """Whether a pull is in flight."""
        return bool(self._asked) and now < self._asked_until

    def is_late(self, now: float) -> bool:
        """Whether a pull was not answered in time."""
        return bool(self._asked) and now >= self._asked_until

    def next_pull(self, now: float) -> Pull | None:
        """Ask for the next of what is wanted; None when there is nothing, or a pull is in flight."""
        if self.is_answering(now) or self.is_barred(now):
            return None
        asked: list[bytes] = []
        while self.wanted and len(asked) < self._pull_size and self._pulls.take(now):
            asked.append(self.wanted.pop())
        self._asked, self._asked_until = set(asked), now + ANSWER_S
        return Pull(tuple(asked)) if asked else None

    def note_answer(self, prefixes: list[bytes]) -> tuple[set[bytes], bool]:
        """Return which of these records were asked for, and whether they end the pull.

        Batches are full but for the last one, which also ends a pull that is answered only in part.
        """
        answered = self._asked.intersection(prefixes)
        if not answered:
            return answered, False
        self._asked -= answered
        if len(prefixes) < MAX_RECORDS:
            self._asked.clear()
        return answered, not self._asked

    def forget_pulls(self) -> None:
        """The link is gone, and with it all answers."""
        self._asked, self.wanted, self.has_more = set(), [], False
        self._replies_due = 0
