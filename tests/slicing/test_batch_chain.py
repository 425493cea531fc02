"""Several stages in virtual time: decoders in groups keep all of them busy, and a slow one gets what it can use."""

from __future__ import annotations

import heapq
import itertools
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from unittest.mock import patch

import pytest

from slicing import batch_ledger
from slicing.batch_choice import Lane, Share, Waiting, choose
from slicing.batch_ledger import Ledger

LANE = Lane("decode", max_works=64, can_split=True)
HOP_MS = 0.3
RUN_MS = 10_000.0


@dataclass
class Stage:
    """One place of the chain: a batch takes `fixed_ms` and `row_ms` for each row."""

    fixed_ms: float
    row_ms: float
    ledger: Ledger = field(default_factory=Ledger)
    queue: dict[int, int] = field(default_factory=dict)  # session -> since
    is_busy: bool = False
    ended: float = 0.0
    sizes: Counter[int] = field(default_factory=Counter)

    def take(self, now: float) -> tuple[list[Share], float]:
        waiting = [Waiting(session, "t", LANE, 1, True, since) for session, since in self.queue.items()]
        batch = choose(self.ledger.snapshot(waiting, now / 1000))
        for share in batch:
            del self.queue[share.session]
        self.is_busy = True
        self.sizes[len(batch)] += 1
        return batch, self.fixed_ms + self.row_ms * len(batch)


def tokens_per_s(stages: Sequence[Stage], num_sessions: int) -> float:
    """Run all sessions for a while; what one batch sends on arrives together."""
    order, num_tokens = itertools.count(), 0
    events: list[tuple[float, int, int, list[Share], float | None]] = []

    def push(at: float, number: int, batch: list[Share], took_ms: float | None = None) -> None:
        heapq.heappush(events, (at, next(order), number, batch, took_ms))

    push(0.0, 0, [Share(session, 1) for session in range(num_sessions)])
    while events and events[0][0] < RUN_MS:
        now, _, number, batch, took_ms = heapq.heappop(events)
        stage, is_last = stages[number], number + 1 == len(stages)
        if took_ms is None:
            for share in batch:
                stage.ledger.note_arrival(share.session, LANE, len(stages), 1, now / 1000)
                stage.queue[share.session] = stage.ledger.tick()
        else:
            stage.ledger.note_batch(batch, took_ms, now - took_ms - stage.ended)
            stage.is_busy, stage.ended = False, now
            num_tokens += len(batch) if is_last else 0
            push(now + HOP_MS, 0 if is_last else number + 1, batch)
        if stage.queue and not stage.is_busy:
            taken, takes_ms = stage.take(now)
            push(now + takes_ms, number, taken, takes_ms)
    return num_tokens / RUN_MS * 1000


def chain(*costs: tuple[float, float]) -> list[Stage]:
    return [Stage(*cost) for cost in costs]


def test_groups_keep_equal_stages_busy_where_one_group_would_leave_two_of_three_idle() -> None:
    equal = [(1.0, 1.4)] * 3
    with patch.object(batch_ledger, "stage_limit", lambda stages: 64):
        together = tokens_per_s(chain(*equal), 8)
    assert tokens_per_s(chain(*equal), 8) >= 1.8 * together


def test_two_sessions_on_two_stages_are_computed_at_once() -> None:
    equal = [(4.0, 0.5)] * 2
    assert tokens_per_s(chain(*equal), 2) >= 1.8 * tokens_per_s(chain(*equal), 1)


@pytest.mark.parametrize("place", [0, 1, 2])
def test_a_slow_stage_takes_more_at_a_time_than_its_share(place: int) -> None:
    costs = [(1.0, 0.3)] * 3
    costs[place] = (10.0, 0.3)
    with patch.object(batch_ledger, "LITTLE_IDLE", -1.0):  # never
        shared = tokens_per_s(chain(*costs), 8)
    stages = chain(*costs)
    assert tokens_per_s(stages, 8) >= 1.2 * shared
    larger = sum(count for size, count in stages[place].sizes.items() if size > 3)
    assert larger > stages[place].sizes.total() / 4
