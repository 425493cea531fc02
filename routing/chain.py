"""One session over its routes: steps go in, answers come back, and when a route fails another takes over.

Records the steps, and after a loss plans again and repeats what the nodes of the next route lack: where all the
others hold their part, nothing but the lost one's work is done again. Of a session of calls only unanswered ones are
recorded, and made again for a route that begins with nothing. Knows nothing of tokens or tensors: payloads are bytes
that the engine made.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import AbstractAsyncContextManager

from routing import live_route, sealing
from routing.answers import ChainTimes
from routing.blame import Blame, Trouble
from routing.calls import Calls, make_due, wrong_with
from routing.errors import ErrorCode, NoRouteError, ProtocolError, RemoteError, WorkError
from routing.frames import memory_wire
from routing.hop_times import HopTimes
from routing.link import Link
from routing.live_route import LiveRoute
from routing.opening import ChainOptions, RouteKeys, wires_of
from routing.prefix import Beginning, context_of
from routing.recorded import CheckAnswer, MakeCall, RecordedStep, Recording
from routing.session_trace import begin_trace
from routing.switch import Switch
from routing.types import (
    Answer,
    Buffer,
    Cancel,
    Failure,
    Keep,
    NodeId,
    Opened,
    Prefix,
    Resumed,
    Route,
    SessionId,
    Standing,
    Want,
    WireDtype,
)

logger = logging.getLogger(__name__)

# How long the only node for some layers is waited for. One that was restarted, or whose link was cut, is back within
# the second (transport.md, 4); one whose NAT box forgot it finds that out a second later, and reserves anew.
RETURN_GRACE_S = 5.0
RETURN_POLL_S = 0.05
# A replay waits for a sign of every so many steps, two windows on their way: a node queues what it is sent.
REPLAY_STEPS = 32
REPLAY_BYTES = 8 << 20
HELD_ROWS = (
    512  # of one step that stands for positions which every node held, should it have to be sent after all
)

Replan = Callable[[frozenset[NodeId], Route | None], Route]


class Chain:
    """One session over one route at a time; `epoch` counts the routes it has had.

    One task at a time sends and waits; `close` may come from any.
    """

    def __init__(
        self,
        switch: Switch,
        replan: Replan,
        options: ChainOptions,
        *,
        new_secret: Callable[[int], bytes],
        beginning: Beginning | None = None,
    ) -> None:
        self._switch = switch
        self._replan = replan
        self._options = options
        self._new_secret = new_secret
        self.session_id = SessionId(new_secret(16))
        self._route_key = new_secret(32)
        self._beginning = beginning
        self.num_held = (
            0  # positions that every node held when the session began: its first step starts there
        )
        self.epoch = 0
        self.replays = 0  # routes that took over
        self.rows_repeated = 0  # rows that we sent again, since no node held them
        self.pauses: list[float] = []  # seconds from noticing trouble to a route that holds
        self.times = ChainTimes()
        self.hop_times = HopTimes()
        self._recording = Recording()
        self._calls = Calls()
        self._live: LiveRoute | None = None
        self._blame = Blame()
        self._holders: set[NodeId] = set()  # nodes that may hold the session and were not told to free it
        self._is_proved = False  # an answer came
        self._starts_over = False  # what nodes hold does not fit together: the next route begins with nothing
        self._is_closed = False
        self._trace = begin_trace(self.name)

    @property
    def route(self) -> Route | None:
        """The present route; None before the first."""
        return self._live.route if self._live else None

    @property
    def path(self) -> tuple[NodeId, ...] | None:
        """The nodes of the present route, in order; None before the first."""
        return self._live.path if self._live else None

    @property
    def first_wire(self) -> WireDtype:
        """The element type that the first hop takes. Other routes keep it, if their first hop speaks it."""
        assert self._live is not None
        return self._live.wires[0]

    @property
    def memory_wire(self) -> WireDtype:
        """The element type that the first hop takes memory in."""
        return memory_wire(self.first_wire)

    @property
    def name(self) -> str:
        """A short name for logs and traces, the same on the nodes."""
        return self.session_id[:4].hex()

    @property
    def num_recorded(self) -> int:
        """Steps that a whole replay would repeat."""
        return len(self._recording)

    async def open(self, *, deadline_s: float | None = None) -> None:
        """Plan and open the first route. Raises NoRouteError, RemoteError, or WorkError DEADLINE."""
        self._switch.register(self)
        async with _within(deadline_s):
            trouble = await self._try_in_time(self._switch.last_loss_at + RETURN_GRACE_S)
            if trouble is not None:
                await self._recover(trouble)

    async def send(
        self,
        payload: Buffer,
        *,
        position: int,
        rows: int,
        want: Want = Want.LAST,
        want_rows: Sequence[int] = (),
        deadline_s: float | None = None,
    ) -> RecordedStep:
        """Send one step; a position below what was sent before rolls the session back first.

        `payload` is in `first_wire`, with the rows' positions behind it where there are axes (see `frames`); `rows`
        are those of all branches, `want_rows` count positions. What fails is told by `answer`; raises WorkError
        DEADLINE.
        """
        options, until = self._options, None if deadline_s is None else time.monotonic() + deadline_s
        recorded = RecordedStep(
            position,
            rows,
            payload,
            self.first_wire,
            want,
            tuple(want_rows),
            until=until,
            branches=options.branches,
            axes=options.axes,
        )
        return await self._send(recorded, deadline_s)

    async def send_memory(
        self, payload: Buffer, rows: int, *, confirms: bool = False, deadline_s: float | None = None
    ) -> RecordedStep:
        """Send rows of memory, behind those that were sent before; all of it goes before the first step.

        `payload` is in `memory_wire`, a row of each branch for every place. No answer comes, but where it `confirms`:
        then `answer` waits until every hop has it. What fails is told by a later `answer`; raises WorkError DEADLINE.
        """
        recorded = RecordedStep(
            0,
            rows,
            payload,
            self.memory_wire,
            Want.LIST if confirms else Want.NONE,
            until=None if deadline_s is None else time.monotonic() + deadline_s,
            branches=self._options.branches,
            is_memory=True,
        )
        return await self._send(recorded, deadline_s)

    async def _send(self, recorded: RecordedStep, deadline_s: float | None) -> RecordedStep:
        assert recorded.rows % recorded.branches == 0, "a step holds a row of each branch"
        if recorded.want is not Want.NONE:
            recorded.answer = asyncio.get_running_loop().create_future()
        self._recording.add(recorded)
        live = self._live
        if live is not None and live.is_live:  # else the next route will send it
            if deadline_s is None or len(recorded.payload) <= live_route.SMALL_BYTES:
                await _send_over(live, recorded)
            else:
                async with _limited(deadline_s):
                    await _send_over(live, recorded)
        return recorded

    async def send_call(
        self, make: MakeCall, check: CheckAnswer | None = None, *, deadline_s: float | None = None
    ) -> RecordedStep:
        """Send one call of blocks, in a session of calls; several may be under way.

        `make(is_fresh)` returns its bytes, in a thread; true: the route has nothing of this session. It is asked again
        for each further route, until the call is answered, and may raise CannotRemake, which `answer` raises then.
        `check` says what is wrong with the answer, if anything; its node is replaced then.
        """
        assert self._options.calls
        until = None if deadline_s is None else time.monotonic() + deadline_s
        recorded = self._calls.new(make, check, until)
        self._recording.add(recorded)
        live = self._live
        if live is not None and live.is_live:  # else the next route will send it
            async with _within(deadline_s):
                try:
                    if await self._make(recorded, live):
                        await live.send(recorded)
                except RemoteError as error:
                    live.note(live.seen(error, 0))
        return recorded

    async def answer(self, recorded: RecordedStep, *, deadline_s: float | None = None) -> Answer:
        """Wait for the answer of a sent step, over as many routes as it takes. It is handed out once.

        Raises NoRouteError when no replica is left, WorkError DEADLINE when the time is over, or the RemoteError
        that no replay can mend; of a call of blocks also CannotRemake.
        """
        if deadline_s is None:
            answer = await self._arrived(recorded)
        else:
            async with _limited(deadline_s):
                answer = await self._arrived(recorded)
        recorded.answer = None  # not kept: a long session's answers are as large as its steps
        if recorded.is_call:
            self._recording.forget(recorded)
            self._note_progress(recorded.answered_epoch)
        return answer

    async def _arrived(self, recorded: RecordedStep) -> Answer:
        """The answer; of a call, one that is right as far as can be seen."""
        while True:
            assert recorded.answer is not None
            assert self._live is not None
            while (trouble := await self._live.wait(recorded.answer)) is not None:
                await self._recover(trouble)
            answer = recorded.answer.result()
            if not recorded.is_call or not (text := await wrong_with(answer, recorded)):
                return answer
            await self._ask_again(recorded, text)

    async def _ask_again(self, recorded: RecordedStep, text: str) -> None:
        """The answer of a call is wrong: have it made by others, or over the route that took over meanwhile."""
        live = self._live
        assert live is not None
        make_due(recorded)
        if recorded.answered_epoch == live.epoch:
            error = ProtocolError(ErrorCode.MALFORMED, f"an answer is none: {text}")
            await self._recover(live.wrong(error))
        elif await self._make(recorded, live):
            await live.send(recorded, is_repeat=True)

    async def step(
        self, payload: Buffer, *, position: int, rows: int, deadline_s: float | None = None
    ) -> Answer:
        """Send one step and wait for its last row."""
        recorded = await self.send(payload, position=position, rows=rows, deadline_s=deadline_s)
        return await self.answer(recorded, deadline_s=deadline_s)

    async def close(self, *, keeps: bool = False) -> bool:
        """Free the session on every node: down the chain, and directly wherever there is a link. Never waits.

        With `keeps`, nodes that can keep its keys and values for sessions that begin in the same way; returns whether
        they were told to.
        """
        names = self._names() if keeps else ()
        if self._trace is not None and not self._is_closed:
            links = {node_id: self._switch.live_link(node_id) for node_id in self.hop_times.by_node}
            self._trace.end(self.hop_times, self.times.network_s, links)
        self._is_closed = True
        self._switch.forget(self)
        if self._live is not None:
            self._live.close()
            closed = WorkError(ErrorCode.CANCELLED, "the session was closed")
            self._live.note(Trouble(closed, is_seen=True))
        if not names:
            self._cancel(self._holders, self.epoch, sealing.CANCEL)
            return False
        self._keep(names)
        return True

    # What the switch tells ------------------------------------------------------------------------------------

    def take_answer(self, peer_id: NodeId, answer: Answer) -> None:
        """An answer arrived; one of an older route, already given, or not from the last hop is dropped."""
        live = self._live
        if live is None or answer.epoch != self.epoch or (taken := live.take_answer(peer_id, answer)) is None:
            return
        sent, opened = taken
        recorded = sent.recorded
        if recorded.answer is None or recorded.answer.done():
            return
        now = time.perf_counter()
        self.times.add(opened, sent, now)
        self.hop_times.add(live.route.hops, opened, now - sent.sent_at)
        if not sent.is_repeat and not recorded.is_memory:  # of memory nothing is computed yet
            self._switch.note_answer(live.route, recorded.work_rows, opened, now - sent.sent_at)
        recorded.wire_back, recorded.answered_epoch = sent.wire_back, answer.epoch
        recorded.answer.set_result(opened)
        if not recorded.is_call:  # that is progress once somebody has looked at it
            self._note_progress(answer.epoch)

    def _note_progress(self, epoch: int) -> None:
        """An answer came over the route of this epoch, and is right as far as can be seen."""
        live = self._live
        nodes = live.nodes if live is not None and epoch == self.epoch else frozenset()
        self._blame.note_progress(nodes, time.monotonic())
        self._is_proved, self._starts_over = True, False

    def take_failure(self, peer_id: NodeId, failure: Failure) -> None:
        """A hop says that a step or the session failed there."""
        if self._live is not None and failure.epoch == self.epoch:
            self._live.take_failure(peer_id, failure)

    def take_resumed(self, peer_id: NodeId, resumed: Resumed) -> None:
        """The first hop says from which step on it needs them."""
        if self._live is not None and resumed.epoch == self.epoch:
            self._live.take_resumed(peer_id, resumed, self._recording.last_number)

    def take_opened(self, peer_id: NodeId, opened: Opened) -> None:
        """The first hop says that the whole route is open."""
        if self._live is not None and opened.epoch == self.epoch:
            self._live.take_opened(peer_id, opened)

    def take_standing(self, peer_id: NodeId, standing: Standing) -> None:
        """A hop says how far it is."""
        if self._live is not None:
            self._live.take_standing(peer_id, standing)

    def take_link_up(self, link: Link) -> None:
        """A link to some node is there."""
        if self._live is not None:
            self._live.take_link_up(link)

    def take_link_loss(self, link: Link, error: RemoteError | None) -> None:
        """A link of ours is gone."""
        if self._live is not None:
            self._live.take_link_loss(link, error)

    def uses(self, link: Link) -> bool:
        """Whether the present route runs over this link of ours."""
        return self._live is not None and self._live.uses(link)

    # Opening --------------------------------------------------------------------------------------------------

    async def _try_route(self) -> Trouble | None:
        """Open the next route and repeat what it lacks; returns what went wrong. Raises NoRouteError."""
        live = await self._new_route()
        try:
            await live.reach()
            if self._is_closed:
                raise WorkError(ErrorCode.CANCELLED, "the session was closed")
            live.open()
            if live.keys.resumes and (trouble := await live.wait(live.resumed)) is not None:
                return trouble
            if live.keys.confirms:
                if (trouble := await live.wait(live.opened)) is not None:
                    return trouble
                self._begin(live)
                live.holds = True
                return None
            trouble = await self._repeat(live, live.resumed.result() if live.keys.resumes else 1)
        except RemoteError as error:
            return live.seen(error, 0)
        live.holds = trouble is None
        return trouble

    async def _new_route(self) -> LiveRoute:
        """Plan a route, and leave the nodes of the one before that it does without. Raises NoRouteError."""
        route = await self._next_route()
        before = self._live
        self.epoch += 1
        wires = wires_of(route, self._options, before.wires[0] if before else None)
        confirms, prefixes = self._asked_at_first(route, wires)
        keys = RouteKeys(
            self.session_id,
            self.epoch,
            self._switch.gateway_id,
            self._route_key,
            self._new_secret(32),
            resumes=self.epoch > 1 and not (self._starts_over or confirms or self._options.calls),
            answered=self._recording.answered,
            room=self._room,
            confirms=confirms,
            prefixes=prefixes,
            trace=self._trace.context if self._trace is not None else None,
        )
        live = LiveRoute(self._switch, route, wires, self._options, keys, may_do_without=self._may_do_without)
        live.is_proved = self._is_proved
        live.expect(self._recording)
        if before is not None:
            before.close()
        self._live = live
        nodes = {hop.address.node_id for hop in route.hops}
        self._cancel(self._holders - nodes, self.epoch - 1, sealing.LEAVE)
        self._holders = nodes
        return live

    @property
    def _room(self) -> int:
        room = self._options.room
        return room if self._options.calls or not room else max(room, self._recording.end)

    def _asked_at_first(self, route: Route, wires: Sequence[WireDtype]) -> tuple[bool, tuple[Prefix, ...]]:
        """Whether a route on which nothing was sent yet is to confirm that it is open, and what it may hold."""
        offers = [hop.offer for hop in route.hops]
        if self._recording.has_sent or not all(offer.confirms for offer in offers):
            return False, ()
        prefixes: tuple[Prefix, ...] = ()
        if self._beginning is not None and self._options.may_share and all(offer.keeps for offer in offers):
            prefixes = tuple(self._beginning.candidates(context_of(route, wires)))[: sealing.MAX_PREFIXES]
        return self._options.confirms or bool(prefixes), prefixes

    def _begin(self, live: LiveRoute) -> None:
        """Nothing needs to be sent for what every node holds."""
        self.num_held = live.opened.result()
        self._recording = Recording()
        self._recording.leave_out(self.num_held, HELD_ROWS, live.wires[0], axes=self._options.axes)
        if self._beginning is not None and live.keys.prefixes:
            self._beginning.note_held(context_of(live.route, live.wires), self.num_held)

    async def _next_route(self) -> Route:
        """Plan, and give nodes that just failed a moment if they are needed again. Raises NoRouteError."""
        while True:
            now = time.monotonic()
            route = self._plan(now)
            pause_s = self._blame.pause_s(route, now)
            if pause_s <= 0:
                return route
            await asyncio.sleep(pause_s)

    def _plan(self, now: float) -> Route:
        missing: NoRouteError | None = None
        for excluded in self._blame.exclusions(now):
            try:
                return self._replan(excluded, self.route)
            except NoRouteError as error:
                missing = error
        assert missing is not None
        raise missing

    def _may_do_without(self, node_id: NodeId) -> bool:
        try:
            self._replan(self._blame.avoided(time.monotonic()) | {node_id}, self.route)
        except NoRouteError:
            return False
        return True

    # Recovery -------------------------------------------------------------------------------------------------

    async def _recover(self, trouble: Trouble | None) -> None:
        """Open other routes, each with what its nodes lack, until one holds."""
        noticed_at = time.monotonic()
        until = noticed_at + RETURN_GRACE_S
        while trouble is not None:
            self._judge(trouble)
            trouble = await self._try_in_time(until)
        if self._recording.has_sent:
            self.replays += 1
            self.pauses.append(time.monotonic() - noticed_at)
            self._switch.note_pause(self.pauses[-1])
            if self._trace is not None:
                self._trace.note_route(self.epoch, self.pauses[-1])
            logger.info(
                "session %s: goes on over another route",
                self.name,
                extra=self._log_fields(epoch=self.epoch, pause_s=self.pauses[-1]),
            )

    async def _try_in_time(self, until: float) -> Trouble | None:
        """Open the next route; without one, wait until that time for nodes that were lost to return."""
        while True:
            try:
                return await self._try_route()
            except NoRouteError:
                self._raise_if_barred()
                if time.monotonic() > until:
                    raise
                await asyncio.sleep(RETURN_POLL_S)

    async def _repeat(self, live: LiveRoute, first: int) -> Trouble | None:
        """Repeat the recorded steps from number `first` on, never more than two windows ahead of any hop."""
        waits_for = num_steps = num_bytes = 0
        for recorded in self._recording:
            if recorded.number < first:
                continue
            if recorded.is_held:
                await self._fill(recorded, live.wires[0])
            if recorded.is_call and (recorded.is_answered or not await self._make(recorded, live)):
                continue
            num_steps, num_bytes = num_steps + 1, num_bytes + len(recorded.payload)
            await live.send(recorded, is_repeat=True)
            self.rows_repeated += recorded.rows
            if not live.is_live:
                return live.trouble.result()
            if num_steps >= REPLAY_STEPS or num_bytes >= REPLAY_BYTES:
                if waits_for and (trouble := await live.wait_done(waits_for)) is not None:
                    return trouble
                waits_for, num_steps, num_bytes = recorded.number, 0, 0
        return None

    async def _make(self, recorded: RecordedStep, live: LiveRoute) -> bool:
        """Make a call for this route; false where that cannot be."""
        is_made = await self._calls.make(recorded, live)
        if not is_made:
            self._recording.forget(recorded)
        return is_made

    async def _fill(self, recorded: RecordedStep, wire: WireDtype) -> None:
        """Make the payload of a step that was left out, since some node does not hold its positions now."""
        assert self._beginning is not None
        recorded.payload = await self._beginning.rows(recorded.position, recorded.end, wire)
        recorded.wire, recorded.is_held = wire, False

    def _judge(self, trouble: Trouble) -> None:
        """Draw the consequences. Raises the error when no other try can mend it."""
        error = trouble.error
        if self._is_closed:
            raise error
        self._blame.note(trouble, time.monotonic(), is_begun=self._is_proved)
        logger.info(
            "session %s hop %s: another route after %s",
            self.name,
            error.hop,
            error.code.name,
            extra=self._log_fields(error.hop, code=error.code.name),
        )
        if self._trace is not None:
            self._trace.note_trouble(error.hop, (trouble.node_id or b"").hex()[:8], error.code.name)
        self._starts_over |= error.code is ErrorCode.STEP
        node_id = trouble.node_id
        if node_id is None:
            return
        if trouble.concerns_others:
            self._switch.note_doubt(node_id)
        if trouble.is_seen and not trouble.is_node_up and node_id not in self._blame.barred:
            self._switch.note_loss(node_id)

    def _log_fields(self, hop: int | None = None, **more: object) -> dict[str, object]:
        """What a line is about, by the names that all lines have for it."""
        hops = self.route.hops if self.route else ()
        model = {"model": hops[0].offer.model_name} if hops else {}
        at_hop: dict[str, object] = {}
        if hop is not None and 0 <= hop < len(hops):
            at_hop = {"hop": hop, "node": hops[hop].address.node_id.hex()[:8]}
        return {"session": self.name, **model, **at_hop, **more}

    def _raise_if_barred(self) -> None:
        """With no route left because of nodes that are there but cannot do it: say what they said."""
        if self._blame.barred:
            with contextlib.suppress(NoRouteError):
                self._replan(frozenset(), self.route)
                raise next(reversed(self._blame.barred.values())) from None

    def _names(self) -> tuple[bytes, ...]:
        """The blocks that every node of the route can keep; none where a step is under way, or a node cannot."""
        live = self._live
        if self._beginning is None or live is None or not (live.holds and live.is_live):
            return ()
        if not self._options.may_share:
            return ()
        if self._recording.unanswered or not all(hop.offer.keeps for hop in live.route.hops):
            return ()
        return tuple(self._beginning.names(context_of(live.route, live.wires), self._recording.end))

    def _keep(self, names: tuple[bytes, ...]) -> None:
        proofs = {
            purpose: sealing.proof(self._route_key, purpose, self.session_id, self.epoch)
            for purpose in (sealing.KEEP, sealing.CANCEL)
        }
        keep = Keep(self.session_id, self.epoch, proofs[sealing.KEEP], names)
        for node_id in self._holders:
            self._switch.keep(node_id, keep, Cancel(self.session_id, self.epoch, proofs[sealing.CANCEL]))

    def _cancel(self, nodes: Iterable[NodeId], epoch: int, purpose: bytes) -> None:
        """Free what `nodes` hold for routes up to `epoch`; a node that is on a later route keeps its session."""
        proof = sealing.proof(self._route_key, purpose, self.session_id, epoch)
        for node_id in nodes:
            self._switch.deliver(node_id, Cancel(self.session_id, epoch, proof))


async def _send_over(live: LiveRoute, recorded: RecordedStep) -> None:
    try:
        await live.send(recorded)
    except RemoteError as error:
        live.note(live.seen(error, 0))


def _within(deadline_s: float | None) -> AbstractAsyncContextManager[None]:
    """Raise WorkError DEADLINE when what is inside takes longer."""
    return contextlib.nullcontext() if deadline_s is None else _limited(deadline_s)


@contextlib.asynccontextmanager
async def _limited(deadline_s: float) -> AsyncIterator[None]:
    try:
        async with asyncio.timeout(deadline_s):
            yield
    except TimeoutError:
        raise WorkError(ErrorCode.DEADLINE, "the answer took longer than its deadline") from None
