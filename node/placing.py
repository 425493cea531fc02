"""When a node looks for the layers where it helps most, and how nodes that look at once stay out of each other's way.

A node says what it is about to hold before it loads (an intention, in its announcement), looks again a moment later,
and gives way to one with a lower id that says the same. What is best is decided by `pool` and `routing.placement`;
loading and draining is the mover's. Knows nothing of sessions and tensors.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from node import events
from node.events import OnEvent
from node.pool import (
    PREFIX_SIZE,
    Pool,
    choose,
    demands,
    improvement,
    line_ms,
    lines_of,
    max_layers,
    pool_of,
)
from node.slice_loader import ModelFacts
from node.slice_mover import LoadFailed, SliceMover
from routing.announcement import Announcement
from routing.link import log_receiver_failure
from routing.placement import Placed, PoolNode, fits_beside, may_leave
from routing.types import NodeId, SliceSpec

logger = logging.getLogger(__name__)

MAX_CLAIMS = 6  # of one decision: each loses to a node that was not heard of before


class Announced(Protocol):
    """What placement needs of a `LiveDirectory`."""

    on_change: list[Callable[[], None]]

    def announced(self) -> Sequence[Announcement]:
        """Live announcements of others."""


@dataclass(frozen=True, slots=True)
class PlacingTimes:
    """Seconds. All but the limits are varied by half, so that nodes fall out of step."""

    first_look: float = 10.0  # a dial, a handshake and a round of gossip, over any distance
    settle: float = 1.5  # before the first choice: others that start now are heard of by then
    confirm: float = 1.0  # between an intention and the load: gossip reaches a few hundred nodes
    delay: float = 4.0  # before a move that helps little; one that helps more is made sooner
    debounce: float = 2.0  # after a change of the network
    every: float = 30.0  # without one
    stay: float = 60.0  # after a move, unless layers are missing
    retry: float = 10.0  # after a load that failed, doubling
    last_retry: float = 600.0
    patience: float = 120.0  # with others that mean to load, or wait for a place


@dataclass(frozen=True, slots=True)
class Room:
    """Memory for weights with their sessions, in bytes."""

    allowed: int  # in all
    free: int  # beside what is held now


class Placer:
    """Keeps a node where it helps most."""

    def __init__(
        self,
        node_id: NodeId,
        facts: Sequence[ModelFacts],
        mover: SliceMover,
        directory: Announced,
        *,
        first_look: Callable[[float], Awaitable[None]],
        layer_ms: Callable[[bytes], float | None],
        room: Callable[[], Room],
        announce: Callable[[], None],
        on_event: OnEvent,
        lines: Callable[[], Mapping[bytes, float]] = dict,
        times: PlacingTimes = PlacingTimes(),
        clock: Callable[[], float] = time.monotonic,
        rng: random.Random | None = None,
    ) -> None:
        """`first_look` waits until the network was heard of, for so many seconds at most.

        `layer_ms` tells how fast a model's layers are here of late, where some are held; `lines`, what lines from
        others bring us, Mbit/s by id prefix, as others are told.
        """
        self.intends: tuple[Placed, ...] = ()
        self._node_id = node_id
        self._facts = {model.digest: model for model in facts}
        self._models = demands(facts)
        self._mover = mover
        self._directory = directory
        self._first_look = first_look
        self._layer_ms = layer_ms
        self._room = room
        self._announce = announce
        self._on_event = on_event
        self._lines = lines
        self._times = times
        self._clock = clock
        self._rng = rng or random.Random()  # noqa: S311 - spreads nodes in time, no secret
        self._changed = asyncio.Event()
        self._planning_since: dict[tuple[NodeId, object], float] = {}
        self._claimed_at = 0.0  # when `intends` was last empty
        self._moved_at: float | None = None
        self._failures = 0
        self._is_idle_told = False
        self._looks_again = False  # soon: somebody may have loaded the same meanwhile

    @property
    def intentions(self) -> tuple[tuple[bytes, int, int], ...]:
        """What is to be announced as intended: (digest prefix, start, end) of every slice after the change."""
        return tuple((p.digest[:PREFIX_SIZE], p.spec.start, p.spec.end) for p in self.intends)

    async def run(self) -> None:
        """Find a place, and look for a better one whenever the network changes; until cancelled."""
        self._directory.on_change.append(self._changed.set)
        try:
            await self._first_look(self._times.first_look)
            await self._pause(self._times.settle)
            while True:
                await self._try_to_look()
                await self._next_occasion()
        finally:
            self._directory.on_change.remove(self._changed.set)

    async def _try_to_look(self) -> None:
        try:
            await self.look()
        except Exception as error:  # a bug of ours, or of the planner: the node serves on with what it holds
            self._failures += 1
            self._say_done()
            log_receiver_failure("placement", error)

    async def look(self) -> None:
        """Decide once, and do it."""
        chosen = self._choose()
        if chosen is None:
            self._tell_idle()
            return
        if self._mover.placed:
            if not self._is_worth_it(chosen):
                return
            await self._pause(self._times.delay / self._factor(chosen))
            chosen = self._choose()
        if chosen is not None and (claimed := await self._claim(chosen)) is not None:
            await self._move(claimed)

    def _tell_idle(self) -> None:
        """Say once why this node holds nothing."""
        if self._mover.placed or self._is_idle_told:
            return
        self._is_idle_told = True
        fits = any(self._me().max_layers.values())
        text = "the others hold every layer" if fits else "not one layer fits into the memory allowed"
        self._on_event(events.waiting(text))

    # Deciding -------------------------------------------------------------------------------------------------

    def _choose(self) -> tuple[Placed, ...] | None:
        """What to hold, as things look now; None: no change, or not now."""
        pool, me = self._pool(), self._me()
        if me.held and pool.movers:  # one node moves at a time
            return None
        chosen = choose(me, pool, self._models)
        return None if chosen is None or set(chosen) == set(me.held) else chosen

    def _pool(self) -> Pool:
        """Once we have said what we intend, who says the same later and has a higher id does not count."""
        announced = self._directory.announced()
        self._note_plans(announced)
        now = self._clock()
        ignored = {
            node_id
            for (node_id, intends), since in self._planning_since.items()
            if now - since > self._times.patience
            or (self.intends and intends and node_id > self._node_id and since > self._claimed_at)
        }
        return pool_of(
            announced, tuple(self._facts.values()), ignored=ignored, lines=self._lines_of(announced)
        )

    def _lines_of(self, announced: Iterable[Announcement]) -> Mapping[NodeId, float]:
        told: dict[NodeId, Mapping[bytes, float]] = {it.node_id: dict(it.neighbour_mbps) for it in announced}
        return lines_of({**told, self._node_id: self._lines()})

    def _note_plans(self, announced: Iterable[Announcement]) -> None:
        """Remember since when others mean to load, or wait for a place: nobody should count on it for ever."""
        now = self._clock()
        plans = {(told.node_id, told.intends) for told in announced if told.intends or not told.offers}
        self._planning_since = {plan: self._planning_since.get(plan, now) for plan in plans}

    def _me(self) -> PoolNode:
        room = self._room()
        models = self._facts.values()
        return PoolNode(
            self._node_id,
            {model.digest: self._layer_ms(model.digest) or model.layer_ms for model in models},
            {model.digest: max_layers(room.allowed, model) for model in models},
            self._mover.placed,
            {model.digest: max_layers(room.free, model) for model in models},
            line_ms(self._lines_of(self._directory.announced()).get(self._node_id), models),
        )

    def _is_worth_it(self, chosen: tuple[Placed, ...]) -> bool:
        """Whether to move so soon after the last move: only where that covers a model."""
        if self._moved_at is None or self._clock() - self._moved_at >= self._times.stay:
            return True
        now, then = improvement(self._me(), chosen, self._pool(), self._models)
        return then.models > now.models

    def _factor(self, chosen: tuple[Placed, ...]) -> float:
        """By how much a change helps, for who goes first: from 1 upwards."""
        now, then = improvement(self._me(), chosen, self._pool(), self._models)
        if then.models > now.models or not now.rate:
            return 100.0
        return max(1.0, then.rate / now.rate) ** 2

    # Claiming -------------------------------------------------------------------------------------------------

    async def _claim(self, chosen: tuple[Placed, ...]) -> tuple[Placed, ...] | None:
        """Say what is intended until nobody with a better right says the same; None: something else is better now."""
        for _ in range(MAX_CLAIMS):
            self._intend(chosen)
            await self._pause(self._times.confirm)
            again = self._choose()
            if again is None:
                self._intend(())
                return None
            if set(again) == set(chosen):
                break
            chosen = again
        return chosen

    def _intend(self, slices: tuple[Placed, ...]) -> None:
        if slices != self.intends:
            if not self.intends:
                self._pool()  # whoever has said so by now came first
                self._claimed_at = self._clock()
            self.intends = slices
            self._announce()

    async def _move(self, chosen: tuple[Placed, ...]) -> None:
        me, held = self._me(), self._mover.placed
        is_beside = fits_beside(me, chosen)
        try:
            if not is_beside and held and not may_leave(me, chosen, self._pool().others):
                return  # somebody left meanwhile: our layers are needed
            told = self._named(chosen)
            self._on_event(events.moving(told, self._named(held)) if held else events.placing(told))
            await self._mover.move(chosen, fits_beside=is_beside, on_held=self._say_done)
            self._failures = 0
            self._moved_at = self._clock()
            self._looks_again = True
            if held:
                self._on_event(events.moved(self._named(self._mover.placed)))
        except LoadFailed:
            self._failures += 1
        finally:
            self._say_done()

    def _say_done(self) -> None:
        """What was intended is held, or never will be."""
        self._intend(())

    def _named(self, slices: Iterable[Placed]) -> list[tuple[str, SliceSpec]]:
        return [(self._facts[placed.digest].public_name, placed.spec) for placed in slices]

    # Waiting --------------------------------------------------------------------------------------------------

    async def _next_occasion(self) -> None:
        """Wait for the network to change in a way that concerns us, or for the usual time to be over."""
        if self._failures:
            await self._pause(min(self._times.last_retry, self._times.retry * 2 ** (self._failures - 1)))
            return
        if self._looks_again:
            self._looks_again = False
            await self._pause(self._times.settle)
            return
        known = self._pool().signature
        deadline = self._clock() + self._varied(self._times.every)
        while (left_s := deadline - self._clock()) > 0:
            self._changed.clear()
            try:
                async with asyncio.timeout(left_s):
                    await self._changed.wait()
            except TimeoutError:
                return
            await self._pause(self._times.debounce)
            if self._pool().signature != known:
                return

    async def _pause(self, seconds: float) -> None:
        await asyncio.sleep(self._varied(seconds))

    def _varied(self, seconds: float) -> float:
        return seconds * self._rng.uniform(0.75, 1.25)
