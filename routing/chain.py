"""One session's live route: steps go in at the first hop, answers come back from the last.

Opens a route, sends steps, waits for answers, and, when a hop is lost, plans again and replays the recorded steps
with the row counts they had. Knows nothing of tokens or tensors: payloads are bytes that the engine made.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from typing import Any

from routing import sealing
from routing.answers import ChainTimes, SentStep, check_answer
from routing.blame import Blame, Trouble
from routing.errors import ErrorCode, LinkError, NoRouteError, RemoteError, WorkError, remote_error
from routing.link import Link
from routing.opening import ChainOptions, RouteKeys, opening_of, wires_of
from routing.recorded import RecordedStep, Recording
from routing.switch import Switch
from routing.types import (
    Answer,
    Buffer,
    Cancel,
    Failure,
    NodeId,
    Route,
    SessionId,
    Step,
    StepFlag,
    Want,
    WireDtype,
)

logger = logging.getLogger(__name__)

# Silence on a watched link that is a reason to re-route, nothing more (transport.md, 5.6).
SUSPECT_AFTER_S = 2.0
SUSPECT_POLL_S = 0.25
REACH_LAST_S = 1.0  # a link for direct return is a gain, not a need; one that comes later is used too
RETURN_GRACE_S = (
    1.0  # a node that was restarted, or whose link was cut, is back within the second (transport.md, 4)
)
RETURN_POLL_S = 0.05
SMALL_BYTES = 64 << 10  # a step of this size is not worth waiting for its leaving; the answer is waited for
# A replay waits for a sign of every so many steps, two windows on their way: a node queues what it is sent.
REPLAY_STEPS = 32
REPLAY_BYTES = 8 << 20
MAX_TEXT = 200  # characters of what a node says about a failure


Replan = Callable[[frozenset[NodeId], Route | None], Route]


class Chain:
    """One session over one route at a time; `epoch` counts the routes it has had.

    One task at a time sends and waits; `close` may come from any.
    """

    def __init__(
        self, switch: Switch, replan: Replan, options: ChainOptions, *, new_secret: Callable[[int], bytes]
    ) -> None:
        self._switch = switch
        self._replan = replan
        self._options = options
        self._new_secret = new_secret
        self.session_id = SessionId(new_secret(16))
        self._route_key = new_secret(32)
        self._answer_key = b""
        self.route: Route | None = None
        self.epoch = 0
        self.replays = 0
        self.times = ChainTimes()
        self._recording = Recording()
        self._sent: dict[int, SentStep] = {}  # by step number, of the present route, answers due
        self._last_number = 0
        self._wires: tuple[WireDtype, ...] = ()  # into each hop, and back
        self._blame = Blame()
        self._trouble: asyncio.Future[Trouble] | None = None
        self._links: list[Link | None] = []
        self._holders: set[NodeId] = set()  # nodes that may hold the session and were not told to free it
        self._watches = contextlib.ExitStack()
        self._is_closed = False

    @property
    def first_wire(self) -> WireDtype:
        """The element type that the first hop takes. Other routes keep it, if their first hop speaks it."""
        return self._wires[0]

    @property
    def num_recorded(self) -> int:
        """Steps that a replay would repeat."""
        return len(self._recording)

    async def open(self, *, deadline_s: float | None = None) -> None:
        """Plan and open the first route. Raises NoRouteError, RemoteError, or WorkError DEADLINE."""
        self._switch.register(self)
        async with _within(deadline_s):
            trouble = await self._try_route()
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

        `payload` is in `first_wire`. What fails is told by `answer`; raises WorkError DEADLINE.
        """
        until = None if deadline_s is None else time.monotonic() + deadline_s
        recorded = RecordedStep(position, rows, payload, self.first_wire, want, tuple(want_rows), until)
        if want is not Want.NONE:
            recorded.answer = asyncio.get_running_loop().create_future()
        self._recording.add(recorded)
        if self._trouble is not None and not self._trouble.done():  # else the replay will send it
            async with _within(deadline_s if len(payload) > SMALL_BYTES else None):
                try:
                    await self._send_recorded(recorded, want)
                except RemoteError as error:
                    self._note_trouble(self._seen(error, 0))
        return recorded

    async def answer(self, recorded: RecordedStep, *, deadline_s: float | None = None) -> Answer:
        """Wait for the answer of a sent step, over as many routes as it takes. It is handed out once.

        Raises NoRouteError when no replica is left, WorkError DEADLINE when the time is over, or the RemoteError
        that no replay can mend.
        """
        answer = recorded.answer
        assert answer is not None
        async with _within(deadline_s):
            while (trouble := await self._or_trouble(answer)) is not None:
                await self._recover(trouble)
        recorded.answer = None  # not kept: a long session's answers are as large as its steps
        return answer.result()

    async def step(
        self, payload: Buffer, *, position: int, rows: int, deadline_s: float | None = None
    ) -> Answer:
        """Send one step and wait for its last row."""
        recorded = await self.send(payload, position=position, rows=rows, deadline_s=deadline_s)
        return await self.answer(recorded, deadline_s=deadline_s)

    async def close(self) -> None:
        """Free the session on every node: down the chain, and directly wherever there is a link. Never waits."""
        self._is_closed = True
        self._switch.forget(self)
        self._watches.close()
        closed = WorkError(ErrorCode.CANCELLED, "the session was closed")
        self._note_trouble(Trouble(closed, is_seen=True))
        self._cancel(self._holders, self.epoch)

    # What the switch tells ------------------------------------------------------------------------------------

    def take_answer(self, peer_id: NodeId, answer: Answer) -> None:
        """An answer arrived; one of an older route, already given, or not from the last hop is dropped."""
        if answer.epoch != self.epoch or not self._may_answer(peer_id, answer):
            return
        sent = self._sent.pop(answer.step, None)
        if sent is None:
            return
        try:
            if StepFlag.SEALED in answer.flags:
                answer = sealing.open_answer(self._answer_key, answer)
            check_answer(answer, sent)
        except RemoteError as error:
            self._note_trouble(self._seen(error, self._hop_of(peer_id)))
            return
        if sent.echo is not None and not sent.echo.done():
            sent.echo.set_result(None)
        recorded = sent.recorded
        if recorded.answer is not None and not recorded.answer.done():
            self.times.add(answer, sent, time.perf_counter())
            self._blame.note_progress()
            recorded.wire_back = sent.wire_back
            recorded.answer.set_result(answer)

    def take_failure(self, peer_id: NodeId, failure: Failure) -> None:
        """A hop says that a step or the session failed there. It may blame itself and those after it."""
        sender = self._hop_of(peer_id)
        if failure.epoch != self.epoch or sender is None or self.route is None:
            return
        hop = failure.hop if sender <= failure.hop < len(self.route.hops) else sender
        error = remote_error(failure.code, _printable(failure.text), hop=hop, retry_ms=failure.retry_ms)
        before = self._node_at(hop - 1) if error.code is ErrorCode.HOP_LOST and hop else None
        self._note_trouble(Trouble(error, is_seen=False, node_id=self._node_at(hop), before=before))

    def take_link_loss(self, link: Link, error: RemoteError | None) -> None:
        """A link of ours is gone; it matters if the route uses it."""
        hop = next((index for index, own in enumerate(self._links) if own is link), None)
        if hop is not None:
            text = "the node's link closed" if error is None else error.text
            self._note_trouble(self._seen(LinkError(ErrorCode.LINK_LOST, text), hop))

    # Opening --------------------------------------------------------------------------------------------------

    async def _open_route(self) -> None:
        route = await self._next_route()
        self._watches.close()
        self._links = []
        self.route = route
        self.epoch += 1
        self._trouble = asyncio.get_running_loop().create_future()
        self._answer_key = self._new_secret(32)
        self._sent.clear()
        self._last_number = 0
        nodes = {hop.address.node_id for hop in route.hops}
        self._cancel(self._holders - nodes, self.epoch - 1)
        self._holders = nodes
        self._wires = wires_of(route, self._options, self._wires[0] if self._wires else None)
        links = [await self._reach(index) for index in range(len(route.hops))]
        if self._is_closed:
            raise WorkError(ErrorCode.CANCELLED, "the session was closed")
        first = links[0]
        assert first is not None
        self._links = links
        for link in links:
            if link is not None:
                self._watches.enter_context(link.watch())
        keys = RouteKeys(
            self.session_id, self.epoch, self._switch.gateway_id, self._route_key, self._answer_key
        )
        first.post(opening_of(route, self._wires, self._options, keys))

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

    async def _reach(self, index: int) -> Link | None:
        """The first hop must be reached, the last should be (direct return); others only if a link is there."""
        assert self.route is not None
        hop = self.route.hops[index]
        if index == 0:
            return await self._switch.reach(hop)
        if index == len(self.route.hops) - 1:
            with contextlib.suppress(RemoteError, TimeoutError):  # else it answers up the chain
                async with asyncio.timeout(REACH_LAST_S):
                    return await self._switch.reach(hop)
        return self._switch.live_link(hop.address.node_id)

    # Sending and waiting --------------------------------------------------------------------------------------

    async def _send_recorded(self, recorded: RecordedStep, want: Want, *, echoes: bool = False) -> SentStep:
        """Number and send a step, wanting back what `want` says. Raises RemoteError."""
        assert self.route is not None
        recorded.widen_to(self.first_wire)
        want_rows = recorded.want_rows if want is recorded.want else ()
        self._last_number += 1
        sent = SentStep(
            recorded,
            recorded.wanted if want is recorded.want else (),
            self._options.runs_closing,
            self._wires[-1],
            self._options.hidden_size or self.route.hops[-1].offer.hidden_size,
            len(self.route.hops),
            time.perf_counter(),
            asyncio.get_running_loop().create_future() if echoes else None,
        )
        flags = StepFlag.TOKEN_IDS if self._options.takes_token_ids else StepFlag.NONE
        if want is not Want.NONE:
            self._sent[self._last_number] = sent
            flags |= StepFlag.TRACE if self._options.trace else StepFlag.NONE
        await self._post(
            Step(
                self.session_id,
                self.epoch,
                self._last_number,
                recorded.position,
                recorded.rows,
                recorded.payload,
                want,
                want_rows,
                flags,
                recorded.left_ms(time.monotonic()),
            )
        )
        return sent

    async def _post(self, step: Step) -> None:
        """Hand a step to the first link; wait until a large one has left, unless the route gets into trouble."""
        first = self._links[0]
        assert first is not None
        if len(step.payload) <= SMALL_BYTES:
            first.post(step)
            return
        sending = asyncio.ensure_future(first.send(step))
        try:
            if await self._or_trouble(sending) is None:
                sending.result()
        finally:
            if not sending.done():
                sending.cancel()  # takes back what has not left
                await asyncio.gather(sending, return_exceptions=True)

    async def _or_trouble(self, future: asyncio.Future[Any]) -> Trouble | None:
        """Wait for a future, or for trouble on this route; look out for silent nodes meanwhile."""
        trouble = self._trouble
        assert trouble is not None
        while not future.done() and not trouble.done():
            asked_at = time.monotonic()
            await asyncio.wait({future, trouble}, timeout=SUSPECT_POLL_S, return_when=asyncio.FIRST_COMPLETED)
            was_stopped = time.monotonic() - asked_at > 2 * SUSPECT_POLL_S  # then it was us who were silent
            if not future.done() and not trouble.done() and not was_stopped:
                self._suspect_the_silent()
        return None if future.done() else trouble.result()

    def _suspect_the_silent(self) -> None:
        """Leave a silent node if another route exists; without one, wait for its link to be declared dead."""
        for hop, link in enumerate(self._links):
            if link is None or link.is_closed or link.silent_for_s < SUSPECT_AFTER_S:
                continue
            try:
                self._replan(self._blame.avoided(time.monotonic()) | {link.peer_id}, self.route)
            except NoRouteError:
                continue
            self._note_trouble(self._seen(LinkError(ErrorCode.TIMEOUT, "the node is silent"), hop))
            return

    def _note_trouble(self, trouble: Trouble) -> None:
        if self._trouble is not None and not self._trouble.done():
            self._trouble.set_result(trouble)

    def _seen(self, error: RemoteError, hop: int | None) -> Trouble:
        """Trouble that we noticed ourselves, with the node at `hop`."""
        error.hop = hop if error.hop is None else error.hop
        node_id = None if error.hop is None else self._node_at(error.hop)
        is_link_lost = error.code in (ErrorCode.LINK_LOST, ErrorCode.KEEPALIVE)
        is_up = is_link_lost and node_id is not None and self._switch.live_link(node_id) is not None
        return Trouble(error, is_seen=True, node_id=node_id, is_node_up=is_up)

    # Recovery -------------------------------------------------------------------------------------------------

    async def _recover(self, trouble: Trouble | None) -> None:
        """Open other routes, and repeat every recorded step with the row counts it had, until one holds."""
        until = time.monotonic() + RETURN_GRACE_S
        while trouble is not None:
            self._judge(trouble)
            while True:
                try:
                    trouble = await self._try_route()
                    break
                except NoRouteError:
                    self._raise_if_barred()
                    if time.monotonic() > until:
                        raise
                    await asyncio.sleep(RETURN_POLL_S)
        self.replays += 1 if self._recording else 0

    async def _try_route(self) -> Trouble | None:
        """Open the next route and repeat what is recorded; returns what went wrong. Raises NoRouteError."""
        try:
            await self._open_route()
            return await self._replay()
        except RemoteError as error:
            return self._seen(error, 0)

    async def _replay(self) -> Trouble | None:
        """Repeat the recorded steps, never more than two windows ahead of the last hop."""
        waiting: asyncio.Future[None] | None = None
        num_steps = num_bytes = 0
        for recorded in self._recording:
            num_steps, num_bytes = num_steps + 1, num_bytes + len(recorded.payload)
            is_border = num_steps >= REPLAY_STEPS or num_bytes >= REPLAY_BYTES
            want = self._replayed_want(recorded)
            if want is Want.NONE and is_border:
                want = Want.LIST  # of no rows: an acknowledgement
            sent = await self._send_recorded(recorded, want, echoes=is_border)
            assert self._trouble is not None
            if self._trouble.done():
                return self._trouble.result()
            if is_border:
                if waiting is not None and (trouble := await self._or_trouble(waiting)) is not None:
                    return trouble
                waiting, num_steps, num_bytes = sent.echo, 0, 0
        return None

    def _replayed_want(self, recorded: RecordedStep) -> Want:
        """An answered step is repeated for its keys and values only, or, where the last hop draws, for its history."""
        return Want.NONE if recorded.is_answered and not self._options.runs_closing else recorded.want

    def _judge(self, trouble: Trouble) -> None:
        """Draw the consequences. Raises the error when no other try can mend it."""
        error = trouble.error
        if self._is_closed:
            raise error
        self._blame.note(trouble, time.monotonic())
        logger.info(
            "session %s hop %s: another route after %s", self.session_id[:4].hex(), error.hop, error.code.name
        )
        node_id = trouble.node_id
        if trouble.is_seen and node_id and not trouble.is_node_up and node_id not in self._blame.barred:
            self._switch.note_loss(node_id)

    def _raise_if_barred(self) -> None:
        """With no route left because of nodes that are there but cannot do it: say what they said."""
        if self._blame.barred:
            with contextlib.suppress(NoRouteError):
                self._replan(frozenset(), self.route)
                raise next(reversed(self._blame.barred.values())) from None

    def _cancel(self, nodes: Iterable[NodeId], epoch: int) -> None:
        """Free what `nodes` hold for routes up to `epoch`; a node that is on a later route keeps its session."""
        proof = sealing.proof(self._route_key, b"cancel", self.session_id, epoch)
        for node_id in nodes:
            self._switch.deliver(node_id, Cancel(self.session_id, epoch, proof))

    # Who is who -----------------------------------------------------------------------------------------------

    def _node_at(self, hop: int) -> NodeId | None:
        hops = self.route.hops if self.route else ()
        return hops[hop].address.node_id if 0 <= hop < len(hops) else None

    def _hop_of(self, node_id: NodeId) -> int | None:
        hops = self.route.hops if self.route else ()
        return next((index for index, hop in enumerate(hops) if hop.address.node_id == node_id), None)

    def _may_answer(self, peer_id: NodeId, answer: Answer) -> bool:
        """The last hop may; what comes up the chain is sealed by it, whoever passes it on."""
        hop = self._hop_of(peer_id)
        if self.route is None or hop is None:
            return False
        return hop == len(self.route.hops) - 1 or StepFlag.SEALED in answer.flags


@contextlib.asynccontextmanager
async def _within(deadline_s: float | None) -> AsyncIterator[None]:
    """Raise WorkError DEADLINE when what is inside takes longer."""
    try:
        async with asyncio.timeout(deadline_s):
            yield
    except TimeoutError:
        raise WorkError(ErrorCode.DEADLINE, "the answer took longer than its deadline") from None


def _printable(text: str) -> str:
    """What a node says, fit for a log."""
    return "".join(char if char.isprintable() else "?" for char in text[:MAX_TEXT])
