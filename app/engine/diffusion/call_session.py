"""Sessions of calls over chains of nodes: passes are packed, sent, and what comes back is checked and unpacked.

A route that takes over begins with nothing: lost calls are made again for it, whole ones even where they were patches.
Knows nothing of pipelines, guidance or when patches are right.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from app.engine.diffusion.passes import CallSession, NoRoomError, PassMade, PassOrder, SessionCounts
from app.engine.request import RouteHop
from app.engine.routes import Routes
from routing.chain import Chain
from routing.errors import ErrorCode, NoRouteError, WorkError
from routing.opening import ChainOptions
from routing.planner import RouteRequest
from routing.recorded import CannotRemake
from routing.switchboard import Switchboard
from routing.types import Answer, Buffer, NodeId, SliceSpec
from slicing.diffusion.calls import Pass
from slicing.diffusion.patches import Mode
from slicing.diffusion.replay import Verdict
from slicing.diffusion.stacks import Stack
from slicing.diffusion.wire import CallHeader, CallReceiver, CallSender, WireForm
from slicing.errors import CallError

MAX_CALLS = 1 << 16  # of one session: a thousand steps of several patches, made again now and then


@dataclass(frozen=True)
class ChainSessions:
    """Opens sessions for one request: routes as it asked for, until its time is over (on time.monotonic)."""

    switchboard: Switchboard
    routes: Routes
    asked: RouteRequest
    form: WireForm = WireForm.RAW
    tenant: bytes = b""
    until: float | None = None

    async def open(
        self, stack: Stack, *, room_kib: int, avoided: frozenset[NodeId] = frozenset()
    ) -> CallSession:
        """See `passes.Sessions`."""
        spec = SliceSpec(stack.offset, stack.end)
        request = replace(
            self.asked,
            spec=spec,
            excluded=self.asked.excluded | avoided,
            pinned=self._pinned_for(spec) - avoided,
        )
        options = ChainOptions(
            max_positions=MAX_CALLS,
            tenant=self.tenant,
            room=room_kib,
            confirms=room_kib > 0,
            calls=True,
        )
        try:
            chain = await self.switchboard.open_chain(request, options, deadline_s=left_s(self.until))
        except NoRouteError as error:
            raise _named(error, stack, self.asked.model_name) from None
        except WorkError as error:
            raise _no_room(error, room_kib) from None
        return ChainSession(chain, self.routes, stack, self.form, room_kib, self.until, self.asked.model_name)

    def _pinned_for(self, spec: SliceSpec) -> frozenset[NodeId]:
        """The pinned nodes that have blocks of this stack: one that has none of it serves another."""
        if not self.asked.pinned:
            return frozenset()
        serving = {
            record.address.node_id
            for record in self.switchboard.directory.records()
            for offer in record.offers
            if offer.model_digest == self.asked.model_digest
            and offer.spec.start < spec.end
            and spec.start < offer.spec.end
        }
        return self.asked.pinned & serving


class ChainSession:
    """A `CallSession` over one chain."""

    def __init__(
        self,
        chain: Chain,
        routes: Routes,
        stack: Stack,
        form: WireForm,
        room_kib: int,
        until: float | None,
        model_name: str = "",
    ) -> None:
        self.chain = chain
        self._model_name = model_name
        self._routes = routes
        self._stack = stack
        self._form = form
        self._room_kib = room_kib
        self._until = until
        self._counts = SessionCounts()
        self._num_passes = 0
        self.is_judged = False  # every hop of the present route was asked what it says of patches
        self.sender = CallSender(form)
        self.receiver = CallReceiver()

    @property
    def epoch(self) -> int:
        return self.chain.epoch

    @property
    def hops(self) -> tuple[RouteHop, ...]:
        return self._routes.taken(self.chain.route)

    @property
    def nodes(self) -> frozenset[NodeId]:
        route = self.chain.route
        return frozenset(hop.address.node_id for hop in route.hops) if route else frozenset()

    @property
    def replays(self) -> int:
        return self.chain.replays

    @property
    def counts(self) -> SessionCounts:
        times = self.chain.times
        self._counts.compute_s, self._counts.network_s = times.compute_s, times.network_s
        self._counts.crypto_s, self._counts.queue_s = times.crypto_s, times.queue_s
        return self._counts

    async def run(
        self, parts: Sequence[tuple[Pass, PassOrder]], whole: Pass, on_sent: Callable[[], None]
    ) -> list[PassMade]:
        """See `passes.CallSession`."""
        group = _Group(self, whole, self._num_passes)
        self._num_passes += 1
        calls = [_Call(group, made, order) for made, order in parts]
        try:
            sent = []
            for call in calls:
                sent.append(await self.chain.send_call(call.make, call.check, deadline_s=left_s(self._until)))
                if len(sent) == 1:
                    on_sent()
            for call, recorded in zip(calls, sent, strict=True):
                try:
                    answer = await self.chain.answer(recorded, deadline_s=left_s(self._until))
                except CannotRemake:  # a whole pass went in its place
                    continue
                self._note(answer)
                assert call.result is not None
        except NoRouteError as error:
            raise _named(error, self._stack, self._model_name) from None
        except WorkError as error:
            raise _no_room(error, self._room_kib) from None
        return [call.result for call in calls if call.result is not None]

    async def close(self) -> None:
        await self.chain.close()

    def renew(self) -> None:
        """A route begins with nothing of what was sent, and sends nothing that builds on it."""
        self.sender, self.receiver = CallSender(self._form), CallReceiver()
        self.is_judged = False

    def note_sent(self, size_bytes: int) -> None:
        self._counts.bytes_sent += size_bytes

    def _note(self, answer: Answer) -> None:
        self._counts.bytes_received += len(answer.payload)
        route = self.chain.route
        for hop, trace in zip(route.hops if route else (), answer.traces, strict=False):
            seconds = self._counts.node_s
            node_id = hop.address.node_id
            seconds[node_id] = seconds.get(node_id, 0.0) + trace.compute_us / 1e6


@dataclass(eq=False)
class _Group:
    """The calls of one pass."""

    session: ChainSession
    whole: Pass = field(repr=False)
    number: int
    is_made_whole: bool = False  # a patch was lost, and the whole pass went in its place


@dataclass(eq=False)
class _Call:
    """One call: made for each route that it is sent over, and its answer."""

    group: _Group
    made: Pass = field(repr=False)
    order: PassOrder
    is_first: bool = False  # on its route to keep keys and values: every hop judges
    sent: Pass | None = field(default=None, repr=False)
    mode: Mode = Mode.WHOLE
    result: PassMade | None = field(default=None, repr=False)

    def make(self, is_fresh: bool) -> Buffer:
        """Its bytes, in a thread of its own. Raises CannotRemake where a whole pass holds what it asks for."""
        session = self.group.session
        self.sent, self.mode = self.made, self.order.mode
        if is_fresh:
            session.renew()
        if self.mode is Mode.PATCH:
            if self.group.is_made_whole:
                raise CannotRemake
            if is_fresh:
                self.sent, self.mode, self.group.is_made_whole = self.group.whole, Mode.WHOLE_KEEP, True
        self.is_first = self.mode is Mode.WHOLE_KEEP and not session.is_judged
        session.is_judged |= self.is_first
        header = CallHeader(int(self.mode), self.group.number, self.order.cut, self.order.extrapolate)
        payload = session.sender.pack(header, self.sent, fresh=is_fresh)
        session.note_sent(len(payload))
        return payload

    def check(self, answer: Answer) -> str | None:
        """Take the streams of an answer; what is wrong with them, if anything is."""
        assert self.sent is not None
        try:
            header, streams = self.group.session.receiver.unpack_streams(answer.payload, self.sent.streams)
        except CallError as error:
            return str(error)
        self.result = PassMade(streams, self._verdicts(header), was_whole=self.mode is not Mode.PATCH)
        return None

    def _verdicts(self, header: CallHeader) -> list[Verdict]:
        """What the hops said, and where they had to, what those that said nothing are taken to have said."""
        verdicts = [Verdict(told.allowed, told.reason) for told in header.verdicts]
        if self.is_first:
            told = {verdict.hop for verdict in header.verdicts}
            route = self.group.session.chain.route
            silent = set(range(len(route.hops) if route else 0)) - told
            verdicts += [Verdict(False, f"hop {hop} did not check it") for hop in sorted(silent)]
        return verdicts


def left_s(until: float | None) -> float | None:
    """Seconds that are left until a time; None: no limit."""
    return None if until is None else max(0.0, until - time.monotonic())


def named_blocks(stack: Stack, missing: Sequence[tuple[int, int]]) -> str:
    """Blocks of a stack, of which these are the global numbers, as the stack numbers them."""
    inside = [
        f"{max(start, stack.offset) - stack.offset}:{min(end, stack.end) - stack.offset}"
        for start, end in missing
    ]
    return f"blocks {', '.join(inside)} of {stack.name}"


def _named(error: NoRouteError, stack: Stack, model: str) -> NoRouteError:
    """The same, with the blocks as their stack numbers them."""
    blocks = named_blocks(stack, error.missing) if error.missing else ""
    reason = "; ".join(part for part in (error.reason, blocks) if part)
    return NoRouteError(error.missing, model, error.missing_ends, reason)


def _no_room(error: WorkError, asked_kib: int) -> Exception:
    if error.code is ErrorCode.NO_ROOM and asked_kib:
        return NoRoomError(asked_kib, error.room)
    return error
