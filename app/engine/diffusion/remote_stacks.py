"""The blocks of one picture's remote stacks, run elsewhere: a session for each stack and guidance branch.

The pipeline's threads hand passes in and wait; the sessions live in the event loop. A branch's session is opened with
its first pass, when it is known how much its nodes must keep. Knows nothing of pipelines or noise schedulers.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from app.engine.diffusion.branches import Attempt
from app.engine.diffusion.guidance_call import same_bits
from app.engine.diffusion.halves import halves_of, joined_halves
from app.engine.diffusion.passes import CallSession, NoRoomError, PassOrder, SessionCounts, Sessions
from app.engine.diffusion.patching import Patching, joined, parts_of
from app.engine.diffusion.request import StackUse
from routing.errors import DiffuseError, NoRouteError
from routing.types import NodeId
from slicing.diffusion.calls import Pass
from slicing.diffusion.patches import Mode
from slicing.diffusion.stacks import Stack
from slicing.diffusion.thread import PassSink


class PictureCancelled(BaseException):
    """Ends the pipeline of a picture. No `Exception`: pipelines must not swallow it."""


class Place(NamedTuple):
    """Whose passes a session runs."""

    stack: str
    ordinal: int
    half: int = 0  # of a pass that is split over two groups of nodes


@dataclass(eq=False)
class _BranchStack:
    """One stack of one guidance branch: its session, and whether its nodes keep what the next patch needs."""

    stack: Stack
    ordinal: int
    session: CallSession | None = None
    avoided: frozenset[NodeId] = frozenset()
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    is_fresh: bool = True
    refreshes: int = 0  # how often it was made fresh from outside
    epoch: int = 0
    closed_counts: list[SessionCounts] = field(default_factory=list)
    half: _BranchStack | None = None  # who runs the second half of the rows
    was_split_tried: bool = False
    is_left: bool = False  # a session of it was given up: it need not be apart from others


@dataclass
class PassCounts:
    """Passes of one picture."""

    passes: int = 0
    patched: int = 0
    waited_s: float = 0.0


class RemoteStacks:
    """Where the passes of one picture go. `sink` is called in the pipeline's threads, `close` in the loop."""

    def __init__(
        self,
        sessions: Sessions,
        stacks: Sequence[Stack],
        patching: Patching,
        *,
        on_pass: Callable[[Pass], None] = lambda made: None,
        splits_branches: bool = True,
    ) -> None:
        """`on_pass` hears of each pass in the pipeline's thread. `splits_branches`: over other nodes, if there are."""
        self.counts = PassCounts()
        self.patching = patching
        self._loop = asyncio.get_running_loop()
        self._sessions = sessions
        self._stacks = stacks
        self._on_pass = on_pass
        self._splits_branches = splits_branches
        self._places: dict[Place, _BranchStack] = {}
        self._pending: set[concurrent.futures.Future[list[torch.Tensor] | None]] = set()
        self._tasks: set[asyncio.Task[object]] = set()
        self._is_closed = False

    def sink(self, attempt: Attempt) -> PassSink:
        """What runs the passes of one forward."""
        latents = attempt.call.latents_shape()

        def run(stack: Stack, made: Pass) -> list[torch.Tensor]:
            self._check(attempt)
            self._on_pass(made)
            began = time.perf_counter()
            future = asyncio.run_coroutine_threadsafe(self._run(attempt, stack, made, latents), self._loop)
            self._pending.add(future)
            try:
                streams = future.result()
            except concurrent.futures.CancelledError:
                raise PictureCancelled from None
            finally:
                self._pending.discard(future)
                self.counts.waited_s += time.perf_counter() - began
            if streams is None:
                attempt.check()
                raise PictureCancelled
            return streams

        return run

    def refresh(self, component: str, ordinal: int) -> None:
        """The next passes of this branch must be whole. From the pipeline's thread."""
        self._loop.call_soon_threadsafe(self._refresh, component, ordinal)

    def cancel(self) -> None:
        """End every pass that is waited for; threads that come with another one are ended, too."""
        self._is_closed = True
        for future in tuple(self._pending):
            future.cancel()

    async def close(self) -> None:
        """Free every session on every node."""
        self.cancel()
        for task in tuple(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for place in self._places.values():
            if place.session is not None:
                await place.session.close()

    # What is told of it ---------------------------------------------------------------------------------------

    @property
    def sessions(self) -> list[CallSession]:
        """Those that are open, the first branch's first."""
        places = sorted(self._places.values(), key=lambda place: (place.ordinal, place.stack.offset))
        return [place.session for place in places if place.session is not None]

    @property
    def replays(self) -> int:
        """Routes that took over."""
        return sum(session.replays for session in self.sessions)

    def uses(self) -> tuple[StackUse, ...]:
        """Each stack, with the routes of its branches."""
        return tuple(
            StackUse(
                stack.name,
                stack.offset,
                stack.end,
                tuple(
                    place.session.hops
                    for place in sorted(self._places.values(), key=lambda place: place.ordinal)
                    if place.stack is stack and place.session is not None
                ),
            )
            for stack in self._stacks
        )

    def session_counts(self) -> list[SessionCounts]:
        """Of all sessions so far."""
        closed = [counts for place in self._places.values() for counts in place.closed_counts]
        return [session.counts for session in self.sessions] + closed

    # In the loop ----------------------------------------------------------------------------------------------

    async def _run(
        self, attempt: Attempt, stack: Stack, made: Pass, latents: Sequence[int]
    ) -> list[torch.Tensor] | None:
        """Run a pass; None when nobody wants it any more."""
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            place = self._place(stack, attempt.branch.ordinal)
            async with place.lock:
                if self._is_closed or attempt.is_dropped:
                    return None
                return await self._run_split(place, made, latents, attempt.note_sent)
        finally:
            self._tasks.discard(task)

    async def _run_split(
        self, place: _BranchStack, made: Pass, latents: Sequence[int], on_sent: Callable[[], None]
    ) -> list[torch.Tensor]:
        """Run a pass, in two halves over two groups of nodes where that gives the same bits."""
        halves = halves_of(made) if self._splits_branches else None
        if halves is not None and place.half is not None:
            self.counts.passes -= 1  # the two are one
            return joined_halves(
                *await asyncio.gather(
                    self._run_in_turn(place, halves[0], latents, on_sent),
                    self._run_in_turn(place.half, halves[1], latents, on_sent),
                )
            )
        streams = await self._run_in_turn(place, made, latents, on_sent)
        if halves is not None and not place.was_split_tried:
            place.was_split_tried = True
            await self._try_split(place, halves, streams, latents)
        return streams

    async def _try_split(
        self, place: _BranchStack, halves: Sequence[Pass], whole: list[torch.Tensor], latents: Sequence[int]
    ) -> None:
        """Run both halves on another group of nodes, if there is one: those that give the same bits are used."""
        assert place.session is not None
        other = _BranchStack(place.stack, place.ordinal)
        room_kib = self.patching.needs_room(place.stack.name, halves[1], latents)
        try:
            other.avoided = place.session.nodes
            other.session = await self._sessions.open(place.stack, room_kib=room_kib, avoided=other.avoided)
            made = [
                await other.session.run([(half, PassOrder(Mode.WHOLE))], half, _nothing) for half in halves
            ]
        except (NoRoomError, DiffuseError):  # no other group, or blocks that do not take one row
            is_same = False
        else:
            found = joined_halves(*(results[0].streams for results in made))
            is_same = all(map(same_bits, found, whole))
        if is_same:
            place.half = self._places[Place(place.stack.name, place.ordinal, 1)] = other
        elif other.session is not None:
            place.closed_counts.append(other.session.counts)
            await other.session.close()

    async def _run_in_turn(
        self, place: _BranchStack, made: Pass, latents: Sequence[int], on_sent: Callable[[], None]
    ) -> list[torch.Tensor]:
        while True:
            session = place.session or await self._open(place, made, latents)
            try:
                return await self._run_over(place, session, made, latents, on_sent)
            except NoRouteError:
                if not place.avoided:
                    raise
                await self._leave(place)  # the nodes of the other branch must do
            except NoRoomError as error:  # of a route that took over
                self._note_no_room(place.stack, error)
                await self._leave(place)

    async def _run_over(
        self,
        place: _BranchStack,
        session: CallSession,
        made: Pass,
        latents: Sequence[int],
        on_sent: Callable[[], None],
    ) -> list[torch.Tensor]:
        name = place.stack.name
        is_fresh = place.is_fresh or session.epoch != place.epoch
        order = self.patching.order(name, made, latents, is_fresh=is_fresh)
        place.epoch, place.is_fresh, refreshes = session.epoch, True, place.refreshes
        parts = parts_of(made, order)
        results = await session.run(parts, made, on_sent)
        self.counts.passes += 1
        if order.mode is Mode.WHOLE_KEEP:
            self.patching.note(name, [verdict for result in results for verdict in result.verdicts])
        place.is_fresh = session.epoch != place.epoch or place.refreshes != refreshes
        whole = next((result for result in results if result.was_whole), None)
        if whole is not None:
            return whole.streams
        assert order.cut is not None
        self.counts.patched += 1
        return joined(made, order.cut, [result.streams for result in results])

    async def _open(self, place: _BranchStack, made: Pass, latents: Sequence[int]) -> CallSession:
        """Open a branch's session, with room for its patches; without room there are none."""
        room_kib = self.patching.needs_room(place.stack.name, made, latents)
        try:
            session = await self._open_apart(place, room_kib)
        except NoRoomError as error:
            self._note_no_room(place.stack, error)
            session = await self._open_apart(place, 0)
        self.patching.note_stages(place.stack.name, len(session.hops))
        place.session, place.epoch, place.is_fresh = session, session.epoch, True
        return session

    def _note_no_room(self, stack: Stack, error: NoRoomError) -> None:
        text = (
            f"{error.asked_kib} KiB a block are needed to keep keys and values, {error.possible_kib} are free"
        )
        self.patching.refuse(stack.name, text)

    async def _open_apart(self, place: _BranchStack, room_kib: int) -> CallSession:
        """Over nodes that no other branch of this stack uses, where the layers have others."""
        others = frozenset(
            node
            for other in self._places.values()
            if other is not place and other.stack is place.stack and other.session is not None
            for node in other.session.nodes
        )
        if others and self._splits_branches and not place.is_left:  # its own group has not failed before
            try:
                session = await self._sessions.open(place.stack, room_kib=room_kib, avoided=others)
            except NoRouteError:
                pass
            else:
                place.avoided = others
                return session
        place.avoided = frozenset()
        return await self._sessions.open(place.stack, room_kib=room_kib)

    async def _leave(self, place: _BranchStack) -> None:
        assert place.session is not None
        place.closed_counts.append(place.session.counts)
        place.is_left = True
        session, place.session, place.avoided = place.session, None, frozenset()
        await session.close()

    def _place(self, stack: Stack, ordinal: int) -> _BranchStack:
        key = Place(stack.name, ordinal)
        if key not in self._places:
            known = next(known for known in self._stacks if known.name == stack.name)
            self._places[key] = _BranchStack(known, ordinal)
        return self._places[key]

    def _refresh(self, component: str, ordinal: int) -> None:
        for place in self._places.values():
            if place.stack.component == component and place.ordinal == ordinal:
                place.is_fresh = True
                place.refreshes += 1

    def _check(self, attempt: Attempt) -> None:
        attempt.check()
        if self._is_closed:
            raise PictureCancelled


def _nothing() -> None:
    """Nobody waits for a trial to be sent."""
