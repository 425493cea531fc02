"""Nodes that choose their layers themselves, asked all the time: one joins, one is killed, one leaves, a gap opens.

As long as every layer has a holder not one request may fail, and a gap must close by itself.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

import pytest

from tests.chaos.model import NUM_LAYERS, WholeAnswers, long_answers, write_model
from tests.support.crowd import Crowd
from tests.support.nursery import Nursery
from tests.support.processes import Process, Processes
from tests.support.slow_process import slowed

pytestmark = [pytest.mark.chaos, pytest.mark.processes]
NUM_TOKENS = 26
MEMORY = "5500kB"  # four of the seven layers, with room for sessions
SETTLE_S = 90.0  # for a node to notice, think, load and drain
LOOK_S = 0.1


def layers_of(node: Process) -> tuple[int, int]:
    """What a node holds by what it said last; nothing yet: 0 to 0."""
    last = "0:0"
    for event in node.events:
        if event["event"] == "ready":
            last = event["layers"]
        elif event["event"] == "moved":
            last = event["layers"][0]["layers"] if isinstance(event["layers"], list) else event["layers"]
    start, _, end = last.partition(":")
    return int(start), int(end)


def holders(nodes: Iterable[Process]) -> Counter[int]:
    """How many hold each layer."""
    return Counter(layer for node in nodes for layer in range(*layers_of(node)))


def spare(nodes: list[Process]) -> Process:
    """A node whose layers all have another holder."""
    counts = holders(nodes)
    return next(node for node in nodes if all(counts[layer] > 1 for layer in range(*layers_of(node))))


async def covered(nodes: list[Process]) -> None:
    """Wait until every layer has a holder."""
    limit = time.monotonic() + SETTLE_S
    while len(holders(nodes)) < NUM_LAYERS:
        told = [[it for it in node.events if it["event"] not in ("progress", "measured")] for node in nodes]
        assert time.monotonic() < limit, told
        await asyncio.sleep(LOOK_S)


@pytest.mark.timeout(600)
async def test_nothing_fails_while_slices_move_and_gaps_close(tmp_path: Path) -> None:
    model = str(write_model(tmp_path / "model"))
    due = long_answers(WholeAnswers(Path(model)), 8, NUM_TOKENS)
    began = time.monotonic()

    def say(what: str) -> None:
        print(f"{time.monotonic() - began:5.1f} s: {what}; {[layers_of(node) for node in nodes]}")

    with Nursery() as nursery, Processes(nursery) as processes:
        sentinel = processes.sentinel()
        flags = ("--memory", MEMORY, "--dtype", "float32")

        async def join(count: int) -> list[Process]:
            slices = [""] * count
            return await asyncio.to_thread(
                lambda: processes.hosts(model, *slices, flags=flags, bootstraps=[sentinel])
            )

        nodes = await join(3)
        await covered(nodes)
        gateway = await asyncio.to_thread(processes.serve, model, [], bootstraps=[sentinel])
        async with Crowd(gateway, due, NUM_TOKENS).asking() as crowd:
            await crowd.more_answers(20)
            say("three nodes")
            nodes += await join(1)
            await crowd.more_answers(20)
            say("one joined")
            nodes.remove(lost := spare(nodes))
            lost.kill()
            await crowd.more_answers(20)
            say("one killed")
            nodes += await join(1)
            await crowd.more_answers(20)
            say("one joined")
            nodes.remove(left := spare(nodes))
            done = await asyncio.to_thread(processes.leave, left)
            assert done.returncode == 0, done.stderr
            await crowd.more_answers(20)
            say("one left")
            assert (crowd.failed, crowd.wrong) == ([], [])

            counts = holders(nodes)
            only = next(node for node in nodes if any(counts[it] == 1 for it in range(*layers_of(node))))
            nodes.remove(only)
            only.kill()
            say("a sole holder killed")
            await covered(nodes)
            say("the gap is filled")
            num_failed = len(crowd.failed)
            await crowd.more_answers(20)
            say(f"{crowd.answered} answers, {crowd.replays} replays, {num_failed} refused for the gap")
        late = crowd.failed[num_failed:]
        assert all(text.startswith("no_route") for text in crowd.failed), Counter(crowd.failed)
        assert len(late) <= crowd.num_people  # those that were asked before the gateway heard of it
        assert crowd.wrong == []


@pytest.mark.timeout(600)
async def test_layers_leave_a_node_that_became_eight_times_slower(tmp_path: Path) -> None:
    model = str(write_model(tmp_path / "model"))
    due = long_answers(WholeAnswers(Path(model)), 8, NUM_TOKENS)
    with Nursery() as nursery, Processes(nursery) as processes:
        sentinel = processes.sentinel()
        flags = ("--memory", MEMORY, "--dtype", "float32")
        nodes = processes.hosts(model, "", "", "", flags=flags, bootstraps=[sentinel])
        await covered(nodes)
        gateway = await asyncio.to_thread(processes.serve, model, [], bootstraps=[sentinel])
        counts = holders(nodes)
        only = next(node for node in nodes if any(counts[it] == 1 for it in range(*layers_of(node))))
        async with Crowd(gateway, due, NUM_TOKENS).asking() as crowd, slowed(only.popen.pid, 8.0):
            began = time.monotonic()
            while not any(it["event"] == "moved" for node in nodes for it in node.events):
                assert time.monotonic() - began < 2 * SETTLE_S, [layers_of(node) for node in nodes]
                await asyncio.sleep(LOOK_S)
            print(f"moved after {time.monotonic() - began:.0f} s: {[layers_of(node) for node in nodes]}")
            await crowd.more_answers(20)
        assert (crowd.failed, crowd.wrong) == ([], [])
        others = holders(node for node in nodes if node is not only)
        assert all(others[layer] for layer in range(*layers_of(only)) if counts[layer] == 1)
