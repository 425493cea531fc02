"""What the queue of steps costs where one stream is all there is: the same steps with it, by hand, and without.

Through `BatchQueue` as on a node; through a bare queue to a thread and back, which anything needs that computes beside
an event loop; and one after the other on the thread. What lies between the first two is choosing and keeping account.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Callable
from functools import partial
from queue import SimpleQueue
from threading import Thread
from typing import Any, cast

import torch

from bench.local_swarm import MODEL
from bench.report import Report, quartiles
from node.history import History, HistoryBudget
from node.prefix_store import ForkedState
from node.scheduler import Scheduler
from node.session import Session
from node.stats import NodeStats
from node.step_batch import run_steps
from node.step_job import StepJob
from routing.types import HopEntry, NodeId, SessionId, Step, Want, WireDtype
from slicing.batching import Part
from slicing.ends import Parts
from slicing.load_runner import load_runner
from slicing.model_kind import shape_of
from slicing.model_source import open_checkpoint

SECTION = "scheduler"
LAYERS = (1, 16)  # those of the first of two nodes
PAST = 128
NUM_STEPS = 8  # of a round: many short ones, as what else runs on a machine comes and goes
ROUNDS = 150
TOKENS = 48  # of the answer that is computed alone
PASSES = 3  # queues that a token goes through: two nodes and the gateway's turn, which closes and opens

RunRound = Callable[[], Any]
Times = dict[str, list[float]]  # milliseconds a step, by the way that steps went


async def measure_scheduler(report: Report, *, rounds: int = ROUNDS, weights: str = "int8") -> None:
    """What queues add to a token of one stream: at most 2 % of what it takes to compute."""
    report.section(SECTION)
    torch.set_num_threads(1)
    checkpoint = open_checkpoint(MODEL)
    num_layers = shape_of(checkpoint.config).num_layers
    runner: Any = load_runner(checkpoint, Parts.whole(num_layers), weights=weights)  # type: ignore[arg-type]
    make = partial(_job, _session(runner), runner)
    scheduler, bare = Scheduler(), BareQueue()
    ways: dict[str, RunRound] = {
        "queue": partial(_one_stream, scheduler.submit, make),
        "bare": partial(_one_stream, bare.submit, make),
        "direct": lambda: scheduler.call(partial(_straight, make)),
    }
    await scheduler.call(lambda: run_steps([Part(make(0, _ignore, rows=PAST), PAST)]))
    wall: Times = {name: [] for name in ways}
    busy: Times = {name: [] for name in ways}  # of the processor, all threads
    for number in range(rounds + 1):  # the first one warms up, and is not counted
        for name in ways if number % 2 else reversed(ways):
            begun = time.perf_counter(), time.process_time()
            await ways[name]()
            wall[name].append((time.perf_counter() - begun[0]) / NUM_STEPS * 1e3)
            busy[name].append((time.process_time() - begun[1]) / NUM_STEPS * 1e3)
    token_ms = await scheduler.call(lambda: _token_ms(runner, num_layers))
    await scheduler.close()
    bare.close()
    name = f"{runner.form}, layers {LAYERS[0]}:{LAYERS[1]}"
    report.add(SECTION, f"{name}: a step, computed without a queue", quartiles(wall["direct"]), "ms")
    report.add(SECTION, "a token of all layers and both ends, computed alone", token_ms, "ms")
    _add(report, "wall clock", wall, token_ms, "<= 0.02")
    _add(report, "processor time", busy, token_ms)


def _add(report: Report, clock: str, taken: Times, token_ms: float, bar: str = "") -> None:
    def more(name: str, other: str) -> float:
        pairs = zip(taken[name][1:], taken[other][1:], strict=True)
        return statistics.median(one - two for one, two in pairs)

    parts = {
        "handed over and back": more("bare", "direct"),
        "choice and account": more("queue", "bare"),
        "whole queue": more("queue", "direct"),
    }
    for name, ms in parts.items():
        report.add(SECTION, f"a pass, {clock}: {name}", ms * 1e3, "us")
    for name, ms in parts.items():
        told = bar if name == "whole queue" else ""
        report.add(
            SECTION, f"{PASSES} passes over a token, {clock}: {name}", PASSES * ms / token_ms, "", told
        )


class BareQueue:
    """A thread that computes what it is given and posts back; decides nothing."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._jobs: SimpleQueue[StepJob | None] = SimpleQueue()
        self._thread = Thread(target=self._work, daemon=True)
        self._thread.start()

    def submit(self, job: StepJob) -> None:
        """Compute a job and finish it on the loop."""
        self._jobs.put(job)

    def close(self) -> None:
        """End the thread."""
        self._jobs.put(None)
        self._thread.join()

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            run_steps([Part(job, job.rows)])
            self._loop.call_soon_threadsafe(job.finish)


async def _one_stream(submit: Callable[[StepJob], object], make: Any) -> None:
    """Each step is submitted by the end of the one before, as an answer's are."""
    done = asyncio.get_running_loop().create_future()
    left = NUM_STEPS

    def go_on(job: StepJob) -> None:
        nonlocal left
        left -= 1
        if job.error is not None:
            done.set_exception(job.error)
        elif left:
            submit(make(PAST + NUM_STEPS - left, go_on))
        else:
            done.set_result(None)

    submit(make(PAST, go_on))
    await done


def _straight(make: Any) -> None:
    for number in range(NUM_STEPS):
        run_steps([Part(make(PAST + number, _ignore), 1)])


def _ignore(job: StepJob) -> None:
    """Nobody waits for it."""


def _token_ms(runner: Any, num_layers: int) -> float:
    """Median of what a decode step takes from ids to logits, in milliseconds."""
    cache, times = runner.new_cache(), []
    runner.run_opening(cache, torch.arange(PAST), 0, end=num_layers)
    for number in range(TOKENS):
        begun = time.perf_counter()
        states = runner.run_opening(cache, torch.tensor([number]), PAST + number, end=num_layers)
        runner.run_closing(cache, states, PAST + number + 1, start=num_layers)
        times.append(time.perf_counter() - begun)
    cache.close()
    return statistics.median(times) * 1000


def _job(
    session: Session, runner: Any, position: int, on_finish: Callable[[StepJob], None], rows: int = 1
) -> StepJob:
    payload = bytes(rows * runner.hidden_size * 4)
    step = Step(session.session_id, 1, position + 1, position, rows, payload, Want.LAST)
    return StepJob(session, step, runner, on_finish, time.perf_counter())


def _session(runner: Any) -> Session:
    entry = HopEntry(
        route_key=bytes(32),
        hop=0,
        num_hops=1,
        gateway_id=NodeId(bytes(32)),
        model_digest=bytes(32),
        start=LAYERS[0],
        end=LAYERS[1],
        wire_in=WireDtype.FLOAT32,
        wire_out=WireDtype.FLOAT32,
        max_positions=PAST + NUM_STEPS,
        idle_timeout_s=60,
    )
    history, state = History(HistoryBudget(NodeStats()), max_bytes=1 << 20), ForkedState(runner.new_cache())
    held = cast(Any, None)  # steps know their runner themselves
    return Session(SessionId(bytes(16)), 1, entry, held, state, history, entry.gateway_id, [], 0.0)
