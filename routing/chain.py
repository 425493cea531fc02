"""One session's live route: steps go in at the first hop, answers come back from the last.

Opens a route, sends steps, waits for answers, and, when a hop is lost, plans again and replays the recorded steps
with the row counts they had. Knows nothing of tokens or tensors: payloads are bytes that the engine made.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from routing import sealing
from routing.errors import ErrorCode, LinkError, NoRouteError, RemoteError, WorkError, remote_error
from routing.link import Link
from routing.types import (
    Answer,
    Buffer,
    Cancel,
    Failure,
    Hop,
    HopEntry,
    NodeId,
    Open,
    Route,
    SessionId,
    Step,
    StepFlag,
    Want,
    WireDtype,
)

logger = logging.getLogger(__name__)

SUSPECT_AFTER_S = (
    2.0  # silence on a watched link that is a reason to re-route, nothing more (transport.md, 5.6)
)
SUSPECT_POLL_S = 0.25
MAX_ATTEMPTS = 8  # routes tried per answer: a swarm that loses more nodes in one answer will not finish it
CANCEL_TIMEOUT_S = (
    1.0  # a stuck link must not hold up the others; its node frees the session when the link dies
)
IDLE_TIMEOUT_S = 120

# A node that failed so is asked again; any other failure that a replay can mend leaves the node out.
SAME_NODE_MAY_RETRY = {ErrorCode.NO_SESSION, ErrorCode.STEP}
REPLAY_MENDS = SAME_NODE_MAY_RETRY | {
    ErrorCode.TIMEOUT,
    ErrorCode.LINK_LOST,
    ErrorCode.KEEPALIVE,
    ErrorCode.HANDSHAKE,
    ErrorCode.ID_MISMATCH,
    ErrorCode.CERTIFICATE_EXPIRED,
    ErrorCode.NETWORK,
    ErrorCode.HOP_LOST,
    ErrorCode.NO_SLICE,
    ErrorCode.BUSY,
    ErrorCode.COMPUTE,
    ErrorCode.CANCELLED,
}


@dataclass(frozen=True, slots=True)
class ChainOptions:
    """What a session needs of its route, the same for every hop and every replay."""

    max_positions: int
    wire: WireDtype | None = None  # None: the dtype each slice computes in
    takes_token_ids: bool = False  # thin mode: the first hop embeds
    runs_closing: bool = False  # thin mode: the last hop keeps the head
    sampling: dict[str, Any] | None = field(default=None, repr=False)
    trace: bool = True
    tenant: bytes = b""


@dataclass(slots=True)
class ChainTimes:
    """Where the time of a chain's answered steps went, in seconds, summed over hops."""

    elapsed_s: float = 0.0
    compute_s: float = 0.0
    queue_s: float = 0.0
    crypto_s: float = 0.0
    steps: int = 0

    @property
    def network_s(self) -> float:
        """What is left of the elapsed time: links, loops and wake-ups."""
        return max(0.0, self.elapsed_s - self.compute_s - self.queue_s - self.crypto_s)


@dataclass(slots=True)
class RecordedStep:
    """A step as it was sent, kept for a replay. `number` is its step number on the present route."""

    position: int
    rows: int
    payload: Buffer = field(repr=False)
    want: Want
    want_rows: tuple[int, ...]
    number: int = 0
    sent_at: float = 0.0
    answer: asyncio.Future[Answer] | None = None

    @property
    def end(self) -> int:
        return self.position + self.rows


class Switch(Protocol):
    """What a chain needs of the gateway's links: to reach nodes, and to hear of answers and losses."""

    @property
    def gateway_id(self) -> NodeId:
        """The identity that nodes see behind the gateway's links."""

    def register(self, chain: Chain) -> None:
        """Give this chain the answers, failures and losses that concern it."""

    def forget(self, chain: Chain) -> None:
        """Stop doing so."""

    async def reach(self, hop: Hop) -> Link:
        """A live link to the node of `hop`; raises RemoteError."""

    def live_link(self, node_id: NodeId) -> Link | None:
        """A link that is up now, without dialling."""

    def note_loss(self, node_id: NodeId) -> None:
        """A node was found gone or silent."""


Replan = Callable[[frozenset[NodeId], Route | None], Route]


class Chain:
    """One session over one route at a time; `epoch` counts the routes it has had."""

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
        self._attempts = 0
        self._recorded: list[RecordedStep] = []
        self._last_number = 0
        self._excluded: set[NodeId] = set()
        self._trouble: asyncio.Future[RemoteError] | None = None
        self._links: list[Link | None] = []
        self._watches = contextlib.ExitStack()

    @property
    def first_wire(self) -> WireDtype:
        """The element type that the first hop takes."""
        return self._wire_of(0)

    @property
    def last_wire(self) -> WireDtype:
        """The element type of the hidden states that the last hop returns."""
        assert self.route is not None
        return self._wire_of(len(self.route.hops))

    @property
    def num_recorded(self) -> int:
        """Steps that a replay would repeat."""
        return len(self._recorded)

    async def open(self) -> None:
        """Plan and open the first route. Raises NoRouteError or RemoteError."""
        self._switch.register(self)
        while True:
            try:
                await self._open_route()
            except RemoteError as error:
                self._give_up_unless_mendable(error)
            else:
                return

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
        """Send one step; a position below what was sent before rolls the session back first."""
        self._roll_back(position)
        answer = None if want is Want.NONE else asyncio.get_running_loop().create_future()
        recorded = RecordedStep(position, rows, payload, want, tuple(want_rows), answer=answer)
        self._recorded.append(recorded)
        if self._trouble is not None and not self._trouble.done():  # else the replay will send it
            try:
                await self._send_recorded(recorded, deadline_s)
            except RemoteError as error:
                self._note_trouble(error)
        return recorded

    async def answer(self, recorded: RecordedStep, *, deadline_s: float | None = None) -> Answer:
        """Wait for the answer of a sent step, over as many routes as it takes.

        Raises NoRouteError when no replica is left, WorkError DEADLINE when the time is over, or the RemoteError
        that no replay can mend.
        """
        assert recorded.answer is not None
        until = None if deadline_s is None else time.monotonic() + deadline_s
        while True:
            try:
                async with asyncio.timeout(None if until is None else max(0.0, until - time.monotonic())):
                    trouble = await self._answer_or_trouble(recorded.answer)
                    if trouble is None:
                        return recorded.answer.result()
                    await self._recover(trouble)
            except TimeoutError:
                raise WorkError(ErrorCode.DEADLINE, "the step took longer than its deadline") from None

    async def step(
        self, payload: Buffer, *, position: int, rows: int, deadline_s: float | None = None
    ) -> Answer:
        """Send one step and wait for its last row."""
        recorded = await self.send(payload, position=position, rows=rows, deadline_s=deadline_s)
        return await self.answer(recorded, deadline_s=deadline_s)

    async def close(self) -> None:
        """Free the session on every node: down the chain, and directly wherever there is a link."""
        self._switch.forget(self)
        self._watches.close()
        if self._trouble is not None:
            self._trouble.cancel()
        if self.route is not None:
            await self._cancel(self.route.hops, self.epoch)

    # What the switch tells ------------------------------------------------------------------------------------

    def take_answer(self, answer: Answer) -> None:
        """An answer arrived; one of an older route, or one already given, is dropped."""
        recorded = next((r for r in reversed(self._recorded) if r.number == answer.step), None)
        if (
            answer.epoch != self.epoch
            or recorded is None
            or recorded.answer is None
            or recorded.answer.done()
        ):
            return
        if StepFlag.SEALED in answer.flags:
            try:
                answer = sealing.open_answer(self._answer_key, answer)
            except RemoteError as error:
                self._note_trouble(error)
                return
        self._add_times(answer, recorded)
        recorded.answer.set_result(answer)

    def take_failure(self, failure: Failure) -> None:
        """A hop says that a step or the session failed there."""
        if failure.epoch == self.epoch:
            error = remote_error(failure.code, failure.text, hop=failure.hop, retry_ms=failure.retry_ms)
            self._note_trouble(error)

    def take_link_loss(self, node_id: NodeId, error: RemoteError | None) -> None:
        """A link of ours to a node is gone; it matters if the node is on the route."""
        hop = self._hop_of(node_id)
        if hop is not None:
            text = "the node's link closed" if error is None else error.text
            self._note_trouble(LinkError(ErrorCode.LINK_LOST, text, hop=hop))

    # Opening --------------------------------------------------------------------------------------------------

    async def _open_route(self) -> None:
        previous = self.route
        self._watches.close()
        self.route = self._replan(frozenset(self._excluded), previous)
        self.epoch += 1
        self._trouble = asyncio.get_running_loop().create_future()
        self._answer_key = self._new_secret(32)
        self._last_number = 0
        if previous is not None:
            await self._cancel(_left_hops(previous, self.route), self.epoch - 1)
        if not self.route.hops:
            return
        self._links = [await self._reach(index) for index in range(len(self.route.hops))]
        entries = tuple(self._sealed_entry(index) for index in range(len(self.route.hops)))
        for link in self._links:
            if link is not None:
                self._watches.enter_context(link.watch())
        first = self._links[0]
        assert first is not None
        await first.send(Open(self.session_id, self.epoch, 0, entries))

    async def _reach(self, index: int) -> Link | None:
        """The first hop must be reached, the last should be (direct return); others only if a link is there."""
        assert self.route is not None
        hop = self.route.hops[index]
        try:
            if index in (0, len(self.route.hops) - 1):
                return await self._switch.reach(hop)
            return self._switch.live_link(hop.address.node_id)
        except RemoteError as error:
            if index:
                return None  # it answers down the chain
            error.hop = 0
            raise

    def _sealed_entry(self, index: int) -> bytes:
        assert self.route is not None
        hops, options = self.route.hops, self._options
        is_last = index == len(hops) - 1
        runs_closing = options.runs_closing and is_last
        entry = HopEntry(
            route_key=self._route_key,
            hop=index,
            num_hops=len(hops),
            gateway_id=self._switch.gateway_id,
            model_digest=hops[index].offer.model_digest,
            start=hops[index].spec.start,
            end=hops[index].spec.end,
            wire_in=self._wire_of(index),
            wire_out=self._wire_of(index + 1),
            max_positions=options.max_positions,
            idle_timeout_s=IDLE_TIMEOUT_S,
            next_hop=None if is_last else hops[index + 1].address,
            answer_key=self._answer_key if is_last else b"",
            run_opening=options.takes_token_ids and index == 0,
            run_closing=runs_closing,
            sampling=options.sampling if runs_closing else None,
            tenant=options.tenant,
        )
        return sealing.seal_entry(
            entry, hops[index].seal_key, sealing.entry_aad(self.session_id, self.epoch, index)
        )

    def _wire_of(self, index: int) -> WireDtype:
        """What travels into hop `index`; `len(hops)` is what the last hop returns."""
        assert self.route is not None
        hops = self.route.hops
        if index == 0 and self._options.takes_token_ids:
            return WireDtype.INT32
        hop = hops[min(index, len(hops) - 1)]
        wanted = self._options.wire or hop.offer.dtype
        return wanted if wanted in hop.dtypes else WireDtype.FLOAT32

    # Sending and waiting --------------------------------------------------------------------------------------

    async def _send_recorded(self, recorded: RecordedStep, deadline_s: float | None) -> None:
        first = self._links[0] if self._links else None
        if first is None:
            return
        flags = StepFlag.TRACE if self._options.trace and recorded.want is not Want.NONE else StepFlag.NONE
        if self._options.takes_token_ids:
            flags |= StepFlag.TOKEN_IDS
        self._last_number += 1
        recorded.number = self._last_number
        recorded.sent_at = time.perf_counter()
        step = Step(
            self.session_id,
            self.epoch,
            recorded.number,
            recorded.position,
            recorded.rows,
            recorded.payload,
            recorded.want,
            recorded.want_rows,
            flags,
            0 if deadline_s is None else max(1, int(deadline_s * 1000)),
        )
        await first.send(step)

    async def _answer_or_trouble(self, answer: asyncio.Future[Answer]) -> RemoteError | None:
        assert self._trouble is not None
        waits: set[asyncio.Future[Any]] = {answer, self._trouble}
        while not answer.done() and not self._trouble.done():
            await asyncio.wait(waits, timeout=SUSPECT_POLL_S, return_when=asyncio.FIRST_COMPLETED)
            if not answer.done() and not self._trouble.done():
                self._suspect_the_silent()
        return None if answer.done() else self._trouble.result()

    def _suspect_the_silent(self) -> None:
        """Leave a silent node if another route exists; without one, wait for its link to be declared dead."""
        for index, link in enumerate(self._links):
            if link is None or link.silent_for_s < SUSPECT_AFTER_S:
                continue
            try:
                self._replan(frozenset(self._excluded | {link.peer_id}), self.route)
            except NoRouteError:
                continue
            self._note_trouble(LinkError(ErrorCode.TIMEOUT, "the node is silent", hop=index))
            return

    def _note_trouble(self, error: RemoteError) -> None:
        if self._trouble is not None and not self._trouble.done():
            self._trouble.set_result(error)

    # Recovery -------------------------------------------------------------------------------------------------

    async def _recover(self, trouble: RemoteError) -> None:
        """Open another route and repeat every recorded step, with the row counts it had."""
        while True:
            self._give_up_unless_mendable(trouble)
            if trouble.retry_ms:
                await asyncio.sleep(trouble.retry_ms / 1000)
            logger.info(
                "session %s: replay %d after %s", self.session_id.hex()[:8], self.replays, trouble.code.name
            )
            try:
                await self._open_route()
                for recorded in tuple(self._recorded):
                    await self._send_recorded(self._for_replay(recorded), None)
            except RemoteError as error:
                trouble = error
            else:
                self.replays += 1
                return

    def _for_replay(self, recorded: RecordedStep) -> RecordedStep:
        """An answered step is repeated for its keys and values only, or, where the last hop draws, for its history."""
        is_answered = recorded.answer is None or recorded.answer.done()
        if is_answered and not self._options.runs_closing:
            return replace(recorded, want=Want.NONE, want_rows=())
        return recorded

    def _give_up_unless_mendable(self, error: RemoteError) -> None:
        self._attempts += 1
        if error.code not in REPLAY_MENDS or self._attempts > MAX_ATTEMPTS:
            raise error
        if error.code in SAME_NODE_MAY_RETRY or self.route is None:
            return
        index = error.hop if error.hop is not None and error.hop < len(self.route.hops) else 0
        node_id = self.route.hops[index].address.node_id
        self._excluded.add(node_id)
        if error.code not in {ErrorCode.BUSY, ErrorCode.COMPUTE}:
            self._switch.note_loss(node_id)
        try:
            self._replan(frozenset(self._excluded), self.route)
        except NoRouteError:
            if error.code in {ErrorCode.BUSY, ErrorCode.COMPUTE}:
                raise error from None  # the node is there: say what it said, not that nobody serves the layers
            raise

    def _roll_back(self, position: int) -> None:
        """Forget recorded rows at or after `position`: the step that comes overwrites them."""
        while self._recorded and self._recorded[-1].position >= position:
            self._recorded.pop()
        if self._recorded and self._recorded[-1].end > position:
            last = self._recorded[-1]
            row_bytes = len(last.payload) // last.rows
            last.rows = position - last.position
            last.payload = memoryview(last.payload)[: last.rows * row_bytes]

    async def _cancel(self, hops: Iterable[Hop], epoch: int) -> None:
        """Free what `hops` hold for routes up to `epoch`; a node that is on a later route keeps its session."""
        cancel = Cancel(
            self.session_id, epoch, sealing.proof(self._route_key, b"cancel", self.session_id, epoch)
        )
        nodes = {hop.address.node_id for hop in hops}
        links = [link for node_id in nodes if (link := self._switch.live_link(node_id)) is not None]
        await asyncio.gather(*(self._send_cancel(link, cancel) for link in links))

    async def _send_cancel(self, link: Link, cancel: Cancel) -> None:
        with contextlib.suppress(RemoteError, TimeoutError):
            async with asyncio.timeout(CANCEL_TIMEOUT_S):
                await link.send(cancel)

    def _hop_of(self, node_id: NodeId) -> int | None:
        hops = self.route.hops if self.route else ()
        return next((index for index, hop in enumerate(hops) if hop.address.node_id == node_id), None)

    def _add_times(self, answer: Answer, recorded: RecordedStep) -> None:
        times = self.times
        times.steps += 1
        times.elapsed_s += time.perf_counter() - recorded.sent_at
        for trace in answer.traces:
            times.compute_s += trace.compute_us / 1e6
            times.queue_s += trace.queue_us / 1e6
            times.crypto_s += trace.crypto_us / 1e6


def _left_hops(previous: Route, route: Route) -> list[Hop]:
    kept = {hop.address.node_id for hop in route.hops}
    return [hop for hop in previous.hops if hop.address.node_id not in kept]
