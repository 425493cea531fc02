"""When the turns of answers that share a route go: in groups, as many as serve the route best (`group_count`).

Without it the answers of a route drift apart until each goes alone, and every stage reads its weights for one row.
A turn waits only while that many groups are out, and for two of their rounds at most. Knows nothing of what a turn
computes.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field

from app.engine.ends_jobs import EndsSession, Turn
from app.engine.group_count import GroupCount

RECENT = 0.2  # weight of a new round's time
# Who is stuck, or whose reader is slow, must not hold up the others: a group is not waited for any more after so many
# of its rounds, nor for the last third of it.
PATIENCE = 2.0
STRAGGLERS = 1 / 3
MAX_REMEMBERED = 64  # routes without answers whose numbers of groups are kept


@dataclass(slots=True, eq=False)
class _Group:
    """Answers whose turns went together."""

    gone_at: float
    size: int
    out: set[EndsSession]

    def is_awaited(self, now: float, patience_s: float) -> bool:
        """Whether those who are here wait for it."""
        return len(self.out) > STRAGGLERS * self.size and now - self.gone_at < patience_s


@dataclass(slots=True, eq=False)
class _Way:
    """One route: who waits to go, and who is out."""

    count: GroupCount
    waiting: list[Turn] = field(default_factory=list)
    groups: list[_Group] = field(default_factory=list)  # the oldest first
    group_of: dict[EndsSession, _Group | None] = field(
        default_factory=dict
    )  # None: it is here, or went alone
    round_s: float = 0.0  # from going to coming back
    look: asyncio.Handle | None = None


class TurnGate:
    """`go` is called, on the event loop, with each turn when it is its time, and its group. Made in a running loop."""

    def __init__(
        self, go: Callable[[Turn, Hashable], None], *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._go = go
        self._clock = clock
        self._loop = asyncio.get_running_loop()
        self._ways: dict[Hashable, _Way] = {}
        self._way_of: dict[EndsSession, _Way] = {}
        self._counts: dict[Hashable, GroupCount] = {}  # the newest last

    def come(self, turn: Turn) -> None:
        """A turn is ready. The first one of an answer on a route goes at once."""
        session, route = turn.session, turn.session.route
        before, way = self._way_of.get(session), self._ways.get(route)
        if before is not None and before is way:
            self._back(way, session)
            way.count.note_turn(len(way.group_of), turn.stages, self._clock())
            way.waiting.append(turn)
            self._look_soon(way)
            return
        self.leave(session)
        way = self._ways[route] = way or _Way(self._count(route))
        self._way_of[session] = way
        way.group_of[session] = None
        self._go(turn, None)

    def leave(self, session: EndsSession) -> None:
        """An answer ended, or goes another way. What it has waiting is dropped."""
        way = self._way_of.pop(session, None)
        if way is None:
            return
        self._out_of_group(way, session)
        del way.group_of[session]
        way.waiting = [turn for turn in way.waiting if turn.session is not session]
        if way.group_of:
            self._look_soon(way)
            return
        if way.look is not None:
            way.look.cancel()
        self._ways = {route: other for route, other in self._ways.items() if other is not way}

    def _count(self, route: Hashable) -> GroupCount:
        """What is known of a route, also from answers that are over."""
        count = self._counts.pop(route, None) or GroupCount()
        self._counts[route] = count
        if len(self._counts) > MAX_REMEMBERED:
            del self._counts[next(iter(self._counts))]
        return count

    def _back(self, way: _Way, session: EndsSession) -> None:
        group = self._out_of_group(way, session)
        if group is not None:
            took_s = self._clock() - group.gone_at
            usual_s = way.round_s or took_s
            way.round_s = usual_s + RECENT * (min(took_s, PATIENCE * usual_s) - usual_s)

    def _out_of_group(self, way: _Way, session: EndsSession) -> _Group | None:
        group, way.group_of[session] = way.group_of[session], None
        if group is not None:
            group.out.discard(session)
            if not group.out:
                way.groups.remove(group)
        return group

    def _look_soon(self, way: _Way) -> None:
        """Behind what the loop has at hand: turns that came together go together."""
        if way.look is not None:
            way.look.cancel()
        way.look = self._loop.call_soon(self._look, way)

    def _look(self, way: _Way) -> None:
        """Let groups go while too few are out; look again when one has been out for too long."""
        way.look = None
        while way.waiting:
            number = way.count.number(len(way.group_of), way.waiting[0].stages)
            patience_s = PATIENCE * way.round_s
            now = self._clock()
            awaited = [group for group in way.groups if group.is_awaited(now, patience_s)]
            if len(awaited) >= number:
                left_s = awaited[-number].gone_at + patience_s - now
                way.look = self._loop.call_later(left_s, self._look, way)
                return
            going = _in_turn(way.waiting)[: math.ceil(len(way.group_of) / number)]
            way.waiting = [turn for turn in way.waiting if turn not in going]
            group = _Group(now, len(going), {turn.session for turn in going})
            way.groups.append(group)
            for turn in going:
                way.group_of[turn.session] = group
                self._go(turn, group)


def _in_turn(waiting: list[Turn]) -> list[Turn]:
    """Tenants in turn, of each the one that came first."""
    counts: dict[Hashable, int] = {}
    places: dict[Turn, int] = {}
    for turn in waiting:
        places[turn] = counts.get(turn.tenant, 0)
        counts[turn.tenant] = places[turn] + 1
    return sorted(waiting, key=places.__getitem__)
