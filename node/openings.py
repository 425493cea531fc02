"""How a session gets its place on this node: opened, or taken on by a later route with what is held; and its next hop.

On the event loop. Knows nothing of what a step computes.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from node.call_job import CallState
from node.drawing import new_sampler
from node.held_slice import HeldSlice
from node.history import (
    KEPT_ANSWER_BYTES,
    KEPT_ANSWERS,
    KEPT_CALL_BYTES,
    SESSION_BYTES,
    History,
    HistoryBudget,
)
from node.outbox import Outbox
from node.prefix_store import ForkedState, PrefixStore
from node.return_path import ReturnPath
from node.room import Room
from node.session import Session
from node.session_table import SessionTable
from node.slice_table import SliceTable
from node.stats import NodeStats
from node.step_flow import StepFlow, hop_lost
from routing import wire
from routing.endpoint import Endpoint
from routing.errors import ErrorCode, ProtocolError, RemoteError, SecurityError, WorkError
from routing.link import Link
from routing.sealing import LEAVE
from routing.types import Cancel, HopEntry, NodeAddress, Open, Opened, Resumed
from slicing.branches import new_cache
from slicing.kept_caches import Fork

if TYPE_CHECKING:
    from node.tracing import NodeTraces

logger = logging.getLogger(__name__)

OPEN_TIMEOUT_S = 30.0  # to the next hop of a first route: it may be busy with loading its slice
REDIAL_TIMEOUT_S = 1.0  # of a live route: somebody waits for the next token
MayDial = Callable[[NodeAddress], bool]


class Openings:
    """Takes Opens and Resumeds. `free` ends a session without telling the next hop."""

    def __init__(
        self,
        slices: SliceTable,
        seal_key: wire.SealKey,
        sessions: SessionTable,
        *,
        room: Room,
        prefixes: PrefixStore,
        steps: StepFlow,
        outbox: Outbox,
        returns: ReturnPath,
        stats: NodeStats,
        tasks: asyncio.TaskGroup,
        clock: Callable[[], float],
        may_dial: MayDial,
        free: Callable[[Session], None],
        traces: NodeTraces | None = None,
    ) -> None:
        self._slices = slices
        self._seal_key = seal_key
        self._sessions = sessions
        self._room = room
        self._prefixes = prefixes
        self._steps = steps
        self._outbox = outbox
        self._returns = returns
        self._stats = stats
        self._tasks = tasks
        self._clock = clock
        self._may_dial = may_dial
        self._free = free
        self._traces = traces
        self._histories = HistoryBudget(stats)
        self._endpoint: Endpoint | None = None

    def connect(self, endpoint: Endpoint) -> None:
        """Give it the endpoint that next hops are dialled with."""
        self._endpoint = endpoint

    def take(self, link: Link, opening: Open) -> None:
        """Open or re-route a session. Raises RemoteError, with nothing changed, for an Open that cannot be taken."""
        entry = self._read_entry(opening)
        session = self._sessions.get(opening.session_id)
        held = self._slices.find(entry, session_held=session.held if session else None)
        if session is None:
            self._open(link, opening, entry, held)
        elif not hmac.compare_digest(session.entry.route_key, entry.route_key):
            raise SecurityError(ErrorCode.NOT_ALLOWED, "the session belongs to another key")
        elif opening.epoch > session.epoch:
            self._reroute(session, link, opening, entry, held)

    def take_resumed(self, link: Link, resumed: Resumed) -> None:
        """The next hop of a re-routed session says what it has: send what it lacks, and tell the hop before."""
        session = self._sessions.get(resumed.session_id)
        if session is None or session.next_link is not link or resumed.epoch != session.epoch:
            return
        if session.onward_from is not None:
            return  # it said so before
        self._steps.next_hop_takes(session, resumed.next_step)
        if not session.is_fresh:
            self._tell_upstream(session)

    def take_opened(self, link: Link, opened: Opened) -> None:
        """The next hop and those after it have opened: say so, and what of the session is held all the way."""
        session = self._sessions.get(opened.session_id)
        if session is None or session.next_link is not link or opened.epoch != session.epoch:
            return
        if session.entry.confirms and session.held_onward is None:
            session.held_onward = opened.held
            self._confirm(session, min(session.first_position, opened.held))

    def _read_entry(self, opening: Open) -> HopEntry:
        aad = wire.entry_aad(opening.session_id, opening.epoch, opening.hop)
        entry = wire.open_entry(opening.entries[opening.hop], self._seal_key, aad)
        if (entry.hop, entry.num_hops) != (opening.hop, len(opening.entries)):
            raise ProtocolError(ErrorCode.MALFORMED, "the route entry is for another place in the chain")
        return entry

    def _open(self, link: Link, opening: Open, entry: HopEntry, held: HeldSlice) -> None:
        if self._sessions.was_cancelled(opening.session_id, opening.epoch, entry.route_key):
            logger.debug("session %s: cancelled before it was opened", opening.session_id[:4].hex())
            return
        session = Session(
            opening.session_id,
            opening.epoch,
            entry,
            held,
            self._admitted_state(link, entry, held),
            self._new_history(entry),
            link.peer_id,
            bound=[link],
            last_seen=self._clock(),
            opened_at=self._clock(),
        )
        self._sessions.add(session)
        self._room.take(session)
        if session.state.fork is not None:
            session.begin_at(session.state.fork.length)
        if self._traces is not None:
            session.trace = self._traces.begin(session)
        self._slices.attach(held)
        self._stats.sessions_opened += 1
        self._stats.num_sessions += 1
        logger.debug("session %s hop %d: opened", session.name, entry.hop, extra=session.log_fields)
        if entry.resumes:
            self._tell_upstream(session)  # whatever the next hop has: everything is needed here
        self._reach_next(session, opening)
        if entry.confirms and entry.next_hop is None:
            self._confirm(session, session.first_position)

    def _admitted_state(self, link: Link, entry: HopEntry, held: HeldSlice) -> ForkedState | CallState:
        """What the compute thread begins with. Raises ProtocolError, or WorkError for want of room."""
        if entry.calls:
            return self._admitted_calls(link, entry, held)
        sampler, fork = new_sampler(held.layers, entry), self._prefixes.find(held, entry)
        try:
            self._check_room(link, entry, held, fork)
        except RemoteError:
            self._stats.sessions_refused += 1
            if fork is not None:
                fork.give_up()
            raise
        return ForkedState(new_cache(held.layers, entry.branches), sampler, fork=fork)

    def _admitted_calls(self, link: Link, entry: HopEntry, held: HeldSlice) -> CallState:
        try:
            self._room.check(link.peer_id, held, entry)
        except RemoteError:
            self._stats.sessions_refused += 1
            raise
        return CallState.of(held.blocks, limit_bytes=held.cache_bytes(entry, entry.room))

    def _check_room(self, link: Link, entry: HopEntry, held: HeldSlice, fork: Fork | None) -> None:
        try:
            self._room.check(link.peer_id, held, entry)
        except WorkError:
            if fork is None or not self._prefixes.take_over(fork):
                raise
            self._room.check(link.peer_id, held, entry)

    def _new_history(self, entry: HopEntry) -> History:
        if entry.calls:
            return History(self._histories, max_bytes=KEPT_CALL_BYTES, max_outputs=KEPT_ANSWERS)
        if entry.next_hop is None:
            return History(
                self._histories,
                max_bytes=KEPT_ANSWER_BYTES,
                max_outputs=KEPT_ANSWERS,
                branches=entry.branches,
            )
        return History(self._histories, max_bytes=SESSION_BYTES, branches=entry.branches, axes=entry.axes)

    def _reroute(self, session: Session, link: Link, opening: Open, entry: HopEntry, held: HeldSlice) -> None:
        self._stats.sessions_rerouted += 1
        self._leave_next(session, entry)
        if not (entry.resumes and held is session.held and session.keeps_state_for(entry)):
            self._free(session)
            self._open(link, opening, entry, held)
            return
        is_last, wire_before = entry.next_hop is None, session.entry.wire_out
        session.reroute(opening.epoch, entry, link)
        session.last_seen = self._clock()
        if session.trace is not None:
            session.trace.note_route(session.epoch)
        told = {**session.log_fields, "epoch": session.epoch}
        logger.info(
            "session %s hop %d: re-routed, epoch %d", session.name, entry.hop, session.epoch, extra=told
        )
        if not is_last:
            self._reach_next(session, opening)
            return
        if entry.wire_out is not wire_before:
            session.history.let_all_go()
        self._steps.answers_from_here(session)
        self._tell_upstream(session)

    def _leave_next(self, session: Session, entry: HopEntry) -> None:
        """Tell the next hop of the route so far that this one does without it, if it does."""
        before, after = session.entry.next_hop, entry.next_hop
        is_same = before is not None and after is not None and before.node_id == after.node_id
        if session.next_link is None or is_same:
            return
        proof = wire.proof(session.entry.route_key, LEAVE, session.session_id, session.epoch)
        self._outbox.put(session.next_link, Cancel(session.session_id, session.epoch, proof))

    def _confirm(self, session: Session, num_held: int) -> None:
        if (upstream := session.upstream) is not None:
            self._outbox.put(upstream, Opened(session.session_id, session.epoch, num_held))

    def _tell_upstream(self, session: Session) -> None:
        if (upstream := session.upstream) is not None:
            self._outbox.put(upstream, Resumed(session.session_id, session.epoch, session.next_step))

    # The next hop ---------------------------------------------------------------------------------------------

    def _reach_next(self, session: Session, opening: Open) -> None:
        if session.entry.next_hop is not None:
            onward = replace(opening, hop=opening.hop + 1)
            self._tasks.create_task(self._dial_next(session, onward))

    async def _dial_next(self, session: Session, onward: Open) -> None:
        entry, link = session.entry, None
        trouble = "the link to the next hop closed"
        try:
            link = await self._dial(entry, is_live=entry.resumes or (entry.calls and onward.epoch > 1))
        except RemoteError as error:
            trouble = f"the next hop cannot be reached, {error.code.name}"
        except Exception as error:  # the address is a gateway's: whatever it makes of the resolver stays here
            kind, told = type(error).__name__, session.log_fields
            logger.warning("session %s: dialling raised %s", session.name, kind, extra=told)
            trouble = "the next hop's address cannot be used"
        if session.is_freed or session.epoch != onward.epoch:
            return
        if link is None or link.is_closed:
            self.lose_next_hop(session, trouble)
            return
        session.take_next(link)
        self._outbox.put(link, onward)
        if not entry.resumes:
            self._steps.next_hop_takes(session, 1)

    async def _dial(self, entry: HopEntry, *, is_live: bool) -> Link:
        assert self._endpoint is not None
        assert entry.next_hop is not None
        ways = [way for way in (entry.next_hop, *entry.next_alternatives) if self._may_dial(way)]
        if not ways:
            raise SecurityError(ErrorCode.NOT_ALLOWED, "this node does not dial there")
        limit_s = REDIAL_TIMEOUT_S if is_live else OPEN_TIMEOUT_S
        return await self._endpoint.reach(ways, timeout_s=limit_s)

    def lose_next_hop(self, session: Session, text: str) -> None:
        """The gateway plans again; what is computed meanwhile waits."""
        session.take_next(None)
        session.is_next_lost = True
        self._returns.report(session, session.last_done, hop_lost(session, text))
