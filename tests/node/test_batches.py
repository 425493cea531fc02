"""An answer is the one its owner would have got alone: whoever else comes, leaves or fails, in whatever pieces."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from routing.types import Answer, SliceOffer, SliceSpec, Want, WireDtype
from slicing import batch_choice
from slicing.batch import Runner
from slicing.batching import BatchCounts
from slicing.ends import Parts
from slicing.load_runner import load_runner
from slicing.model_source import open_checkpoint
from slicing.sampler import SamplingParams
from tests.node.fake_runner import FakeRunner
from tests.node.rig import DIGEST, Node, Rig, Script, fake_offer, fake_rig
from tests.support.tiny_models import small_llama

VOCAB_SIZE = 32
NUM_LAYERS = 4
MAX_WORKS = 4
SAMPLING = {"params": SamplingParams(temperature=0.8, seed=5).to_map(), "prompt_ids": ()}


@dataclass(frozen=True)
class Plan:
    """One session of a schedule: rows of each step, when it comes, and after how many answers it is given up."""

    steps: tuple[int, ...]
    waits: int  # turns of the event loop before its first step
    leaves_after: int  # steps that it sends; its answers are not waited for then
    is_greedy: bool
    tenant: bytes


@dataclass
class Schedule:
    plans: Sequence[Plan]
    first_piece: int
    max_piece: int


@st.composite
def schedules(draw: st.DrawFn) -> Schedule:
    plans = []
    for _ in range(draw(st.integers(2, 5))):
        prompt = draw(st.sampled_from([1, 3, 17, 40, 70]))
        steps = (prompt, *draw(st.lists(st.integers(1, 3), max_size=4)))
        leaves = draw(st.sampled_from([len(steps)] * 3 + [1]))
        plan = Plan(
            steps,
            draw(st.integers(0, 6)),
            leaves,
            draw(st.booleans()),
            draw(st.sampled_from([b"a" * 8, b""])),
        )
        plans.append(plan)
    return Schedule(plans, draw(st.integers(1, 40)), draw(st.integers(4, 40)))


class Swarm:
    """A rig with one node that serves the whole model in the thin mode."""

    def __init__(self, rig: Rig, node: Node) -> None:
        self.rig, self.node = rig, node
        self.answers: dict[bytes, dict[int, bytes]] = {}

    def script(self, plan: Plan, num_layers: int) -> Script:
        sampling = None if plan.is_greedy else SAMPLING
        changes = {"tenant": plan.tenant}
        return self.rig.script(
            (self.node, 0, num_layers), opens=True, closes=True, sampling=sampling, changes=changes
        )

    async def receive(self) -> None:
        """Collect answers until cancelled."""
        while True:
            _, message = await self.rig.gateway.inbox.get()
            assert isinstance(message, Answer), message
            self.answers.setdefault(message.session_id, {})[message.step] = bytes(message.payload)

    async def play(self, plan: Plan, number: int, num_layers: int) -> list[bytes]:
        """The answers of a session; none where it was given up."""
        for _ in range(plan.waits):
            await asyncio.sleep(0)
        script = self.script(plan, num_layers)
        await script.open()
        position = 0
        for step, rows in enumerate(plan.steps[: plan.leaves_after], start=1):
            ids = [(number * 7 + position + row * row) % VOCAB_SIZE for row in range(rows)]
            await script.send(step, position, ids, want=Want.LAST if rows > 3 else Want.ALL)
            position += rows
            if plan.leaves_after < len(plan.steps):
                await script.first.send(script.cancel())
                return []
            async with asyncio.timeout(20):
                while step not in self.answers.get(script.session_id, {}):
                    await asyncio.sleep(0.0005)
        await script.first.send(script.cancel())
        return list(self.answers[script.session_id].values())


async def compare(schedule: Schedule, runner: Any, offer: SliceOffer) -> BatchCounts:
    """Play every session alone, then all of them together; returns what was counted meanwhile."""
    async with fake_rig() as rig:
        node = await rig.add_node(runner, offer)
        swarm = Swarm(rig, node)
        receiving = asyncio.create_task(swarm.receive())
        try:
            plays = [
                partial(swarm.play, plan, number, offer.num_layers)
                for number, plan in enumerate(schedule.plans)
            ]
            runner.is_invariant = False  # steps stay whole
            alone = [await play() for play in plays]
            runner.is_invariant = True
            pieces = {"FIRST_PIECE_ROWS": schedule.first_piece, "MAX_PIECE_ROWS": schedule.max_piece}
            with patch.multiple(batch_choice, **pieces):
                together = await asyncio.gather(*(play() for play in plays))
        finally:
            receiving.cancel()
        assert together == alone
        return node.stats.batches


@given(schedules())
@settings(max_examples=40, deadline=None)
def test_every_schedule_gives_each_session_the_bits_it_has_alone(schedule: Schedule) -> None:
    offer = fake_offer(SliceSpec(0, 6), has_opening=True, has_closing=True)
    asyncio.run(compare(schedule, FakeRunner(max_works=MAX_WORKS), offer))


async def test_sessions_of_such_a_schedule_do_share_calls_and_prefills_are_split() -> None:
    plans = [Plan((40, 1, 2, 1, 1), 0, 5, True, bytes([number]) * 8) for number in range(4)]
    offer = fake_offer(SliceSpec(0, 6), has_opening=True, has_closing=True)
    counts = await compare(Schedule(plans, 16, 16), FakeRunner(max_works=MAX_WORKS), offer)
    num_steps = 2 * sum(len(plan.steps) for plan in plans)
    assert counts.works >= num_steps + 4 * 2  # each prompt of those together in three pieces
    assert counts.batches < counts.works


@pytest.fixture(scope="module", params=["invariant", "fast"])
def runner(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runner]:
    folder = tmp_path_factory.mktemp("tiny")
    with small_llama(1024, vocab_size=VOCAB_SIZE, num_layers=NUM_LAYERS) as llama:
        llama.save_pretrained(folder)
        yield load_runner(open_checkpoint(str(folder)), Parts.whole(NUM_LAYERS), runner=request.param)


@given(schedule=schedules())
@settings(max_examples=8, deadline=None)
def test_a_real_model_gives_each_session_the_bits_it_has_alone(runner: Runner, schedule: Schedule) -> None:
    whole = SliceSpec(0, NUM_LAYERS)
    offer = SliceOffer("tiny", DIGEST, NUM_LAYERS, 32, whole, WireDtype.FLOAT32, runner.form, True, True)
    asyncio.run(compare(schedule, runner, offer))
