"""What goes into the next batch: a pure decision over a snapshot of what waits.

All decode steps of one lane that are ready, up to what keeps every stage of a chain busy, and at most one piece of a
prefill, as large as the measured times allow. Fair between tenants and between sessions. Knows nothing of threads,
models or clocks.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace

MAX_DECODE_ROWS = 16  # a decode step with drafts is about this long; a longer step costs like a prefill
MAX_DECODE_RUN = 4  # decode batches that may pass a prefill that cannot be split: it gets every fifth turn
MAX_DECODE_RUN_SPLIT = 8  # the same where pieces were dearer than hoped, and decoders are paid back
FIRST_PIECE_ROWS = 32  # before anything is measured
MIN_PIECE_ROWS = 4  # fewer read the weights, and the keys before them, for too little (performance.md 13)
MIN_JOINED_ROWS = 2  # beside decode steps, for which the weights are read anyway
MAX_PIECE_ROWS = 512  # kernels gain nothing from more, and a piece cannot be interrupted for others

TARGET_MS = 50.0  # of a batch with a piece in it: a decoder that just missed it waits for so long
# The same while nobody decodes. Where several sessions come and go, a short prompt behind a long one waits for a piece
# as long as so many decode steps: reading the weights, which is most of one, is then a tenth of it.
IDLE_STEPS = 10
LEAST_IDLE_MS, IDLE_TARGET_MS = 25.0, 200.0
WHOLE = 2.0  # a prefill that takes no longer than so many pieces goes in one
# Decoders keep more than half their speed: those that are always there get SLOWDOWN, those that come and go wait for
# half a piece on average.
SLOWDOWN = 1.75  # of a decode batch by the piece in it
LEAST_SLOWDOWN = 1.25  # where decode batches alone take longer than the target
SHARE = SLOWDOWN - 1  # of the decoders' time that pieces may cost them
SHORT_FIRST = 4  # of so many pieces in a row all but one go to the prefill with the fewest rows left

RECENT = (
    0.3  # weight of a new measurement: pieces grow dearer with the position, and are cheap again after it
)


@dataclass(frozen=True, slots=True)
class Lane:
    """What may share a call: jobs whose lanes are equal."""

    key: Hashable
    max_works: int = 1  # more in a call gain nothing
    can_split: bool = False  # a session's bits do not depend on how its rows are split


@dataclass(frozen=True, slots=True)
class Waiting:
    """The first job of a session's queue."""

    session: Hashable
    tenant: Hashable
    lane: Lane
    rows: int  # still to compute
    is_decode: bool
    since: int  # number of the batch, or arrival, after which it was first in its queue: lower came earlier
    company: Hashable = None  # equal for those that came together; None: it came alone
    is_begun: bool = False  # a piece of it was computed


@dataclass(frozen=True, slots=True)
class RowTimes:
    """Measured milliseconds per row, by the power of two below the rows of a batch.

    More rows are taken to cost no more each: what says otherwise is old, and gives way to the newest.
    """

    row_ms: tuple[tuple[int, float], ...] = ()  # (power, ms per row), ascending

    def noted(self, rows: int, ms: float) -> RowTimes:
        """With one more batch of so many rows."""
        power, known = rows.bit_length() - 1, dict(self.row_ms)
        before = known.get(power, ms / rows)
        newest = known[power] = before + RECENT * (ms / rows - before)
        for other, row_ms in self.row_ms:
            if (other > power and row_ms > newest) or (other < power and row_ms < newest):
                known[other] = row_ms + RECENT * (newest - row_ms)
        return RowTimes(tuple(sorted(known.items())))

    def knows(self, rows: int) -> bool:
        """Whether a batch of about so many rows was measured."""
        return any(power == rows.bit_length() - 1 for power, _ in self.row_ms)

    def expected_ms(self, rows: int) -> float | None:
        """What so many rows will take; None before anything is known. Too much rather than too little."""
        if not self.row_ms or not rows:
            return None if rows else 0.0
        power = rows.bit_length() - 1
        below = [ms for known, ms in self.row_ms if known <= power]
        return rows * below[-1] if below else 2 ** self.row_ms[0][0] * self.row_ms[0][1]

    def rows_within(self, ms: float) -> int | None:
        """The most rows that take so long or less; None before anything is known."""
        if not self.row_ms:
            return None
        most = 0
        for number, (power, row_ms) in enumerate(self.row_ms):
            is_last = number + 1 == len(self.row_ms)
            end = MAX_PIECE_ROWS if is_last else 2 ** self.row_ms[number + 1][0] - 1
            rows = min(end, int(ms / row_ms)) if row_ms > 0 else end
            if rows >= 2**power:
                most = max(most, rows)
        return most


@dataclass(frozen=True, slots=True)
class LaneView:
    """What is known of a lane."""

    decode_limit: int = 1 << 16  # decode steps in a batch, so that no other stage of their chains idles
    decodes: RowTimes = RowTimes()  # of batches of decode steps
    pieces: RowTimes = RowTimes()  # of batches with a piece in them

    @property
    def piece_times(self) -> RowTimes:
        """What is known of batches with a piece in them, or is closest to it."""
        return self.pieces if self.pieces.row_ms else self.decodes


@dataclass(frozen=True, slots=True)
class Due:
    """A decode step that is elsewhere, and comes back when its last rounds were true."""

    lane: Lane
    in_ms: float
    patience_ms: float  # how long to wait for it at most: more than `in_ms`


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Everything that the decision depends on."""

    waiting: Sequence[Waiting]
    lanes: Mapping[Lane, LaneView]
    tenant_turns: Mapping[Hashable, int]  # when a tenant last had decode steps in a batch
    tenant_rows: Mapping[
        Hashable, float
    ]  # prefill rows computed for a tenant so far, of those who have some waiting
    decode_ms: float = 0.0  # of a batch of decode steps of late; 0: nobody decodes, here or elsewhere
    decode_run: int = 0  # batches since a prefill that waits last had its turn
    debt_ms: float = 0.0  # what pieces took from decoders beyond their share
    num_passed: int = 0  # pieces in a row that did not go to the prefill that waited longest
    due: Due | None = None  # the decode step that is expected next; None: none is, or it is overdue
    has_company: bool = True  # of late several sessions were here at a time


@dataclass(frozen=True, slots=True)
class Share:
    """A session's part of a batch."""

    session: Hashable
    rows: int


def choose(snapshot: Snapshot) -> list[Share]:
    """The next batch, decode steps first; empty where nothing waits, or only a prefill that goes with the step due."""
    decodes = _by_turn([waiting for waiting in snapshot.waiting if waiting.is_decode], snapshot)
    prefill = _next_prefill(snapshot)
    if prefill is None:
        return _decode_batch(decodes, snapshot)
    if not decodes:
        return [] if _waits(prefill, snapshot) else [_piece(prefill, 0, snapshot)]
    if _can_join(prefill, decodes[0].lane):
        batch = _decode_batch(decodes, snapshot, kept_free=1)
        rows = sum(share.rows for share in batch)
        if _may_join(prefill, rows, snapshot):
            return [*batch, _piece(prefill, rows, snapshot)]
        return _decode_batch(decodes, snapshot)
    if _has_waited(prefill, snapshot):
        return [_piece(prefill, 0, snapshot)]
    return _decode_batch(decodes, snapshot)


def stage_limit(stages: Sequence[int]) -> int:
    """Decode steps in a batch, by the number of stages on each active session's way: those that are here at a time."""
    return max(1, math.ceil(sum(1 / number for number in stages) - 1e-9))


def _by_turn(decodes: list[Waiting], snapshot: Snapshot) -> list[Waiting]:
    """Tenants in turn, the one that waited longest first; of each the session that waited longest."""
    if len(decodes) < 2:
        return decodes
    ranked, counts = [], dict[Hashable, int]()
    for waiting in sorted(decodes, key=lambda waiting: waiting.since):
        place = counts.get(waiting.tenant, 0)
        counts[waiting.tenant] = place + 1
        ranked.append((place, snapshot.tenant_turns.get(waiting.tenant, -1), waiting.since, waiting))
    ranked.sort(key=lambda entry: entry[:3])
    return [entry[-1] for entry in ranked]


def _decode_batch(decodes: list[Waiting], snapshot: Snapshot, kept_free: int = 0) -> list[Share]:
    lane = decodes[0].lane if decodes else None
    if lane is None:
        return []
    mates = [waiting for waiting in decodes if waiting.lane == lane]
    # What came together was grouped by who sent it, and goes on together.
    company = decodes[0].company
    together = 1 if company is None else sum(waiting.company == company for waiting in mates)
    limit = max(1, min(lane.max_works - kept_free, max(together, snapshot.lanes[lane].decode_limit)))
    return [Share(waiting.session, waiting.rows) for waiting in mates[:limit]]


def _next_prefill(snapshot: Snapshot) -> Waiting | None:
    """Of the tenant with the fewest rows so far the shortest prefill; now and then that which waited longest."""
    prefills = [waiting for waiting in snapshot.waiting if not waiting.is_decode]
    if not prefills:
        return None
    is_short_first = snapshot.num_passed + 1 < SHORT_FIRST

    def key(waiting: Waiting) -> tuple[float, int, int]:
        rows = snapshot.tenant_rows.get(waiting.tenant, 0.0)
        return rows, waiting.rows if is_short_first else 0, waiting.since

    return min(prefills, key=key)


def _may_join(prefill: Waiting, decode_rows: int, snapshot: Snapshot) -> bool:
    """Whether a piece goes with the decode steps: not before it is known what those take alone."""
    is_known = snapshot.lanes[prefill.lane].decodes.knows(decode_rows)
    return (is_known and snapshot.debt_ms <= 0) or snapshot.decode_run >= MAX_DECODE_RUN_SPLIT


def _can_join(prefill: Waiting, lane: Lane) -> bool:
    return prefill.lane == lane and lane.max_works > 1 and lane.can_split


def _waits(prefill: Waiting, snapshot: Snapshot) -> bool:
    """Whether a prefill waits for a decode step that is all but here: a piece of its own would hold that up."""
    due, view = snapshot.due, snapshot.lanes[prefill.lane]
    if due is None or not _can_join(prefill, due.lane) or snapshot.decode_run >= MAX_DECODE_RUN_SPLIT:
        return False
    least_ms = view.piece_times.expected_ms(MIN_PIECE_ROWS)
    return least_ms is not None and due.in_ms < least_ms


def _has_waited(prefill: Waiting, snapshot: Snapshot) -> bool:
    """Whether a prefill that cannot join the decode steps goes before them."""
    if not prefill.lane.can_split:
        return snapshot.decode_run >= MAX_DECODE_RUN
    is_due = snapshot.debt_ms <= 0 and snapshot.decode_run >= 1
    return is_due or snapshot.decode_run >= MAX_DECODE_RUN_SPLIT


def _piece(prefill: Waiting, decode_rows: int, snapshot: Snapshot) -> Share:
    """As many rows as fit a batch that has `decode_rows` of others already."""
    lane = prefill.lane
    if not lane.can_split:
        return Share(prefill.session, prefill.rows)
    view = snapshot.lanes[lane]
    fitting = view.piece_times.rows_within(target_ms(prefill, decode_rows, snapshot))
    rows = FIRST_PIECE_ROWS if fitting is None else fitting - decode_rows
    least = MIN_JOINED_ROWS if decode_rows else MIN_PIECE_ROWS
    return Share(prefill.session, min(prefill.rows, MAX_PIECE_ROWS, max(least, rows)))


def target_ms(prefill: Waiting, decode_rows: int, snapshot: Snapshot) -> float:
    """How long a batch with a piece in it may take: beside decode steps, between those of others, or alone."""
    view = snapshot.lanes[prefill.lane]
    if decode_rows:
        alone_ms = view.decodes.expected_ms(decode_rows)
        if alone_ms is None:
            return TARGET_MS
        return min(SLOWDOWN * alone_ms, max(TARGET_MS, LEAST_SLOWDOWN * alone_ms))
    if snapshot.due is not None:
        return min(max(snapshot.due.in_ms, snapshot.decode_ms), TARGET_MS)
    if snapshot.decode_ms:
        return min(snapshot.decode_ms, TARGET_MS)
    if not snapshot.has_company:
        return IDLE_TARGET_MS
    one_ms = view.decodes.expected_ms(1)
    idle_ms = TARGET_MS if one_ms is None else min(IDLE_TARGET_MS, max(LEAST_IDLE_MS, IDLE_STEPS * one_ms))
    whole_ms = math.inf if prefill.is_begun else view.pieces.expected_ms(prefill.rows) or math.inf
    return max(idle_ms, whole_ms) if whole_ms <= min(WHOLE * idle_ms, IDLE_TARGET_MS) else idle_ms


def debt_after(
    snapshot: Snapshot, view: LaneView, decode_rows: int, piece_rows: int, ms: float, waited_ms: float
) -> float:
    """What pieces have taken from decoders beyond their share, after one more batch; 0 while nobody decodes.

    `waited_ms`: for how much of the batch a decode step waited that was not in it.
    """
    if not snapshot.decode_ms:
        return 0.0
    alone_ms = ms if not piece_rows else (view.decodes.expected_ms(decode_rows) or 0.0)
    extra_ms = max(0.0, ms - alone_ms) if decode_rows else waited_ms
    return min(TARGET_MS * SHORT_FIRST, max(0.0, snapshot.debt_ms + extra_ms - SHARE * alone_ms))


def with_time(view: LaneView, decode_rows: int, piece_rows: int, ms: float) -> LaneView:
    """A lane's view with one more measured batch."""
    if piece_rows:
        return replace(view, pieces=view.pieces.noted(decode_rows + piece_rows, ms))
    return replace(view, decodes=view.decodes.noted(decode_rows, ms))
