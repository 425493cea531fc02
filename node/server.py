"""What a node does with each message: sessions open, are re-routed, attached, cancelled, and expire.

All of it on the event loop; steps are the step flow's, computing the scheduler's, sending the outbox's. Knows
nothing of sockets and tensors.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import time
from collections.abc import Callable
from dataclasses import replace

from node.budget import MemoryBudget
from node.held_slice import HeldSlice
from node.outbox import Outbox
from node.return_path import ReturnPath
from node.scheduler import Scheduler
from node.session import Session
from node.session_table import SessionTable, is_proven
from node.settings import NodeSettings
from node.stats import NodeStats
from node.step_flow import StepFlow, hop_lost
from node.step_job import StepJob, new_sampler, new_state
from routing import wire
from routing.endpoint import Endpoint
from routing.errors import ErrorCode, ProtocolError, RemoteError, SecurityError, WorkError
from routing.link import Link
from routing.types import (
    Answer,
    Attach,
    Cancel,
    Describe,
    Description,
    Failure,
    HopEntry,
    Message,
    Open,
    Step,
)

logger = logging.getLogger(__name__)

SWEEP_S = 1.0  # how often idle and orphaned sessions are looked for
ORPHAN_GRACE_S = 10.0  # a gateway that lost its link dials again well within it


class NodeServer:
    """The sessions of one node and what happens to them; a `LinkReceiver`.

    Built before its endpoint (which delivers to it) and connected to it afterwards. `tasks` runs dials and sending.
    """

    def __init__(
        self,
        held: HeldSlice,
        seal_key: wire.SealKey,
        settings: NodeSettings,
        *,
        scheduler: Scheduler[StepJob],
        budget: MemoryBudget,
        stats: NodeStats,
        tasks: asyncio.TaskGroup,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.stats = stats
        self._held = held
        self._seal_key = seal_key
        self._settings = settings
        self._budget = budget
        self._tasks = tasks
        self._clock = clock
        self._outbox = Outbox(tasks)
        self._returns = ReturnPath(self._outbox, stats)
        self._sessions = SessionTable(settings.max_sessions, settings.max_sessions_per_peer)
        self._steps = StepFlow(
            held,
            settings.max_rows,
            scheduler=scheduler,
            budget=budget,
            outbox=self._outbox,
            returns=self._returns,
            stats=stats,
            on_broken=self._free,
        )
        self._endpoint: Endpoint | None = None
        self._is_closing = False

    def connect(self, endpoint: Endpoint) -> None:
        """Give the server the endpoint that it dials next hops with and finds gateways' links in."""
        self._endpoint = endpoint
        self._returns.connect(endpoint)

    async def sweep_for_ever(self) -> None:
        """Free what nobody asks about any more, until cancelled."""
        while True:
            await asyncio.sleep(SWEEP_S)
            self.sweep()

    def sweep(self) -> None:
        """Free sessions that are idle, or that no link leads to, for too long."""
        now = self._clock()
        for session in self._sessions:
            if self._is_expired(session, now):
                logger.info("session %s hop %d: expired", session.name, session.entry.hop)
                self.stats.sessions_expired += 1
                self._free(session)

    def close(self) -> None:
        """Free every session, here and down the chain; what still arrives is ignored.

        The end of its links tells a gateway to plan again. A failure would let it ask this node once more.
        """
        self._is_closing = True
        for session in self._sessions:
            self._free(session)

    def description(self) -> Description:
        """What this node serves now."""
        return Description(
            (self._held.offer,), len(self._sessions), self._settings.max_sessions, self._budget.free_bytes
        )

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
            case Attach():
                self._on_attach(link, message)
            case Describe():
                self._outbox.put(link, self.description())
            case _:
                logger.debug("peer %s sent a %s to a node", link.peer_id.hex()[:8], type(message).__name__)

    def on_link_closed(self, link: Link, error: RemoteError | None) -> None:
        """Sessions that went on over this link tell their gateway, which plans again."""
        if error is not None:
            logger.info("peer %s: link lost, %s", link.peer_id.hex()[:8], error.code.name)
        for session in self._sessions:
            session.bound = [bound for bound in session.bound if bound is not link]
            if session.next_link is link:
                self._lose_next_hop(session, "the link to the next hop closed")

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

    # Opening --------------------------------------------------------------------------------------------------

    def _on_open(self, link: Link, opening: Open) -> None:
        try:
            entry = self._read_entry(opening)
            session = self._sessions.get(opening.session_id)
            if session is None:
                self._open(link, opening, entry)
            elif not hmac.compare_digest(session.entry.route_key, entry.route_key):
                raise SecurityError(ErrorCode.NOT_ALLOWED, "the session belongs to another key")
            elif opening.epoch > session.epoch:
                self._reroute(session, link, opening, entry)
        except RemoteError as error:
            self._returns.refuse(link, opening.session_id, opening.epoch, error, hop=opening.hop)

    def _read_entry(self, opening: Open) -> HopEntry:
        aad = wire.entry_aad(opening.session_id, opening.epoch, opening.hop)
        entry = wire.open_entry(opening.entries[opening.hop], self._seal_key, aad)
        if (entry.hop, entry.num_hops) != (opening.hop, len(opening.entries)):
            raise ProtocolError(ErrorCode.MALFORMED, "the route entry is for another place in the chain")
        self._held.check(entry)
        return entry

    def _open(self, link: Link, opening: Open, entry: HopEntry) -> None:
        if self._sessions.was_cancelled(opening.session_id, opening.epoch, entry.route_key):
            logger.debug("session %s: cancelled before it was opened", opening.session_id[:4].hex())
            return
        self._sessions.check_room(link.peer_id)
        session = Session(
            opening.session_id,
            opening.epoch,
            entry,
            new_state(self._held.runner, entry),
            link.peer_id,
            bound=[link],
            last_seen=self._clock(),
        )
        self._sessions.add(session)
        self.stats.sessions_opened += 1
        self.stats.num_sessions += 1
        logger.debug("session %s hop %d: opened", session.name, entry.hop)
        self._reach_next(session, opening)

    def _reroute(self, session: Session, link: Link, opening: Open, entry: HopEntry) -> None:
        if not session.keeps_state_for(entry):
            self._free(session, tell_next=False)
            self._open(link, opening, entry)
            return
        if session.entry.sampling != entry.sampling:
            session.state = replace(
                session.state, sampler=new_sampler(self._held.runner, entry), drawn_for=[]
            )
        self._steps.drop(session)
        session.reroute(opening.epoch, entry, link)
        session.last_seen = self._clock()
        self.stats.sessions_rerouted += 1
        logger.info("session %s hop %d: re-routed, epoch %d", session.name, entry.hop, session.epoch)
        self._reach_next(session, opening)

    def _reach_next(self, session: Session, opening: Open) -> None:
        if session.entry.next_hop is not None:
            onward = replace(opening, hop=opening.hop + 1)
            self._tasks.create_task(self._dial_next(session, onward))

    async def _dial_next(self, session: Session, onward: Open) -> None:
        assert self._endpoint is not None
        assert session.entry.next_hop is not None
        link: Link | None = None
        trouble = "the link to the next hop closed"
        try:
            link = await self._endpoint.dial(session.entry.next_hop)
        except RemoteError as error:
            trouble = f"the next hop cannot be reached, {error.code.name}"
        except Exception as error:  # the address is a gateway's: whatever it makes of the resolver stays here
            logger.warning("session %s: dialling raised %s", session.name, type(error).__name__)
            trouble = "the next hop's address cannot be used"
        if session.is_freed or session.epoch != onward.epoch:
            return
        if link is None or link.is_closed:
            self._lose_next_hop(session, trouble)
            return
        session.next_link = link
        self._outbox.put(link, onward)
        self._steps.next_hop_up(session)

    def _lose_next_hop(self, session: Session, text: str) -> None:
        session.next_link = None
        session.is_next_lost = True
        self._returns.report(session, session.last_done, hop_lost(session, text))

    def _on_attach(self, link: Link, attach: Attach) -> None:
        session = self._sessions.get(attach.session_id)
        if session is None:
            unknown = WorkError(ErrorCode.NO_SESSION, "no such session here")
            self._returns.refuse(link, attach.session_id, attach.epoch, unknown)
            return
        key = session.entry.route_key
        if not wire.is_proof(attach.proof, key, b"attach", attach.session_id, attach.epoch):
            foreign = SecurityError(ErrorCode.NOT_ALLOWED, "the session belongs to another key")
            self._returns.refuse(link, attach.session_id, attach.epoch, foreign)
        elif attach.epoch == session.epoch and link not in session.bound:
            session.bound.append(link)
            session.last_seen = self._clock()

    # Ending ---------------------------------------------------------------------------------------------------

    def _on_cancel(self, cancel: Cancel) -> None:
        session = self._sessions.get(cancel.session_id)
        if session is None:
            self._sessions.remember(cancel)
        elif not is_proven(cancel, session.entry.route_key):
            logger.info("session %s: a cancel without proof", session.name)
        elif (
            cancel.epoch >= session.epoch
        ):  # an older one is of a route that was left: what is shared goes on
            self.stats.sessions_cancelled += 1
            self._sessions.remember(cancel)
            self._free(session, cancel)

    def _free(self, session: Session, cancel: Cancel | None = None, *, tell_next: bool = True) -> None:
        """End a session at once; its keys and values go when the job that uses them has ended."""
        session.is_freed = True
        self._sessions.remove(session)
        self.stats.num_sessions -= 1
        self._steps.drop(session)
        if tell_next and session.next_link is not None:
            self._outbox.put(session.next_link, cancel or _own_cancel(session))
        logger.debug("session %s hop %d: freed", session.name, session.entry.hop)
        self._steps.free_state(session)

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
    proof = wire.proof(session.entry.route_key, b"cancel", session.session_id, session.epoch)
    return Cancel(session.session_id, session.epoch, proof)
