"""Checking whether members live: pings of ours, by others for us, and by us for others (SWIM).

The shell of `suspicion`, which decides. Knows nothing of records or how they spread.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from routing.admission import TokenBucket
from routing.background import Background
from routing.endpoint import Endpoint
from routing.errors import ErrorCode, LinkError, RemoteError
from routing.link import Link
from routing.suspicion import AskOthers, Ping, Refuted, Suspected, Suspicion
from routing.types import Message, NodeAddress, NodeId, PingReport, PingRequest

TICK_S = 0.25
HELP_TIMEOUT_S = 1.0  # of a ping for another (transport.md 5.5)
PING_TIMEOUT_S = 3.0  # of our own: `suspicion` decides when to ask others, an answer counts even then
ASK_TIMEOUT_S = 2.5  # a ping of another's, and the way there and back
MAX_CHECKS = 16  # at once, for ourselves and for others together
REQUESTS_PER_S = 10.0  # that one peer may ask of us
MAX_BUCKETS = 1024


@dataclass(frozen=True, slots=True)
class _Asked:
    peer_id: NodeId
    target: NodeId
    answer: asyncio.Future[bool]


class Liveness:
    """Runs `suspicion`.

    `ways(node_id)` are a member's announced addresses, `sequence(node_id)` the number of the record that told them;
    `tell(node_id)` spreads a doubt, `end_doubt(node_id)` says that it was wrong.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        suspicion: Suspicion,
        background: Background,
        *,
        ways: Callable[[NodeId], Sequence[NodeAddress]],
        sequence: Callable[[NodeId], int | None],
        tell: Callable[[NodeId], None],
        end_doubt: Callable[[NodeId], None],
        on_change: Callable[[], None],
    ) -> None:
        self._endpoint = endpoint
        self._suspicion = suspicion
        self._background = background
        self._ways = ways
        self._sequence = sequence
        self._tell = tell
        self._end_doubt = end_doubt
        self._on_change = on_change
        self._suspected: frozenset[NodeId] = frozenset()
        self._asked: dict[int, _Asked] = {}
        self._buckets: dict[NodeId, TokenBucket] = {}
        self._room = asyncio.Semaphore(MAX_CHECKS)
        self._checking: set[NodeId] = set()

    async def run(self) -> None:
        """Let time pass for the suspicions until cancelled."""
        while True:
            for action in self._suspicion.tick():
                match action:
                    case Ping(node_id=node_id):
                        self.check(node_id)
                    case AskOthers(node_id=node_id, via=via):
                        self._background.spawn(self._ask_others(node_id, via), "an indirect ping")
                    case Suspected(node_id=node_id):
                        self._tell(node_id)
                    case Refuted(node_id=node_id):
                        self._end_doubt(node_id)
            self.look()
            await asyncio.sleep(TICK_S)

    @property
    def suspected(self) -> frozenset[NodeId]:
        """Members believed gone."""
        return self._suspicion.suspected

    def look(self) -> None:
        """Tell if somebody is suspected, or is no more."""
        if self._suspicion.suspected != self._suspected:
            self._suspected = self._suspicion.suspected
            self._on_change()

    def note_alive(self, node_id: NodeId) -> None:
        """A member gave a sign of life to somebody here."""
        self._suspicion.note_alive(node_id)
        self.look()

    def note_failed(self, node_id: NodeId, sequence: int | None = None) -> None:
        """A member could not be reached at the place that its record of this number told."""
        self._suspicion.note_failed(node_id, sequence)
        self.look()

    def check(self, node_id: NodeId, *, is_lost: bool = False) -> None:
        """Find out, beside everything else, whether a member lives; one that `is_lost` is suspected if it does not."""
        if node_id not in self._checking:
            self._checking.add(node_id)
            self._background.spawn(self._check(node_id, is_lost), "a ping")

    # --- a link's receiver

    def on_message(self, link: Link, message: Message) -> None:
        match message:
            case PingRequest():
                if self._may_ask(link.peer_id):
                    self._background.spawn(self._check_for(link, message), "a ping for another")
            case PingReport(nonce=nonce, is_alive=is_alive):
                asked = self._asked.get(nonce)
                if asked is not None and asked.peer_id == link.peer_id and not asked.answer.done():
                    asked.answer.set_result(is_alive)

    def on_link_up(self, link: Link) -> None:
        self._suspicion.note_link(link.peer_id)
        self.look()

    def on_link_closed(self, link: Link, error: RemoteError | None) -> None:
        if not self._endpoint.links_to(link.peer_id):
            self._suspicion.note_unlink(link.peer_id)

    # --- pings

    async def _check(self, node_id: NodeId, is_lost: bool) -> None:
        sequence = self._sequence(node_id)
        try:
            async with self._room:
                await self._reach(node_id, PING_TIMEOUT_S, by_relays=True)
        except (RemoteError, TimeoutError) as error:
            code = error.code if isinstance(error, RemoteError) else ErrorCode.TIMEOUT
            if is_lost or code == ErrorCode.ID_MISMATCH:  # in the latter case somebody else is there now
                self._suspicion.note_failed(node_id, sequence)
            elif code != ErrorCode.TIMEOUT:
                self._suspicion.note_unanswered(node_id)
        else:
            self._suspicion.note_alive(node_id)
        finally:
            self._checking.discard(node_id)
        self.look()

    async def _reach(self, node_id: NodeId, timeout_s: float, *, by_relays: bool) -> None:
        """Return if a node gives a sign of life; raise RemoteError or TimeoutError if not."""
        if links := self._endpoint.links_to(node_id):
            async with asyncio.timeout(timeout_s):
                await links[0].ping()
            return
        trouble: RemoteError = LinkError(ErrorCode.LINK_LOST, "there is no way to the node")
        relays: list[NodeId] = []
        for address in self._ways(node_id):
            if address.relay_id is not None:
                relays.append(address.relay_id)
                continue
            try:
                await self._endpoint.probe(address, timeout_s)
            except RemoteError as error:
                trouble = error
            else:
                return
        if not (by_relays and relays and await self._ask(node_id, relays)):
            raise trouble

    async def _ask_others(self, node_id: NodeId, via: Iterable[NodeId]) -> None:
        """Pass on what each helper saw: one that does not even say no speaks against our own network."""
        for answer in asyncio.as_completed(self._asks(node_id, via)):
            if (is_alive := await answer) is not None:
                self._suspicion.note_report(node_id, is_alive=is_alive)
                self.look()

    async def _ask(self, node_id: NodeId, via: Iterable[NodeId]) -> bool:
        """Whether one of these peers, as far as we have links to them, reaches the node."""
        asks = self._asks(node_id, via)
        try:
            for answer in asyncio.as_completed(asks):
                if await answer:
                    return True
        finally:
            for ask in asks:
                ask.cancel()
        return False

    def _asks(self, node_id: NodeId, via: Iterable[NodeId]) -> list[asyncio.Future[bool | None]]:
        links = [self._endpoint.links_to(peer_id)[:1] for peer_id in via]
        return [asyncio.ensure_future(self._ask_one(link, node_id)) for found in links for link in found]

    async def _ask_one(self, link: Link, node_id: NodeId) -> bool | None:
        """What this peer says; None when it says nothing in time."""
        nonce = secrets.randbits(63)
        answer: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self._asked[nonce] = _Asked(link.peer_id, node_id, answer)
        try:
            link.post(PingRequest(nonce, node_id))
            async with asyncio.timeout(ASK_TIMEOUT_S):
                return await answer
        except (TimeoutError, RemoteError):
            return None
        finally:
            del self._asked[nonce]

    async def _check_for(self, link: Link, request: PingRequest) -> None:
        """Only members are looked for: nobody can have us dial elsewhere."""
        is_alive = False
        if not self._room.locked():
            async with self._room:
                try:
                    await self._reach(request.target, HELP_TIMEOUT_S, by_relays=False)
                except (RemoteError, TimeoutError):
                    pass
                else:
                    is_alive = True
        if not link.is_closed:
            link.post(PingReport(request.nonce, is_alive))

    def _may_ask(self, peer_id: NodeId) -> bool:
        now = time.monotonic()
        if len(self._buckets) >= MAX_BUCKETS:
            self._buckets = {peer: it for peer, it in self._buckets.items() if not it.is_full(now)}
            if len(self._buckets) >= MAX_BUCKETS and peer_id not in self._buckets:
                return False
        bucket = self._buckets.setdefault(peer_id, TokenBucket(REQUESTS_PER_S, REQUESTS_PER_S, now))
        return bucket.take(now)
