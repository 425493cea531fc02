"""A slice is changed for another while the node serves: what is offered when, what drains, and what goes wrong."""

from __future__ import annotations

import asyncio
import gc
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from node.held_slice import HeldSlice
from node.loading import LoadedSlice
from node.slice_mover import LoadFailed, SliceMover
from node.slice_table import SliceTable
from node.stats import NodeStats
from routing.placement import Placed
from routing.types import SliceSpec
from slicing.errors import ModelError
from tests.integration.home import Home, home, rows, run
from tests.node.rig import DIGEST, TIMEOUT_S, Node
from tests.node.test_slice_table import OTHER_DIGEST, fake_held

OLD, NEW = Placed(DIGEST, SliceSpec(0, 4)), Placed(DIGEST, SliceSpec(2, 6))


class FakeLoader:
    """Loads at once, or when it is let; fails when it is told to."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, SliceSpec | None]] = []
        self.errors: list[Exception] = []
        self.digest = DIGEST
        self.may_end = asyncio.Event()
        self.may_end.set()
        self.was_stopped = False

    async def load(self, model: str, layers: SliceSpec | None) -> LoadedSlice:
        self.asked.append((model, layers))
        try:
            await self.may_end.wait()
        except asyncio.CancelledError:
            self.was_stopped = True
            raise
        if self.errors:
            raise self.errors.pop()
        assert layers is not None
        return LoadedSlice(fake_held(layers.start, layers.end, digest=self.digest), 1, 0.1, 100, 100)


@dataclass
class Moving:
    """A mover and all that it touches."""

    slices: SliceTable
    loader: FakeLoader
    stats: NodeStats = field(default_factory=NodeStats)
    events: list[dict[str, Any]] = field(default_factory=list)
    offered: list[list[str]] = field(default_factory=list)  # at each announcement

    def mover(self, drain_s: float = TIMEOUT_S) -> SliceMover:
        return SliceMover(
            self.slices,
            self.loader,
            {DIGEST: "fake"},
            drain_s=drain_s,
            stats=self.stats,
            announce=lambda: self.offered.append([str(offer.spec) for offer in self.slices.offers()]),
            on_loaded=lambda loaded: None,
            on_event=lambda event: self.events.append(dict(event)),
        )


@pytest.fixture
async def moving() -> Moving:
    return Moving(SliceTable((fake_held(0, 4),)), FakeLoader())


async def until(is_true: Callable[[], bool]) -> None:
    async with asyncio.timeout(TIMEOUT_S):
        while not is_true():
            await asyncio.sleep(0.001)


async def test_the_new_slice_is_offered_before_the_old_one_is_not(moving: Moving) -> None:
    held_events: list[int] = []
    await moving.mover().move(
        (NEW,), fits_beside=True, on_held=lambda: held_events.append(len(moving.slices))
    )
    assert moving.offered == [["0:4", "2:6"], ["2:6"]]
    assert held_events == [2]
    assert (moving.stats.slices_loaded, moving.stats.slices_drained, moving.stats.sessions_cut) == (1, 1, 0)
    assert (moving.stats.num_slices, moving.stats.weights_bytes) == (1, 100)


async def test_the_old_slice_stays_until_its_last_session_ends(moving: Moving) -> None:
    (old,) = moving.slices.held
    moving.slices.attach(old)
    move = asyncio.create_task(moving.mover().move((NEW,), fits_beside=True))
    await until(lambda: moving.offered[-1:] == [["2:6"]])
    assert old in moving.slices
    assert not move.done()
    moving.slices.detach(old)
    await move
    assert old not in moving.slices


async def test_sessions_that_outlast_the_limit_are_ended_by_the_table(moving: Moving) -> None:
    (old,) = moving.slices.held
    ended: list[HeldSlice] = []
    moving.slices.on_removed = ended.append
    moving.slices.attach(old)
    await moving.mover(drain_s=0.0).move((NEW,), fits_beside=True)
    assert (ended, moving.stats.sessions_cut) == ([old], 1)


async def test_an_unchanged_slice_is_not_touched(moving: Moving) -> None:
    (old,) = moving.slices.held
    await moving.mover().move((OLD, Placed(DIGEST, SliceSpec(5, 6))), fits_beside=True)
    assert moving.loader.asked == [("fake", SliceSpec(5, 6))]
    assert old in moving.slices
    assert moving.stats.slices_drained == 0


async def test_slices_of_models_that_placement_does_not_decide_about_stay(moving: Moving) -> None:
    other = fake_held(0, 6, digest=OTHER_DIGEST)
    moving.slices.add(other)
    await moving.mover().move((NEW,), fits_beside=True)
    assert other in moving.slices


@pytest.mark.parametrize(
    ("error", "code", "text"),
    [
        (ModelError("the hub does not answer"), "MODEL", "the hub does not answer"),
        (OSError(28, "No space left on device"), "DISK", "No space left on device"),
        (MemoryError(), "MEMORY", "not enough memory"),
        (RuntimeError("tensor([1, 2])"), "LOAD", "RuntimeError"),
    ],
)
async def test_a_load_that_fails_keeps_the_old_slice(
    moving: Moving, error: Exception, code: str, text: str
) -> None:
    (old,) = moving.slices.held
    moving.loader.errors = [error]
    with pytest.raises(LoadFailed):
        await moving.mover().move((NEW,), fits_beside=True)
    assert moving.slices.serving == (old,)
    (event,) = moving.events
    assert (event["event"], event["layers"], event["code"]) == ("load_failed", "2:6", code)
    assert text in event["text"]
    assert "tensor" not in event["text"]
    assert moving.stats.loads_failed == 1


async def test_files_that_have_become_another_model_are_not_served(moving: Moving) -> None:
    moving.loader.digest = OTHER_DIGEST
    with pytest.raises(LoadFailed):
        await moving.mover().move((NEW,), fits_beside=True)
    assert [offer.spec for offer in moving.slices.offers()] == [SliceSpec(0, 4)]
    assert moving.events[0]["code"] == "DIGEST"


async def test_without_room_for_both_the_old_slice_goes_first(moving: Moving) -> None:
    (old,) = moving.slices.held
    moving.slices.attach(old)
    move = asyncio.create_task(moving.mover().move((NEW,), fits_beside=False))
    await until(lambda: bool(moving.offered))
    assert moving.offered == [[]]
    assert moving.loader.asked == []
    moving.slices.detach(old)
    await move
    assert moving.offered == [[], ["2:6"]]


async def test_without_room_for_both_a_failed_load_brings_the_old_slice_back(moving: Moving) -> None:
    moving.loader.errors = [OSError(5, "Input/output error")]
    with pytest.raises(LoadFailed):
        await moving.mover().move((NEW,), fits_beside=False)
    assert moving.loader.asked == [("fake", SliceSpec(2, 6)), ("fake", SliceSpec(0, 4))]
    assert moving.offered[-1] == ["0:4"]


async def test_leaving_during_a_load_ends_it(moving: Moving) -> None:
    moving.loader.may_end.clear()
    move = asyncio.create_task(moving.mover().move((NEW,), fits_beside=True))
    await until(lambda: bool(moving.loader.asked))
    move.cancel()
    with pytest.raises(asyncio.CancelledError):
        await move
    assert moving.loader.was_stopped
    assert len(moving.slices) == 1


async def test_a_removed_slice_frees_its_memory(moving: Moving) -> None:
    (held,) = moving.slices.held
    runner = weakref.ref(held.runner)
    del held
    await moving.mover().move((NEW,), fits_beside=True)
    gc.collect()
    assert runner() is None


# Under load -------------------------------------------------------------------------------------------------------


async def stream(here: Home, num_steps: int, seed: int) -> np.ndarray[Any, Any]:
    """An answer that feeds on itself, like a text: each row sent is made of the last one that came back."""
    chain = await here.open()
    try:
        outputs = [await run(chain, 0, rows(3, seed))]
        for position in range(3, 3 + num_steps):
            outputs.append(await run(chain, position, np.tanh(outputs[-1][-1:])))
        return np.concatenate(outputs)
    finally:
        await chain.close()


def mover_of(node: Node, drain_s: float) -> SliceMover:
    return SliceMover(
        node.slices,
        FakeLoader(),
        {DIGEST: "fake"},
        drain_s=drain_s,
        stats=node.stats,
        announce=lambda: None,
        on_loaded=lambda loaded: None,
        on_event=lambda event: None,
    )


@pytest.mark.parametrize("drain_s", [TIMEOUT_S, 0.0], ids=["drained", "cut"])
async def test_no_stream_fails_and_none_changes_while_slices_move(drain_s: float) -> None:
    async with home() as here:
        first, second = await here.rig.add_fake_node(0, 4), await here.rig.add_fake_node(2, 6)
        await here.know(first, second)
        expected = [await stream(here, 20, seed) for seed in range(4)]
        streams = [asyncio.create_task(stream(here, 20, seed)) for seed in range(4)]
        await until(lambda: first.stats.num_sessions == second.stats.num_sessions == 4)
        for node, spec in ((first, SliceSpec(0, 3)), (second, SliceSpec(1, 6)), (first, SliceSpec(0, 5))):
            await mover_of(node, drain_s).move((Placed(DIGEST, spec),), fits_beside=True)
        for got, unbroken in zip(await asyncio.gather(*streams), expected, strict=True):
            np.testing.assert_array_equal(got, unbroken)
        late = await stream(here, 20, 0)
        np.testing.assert_array_equal(late, expected[0])
        assert first.stats.slices_moved == 2
        assert (first.stats.sessions_cut + second.stats.sessions_cut > 0) is (drain_s == 0.0)
        assert [str(held.offer.spec) for held in first.slices.held] == ["0:5"]
