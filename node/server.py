"""What a node does with each message: sessions open, are re-routed, attached, cancelled, and expire.

All of it on the event loop; opening and re-routing are the openings', steps the step flow's, computing the
scheduler's, sending the outbox's. Knows nothing of sockets and tensors.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from functools import partial
from typing import TYPE_CHECKING

from node.budget import MemoryBudget
from node.held_slice import HeldSlice
from node.openings import MayDial, Openings
from node.outbox import Outbox
from node.prefix_store import PrefixStore
from node.return_path import ReturnPath
from node.room import Room
from node.scheduler import Scheduler
from node.session import Session
from node.session_table import SessionTable, ends_session, is_proven
from node.settings import NodeSettings
from node.slice_table import SliceTable
from node.stats import NodeStats
from node.step_flow import StepFlow
from routing import wire
from routing.allow_list import AllowList
from routing.endpoint import Endpoint
from routing.errors import ErrorCode, RemoteError, SecurityError, WorkError
from routing.link import Link
from routing.sealing import ATTACH, CANCEL, KEEP
from routing.types import (
    Answer,
    Attach,
    Cancel,
    Describe,
    Description,
    Failure,
    Inquire,
    Keep,
    Message,
    Open,
    Opened,
    Resumed,
    Standing,
    Step,
)

if TYPE_CHECKING:
    from node.tracing import NodeTraces

logger = logging.getLogger(__name__)

SWEEP_S = 1.0  # how often idle and orphaned sessions are looked for
ORPHAN_GRACE_S = 10.0  # a gateway that lost its link dials again well within it


class NodeServer:
    """The sessions of one node and what happens to them; a `LinkReceiver`.

    Built before its endpoint (which delivers to it) and connected to it afterwards. `tasks` runs dials and sending.
    """

    def __init__(
        self,
        slices: SliceTable,
        seal_key: wire.SealKey,
        settings: NodeSettings,
        *,
        scheduler: Scheduler,
        budget: MemoryBudget,
        stats: NodeStats,
        tasks: asyncio.TaskGroup,
        clock: Callable[[], float] = time.monotonic,
        may_dial: MayDial = lambda _: True,
        traces: NodeTraces | None = None,
    ) -> None:
        self.stats = stats
        self._slices = slices
        self._settings = settings
        self._budget = budget
        self._scheduler = scheduler
        self._clock = clock
        self._outbox = Outbox(tasks)
        self._returns = ReturnPath(self._outbox, stats)
        limits = settings.max_sessions, settings.max_sessions_per_peer
        if isinstance(settings.allow, AllowList):
            self._sessions = SessionTable(*limits, settings.allow.session_limit)
        else:
            self._sessions = SessionTable(*limits)
        self._steps = StepFlow(
            slices,
            settings.max_rows,
            scheduler=scheduler,
            budget=budget,
            outbox=self._outbox,
            returns=self._returns,
            stats=stats,
            on_broken=partial(self._free, how="broken"),
        )
        self._prefixes = PrefixStore(budget, stats, clock)
        room = Room(budget, self._sessions, self._prefixes, stats, clock=clock, evict=self._evict)
        self._openings = Openings(
            slices,
            seal_key,
            self._sessions,
            room=room,
            prefixes=self._prefixes,
            steps=self._steps,
            outbox=self._outbox,
            returns=self._returns,
            stats=stats,
            tasks=tasks,
            clock=clock,
            may_dial=may_dial,
            free=partial(self._free, how="rerouted"),
            traces=traces,
        )
        slices.on_removed = self._end_slice
        self._describing: set[Link] = set()  # links on which a description waits to leave
        self._is_closing = False

    def connect(self, endpoint: Endpoint) -> None:
        """Give the server the endpoint that it dials next hops with and finds gateways' links in."""
        self._openings.connect(endpoint)
        self._returns.connect(endpoint)

    async def sweep_for_ever(self) -> None:
        """Free what nobody asks about any more, until cancelled."""
        while True:
            await asyncio.sleep(SWEEP_S)
            self.sweep()

    def sweep(self) -> None:
        """Free sessions that are idle, or that no link leads to, for too long, and what is kept for nobody."""
        self._prefixes.sweep()
        now = self._clock()
        for session in self._sessions:
            if self._is_expired(session, now):
                self.stats.sessions_expired += 1
                self._tell_next(session, _own_cancel(session))
                self._free(session, "expired")

    def close(self) -> None:
        """Free every session here; what still arrives is ignored.

        The end of its links tells a gateway to plan again, with what the others hold. A failure would let it ask
        this node once more.
        """
        self._is_closing = True
        for session in self._sessions:
            self._free(session, "stopped")
        self._prefixes.clear()

    def description(self) -> Description:
        """What this node serves now."""
        return Description(
            self._slices.offers(),
            len(self._sessions),
            self._settings.max_sessions,
            max(0, self._budget.available_bytes),
        )

    @property
    def num_sessions(self) -> int:
        """Live sessions."""
        return len(self._sessions)

    # What the links tell (link.LinkReceiver) ------------------------------------------------------------------

    def on_link_up(self, link: Link) -> None:
        """Nothing to do: whoever dialled goes on."""

    def on_message(self, link: Link, message: Message) -> None:
        """Steps and answers first: they are what there is most of."""
        if self._is_closing:
            return
        match message:
            case Step():
                self._on_step(link, message)
            case Answer() | Failure():
                self._pass_up(link, message)
            case Open():
                self._on_open(link, message)
            case Cancel():
                self._on_cancel(message)
            case Keep():
                self._on_keep(message)
            case Attach():
                self._on_attach(link, message)
            case Opened():
                self._openings.take_opened(link, message)
            case Resumed():
                self._openings.take_resumed(link, message)
            case Inquire():
                self._on_inquire(link, message)
            case Describe():
                self._on_describe(link)
            case _:
                logger.debug("peer %s sent a %s to a node", link.peer_id.hex()[:8], type(message).__name__)

    def on_link_closed(self, link: Link, error: RemoteError | None) -> None:
        """Sessions that went on over this link tell their gateway, which plans again."""
        self._describing.discard(link)
        if error is not None:
            peer, code = link.peer_id.hex()[:8], error.code.name
            logger.info("peer %s: link lost, %s", peer, code, extra={"peer": peer, "code": code})
        for session in self._sessions:
            session.bound = [bound for bound in session.bound if bound is not link]
            if session.next_link is link:
                self._openings.lose_next_hop(session, "the link to the next hop closed")

    # Steps and what comes back --------------------------------------------------------------------------------

    def _on_step(self, link: Link, step: Step) -> None:
        session = self._sessions.get(step.session_id)
        if session is None:
            unknown = WorkError(ErrorCode.NO_SESSION, "no such session here")
            self._returns.refuse(link, step.session_id, step.epoch, unknown, step=step.step)
        elif step.epoch < session.epoch:
            return  # of a route that was left
        elif link not in session.bound:
            foreign = SecurityError(ErrorCode.NOT_ALLOWED, "the session is not bound to this link")
            hop = session.entry.hop
            self._returns.refuse(link, step.session_id, step.epoch, foreign, step=step.step, hop=hop)
        else:
            session.last_seen = self._clock()
            try:
                self._steps.take(session, link, step)
            except RemoteError as error:
                self._returns.report(session, step.step, error)

    def _pass_up(self, link: Link, message: Answer | Failure) -> None:
        session = self._sessions.get(message.session_id)
        if session is None or session.next_link is None or session.next_link.peer_id != link.peer_id:
            return  # nobody but the next hop may speak for what comes after us
        session.last_seen = self._clock()
        if isinstance(message, Failure) and message.hop <= session.entry.hop:
            message = replace(message, hop=session.entry.hop + 1)  # it may not blame us, or those before us
        self._returns.send(session, message)

    # Opening and attaching ------------------------------------------------------------------------------------

    def _on_open(self, link: Link, opening: Open) -> None:
        try:
            self._openings.take(link, opening)
        except RemoteError as error:
            self._returns.refuse(link, opening.session_id, opening.epoch, error, hop=opening.hop)

    def _on_attach(self, link: Link, attach: Attach) -> None:
        session = self._sessions.get(attach.session_id)
        if session is None:
            unknown = WorkError(ErrorCode.NO_SESSION, "no such session here")
            self._returns.refuse(link, attach.session_id, attach.epoch, unknown)
            return
        key = session.entry.route_key
        if not wire.is_proof(attach.proof, key, ATTACH, attach.session_id, attach.epoch):
            foreign = SecurityError(ErrorCode.NOT_ALLOWED, "the session belongs to another key")
            self._returns.refuse(link, attach.session_id, attach.epoch, foreign)
        elif attach.epoch == session.epoch and link not in session.bound:
            session.bound.append(link)
            session.last_seen = self._clock()

    def _on_describe(self, link: Link) -> None:
        """Say what is served now; who asks again before that has left is answered by it."""
        if link not in self._describing:
            self._describing.add(link)
            self._outbox.put(link, self.description(), partial(self._describing.discard, link))

    def _on_inquire(self, link: Link, asked: Inquire) -> None:
        """Say how far a session is, to its gateway; to others as if it were not here."""
        session = self._sessions.get(asked.session_id)
        if session is None or link.peer_id != session.entry.gateway_id:
            standing = Standing(asked.session_id, 0, 0, 0, 0)
        else:
            rows, busy_s = self._scheduler.busy
            standing = Standing(
                session.session_id,
                session.epoch,
                session.entry.hop,
                session.last_done,
                session.next_step,
                int(busy_s * 1000),
                rows,
            )
        self._outbox.put(link, standing)

    # Ending ---------------------------------------------------------------------------------------------------

    def _on_cancel(self, cancel: Cancel) -> None:
        session = self._sessions.get(cancel.session_id)
        if session is None:
            self._sessions.remember(cancel)
        elif not is_proven(cancel, session.entry.route_key):
            logger.info("session %s: a cancel without proof", session.name, extra=session.log_fields)
        elif (
            cancel.epoch >= session.epoch
        ):  # an older one is of a route that was left: what is shared goes on
            self.stats.sessions_cancelled += 1
            self._sessions.remember(cancel)
            if ends_session(cancel, session.entry.route_key):
                self._tell_next(session, cancel)
            self._free(session, "ended")

    def _on_keep(self, keep: Keep) -> None:
        """A session ended well: keep what it computed, where that can be used for others."""
        session = self._sessions.get(keep.session_id)
        if session is None:
            return  # the hop before passed it on already
        if not wire.is_proof(keep.proof, session.entry.route_key, KEEP, keep.session_id, keep.epoch):
            logger.info("session %s: a keep without proof", session.name, extra=session.log_fields)
        elif keep.epoch >= session.epoch:
            self._tell_next(session, keep)
            keeps = self._prefixes.may_keep(session, keep.hashes)
            self._free(session, "ended", keeps_state=keeps)
            if keeps:
                self._prefixes.keep(session, keep.hashes)

    def _evict(self, session: Session) -> None:
        """Others need its room: it is built again if a step comes for it. Those after it keep theirs."""
        self._free(session, "evicted")

    def _end_slice(self, held: HeldSlice) -> None:
        """A slice was taken away: its sessions go on elsewhere."""
        self._prefixes.drop(held)
        for session in self._sessions:
            if session.held is held:
                gone = WorkError(ErrorCode.NO_SLICE, "the slice is not held here any more")
                self._returns.report(session, session.last_done, gone)
                self._free(session, "slice_gone")

    def _tell_next(self, session: Session, cancel: Cancel | Keep) -> None:
        if session.next_link is not None:
            self._outbox.put(session.next_link, cancel)

    def _free(self, session: Session, how: str, *, keeps_state: bool = False) -> None:
        """End a session here at once; its keys and values go when the job that uses them has ended. `how` is logged.

        Those after it keep theirs: a later route may go through them.
        """
        session.is_freed = True
        self._sessions.remove(session)
        self._slices.detach(session.held)
        self.stats.num_sessions -= 1
        self._steps.drop(session)
        if session.num_in_flight == 0:
            session.state.give_up()
        session.take_next(None)
        session.history.close()
        self._log_end(session, how)
        if session.trace is not None:
            session.trace.end(how)
        if not keeps_state:
            self._steps.free_state(session)

    def _log_end(self, session: Session, how: str) -> None:
        if not logger.isEnabledFor(logging.INFO):
            return
        told = {**session.log_fields, "outcome": how, "lasted_s": self._clock() - session.opened_at}
        logger.info(
            "session %s hop %d: %s after %d steps of %d rows",
            session.name,
            session.entry.hop,
            how,
            session.done.steps,
            session.done.rows,
            extra={**told, **asdict(session.done)},
        )

    def _is_expired(self, session: Session, now: float) -> bool:
        limit_s = min(session.entry.idle_timeout_s, self._settings.max_idle_timeout_s)
        if now - session.last_seen > limit_s and session.num_in_flight == 0:
            return True
        if session.upstream is not None or self._returns.gateway_link(session) is not None:
            session.orphan_since = None
            return False
        session.orphan_since = now if session.orphan_since is None else session.orphan_since
        return now - session.orphan_since >= ORPHAN_GRACE_S


def _own_cancel(session: Session) -> Cancel:
    proof = wire.proof(session.entry.route_key, CANCEL, session.session_id, session.epoch)
    return Cancel(session.session_id, session.epoch, proof)
