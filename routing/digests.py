"""Two tables compared by digests: what we tell, what we want of what a peer told, what it lacks.

Pure functions over a table. The first 8 bytes of an id stand for it; ids that begin alike are told apart by
their sequences, so that nobody can hide another's record behind a prefix of his own making.
"""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Sequence

from routing.announcement import PREFIX_SIZE
from routing.record_table import RecordTable
from routing.types import Digest

DigestEntry = tuple[bytes, int]  # (id prefix, sequence)
_LAST = b"\xff" * PREFIX_SIZE


def digest_of(
    table: RecordTable, span_size: int, rng: random.Random, doubts: tuple[bytes, ...] = ()
) -> Digest:
    """Return all that a table holds; of a large one a random part of the id space, of about `span_size` entries."""
    num_parts = -(-len(table) // span_size)
    if num_parts <= 1:
        return Digest(tuple(table.digest), doubts=doubts)
    part = rng.randrange(num_parts)
    first = ((part << 64) // num_parts).to_bytes(PREFIX_SIZE, "big")
    last = (((part + 1) << 64) // num_parts - 1).to_bytes(PREFIX_SIZE, "big")
    entries = tuple(entry for entry in table.digest if first <= entry[0] <= last)
    return Digest(entries, first=first, last=last, doubts=doubts)


def wanted(table: RecordTable, entries: Sequence[DigestEntry]) -> list[DigestEntry]:
    """Return what a peer tells that is newer than ours, or one more with a prefix that it tells twice."""
    known = table.digest
    others = sorted(entry for entry in entries if entry not in known)
    news = [entry for entry in others if entry[1] > table.sequence_of(entry[0])]
    if len(news) < len(others):
        counts = Counter(prefix for prefix, _ in entries)
        news += sorted(entry for entry in set(others).difference(news) if counts[entry[0]] > 1)
    return news


def lacking(table: RecordTable, digest: Digest, limit: int) -> tuple[DigestEntry, ...]:
    """Return up to `limit` entries that a peer lacks within the part that its digest speaks of."""
    others = table.digest.difference(digest.entries)
    if not others:
        return ()
    theirs = dict(sorted(digest.entries))  # of those that begin alike, the highest sequence
    newer = (
        (prefix, sequence)
        for prefix, sequence in sorted(others)
        if digest.first <= prefix <= digest.last
        and (sequence > theirs.get(prefix, -1) or table.is_shared(prefix))
    )
    return tuple(itertools.islice(newer, limit))
