"""One route of a session while it is live: its links, the steps whose answers are due on it, and what troubles it.

A chain makes one for each epoch. Looks out for silent and overdue hops while somebody waits. Knows nothing of
planning, and of what comes after it has failed.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

from routing import sealing
from routing.answers import SentStep, check_answer
from routing.blame import Trouble
from routing.endpoint import STALE_AFTER_S
from routing.errors import ErrorCode, LinkError, ProtocolError, RemoteError, remote_error
from routing.frames import memory_wire
from routing.link import Link
from routing.opening import ChainOptions, RouteKeys, opening_of
from routing.parts import Assembly, most_of_answer, parts_of
from routing.recorded import RecordedStep
from routing.route_watch import Due, RouteWatch
from routing.switch import Switch
from routing.types import (
    Answer,
    AnswerKind,
    Attach,
    Failure,
    NodeId,
    Opened,
    Resumed,
    Route,
    Standing,
    Step,
    StepFlag,
    Want,
    WireDtype,
)

SUSPECT_POLL_S = 0.1  # between two looks at the hops while somebody waits
STOPPED_S = 0.5  # a look that comes so late: it was us who were stopped, or very busy
PACE_POLL_S = 0.02  # between two looks at how far a replay is
OPEN_TIMEOUT_S = 30.0  # of a first route: a node may be busy with loading its slice
REDIAL_TIMEOUT_S = 1.0  # of a route that takes over: somebody waits for the next token
REACH_LAST_S = 1.0  # a link for direct return is a gain, not a need; one that comes later is used too
SMALL_BYTES = 64 << 10  # a step of this size is not worth waiting for its leaving; the answer is waited for
_SEALED = int(StepFlag.SEALED)
MAX_TEXT = 200  # characters of what a node says about a failure


class LiveRoute:
    """Steps go in at the first hop, answers come back from the last; `trouble` is set when it cannot go on.

    `may_do_without` tells whether another route exists without a node.
    """

    def __init__(
        self,
        switch: Switch,
        route: Route,
        wires: tuple[WireDtype, ...],
        options: ChainOptions,
        keys: RouteKeys,
        *,
        may_do_without: Callable[[NodeId], bool],
    ) -> None:
        loop = asyncio.get_running_loop()
        self.route = route
        self.path = route.path
        self.nodes = frozenset(self.path)
        self.wires = wires
        self.keys = keys
        self.trouble: asyncio.Future[Trouble] = loop.create_future()
        self.resumed: asyncio.Future[int] = loop.create_future()
        self.opened: asyncio.Future[int] = loop.create_future()  # positions that every hop holds already
        self._flags = _flags_of(options)
        self.is_proved = False  # the session has had an answer, on this route or before
        self.holds = False  # it is open, and every recorded step went in again
        self._switch = switch
        self._options = options
        self._sent: dict[int, SentStep] = {}  # by step number: answers due
        self._parts: dict[int, Assembly] = {}  # by step number: of calls' answers that have begun to arrive
        self._last_sent = self._last_answered = 0
        self._links: list[Link | None] = [None] * len(route.hops)
        self._heartbeats = contextlib.ExitStack()
        self._better: Link | None = None  # a link to the first hop that the session should move to
        self._rebuilt: list[RecordedStep] = []  # what nodes may compute again before the next answer
        self._waits_for = 0  # the step that a replay waits for
        self._num_waiting = 0  # of `wait`, while which somebody looks out
        self._look_timer: asyncio.TimerHandle | None = None
        self._watch = RouteWatch(
            route,
            keys,
            self._links,
            measured=lambda: switch.measured(route.hops[0].offer.model_digest),
            may_do_without=may_do_without,
            note=self.note,
            reach_again=lambda hop: switch.reach_soon(route.hops[hop]),
        )

    @property
    def epoch(self) -> int:
        """The number of this route among the session's."""
        return self.keys.epoch

    @property
    def is_live(self) -> bool:
        """Whether nothing has gone wrong so far."""
        return not self.trouble.done()

    def uses(self, link: Link) -> bool:
        """Whether this route runs over this link of ours."""
        return any(own is link for own in self._links)

    # Opening --------------------------------------------------------------------------------------------------

    async def reach(self) -> None:
        """Get links: to the first hop by all means, to the others in the background. Raises RemoteError."""
        first, last = self.route.hops[0], len(self.route.hops) - 1
        is_first_route = self.epoch == 1
        limit_s = REDIAL_TIMEOUT_S if self.is_proved else OPEN_TIMEOUT_S
        self._use(0, await self._switch.reach(first, limit_s))
        for index in range(1, last + 1):
            hop = self.route.hops[index]
            link = self._switch.live_link(hop.address.node_id)
            if link is None and index == last and is_first_route:
                with contextlib.suppress(RemoteError):  # else it answers up the chain
                    link = await self._switch.reach(hop, REACH_LAST_S)
            if link is not None:
                self._use(index, link)
            else:
                self._switch.reach_soon(hop)

    def open(self) -> None:
        """Send the Open. Raises RemoteError."""
        first = self._links[0]
        assert first is not None
        first.post(opening_of(self.route, self.wires, self._options, self.keys))
        self._watch.note_progress()

    def expect(self, recorded: Iterable[RecordedStep]) -> None:
        """Any of these steps may be computed again; answers that nobody has had yet are due, whoever repeats them."""
        self._rebuilt = list(recorded)
        for step in self._rebuilt:
            if not step.is_answered:
                self._sent[step.number] = self._sending(step, is_repeat=True)

    def close(self) -> None:
        """Stop asking its links for signs of life."""
        self._heartbeats.close()
        if self._look_timer is not None:
            self._look_timer.cancel()

    def _use(self, hop: int, link: Link) -> None:
        self._links[hop] = link
        self._heartbeats.enter_context(link.watch())

    # Sending --------------------------------------------------------------------------------------------------

    def forget(self, recorded: RecordedStep) -> None:
        """No answer of this step is due any more."""
        self._sent.pop(recorded.number, None)

    async def send(self, recorded: RecordedStep, *, is_repeat: bool = False) -> None:
        """Send a step to the first hop. Raises RemoteError."""
        is_call, is_memory, is_answered = recorded.is_call, recorded.is_memory, recorded.is_answered
        flags = self._flags[is_call, is_memory, self._options.trace and not is_answered]
        if not is_call:
            recorded.widen_to(memory_wire(self.wires[0]) if is_memory else self.wires[0])
        if is_repeat or recorded.leaves_out:
            flags |= StepFlag.REPLAY
        want, want_rows = recorded.want, recorded.want_rows
        if is_answered and (is_memory or not self._options.draws):
            want, want_rows = Want.NONE, ()  # repeated for its keys and values only
        if not is_answered:
            self._sent[recorded.number] = self._sending(recorded, is_repeat=is_repeat)
        if not is_repeat:
            self._move_to_better()
            if len(self._sent) <= 1:
                self._watch.note_progress()
        self._last_sent = recorded.number
        step = Step(
            self.keys.session_id,
            self.epoch,
            recorded.number,
            recorded.position,
            recorded.rows,
            recorded.payload,
            want,
            want_rows,
            flags,
            0 if recorded.until is None else recorded.left_ms(time.monotonic()),
        )
        if is_call:
            for part in parts_of(step):
                await self._post(part)
        else:
            await self._post(step)

    def _sending(self, recorded: RecordedStep, *, is_repeat: bool) -> SentStep:
        return SentStep(
            recorded,
            recorded.wanted,
            self._options.draws,
            self.wires[-1],
            self._options.hidden_size or self.route.hops[-1].offer.hidden_size,
            len(self.route.hops),
            time.perf_counter(),
            is_repeat,
            self._options.streams,
        )

    async def _post(self, step: Step) -> None:
        """Hand a step to the first link; wait until a large one has left, unless the route gets into trouble."""
        first = self._links[0]
        assert first is not None
        if len(step.payload) <= SMALL_BYTES:
            first.post(step)
            return
        sending = asyncio.ensure_future(first.send(step))
        try:
            if await self.wait(sending) is None:
                sending.result()
        finally:
            if not sending.done():
                sending.cancel()  # takes back what has not left
                await asyncio.gather(sending, return_exceptions=True)

    def _move_to_better(self) -> None:
        """Bind the session to a better link to the first hop, when nothing can be lost on the one so far."""
        better, is_idle = self._better, self._last_answered >= self._last_sent
        if better is None or not is_idle:
            return
        self._better = None
        if not better.is_closed:
            self._attach(better)

    def _attach(self, link: Link) -> None:
        keys = self.keys
        proof = sealing.proof(keys.route_key, sealing.ATTACH, keys.session_id, keys.epoch)
        with contextlib.suppress(RemoteError):  # a link that is lost meanwhile is told by itself
            link.post(Attach(keys.session_id, keys.epoch, proof))
        self._use(0, link)

    # What the links tell --------------------------------------------------------------------------------------

    def take_answer(self, peer_id: NodeId, answer: Answer) -> tuple[SentStep, Answer] | None:
        """An answer that was due, opened and checked; one already given, or not from the last hop, is dropped."""
        hop = self.hop_of(peer_id)
        is_sealed = bool(int(answer.flags) & _SEALED)
        may_answer = hop == len(self.route.hops) - 1 or is_sealed
        if hop is None or not may_answer or (sent := self._sent.get(answer.step)) is None:
            return None
        try:
            if is_sealed:
                answer = sealing.open_answer(self.keys.answer_key, answer)
            if sent.recorded.is_call and answer.kind is AnswerKind.CALL:
                if (whole := self._whole(answer, len(sent.recorded.payload))) is None:
                    self._watch.note_progress()
                    return None
                answer = whole
            del self._sent[answer.step]
            check_answer(answer, sent)
        except RemoteError as error:
            self._sent.pop(answer.step, None)
            self.note(self.wrong(error) if sent.recorded.is_call else self.seen(error, hop))
            return None
        self.is_proved = True
        self._last_answered = max(self._last_answered, answer.step)
        self._note_progress()
        return sent, answer

    def _whole(self, part: Answer, call_bytes: int) -> Answer | None:
        """The answer of a call of so many bytes, once this was its last part. Raises ProtocolError."""
        assembly = self._parts.setdefault(part.step, Assembly(most_of_answer(call_bytes)))
        payloads = assembly.add(part)
        if payloads is None:
            return None
        del self._parts[part.step]
        return part if len(payloads) == 1 else replace(part, payload=b"".join(payloads))

    def take_failure(self, peer_id: NodeId, failure: Failure) -> None:
        """A hop says that a step or the session failed there. It may blame itself and those after it."""
        sender = self.hop_of(peer_id)
        if sender is None:
            return
        hop = failure.hop if sender <= failure.hop < len(self.route.hops) else sender
        text = _printable(failure.text)
        error = remote_error(failure.code, text, hop=hop, retry_ms=failure.retry_ms, room=failure.room)
        may_be_before = (
            {ErrorCode.HOP_LOST, ErrorCode.COMPUTE} if self._options.calls else {ErrorCode.HOP_LOST}
        )
        before = self._node_at(hop - 1) if error.code in may_be_before and hop else None
        self.note(
            Trouble(
                error,
                is_seen=False,
                node_id=self._node_at(hop),
                before=before,
                is_told_by_itself=hop == sender,
            )
        )

    def take_resumed(self, peer_id: NodeId, resumed: Resumed, last_number: int) -> None:
        """The first hop says from which step on it needs them."""
        if self.hop_of(peer_id) != 0 or self.resumed.done():
            return
        if not 1 <= resumed.next_step <= last_number + 1:
            text = f"hop 0 has step {resumed.next_step - 1} of {last_number}"
            self.note(self.seen(ProtocolError(ErrorCode.MALFORMED, text), 0))
            return
        self.resumed.set_result(resumed.next_step)
        self._watch.note_progress()

    def take_opened(self, peer_id: NodeId, opened: Opened) -> None:
        """The first hop says that all have opened, and how much of the session they hold."""
        if self.hop_of(peer_id) != 0 or self.opened.done() or not self.keys.confirms:
            return
        lengths = [0, *(prefix.length for prefix in self.keys.prefixes)]
        if opened.held not in lengths:
            text = f"hop 0 holds {opened.held} positions of a session that nobody asked for"
            self.note(self.seen(ProtocolError(ErrorCode.MALFORMED, text), 0))
            return
        self.opened.set_result(opened.held)
        self._watch.note_progress()

    def take_standing(self, peer_id: NodeId, standing: Standing) -> None:
        """A hop says how far it is."""
        hop = self.hop_of(peer_id)
        if hop is not None:
            self._watch.take(hop, standing)

    def take_link_up(self, link: Link) -> None:
        """A link to one of the nodes is there: use it where there was none, or where it is the better one."""
        hop = self.hop_of(link.peer_id)
        if hop is None:
            return
        own = self._links[hop]
        if own is not None and own is not link and self._is_stuck_on(own):
            silent = LinkError(ErrorCode.TIMEOUT, "the path to the node is silent", hop=hop)
            self.note(Trouble(silent, is_seen=True, node_id=link.peer_id, is_node_up=True))
        elif hop == 0:
            if own is not None and own is not link and own.is_relayed:  # direct, or newer
                self._better = link
        elif own is None or own.is_closed or (own.is_relayed and not link.is_relayed):
            self._use(hop, link)

    def _is_stuck_on(self, own: Link) -> bool:
        is_silent = not own.is_closed and own.silent_for_s >= STALE_AFTER_S
        return is_silent and (bool(self._sent) or not self.holds)

    def take_link_loss(self, link: Link, error: RemoteError | None) -> None:
        """A link of ours is gone; it matters if the route uses it and something may be lost with it."""
        hop = next((index for index, own in enumerate(self._links) if own is link), None)
        if hop is None:
            return
        other = self._switch.live_link(link.peer_id)
        is_idle = self.holds and self._last_answered >= self._last_sent and not self._sent
        is_between = 0 < hop < len(self._links) - 1
        if other is not None and self.is_live and (is_idle or is_between):
            if hop == 0:
                self._attach(other)
            else:
                self._use(hop, other)
            return
        text = "the node's link closed" if error is None else error.text
        self.note(self.seen(LinkError(ErrorCode.LINK_LOST, text), hop))

    # Waiting --------------------------------------------------------------------------------------------------

    async def wait(self, future: asyncio.Future[Any]) -> Trouble | None:
        """Wait for a future, or for trouble; look out for silent nodes and overdue steps meanwhile."""
        if not future.done() and not self.trouble.done():
            waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            wake = functools.partial(_wake, waiter)
            future.add_done_callback(wake)
            self.trouble.add_done_callback(wake)
            self._num_waiting += 1
            if self._look_timer is None:
                self._look_soon()
            try:
                await waiter
            finally:
                self._num_waiting -= 1
                future.remove_done_callback(wake)
                self.trouble.remove_done_callback(wake)
        return None if future.done() else self.trouble.result()

    def _look_soon(self) -> None:
        """One timer for all tokens: each is waited for much shorter than it runs."""
        due = time.monotonic() + SUSPECT_POLL_S
        self._look_timer = asyncio.get_running_loop().call_later(SUSPECT_POLL_S, self._look, due)

    def _look(self, due: float) -> None:
        self._look_timer = None
        if not self._num_waiting or not self.is_live:
            return
        self._look_soon()
        if time.monotonic() - due > STOPPED_S:  # then it was us who were silent
            self._watch.note_progress()
        else:
            self._watch.look(self._due)

    async def wait_done(self, number: int) -> Trouble | None:
        """Wait until every hop that we can ask has done a step."""
        self._waits_for = number
        try:
            while self.is_live:
                self._watch.ask()
                while not self._watch.is_told and self.is_live:
                    await asyncio.sleep(PACE_POLL_S)
                    self._watch.look(self._due)
                if self.is_live and self._watch.have_done(number):
                    self._watch.note_progress()
                    return None
                await asyncio.sleep(PACE_POLL_S)
        finally:
            self._waits_for = 0
        return self.trouble.result()

    def note(self, trouble: Trouble) -> None:
        """The first trouble counts."""
        if not self.trouble.done():
            self.trouble.set_result(trouble)

    def seen(self, error: RemoteError, hop: int | None) -> Trouble:
        """Trouble that we noticed ourselves, with the node at `hop`."""
        error.hop = hop if error.hop is None else error.hop
        node_id = None if error.hop is None else self._node_at(error.hop)
        is_link_lost = error.code in (ErrorCode.LINK_LOST, ErrorCode.KEEPALIVE)
        is_up = is_link_lost and node_id is not None and self._switch.live_link(node_id) is not None
        return Trouble(error, is_seen=True, node_id=node_id, is_node_up=is_up)

    def wrong(self, error: RemoteError) -> Trouble:
        """A call's answer is wrong: the last hop did it, or passed on what one before it did."""
        last = len(self.route.hops) - 1 if error.hop is None else error.hop
        error.hop = last
        before = self._node_at(last - 1)
        return Trouble(
            error,
            is_seen=True,
            node_id=self._node_at(last),
            before=before,
            is_node_up=before is not None,
            suspects=self.nodes,
        )

    def _due(self) -> Due:
        """What somebody waits for now."""
        resumes = self.keys.resumes and not self.resumed.done()
        opens = resumes or (self.keys.confirms and not self.opened.done())
        step = self._waits_for or min(self._sent, default=0)
        steps = self._rebuilt or [sent.recorded for sent in self._sent.values()]
        return Due(step, steps, is_first=not self.is_proved and not resumes, is_anything=bool(step) or opens)

    def _note_progress(self) -> None:
        self._watch.note_progress()
        self._rebuilt = []

    # Who is who -----------------------------------------------------------------------------------------------

    def hop_of(self, node_id: NodeId) -> int | None:
        """The place of a node on this route."""
        return self.path.index(node_id) if node_id in self.nodes else None

    def _node_at(self, hop: int) -> NodeId | None:
        hops = self.route.hops
        return hops[hop].address.node_id if 0 <= hop < len(hops) else None


def _flags_of(options: ChainOptions) -> dict[tuple[bool, bool, bool], StepFlag]:
    """The flags of a step by (is a call, is memory, is traced), made once: to join an IntFlag's bits is slow."""
    plain = StepFlag.TOKEN_IDS if options.takes_token_ids else StepFlag.NONE
    kinds = {
        (False, False): plain,
        (True, False): plain | StepFlag.CALL,
        (False, True): StepFlag.MEMORY,
    }
    traced = {False: StepFlag.NONE, True: StepFlag.TRACE}
    return {(*kind, is_traced): kinds[kind] | traced[is_traced] for kind in kinds for is_traced in traced}


def _wake(waiter: asyncio.Future[None], _: asyncio.Future[Any]) -> None:
    if not waiter.done():
        waiter.set_result(None)


def _printable(text: str) -> str:
    """What a node says, fit for a log."""
    return "".join(char if char.isprintable() else "?" for char in text[:MAX_TEXT])
