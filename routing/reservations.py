"""A node's reservations at sentinels: keeps some, refreshes them, and finds others when one is lost.

A relay contact is offered for announcing only while its reservation is held. Knows nothing of circuits.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from routing.announcement import Contact, Voucher, check_voucher
from routing.endpoint import Endpoint
from routing.errors import ErrorCode, LinkError, ProtocolError, RemoteError, remote_error
from routing.link import Link
from routing.types import GoAway, Message, NodeAddress, NodeId, Reserve, Reserved

logger = logging.getLogger(__name__)

TTL_S = 180  # as a record lives; asked again at a third of it
ANSWER_TIMEOUT_S = 5.0
FIRST_RETRY_S = 0.25  # transport.md, section 4: a flushed NAT table costs a second, not more
LAST_RETRY_S = 30.0
UP_S = 60.0  # held for so long, the next loss begins with the first pause again
MIN_REFRESH_S = 3.0  # however short a sentinel's reservations are, or wrong its clock
LEAVING_S = 30.0  # a sentinel that sent us away is not asked before this
_LOOK_S = 1.0  # how often the list of sentinels is read while there are too few
_MAX_ALTERNATIVES = 8


class Reservations:
    """Keeps reservations at up to `count` of `sentinels()`. A `LinkReceiver` for `Reservations.KINDS`.

    `on_change` is called whenever `contacts` has changed. `may_dial` is asked about sentinels that others named.
    """

    KINDS: tuple[type[Message], ...] = (Reserved, GoAway)

    def __init__(
        self,
        endpoint: Endpoint,
        sentinels: Callable[[], Sequence[NodeAddress]],
        *,
        count: int = 2,
        on_change: Callable[[], None] = lambda: None,
        may_dial: Callable[[NodeAddress], bool] = lambda _: True,
        ttl_s: int = TTL_S,
    ) -> None:
        self._endpoint = endpoint
        self._sentinels = sentinels
        self._count = count
        self._on_change = on_change
        self._may_dial = may_dial
        self._ttl_s = ttl_s
        self._held: dict[NodeId, _Held] = {}
        self._in_use: set[NodeId] = set()
        self._retries: dict[NodeId, _Retry] = {}
        self._alternatives: dict[NodeId, NodeAddress] = {}  # named by sentinels that go away
        self._asked: dict[Link, asyncio.Future[Reserved]] = {}  # an answer is due
        self._leaving: dict[Link, asyncio.Future[GoAway]] = {}
        self._news = asyncio.Event()
        self.lost = 0  # reservations lost, and
        self.superseded = 0  # times a sentinel told of a second holder of our key
        self.last_errors: dict[NodeAddress, str] = {}

    @property
    def contacts(self) -> tuple[Contact, ...]:
        """Our relayed addresses, each with the sentinel's word for it; only what is held now."""
        now_ms = time.time() * 1000
        return tuple(
            held.contact
            for held in self._held.values()
            if held.contact.voucher is not None and held.contact.voucher.expires_ms > now_ms
        )

    @property
    def sentinels(self) -> tuple[NodeId, ...]:
        """The sentinels where a reservation is held now."""
        return tuple(self._held)

    async def run(self) -> None:
        """Keep reservations until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            for _ in range(self._count):
                tasks.create_task(self._keep_one())

    def wake(self) -> None:
        """Look at the list of sentinels now: it has grown."""
        self._news.set()

    # link.LinkReceiver

    def on_message(self, link: Link, message: Message) -> None:
        match message:
            case Reserved():
                asked = self._asked.get(link)
                if asked is not None and not asked.done():
                    asked.set_result(message)
            case GoAway(code=ErrorCode.SUPERSEDED):
                self.superseded += 1
                logger.error("another link holds our reservation: are two nodes running with one key?")
            case GoAway():
                leaving = self._leaving.get(link)
                if leaving is not None and not leaving.done():
                    leaving.set_result(message)

    def on_link_up(self, link: Link) -> None:
        pass

    def on_link_closed(self, link: Link, error: RemoteError | None) -> None:
        pass

    # --- one reservation

    async def _keep_one(self) -> None:
        while True:
            address = await self._choose()
            self._in_use.add(address.node_id)
            began = time.monotonic()
            try:
                await self._hold(address)
            except RemoteError as error:
                self._note_error(address, error)
            finally:
                self._in_use.discard(address.node_id)
                self._news.set()
            self._retry_later(address.node_id, time.monotonic() - began)

    async def _choose(self) -> NodeAddress:
        """Wait for a sentinel that is not in use and may be asked (again)."""
        while True:
            self._news.clear()
            now = time.monotonic()
            free = [address for address in self._known() if address.node_id not in self._in_use]
            if due := [address for address in free if self._retry_at(address) <= now]:
                return due[0]
            wait_s = min([_LOOK_S, *(self._retry_at(address) - now for address in free)])
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(wait_s):
                    await self._news.wait()

    def _known(self) -> list[NodeAddress]:
        known = {address.node_id: address for address in reversed(self._sentinels())}
        known = {node_id: known[node_id] for node_id in reversed(known)}
        known |= {key: value for key, value in self._alternatives.items() if key not in known}
        return [
            address
            for address in known.values()
            if address.node_id != self._endpoint.node_id and not address.is_relayed
        ]

    async def _hold(self, address: NodeAddress) -> None:
        """Reserve at one sentinel and refresh until it is lost, or the sentinel goes away. Raises RemoteError."""
        link = await self._endpoint.dial(address)
        link.accepts_circuits = True
        leaving = self._leaving[link] = asyncio.get_running_loop().create_future()
        closed = asyncio.ensure_future(link.wait_closed())
        try:
            while not leaving.done():
                reserved = await self._ask(link, closed)
                self._set(address, link, reserved)
                refresh_s = self._refresh_s(reserved)
                await asyncio.wait({closed, leaving}, timeout=refresh_s, return_when=asyncio.FIRST_COMPLETED)
                if closed.done():
                    raise closed.result() or LinkError(ErrorCode.LINK_LOST, "the sentinel closed the link")
            self._take_leave(address, leaving.result())
        finally:
            closed.cancel()
            self._leaving.pop(link, None)
            link.accepts_circuits = False
            if self._held.pop(address.node_id, None) is not None:
                self.lost += 1
                self._on_change()

    async def _ask(self, link: Link, closed: asyncio.Future[RemoteError | None]) -> Reserved:
        asked = self._asked[link] = asyncio.get_running_loop().create_future()
        try:
            link.post(Reserve(self._ttl_s))
            await asyncio.wait({asked, closed}, timeout=ANSWER_TIMEOUT_S, return_when=asyncio.FIRST_COMPLETED)
        finally:
            self._asked.pop(link, None)
        if not asked.done():
            raise LinkError(ErrorCode.TIMEOUT, "the sentinel does not answer")
        reserved: Reserved = asked.result()
        if reserved.code:
            raise remote_error(reserved.code, "the sentinel gives no reservation")
        self._check_voucher(link, reserved)
        return reserved

    def _check_voucher(self, link: Link, reserved: Reserved) -> None:
        """A forged voucher would have everybody refuse our record, and the other ways in it.

        One that is over, by our clock, is not announced.
        """
        voucher = Voucher(link.peer_key, reserved.expires_ms, reserved.voucher)
        network_id, own_id = self._endpoint.membership.network_id, self._endpoint.node_id
        if not check_voucher(voucher, network_id, own_id, link.peer_id, now_ms=-1):
            raise ProtocolError(ErrorCode.MALFORMED, "the sentinel's voucher does not hold")

    def _refresh_s(self, reserved: Reserved) -> float:
        """A third of what we asked for, or of what we were given if that is less."""
        given_s = reserved.expires_ms / 1000 - time.time()
        return max(MIN_REFRESH_S, min(self._ttl_s, given_s) / 3)

    def _set(self, address: NodeAddress, link: Link, reserved: Reserved) -> None:
        voucher = Voucher(link.peer_key, reserved.expires_ms, reserved.voucher)
        relayed = NodeAddress(self._endpoint.node_id, address.host, address.port, address.node_id)
        self._held[address.node_id] = _Held(Contact(relayed, voucher))
        self.last_errors.pop(address, None)
        self._on_change()

    def _take_leave(self, address: NodeAddress, message: GoAway) -> None:
        """The sentinel goes away: others that it named are tried next."""
        named = [other for other in message.alternatives if not other.is_relayed and self._may_dial(other)]
        for other in named[:_MAX_ALTERNATIVES]:
            self._alternatives[other.node_id] = other
        while len(self._alternatives) > _MAX_ALTERNATIVES:
            del self._alternatives[next(iter(self._alternatives))]
        self._alternatives.pop(address.node_id, None)
        retry_s = max(LEAVING_S, message.retry_ms / 1000)
        self._retries[address.node_id] = _Retry(not_before=time.monotonic() + retry_s)

    # --- when to try again

    def _retry_at(self, address: NodeAddress) -> float:
        retry = self._retries.get(address.node_id)
        return 0.0 if retry is None else retry.not_before

    def _retry_later(self, node_id: NodeId, up_s: float) -> None:
        """First after 0.25 s, then with full jitter up to a bound that doubles."""
        now = time.monotonic()
        retry = self._retries.setdefault(node_id, _Retry())
        if retry.not_before > now:
            return  # it said when
        retry.num_failed = 1 if up_s >= UP_S else retry.num_failed + 1
        bound_s = min(LAST_RETRY_S, FIRST_RETRY_S * 2 ** min(retry.num_failed - 1, 16))
        is_first = retry.num_failed == 1
        pause_s = FIRST_RETRY_S if is_first else random.uniform(0.0, bound_s)  # noqa: S311 - spreads load, no secret
        retry.not_before = now + pause_s

    def _note_error(self, address: NodeAddress, error: RemoteError) -> None:
        text = str(error)
        if self.last_errors.get(address) != text:
            logger.warning("sentinel %s: %s", address.node_id.hex()[:8], text)
        self.last_errors[address] = text


@dataclass(frozen=True, slots=True)
class _Held:
    contact: Contact = field(repr=False)


@dataclass(slots=True)
class _Retry:
    not_before: float = 0.0
    num_failed: int = 0
