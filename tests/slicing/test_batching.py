"""What goes into a batch, in virtual time; and the queue with its one thread."""

from __future__ import annotations

import asyncio
import itertools
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field, replace

import pytest
import pytest_asyncio
from hypothesis import given, settings
from hypothesis import strategies as st

from slicing.batch_choice import (
    IDLE_TARGET_MS,
    MAX_DECODE_ROWS,
    MAX_DECODE_RUN,
    MAX_DECODE_RUN_SPLIT,
    MAX_PIECE_ROWS,
    MIN_JOINED_ROWS,
    MIN_PIECE_ROWS,
    Due,
    Lane,
    LaneView,
    RowTimes,
    Share,
    Snapshot,
    Waiting,
    choose,
    stage_limit,
    target_ms,
)
from slicing.batch_ledger import Ledger
from slicing.batching import SETTLE_TURNS, SHORT_MS, BatchQueue, Dropped, Part

INVARIANT = Lane("invariant", max_works=16, can_split=True)
PLAIN = Lane("plain")
LANES = (INVARIANT, PLAIN, Lane("other", max_works=4, can_split=True))


# The decision ---------------------------------------------------------------------------------------------------


def waiting(
    session: str,
    rows: int = 1,
    lane: Lane = INVARIANT,
    tenant: str = "t",
    since: int = 0,
    company: str | None = None,
) -> Waiting:
    return Waiting(session, tenant, lane, rows, rows <= MAX_DECODE_ROWS, since, company)


def snapshot(*entries: Waiting, **fields: object) -> Snapshot:
    given = {"lanes": {entry.lane: LaneView() for entry in entries}, "tenant_turns": {}, "tenant_rows": {}}
    return Snapshot(entries, **given | fields)


def measured(ms_of: dict[int, float]) -> RowTimes:
    times = RowTimes()
    for rows, ms in ms_of.items():
        times = times.noted(rows, ms)
    return times


@st.composite
def snapshots(draw: st.DrawFn) -> Snapshot:
    numbers = st.integers(0, 20)
    entries = [
        Waiting(
            number,
            draw(st.sampled_from("xyz")),
            draw(st.sampled_from(LANES)),
            rows,
            rows <= 16,
            draw(numbers),
            draw(st.sampled_from([None, None, "u", "v"])),
        )
        for number, rows in enumerate(draw(st.lists(st.sampled_from([1, 1, 1, 5, 16, 17, 300, 4096]))))
    ]
    row_ms = st.dictionaries(st.integers(1, 600), st.floats(0.1, 200), max_size=4)
    views = {
        lane: LaneView(draw(st.integers(1, 16)), measured(draw(row_ms)), measured(draw(row_ms)))
        for lane in LANES
    }
    return Snapshot(
        entries,
        views,
        draw(st.dictionaries(st.sampled_from("xyz"), numbers)),
        draw(st.dictionaries(st.sampled_from("xyz"), st.floats(0, 9000))),
        decode_ms=draw(st.sampled_from([0.0, 5.0, 80.0])),
        decode_run=draw(st.integers(0, 9)),
        debt_ms=draw(st.sampled_from([0.0, 40.0])),
        num_passed=draw(st.integers(0, 5)),
        due=draw(st.none() | st.builds(Due, st.sampled_from(LANES), st.floats(-5, 60), st.floats(60, 90))),
        has_company=draw(st.booleans()),
    )


@given(snapshots())
@settings(max_examples=300, deadline=None)
def test_every_batch_obeys_the_rules(given: Snapshot) -> None:
    batch = choose(given)
    by_session = {entry.session: entry for entry in given.waiting}
    if (
        not batch
    ):  # what waits goes, but for a prefill that is to go with the decode step that is all but here
        assert not given.waiting or (given.due is not None and not any(e.is_decode for e in given.waiting))
        return
    chosen = [by_session[share.session] for share in batch]
    lane, view = chosen[0].lane, given.lanes[chosen[0].lane]
    decodes = [entry for entry in chosen if entry.is_decode]
    assert len({share.session for share in batch}) == len(batch) <= lane.max_works
    assert {entry.lane for entry in chosen} == {lane}
    companies = Counter(
        entry.company
        for entry in given.waiting
        if entry.is_decode and entry.lane == lane and entry.company is not None
    )
    most = max(view.decode_limit, companies[decodes[0].company] if decodes else 0)
    assert len(decodes) <= most
    assert len(chosen) - len(decodes) <= 1
    for share, entry in zip(batch, chosen, strict=True):
        is_whole = share.rows == entry.rows
        assert is_whole or (
            lane.can_split and not entry.is_decode and MIN_JOINED_ROWS <= share.rows < entry.rows
        )
    if len(decodes) == len(chosen):  # as many decode steps as may go together
        ready = sum(entry.is_decode and entry.lane == lane for entry in given.waiting)
        assert len(decodes) == min(ready, lane.max_works, most)


@given(snapshots())
@settings(max_examples=200, deadline=None)
def test_a_piece_keeps_its_batch_within_the_target_by_what_was_measured(given: Snapshot) -> None:
    batch = choose(given)
    by_session = {entry.session: entry for entry in given.waiting}
    piece = next((share for share in batch if not by_session[share.session].is_decode), None)
    if piece is None or piece.rows in (MIN_JOINED_ROWS, MIN_PIECE_ROWS, by_session[piece.session].rows):
        return  # the least that goes, or all there is
    view = given.lanes[by_session[piece.session].lane]
    times = view.pieces if view.pieces.row_ms else view.decodes
    if times.row_ms:
        rows = sum(share.rows for share in batch)
        target = target_ms(by_session[piece.session], rows - piece.rows, given)
        assert times.expected_ms(rows) <= target + 1e-6


def test_tenants_take_turns_however_many_sessions_they_have() -> None:
    many = [waiting(f"a{n}", tenant="a", since=n) for n in range(5)]
    view = {"lanes": {INVARIANT: LaneView(decode_limit=3)}}
    batch = choose(snapshot(*many, waiting("b0", tenant="b", since=9), tenant_turns={"a": 3, "b": 2}, **view))
    assert [share.session for share in batch] == ["b0", "a0", "a1"]


def test_no_stage_idles_where_decoders_go_in_groups() -> None:
    assert [stage_limit([3] * number) for number in (1, 3, 4, 8)] == [1, 1, 2, 3]
    assert stage_limit([1] * 8) == 8
    assert stage_limit([2, 2, 4, 4]) == 2
    assert stage_limit([]) == 1


def test_what_came_together_goes_on_together_and_no_more_than_that() -> None:
    pair = [waiting("a", company="ab"), waiting("b", since=1, company="ab")]
    others = [waiting("c", since=2), waiting("d", since=3, company="d")]
    view = {"lanes": {INVARIANT: LaneView(decode_limit=1)}}
    assert [share.session for share in choose(snapshot(*pair, *others, **view))] == ["a", "b"]
    assert [share.session for share in choose(snapshot(*others, **view))] == ["c"]


def test_a_crowd_that_came_together_does_not_go_before_other_tenants() -> None:
    crowd = [waiting(f"a{n}", tenant="a", since=n, company="crowd") for n in range(6)]
    late = waiting("b0", tenant="b", since=9)
    view = {"lanes": {INVARIANT: LaneView(decode_limit=2)}}
    batch = choose(snapshot(*crowd, late, tenant_turns={"a": 3, "b": 4}, **view))
    assert [share.session for share in batch][:2] == ["a0", "b0"]


def test_a_short_prompt_goes_before_a_long_one_and_does_not_stop_it() -> None:
    entries = [waiting("long", 8000, since=0), waiting("short", 100, since=1)]
    ledger, order = Ledger(), []
    for _ in range(8):
        (share,) = choose(ledger.snapshot(entries, 0.0))
        ledger.note_batch([share], 1.0)
        order.append(share.session)
    assert order == ["short", "short", "short", "long"] * 2


def test_a_prefill_that_cannot_be_split_goes_alone_after_a_few_decode_batches() -> None:
    entries = [waiting("p", 400, PLAIN), waiting("d", 1, PLAIN)]
    runs = [choose(snapshot(*entries, decode_run=number))[0] for number in (0, MAX_DECODE_RUN)]
    assert runs == [Share("d", 1), Share("p", 400)]


def test_pieces_that_were_too_dear_are_paid_back_first_but_not_for_ever() -> None:
    entries = [waiting("p", 400), waiting("d")]
    runs = [
        choose(snapshot(*entries, decode_run=number, debt_ms=9.0)) for number in (1, MAX_DECODE_RUN_SPLIT)
    ]
    assert [len(batch) for batch in runs] == [1, 2]


def test_measured_times_are_taken_for_no_less_than_they_are() -> None:
    times = measured({1: 4.0, 4: 5.0, 64: 64.0})
    assert times.expected_ms(1) == 4.0
    assert times.expected_ms(8) == 10.0
    assert times.expected_ms(128) == 128.0
    assert times.rows_within(20.0) == 16
    assert times.rows_within(100.0) == 100
    assert times.rows_within(3.0) == 0
    assert RowTimes().rows_within(50.0) is None


def test_a_first_batch_that_was_slow_for_its_own_reasons_is_forgotten() -> None:
    times = measured({64: 6400.0})
    for _ in range(12):
        times = times.noted(min(100, times.rows_within(50.0) or 1), 20.0)
    assert times.rows_within(200.0) >= 64


def test_what_decode_steps_take_alone_is_measured_before_a_piece_joins_them() -> None:
    entries = [waiting("p", 400), waiting("d")]
    known = {"lanes": {INVARIANT: LaneView(decodes=measured({1: 4.0}))}}
    assert [len(choose(snapshot(*entries, **fields))) for fields in ({}, known)] == [1, 2]


# In virtual time ------------------------------------------------------------------------------------------------


@dataclass
class Stream:
    """A session of the simulation: a prompt, then tokens, each `away_ms` after the last."""

    name: str
    rows_left: int
    tenant: str = "t"
    stages: int = 1
    away_ms: float = 0.0
    num_tokens: int = 0
    ready_at: float = 0.0
    since: int = 0
    rows: int = 0  # of the prompt
    is_prefill: bool = False
    done_at: list[float] = field(default_factory=list)


class Simulation:
    """One node in virtual time: batches take what a CPU's kernels take, by rows and by keys behind them."""

    def __init__(
        self, *streams: Stream, fixed_ms: float = 3.0, row_ms: float = 1.0, keys_ms: float = 0.0
    ) -> None:
        """`keys_ms`: what a piece reads of the keys before it, for each 1000 of them."""
        self.keys_ms = keys_ms
        self.now = 0.0
        self.ledger = Ledger()
        self.streams = {stream.name: stream for stream in streams}
        self.fixed_ms, self.row_ms = fixed_ms, row_ms
        self.batches: list[dict[str, int]] = []
        for stream in streams:
            stream.rows, stream.is_prefill = stream.rows_left, stream.rows_left > MAX_DECODE_ROWS

    def run(self, until_ms: float) -> None:
        waiting_now: set[str] = set()
        while self.now < until_ms:
            self._arrive(waiting_now)
            coming = [
                stream.ready_at
                for name, stream in self.streams.items()
                if stream.rows_left and name not in waiting_now
            ]
            if not waiting_now:
                if not coming:
                    return
                self.now = min(coming)
                continue
            waits = [self._waiting(self.streams[name]) for name in sorted(waiting_now)]
            batch = choose(self.ledger.snapshot(waits, self.now / 1000))
            if not batch:  # for the step that is due
                self.now = min(*coming, self.now + max(0.001, self.ledger.patience_s * 1000))
                continue
            rows = sum(share.rows for share in batch)
            ms = self.fixed_ms + self.row_ms * rows + self._keys_ms(batch)
            self.now += ms
            self._arrive(waiting_now)
            self.ledger.note_batch(batch, ms)
            self.batches.append({share.session: share.rows for share in batch})
            for share in batch:
                self._take(self.streams[share.session], share.rows, waiting_now)

    def _arrive(self, waiting_now: set[str]) -> None:
        for name, stream in self.streams.items():
            if stream.rows_left and stream.ready_at <= self.now and name not in waiting_now:
                waiting_now.add(name)
                stream.since = self.ledger.tick()
                self.ledger.note_arrival(
                    name, INVARIANT, stream.stages, stream.rows_left, stream.ready_at / 1000
                )

    def _keys_ms(self, batch: Sequence[Share]) -> float:
        prefills = [self.streams[share.session] for share in batch if self.streams[share.session].is_prefill]
        return sum(self.keys_ms * (stream.rows - stream.rows_left) / 1000 for stream in prefills)

    def _waiting(self, stream: Stream) -> Waiting:
        return Waiting(
            stream.name, stream.tenant, INVARIANT, stream.rows_left, not stream.is_prefill, stream.since
        )

    def _take(self, stream: Stream, rows: int, waiting_now: set[str]) -> None:
        stream.rows_left -= rows
        if stream.rows_left:
            return
        stream.since = self.ledger.tick()
        waiting_now.remove(stream.name)
        stream.done_at.append(self.now)
        stream.is_prefill = False
        if stream.num_tokens:
            stream.num_tokens -= 1
            stream.rows_left, stream.ready_at = 1, self.now + stream.away_ms


def decoder(name: str, **fields: object) -> Stream:
    return Stream(name, 1, num_tokens=10_000, **fields)


@pytest.mark.parametrize("keys_ms", [0.0, 2.0])
@pytest.mark.parametrize("away_ms", [0.0, 4.0, 12.0])
@pytest.mark.parametrize("num_decoders", [1, 4])
def test_decoders_beside_a_long_prefill_keep_half_their_speed(
    away_ms: float, num_decoders: int, keys_ms: float
) -> None:
    def tokens(*others: Stream) -> tuple[int, Simulation]:
        decoders = [decoder(f"d{n}", away_ms=away_ms, stages=1 + (away_ms > 0)) for n in range(num_decoders)]
        simulation = Simulation(*decoders, *others, keys_ms=keys_ms)
        simulation.run(8000)
        return sum(len(stream.done_at) for stream in decoders), simulation

    alone, _ = tokens()
    long = Stream("long", 8000)
    beside, simulation = tokens(long)
    assert beside >= 0.5 * alone
    assert 8000 - long.rows_left >= 0.15 * simulation.now / simulation.row_ms  # and the prefill goes on


def test_a_short_prompt_behind_a_long_one_starts_within_half_as_much_again() -> None:
    alone = Stream("short", 400)
    Simulation(alone).run(5000)
    short, long = Stream("short", 400, ready_at=1000.0), Stream("long", 8000)
    Simulation(short, long).run(20_000)
    assert short.done_at[0] - 1000 <= 1.5 * alone.done_at[0] + IDLE_TARGET_MS * 1.2
    assert long.rows_left == 0


def test_pieces_are_as_long_as_ten_decode_steps_while_nobody_decodes() -> None:
    """With 5 ms for a decode step and 0.3 ms a row of a piece, 50 ms and not 200: what a short prompt waits for."""
    view = LaneView(decodes=measured({1: 5.0}), pieces=measured({128: 128 * 0.3}))
    (share,) = choose(snapshot(waiting("p", 4096), lanes={INVARIANT: view}))
    assert share.rows == int(10 * 5.0 / 0.3)
    (lone,) = choose(snapshot(waiting("p", 4096), lanes={INVARIANT: view}, has_company=False))
    assert lone.rows == MAX_PIECE_ROWS > 3 * share.rows


def test_a_prompt_that_takes_little_longer_than_a_piece_goes_in_one() -> None:
    view = LaneView(decodes=measured({1: 5.0}), pieces=measured({16: 16 * 1.0}))
    for prompt, rows in ((90, 90), (110, 50)):  # a piece takes 50 ms
        (share,) = choose(snapshot(waiting("p", prompt), lanes={INVARIANT: view}))
        assert share.rows == rows
    begun = replace(waiting("p", 90), is_begun=True)  # of a long one
    (share,) = choose(snapshot(begun, lanes={INVARIANT: view}))
    assert share.rows == 50


def test_a_prefill_waits_for_the_decode_step_that_is_all_but_here_and_goes_with_it() -> None:
    view = LaneView(decodes=measured({1: 5.0}), pieces=measured({1: 5.0, 4: 9.0}))
    known = {"lanes": {INVARIANT: view, PLAIN: LaneView()}, "decode_ms": 5.0}
    prefill = waiting("p", 4096)
    assert choose(snapshot(prefill, due=Due(INVARIANT, 4.0, 6.0), **known)) == []
    (between,) = choose(snapshot(prefill, due=Due(INVARIANT, 30.0, 35.0), **known))
    assert view.pieces.expected_ms(between.rows) <= 30.0  # and one that is over by then does not wait
    assert choose(snapshot(prefill, due=Due(PLAIN, 4.0, 6.0), **known))  # with whose steps it cannot go
    assert choose(snapshot(prefill, due=Due(INVARIANT, 4.0, 6.0), **known, decode_run=MAX_DECODE_RUN_SPLIT))
    assert len(choose(snapshot(prefill, waiting("d"), **known))) == 2


def test_a_decode_step_is_due_after_the_shorter_of_its_last_two_rounds_and_then_overdue() -> None:
    ledger = Ledger()
    for now in (0.0, 0.030, 0.080):  # rounds of 30 and 50 ms
        ledger.note_arrival("d", INVARIANT, 2, 1, now)
    ledger.note_batch(choose(ledger.snapshot([waiting("d")], 0.080)), 8.0)
    prefill = [waiting("p", 400)]
    due = ledger.snapshot(prefill, 0.090).due
    assert due is not None
    assert (due.in_ms, due.patience_ms) == (pytest.approx(20.0), pytest.approx(27.5))
    assert ledger.snapshot(prefill, 0.116).due is not None
    assert ledger.snapshot(prefill, 0.118).due is None
    assert ledger.snapshot([waiting("d"), *prefill], 0.090).due is None  # it is here
    ledger.forget("d")
    assert ledger.snapshot(prefill, 0.090).due is None


def test_company_is_sessions_at_the_same_time_not_one_after_the_other() -> None:
    ledger = Ledger()
    for number in range(3):
        ledger.note_arrival(f"s{number}", INVARIANT, 1, 400, float(number))
        assert not ledger.snapshot([waiting(f"s{number}", 400)], number + 0.5).has_company
        ledger.forget(f"s{number}")
    ledger.note_arrival("a", INVARIANT, 1, 400, 10.0)
    ledger.note_arrival("b", INVARIANT, 1, 400, 11.0)
    assert ledger.snapshot([waiting("a", 400)], 12.0).has_company
    ledger.note_arrival("a", INVARIANT, 1, 400, 40.0)
    assert not ledger.snapshot([waiting("a", 400)], 41.0).has_company


@pytest.mark.parametrize("tenant", ["t", "u"])
def test_a_long_prefill_ends_although_short_ones_keep_coming(tenant: str) -> None:
    long = Stream("long", 2000, tenant=tenant)
    shorts = [Stream(f"s{n}", 200, ready_at=n * 180.0) for n in range(200)]
    simulation = Simulation(long, *shorts)
    simulation.run(20_000)
    assert long.done_at


def test_two_tenants_prefills_get_half_each() -> None:
    mine = Stream("mine", 6000, tenant="one")
    theirs = [Stream(f"s{n}", 6000, tenant="many") for n in range(5)]
    Simulation(mine, *theirs).run(6000)
    assert 6000 - mine.rows_left >= 0.4 * sum(6000 - stream.rows_left for stream in (mine, *theirs))


def test_decoders_of_a_chain_go_in_as_many_groups_as_there_are_stages() -> None:
    simulation = Simulation(*(decoder(f"d{n}", stages=2, away_ms=7.0) for n in range(8)))
    simulation.run(2000)
    sizes = Counter(len(batch) for batch in simulation.batches[10:])
    assert max(sizes) <= 4
    assert sizes[4] > 0.9 * sum(sizes.values())


# The queue and its thread ---------------------------------------------------------------------------------------


@dataclass
class FakeJob:
    """Remembers what became of it."""

    session: str
    rows: int = 1
    tenant: str = ""
    lane: Lane = INVARIANT
    stages: int = 1
    is_poisoned: bool = False
    error: Exception | None = None
    num_finished: int = 0

    def fail(self, error: Exception) -> None:
        self.error, self.rows = error, 0

    def finish(self) -> None:
        self.num_finished += 1


class FakeWork:
    """What the queue runs: the first batch waits for the gate."""

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.entered = threading.Event()
        self.batches: list[list[tuple[str, int]]] = []
        self.threads: set[int] = set()

    def run(self, parts: Sequence[Part[FakeJob]]) -> None:
        self.threads.add(threading.get_ident())
        self.entered.set()
        assert self.gate.wait(10)
        if any(part.job.is_poisoned for part in parts):
            raise ValueError("poison")
        self.batches.append([(part.job.session, part.rows) for part in parts])
        for part in parts:
            part.job.rows -= part.rows


@pytest_asyncio.fixture
async def work() -> FakeWork:
    return FakeWork()


@pytest_asyncio.fixture
async def queue(work: FakeWork) -> AsyncIterator[BatchQueue[FakeJob]]:
    made = BatchQueue(work.run)
    yield made
    work.gate.set()
    await made.close()


async def submit_all(queue: BatchQueue[FakeJob], work: FakeWork, *jobs: FakeJob) -> None:
    """Queue jobs behind one that holds the thread, and let all of them go."""
    queue.submit(FakeJob("blocker"))
    await asyncio.to_thread(work.entered.wait, 10)
    for job in jobs:
        queue.submit(job)
    work.gate.set()
    async with asyncio.timeout(10):
        while not all(job.num_finished for job in jobs):
            await asyncio.sleep(0.001)
    assert work.batches.pop(0) == [("blocker", 1)]


async def test_what_is_ready_goes_together_and_a_sessions_own_jobs_in_order(
    queue: BatchQueue[FakeJob], work: FakeWork
) -> None:
    jobs = [FakeJob("a"), FakeJob("a", 2), FakeJob("b"), FakeJob("c")]
    await submit_all(queue, work, *jobs)
    sessions = [{session for session, _ in batch} for batch in work.batches]
    assert sorted(rows for batch in work.batches for session, rows in batch if session == "a") == [1, 2]
    assert sessions[-1] == {"a"} or len(sessions) == 2
    assert all(job.num_finished == 1 for job in jobs)


async def test_steps_that_come_in_one_turn_of_the_loop_go_together_on_an_idle_thread(
    queue: BatchQueue[FakeJob], work: FakeWork
) -> None:
    work.gate.set()
    jobs = [FakeJob(name) for name in "abcd"]
    for job in jobs:
        queue.submit(job)
        time.sleep(0.005)  # the thread would have begun by now
    async with asyncio.timeout(10):
        while not all(job.num_finished for job in jobs):
            await asyncio.sleep(0.001)
    assert work.batches == [[(name, 1) for name in "abcd"]]


async def test_steps_of_a_chain_that_come_in_one_turn_are_not_parted_for_its_stages(
    queue: BatchQueue[FakeJob], work: FakeWork
) -> None:
    queue.submit(FakeJob("blocker"))
    await asyncio.to_thread(work.entered.wait, 10)
    jobs = [FakeJob(name, stages=4) for name in "abcd"]
    for pair in (jobs[:2], jobs[2:]):
        for job in pair:
            queue.submit(job)
        for _ in range(SETTLE_TURNS):
            await asyncio.sleep(0)
    work.gate.set()
    async with asyncio.timeout(10):
        while not all(job.num_finished for job in jobs):
            await asyncio.sleep(0.001)
    assert work.batches[1:] == [[("a", 1), ("b", 1)], [("c", 1), ("d", 1)]]


async def test_two_companies_that_come_in_one_turn_do_not_become_one(
    queue: BatchQueue[FakeJob], work: FakeWork
) -> None:
    queue.submit(FakeJob("blocker"))
    await asyncio.to_thread(work.entered.wait, 10)
    jobs = [FakeJob(name, stages=4) for name in "abcd"]
    for number, job in enumerate(jobs):
        queue.submit(job, company=("first", "second")[number // 2])
    work.gate.set()
    async with asyncio.timeout(10):
        while not all(job.num_finished for job in jobs):
            await asyncio.sleep(0.001)
    assert work.batches[1:] == [[("a", 1), ("b", 1)], [("c", 1), ("d", 1)]]


async def test_a_plain_lane_is_computed_one_job_a_call(queue: BatchQueue[FakeJob], work: FakeWork) -> None:
    await submit_all(queue, work, *(FakeJob(name, rows, lane=PLAIN) for name in "abc" for rows in (1, 40)))
    assert sorted(rows for batch in work.batches for _, rows in batch) == [1, 1, 1, 40, 40, 40]
    assert {len(batch) for batch in work.batches} == {1}


async def test_a_prefill_is_computed_in_pieces_and_finishes_once(
    queue: BatchQueue[FakeJob], work: FakeWork
) -> None:
    prefill = FakeJob("p", 5000)
    decodes = [FakeJob(f"d{n}") for n in range(3)]
    await submit_all(queue, work, prefill, *decodes)
    assert sum(rows for batch in work.batches for session, rows in batch if session == "p") == 5000
    assert len(work.batches) > 4
    assert prefill.num_finished == 1
    assert queue.counts.pieces == sum("p" in dict(batch) for batch in work.batches)


async def test_what_comes_behind_a_prefill_meanwhile_waits_for_all_of_its_pieces(
    queue: BatchQueue[FakeJob], work: FakeWork
) -> None:
    prefill, behind = FakeJob("p", 3000), FakeJob("p", 1)
    queue.submit(prefill)
    await asyncio.to_thread(work.entered.wait, 10)
    queue.submit(behind)
    work.gate.set()
    async with asyncio.timeout(10):
        while not behind.num_finished:
            await asyncio.sleep(0.001)
    assert prefill.num_finished == 1
    assert work.batches[-1] == [("p", 1)]
    assert max(rows for batch in work.batches for _, rows in batch) <= MAX_PIECE_ROWS
    assert queue.counts.pieces == len(work.batches) - 1


async def test_a_poisoned_job_fails_alone(queue: BatchQueue[FakeJob], work: FakeWork) -> None:
    jobs = [FakeJob(name, is_poisoned=name == "b") for name in "abcd"]
    await submit_all(queue, work, *jobs)
    assert [type(job.error) for job in jobs] == [type(None), ValueError, type(None), type(None)]
    assert work.batches[-3:] == [[("a", 1)], [("c", 1)], [("d", 1)]]
    assert queue.counts.repeats == 1


async def test_a_job_that_run_forgets_does_not_go_round_for_ever(work: FakeWork) -> None:
    queue: BatchQueue[FakeJob] = BatchQueue(lambda parts: None)
    job = FakeJob("a")
    queue.submit(job)
    async with asyncio.timeout(5):
        while not job.num_finished:
            await asyncio.sleep(0.001)
    assert isinstance(job.error, AssertionError)
    await queue.close()


async def test_discarded_jobs_never_run(queue: BatchQueue[FakeJob], work: FakeWork) -> None:
    queue.submit(FakeJob("blocker"))
    await asyncio.to_thread(work.entered.wait, 10)
    doomed, last = [FakeJob("a"), FakeJob("a", 50)], FakeJob("b")
    for job in (*doomed, last):
        queue.submit(job)
    assert queue.discard("a") == doomed
    assert queue.num_queued == 1
    work.gate.set()
    async with asyncio.timeout(10):
        while not last.num_finished:
            await asyncio.sleep(0.001)
    assert work.batches == [[("blocker", 1)], [("b", 1)]]
    assert queue.discard("a") == []
    assert [job.num_finished for job in doomed] == [0, 0]


async def test_a_prefill_discarded_in_the_middle_of_a_piece_finishes_as_dropped(
    queue: BatchQueue[FakeJob], work: FakeWork
) -> None:
    prefill, again = FakeJob("p", 4000), FakeJob("p", 3)
    queue.submit(prefill)
    await asyncio.to_thread(work.entered.wait, 10)
    assert queue.discard("p") == []
    queue.submit(again)
    work.gate.set()
    async with asyncio.timeout(10):
        while not again.num_finished:
            await asyncio.sleep(0.001)
    assert isinstance(prefill.error, Dropped)
    assert (prefill.num_finished, again.error) == (1, None)


async def test_calls_run_on_the_one_thread_and_bring_their_errors_back(
    queue: BatchQueue[FakeJob], work: FakeWork
) -> None:
    await submit_all(queue, work, *(FakeJob(name, 1) for name in "abc"))
    assert {await queue.call(threading.get_ident)} == work.threads
    assert threading.get_ident() not in work.threads

    def fail() -> None:
        raise ValueError("as it is")

    with pytest.raises(ValueError, match="as it is"):
        await queue.call(fail)


async def test_batches_and_idle_time_are_counted(queue: BatchQueue[FakeJob], work: FakeWork) -> None:
    queue.is_open = lambda: True
    await submit_all(queue, work, *(FakeJob(f"s{n}") for n in range(5)))
    assert await queue.call(lambda: 1) == 1  # the thread has counted what it computed
    counts = queue.counts
    assert (counts.batches, counts.works, counts.rows, counts.pieces) == (len(work.batches) + 1, 6, 6, 0)
    assert sum(counts.by_rows) == counts.batches
    assert counts.by_rows[2] == sum(4 <= len(batch) < 8 for batch in work.batches)
    await asyncio.sleep(0.05)
    assert await queue.call(lambda: 1) == 1
    assert 0.04 < counts.idle_s < 5


async def settled(job: FakeJob) -> None:
    async with asyncio.timeout(10):
        while not job.num_finished:
            await asyncio.sleep(0.001)


async def test_decode_steps_known_to_be_short_are_computed_by_the_loop_itself(
    queue: BatchQueue[FakeJob], work: FakeWork
) -> None:
    work.gate.set()
    queue.is_open = lambda: True
    for rows, where in ((1, "thread"), (1, "loop"), (40, "thread"), (1, "loop")):
        work.threads.clear()
        job = FakeJob("a", rows)
        queue.submit(job)
        await settled(job)
        is_here = work.threads == {threading.get_ident()}
        assert where == ("loop" if is_here else "thread")
    assert queue.counts.batches == queue.counts.works == 4
    assert queue.busy == (0, 0.0)


async def test_the_loop_lets_come_what_was_sent_together_before_it_computes(
    queue: BatchQueue[FakeJob], work: FakeWork
) -> None:
    work.gate.set()
    for name in "ab":  # both decode, and what a step takes is known
        job = FakeJob(name)
        queue.submit(job)
        await settled(job)
    jobs = [FakeJob(name) for name in "ab"]
    work.batches.clear()
    work.threads.clear()
    for job in jobs:
        queue.submit(job)
        await asyncio.sleep(0)
    for job in jobs:
        await settled(job)
    assert work.batches == [[("a", 1), ("b", 1)]]
    assert work.threads == {threading.get_ident()}


@pytest.mark.parametrize("why", ["slow", "never", "plain"])
async def test_decode_steps_that_hold_the_loop_up_are_not_computed_by_it(why: str) -> None:
    clock = itertools.count(step=SHORT_MS / 1000) if why == "slow" else None
    work = FakeWork()
    work.gate.set()
    queue: BatchQueue[FakeJob] = BatchQueue(
        work.run, clock=time.perf_counter if clock is None else lambda: next(clock)
    )
    queue.short_ms = 0.0 if why == "never" else SHORT_MS / 2
    for _ in range(3):
        job = FakeJob("a", lane=PLAIN if why == "plain" else INVARIANT)
        queue.submit(job)
        await settled(job)
    assert threading.get_ident() not in work.threads
    await queue.close()


async def test_the_loop_leaves_decode_steps_to_the_thread_while_that_computes_or_a_prefill_waits(
    queue: BatchQueue[FakeJob], work: FakeWork
) -> None:
    work.gate.set()
    first = FakeJob("a")
    queue.submit(first)
    await settled(first)  # what a step takes is known from here
    work.threads.clear()
    prefill, decode = FakeJob("p", 3000), FakeJob("a")
    work.gate.clear()
    work.entered.clear()
    queue.submit(prefill)
    await asyncio.to_thread(work.entered.wait, 10)
    queue.submit(decode)
    for _ in range(2 * SETTLE_TURNS):
        await asyncio.sleep(0)
    assert not decode.num_finished
    work.gate.set()
    await settled(decode)
    await settled(prefill)
    assert threading.get_ident() not in work.threads


async def test_what_fails_on_the_loop_fails_alone_too(queue: BatchQueue[FakeJob], work: FakeWork) -> None:
    work.gate.set()
    for name in "ab":
        job = FakeJob(name)
        queue.submit(job)
        await settled(job)
    work.threads.clear()
    jobs = [FakeJob(name, is_poisoned=name == "b") for name in "abc"]
    for job in jobs:
        queue.submit(job)
    for job in jobs:
        await settled(job)
    assert work.threads == {threading.get_ident()}
    assert [type(job.error) for job in jobs] == [type(None), ValueError, type(None)]


async def test_what_the_loop_computes_is_not_counted_as_idle(work: FakeWork) -> None:
    def run(parts: Sequence[Part[FakeJob]]) -> None:
        work.run(parts)
        time.sleep(0.01)

    queue = BatchQueue(run)
    queue.is_open = lambda: True
    work.gate.set()
    await queue.call(lambda: None)
    begun = time.perf_counter()
    for _ in range(10):
        job = FakeJob("a")
        queue.submit(job)
        await settled(job)
    await queue.call(lambda: None)
    took_s = time.perf_counter() - begun
    assert threading.get_ident() in work.threads
    assert queue.counts.idle_s <= took_s - 0.1 + 0.01
    await queue.close()


async def test_closing_drops_what_is_queued_and_ends_the_thread(work: FakeWork) -> None:
    queue = BatchQueue(work.run)
    queue.submit(FakeJob("a"))
    await asyncio.to_thread(work.entered.wait, 10)
    queue.submit(FakeJob("b"))
    async with asyncio.timeout(5):
        closing = asyncio.create_task(queue.close())
        await asyncio.sleep(0)
        work.gate.set()
        await closing
    assert work.batches == [[("a", 1)]]
    assert not queue._thread.is_alive()
