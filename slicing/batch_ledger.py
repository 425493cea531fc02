"""What the decision about the next batch depends on besides the queues.

Who had how much, what batches took, and which sessions decode, here or at another stage now. Knows nothing of threads.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from slicing.batch_choice import (
    MAX_DECODE_ROWS,
    RECENT,
    TARGET_MS,
    Due,
    Lane,
    LaneView,
    Share,
    Snapshot,
    Waiting,
    debt_after,
    stage_limit,
    with_time,
)

ACTIVE_S = 1.0  # a session that decodes comes again within it, or within a few of its own rounds
ACTIVE_ROUNDS = 4
LATE = 0.25  # of its round a decode step may be late until nobody waits for it any more
COMPANY_S = 10.0  # for how long several sessions at a time are taken to be what is usual
# A stage that others wait for has no use for small groups: it takes one more step at a time while it hardly idles, and
# gives half of them back once it does, for then the others wait in one group for it.
WINDOW_MS = 250.0  # about ten batches of a small model
LITTLE_IDLE = 0.05
MUCH_IDLE = 0.15
BURST_ROWS = 512.0  # a tenant that asked for nothing of late goes first with so many rows
MAX_REMEMBERED = (
    1024  # tenants, and lanes, whose turns and times are kept; decoders before the idle are looked for
)
NOTHING = Snapshot((), {}, {}, {})
Key = TypeVar("Key")
Value = TypeVar("Value")


@dataclass(slots=True)
class _Decoder:
    """A session that decodes."""

    lane: Lane
    stages: int
    seen: float
    round_s: float = 0.0
    last_round_s: float = 0.0


@dataclass(slots=True)
class _Window:
    """What the thread did of late."""

    busy_ms: float = 0.0
    idle_ms: float = 0.0
    has_left_some: bool = False  # decode steps that were ready and did not go, for the others' sake


class Ledger:
    """Kept up to date with what arrives and what was computed; times in seconds of one clock."""

    def __init__(self) -> None:
        self._ticks = 0
        self._views: dict[Lane, LaneView] = {}
        self._decoders: dict[Hashable, _Decoder] = {}
        self._tenant_turns: dict[Hashable, int] = {}
        self._tenant_rows: dict[Hashable, float] = {}
        self._floor_rows = 0.0  # what the least served tenant had when it was served, of late
        self._chosen_from = NOTHING
        self._decode_ms = 0.0
        self._decode_run = 0
        self._debt_ms = 0.0
        self._num_passed = 0
        self._window = _Window()
        self._more_steps = 0  # in a batch than the stages alone would have it
        self._chosen_at = 0.0
        self._arrivals: dict[Hashable, float] = {}  # when something last came of a session, the newest last
        self._company_at = -math.inf  # when a session came and another one was here

    def tick(self) -> int:
        """The next number in the order of things."""
        self._ticks += 1
        return self._ticks

    def note_arrival(self, session: Hashable, lane: Lane, stages: int, rows: int, now: float) -> None:
        """A job was queued: its session decodes, or does not now."""
        _remember(self._arrivals, session, now)
        if len(self._arrivals) > 1:
            self._note_company(now)
        if rows > MAX_DECODE_ROWS:
            self._decoders.pop(session, None)
            return
        decoder = self._decoders.get(session)
        if decoder is None:
            self._decoders[session] = _Decoder(lane, stages, now)
            if len(self._decoders) > MAX_REMEMBERED:
                self._drop_idle(now)
        else:
            decoder.lane, decoder.stages = lane, stages
            decoder.last_round_s, decoder.round_s, decoder.seen = decoder.round_s, now - decoder.seen, now

    def forget(self, session: Hashable) -> None:
        """A session ended, or starts anew."""
        self._decoders.pop(session, None)
        self._arrivals.pop(session, None)

    @property
    def num_decoders(self) -> int:
        """Sessions that decode, here or elsewhere now; those that have stopped of late count too."""
        return len(self._decoders)

    @property
    def patience_s(self) -> float:
        """How long what was left out of the last snapshot's batch waits for the step that is due."""
        due = self._chosen_from.due
        return 0.0 if due is None else max(0.0, due.patience_ms / 1000)

    def expected_ms(self, lane: Lane, rows: int) -> float:
        """What a batch of decode steps with so many rows will take; infinity before any was measured."""
        expected = self._views.get(lane, LaneView()).decodes.expected_ms(rows)
        return math.inf if expected is None else expected

    def snapshot(self, waiting: Sequence[Waiting], now: float) -> Snapshot:
        """Everything that the next decision depends on. `note_batch` belongs to the last one."""
        is_single = len(waiting) == 1 and waiting[0].is_decode  # one stream has no use for most of it
        if not is_single:
            self._drop_idle(now)
            self._admit_tenants(waiting)
        lanes = {entry.lane for entry in waiting}
        self._chosen_at = now
        self._chosen_from = Snapshot(
            waiting,
            {lane: self._view(lane, is_single=is_single) for lane in lanes},
            self._tenant_turns,
            self._tenant_rows,
            decode_ms=(self._decode_ms or TARGET_MS) if self._decoders else 0.0,
            decode_run=self._decode_run,
            debt_ms=self._debt_ms,
            num_passed=self._num_passed,
            due=None if any(entry.is_decode for entry in waiting) else self._due(now),
            has_company=now - self._company_at <= COMPANY_S,
        )
        return self._chosen_from

    def note_batch(self, batch: Sequence[Share], ms: float, idle_ms: float = 0.0) -> bool:
        """A batch chosen from the last snapshot was computed, after so long without work.

        Tells whether rows of a prefill were in it.
        """
        turn, decode_rows, piece_rows = self.tick(), 0, 0
        waiting = {entry.session: entry for entry in self._chosen_from.waiting}
        for share in batch:
            entry = waiting[share.session]
            if entry.is_decode:
                decode_rows += share.rows
                _remember(self._tenant_turns, entry.tenant, turn)
            else:
                piece_rows += share.rows
                mates = [e for e in waiting.values() if not e.is_decode and e.tenant == entry.tenant]
                is_oldest = entry.since == min(mate.since for mate in mates)
                self._num_passed = 0 if is_oldest else self._num_passed + 1
                rows = self._tenant_rows.get(entry.tenant, 0.0)
                self._floor_rows = max(self._floor_rows, rows)
                _remember(self._tenant_rows, entry.tenant, rows + share.rows)
        lane = waiting[batch[0].session].lane
        view = self._views.get(lane, LaneView())
        waited_ms = self._waited_ms(ms) if piece_rows and not decode_rows else 0.0
        self._debt_ms = debt_after(self._chosen_from, view, decode_rows, piece_rows, ms, waited_ms)
        _remember(self._views, lane, with_time(view, decode_rows, piece_rows, ms))
        self._note_turn(piece_rows, ms)
        ready = sum(entry.is_decode and entry.lane == lane for entry in waiting.values())
        self._note_idle(ms, idle_ms, has_left_some=ready > len(batch) - (piece_rows > 0))
        self._chosen_from = NOTHING  # holds sessions, which may have ended
        return piece_rows > 0

    def _note_turn(self, piece_rows: int, ms: float) -> None:
        if piece_rows:
            self._decode_run = 0
            return
        has_prefill = any(not entry.is_decode for entry in self._chosen_from.waiting)
        self._decode_run = self._decode_run + 1 if has_prefill else 0
        self._decode_ms += (RECENT if self._decode_ms else 1.0) * (ms - self._decode_ms)

    def _note_idle(self, ms: float, idle_ms: float, *, has_left_some: bool) -> None:
        window = self._window
        window.busy_ms += ms
        window.idle_ms += idle_ms
        window.has_left_some |= has_left_some
        length_ms = window.busy_ms + window.idle_ms
        if length_ms < WINDOW_MS:
            return
        self._window = _Window()
        if window.idle_ms > MUCH_IDLE * length_ms:
            self._more_steps //= 2
        elif window.has_left_some and window.idle_ms < LITTLE_IDLE * length_ms:
            self._more_steps += 1

    def _view(self, lane: Lane, *, is_single: bool) -> LaneView:
        view = self._views.get(lane, LaneView())
        if is_single or lane.max_works == 1:
            return view
        stages = [decoder.stages for decoder in self._decoders.values() if decoder.lane == lane]
        return replace(view, decode_limit=stage_limit(stages) + self._more_steps)

    def _note_company(self, now: float) -> None:
        """Something came: was another session here too?"""
        oldest = next(iter(self._arrivals))
        while now - self._arrivals[oldest] > COMPANY_S:
            del self._arrivals[oldest]
            oldest = next(iter(self._arrivals))
        if len(self._arrivals) > 1:
            self._company_at = now

    def _due(self, now: float) -> Due | None:
        """The decode step that comes back next. The shorter of its last two rounds counts: early is worse than late."""
        due: Due | None = None
        for decoder in self._decoders.values():
            round_ms = min(decoder.round_s, decoder.last_round_s) * 1000
            in_ms = round_ms - (now - decoder.seen) * 1000
            late_ms = min(LATE * round_ms, self._decode_ms)
            if round_ms and in_ms > -late_ms and (due is None or in_ms < due.in_ms):
                due = Due(decoder.lane, in_ms, in_ms + late_ms)
        return due

    def _waited_ms(self, ms: float) -> float:
        """For how much of a batch without decode steps one was waiting."""
        if any(entry.is_decode for entry in self._chosen_from.waiting):
            return ms
        came = [decoder.seen for decoder in self._decoders.values() if decoder.seen > self._chosen_at]
        return max(0.0, ms - (min(came) - self._chosen_at) * 1000) if came else 0.0

    def _drop_idle(self, now: float) -> None:
        """Forget sessions that have not decoded for longer than a few of their rounds."""
        idle = [
            session
            for session, decoder in self._decoders.items()
            if now - decoder.seen > max(ACTIVE_S, ACTIVE_ROUNDS * decoder.round_s)
        ]
        for session in idle:
            del self._decoders[session]

    def _admit_tenants(self, waiting: Sequence[Waiting]) -> None:
        """A tenant whose prefills wait again begins little behind the others, whatever it did not use meanwhile."""
        least = self._floor_rows - BURST_ROWS
        for tenant in {entry.tenant for entry in waiting if not entry.is_decode}:
            if self._tenant_rows.get(tenant, least) <= least:
                _remember(self._tenant_rows, tenant, least)


def _remember(table: dict[Key, Value], key: Key, value: Value) -> None:
    """Keep a value as the newest, and no more than so many."""
    table.pop(key, None)
    table[key] = value
    if len(table) > MAX_REMEMBERED:
        del table[next(iter(table))]
