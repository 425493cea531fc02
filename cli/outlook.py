"""How sentinels see this machine: asked with links of our own, as a node would ask.

Knows the messages of dial-back and relay. Announces nothing, and leaves nothing behind; judging is `checkup`'s part.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Final, TypeVar

from cli.membership import Membership
from routing.endpoint import Endpoint
from routing.errors import ErrorCode, LinkError, RemoteError, remote_error
from routing.identity import Identity
from routing.link import Link
from routing.network import Network, NetworkSettings
from routing.types import Capabilities, Message, NodeAddress, Probe, Probed, Reserve, Reserved

ASK_TIMEOUT_S: Final = 8.0  # a handshake and a question; a dial back may take 3 s of it
RESERVE_TIMEOUT_S: Final = 3.0  # a node that is no sentinel does not answer
RESERVE_S: Final = 60
MAX_SENTINELS: Final = 6  # a node keeps two reservations; more need not be asked

Reply = TypeVar("Reply", Probed, Reserved)


@dataclass(frozen=True, slots=True)
class Outlook:
    """How one sentinel sees us. What is None was not learnt; `error` says why nothing was."""

    sentinel: NodeAddress
    error: RemoteError | None = None
    rtt_ms: float | None = None
    skew_ms: float | None = None  # our clock less its own
    observed: tuple[str, int] | None = None  # the address it sees, with the port we listen on
    dial_back: RemoteError | None = None  # why it could not dial us there
    reservation: RemoteError | None = None
    echo_ms: float | None = None  # to ourselves through it, and back
    echo: RemoteError | None = None

    @property
    def is_dialled(self) -> bool:
        """Whether others reach us directly, as far as this one can tell."""
        return self.observed is not None and self.dial_back is None

    @property
    def is_relayed(self) -> bool:
        """Whether others reach us through it."""
        return self.echo_ms is not None


class Onlooker:
    """A would-be node: it listens, asks, and is itself once more (`caller`) to try the way back to itself."""

    def __init__(self, identity: Identity, membership: Membership, token: bytes = b"") -> None:
        self._identity = identity
        self._membership = membership
        self._token = token
        self._inbox = _Replies()
        self._here = self._endpoint(self._inbox)
        self._caller = self._endpoint(_Replies())
        self.bound: tuple[str, int] = ("", 0)

    @asynccontextmanager
    async def listening(self, host: str, port: int) -> AsyncIterator[Onlooker]:
        """Listen meanwhile. Raises `LinkError` where that address cannot be bound."""
        try:
            self.bound = await self._here.listen(host, port)
            yield self
        finally:
            await self._caller.close()
            await self._here.close()

    async def ask_all(self, bootstraps: Sequence[NodeAddress]) -> list[Outlook]:
        """Ask the sentinels that were named, then those that they know."""
        outlooks = await asyncio.gather(*(self.ask(address) for address in bootstraps))
        if all(outlook.error for outlook in outlooks):
            return outlooks
        others = await self._announced_sentinels(bootstraps)
        return outlooks + await asyncio.gather(*(self.ask(address) for address in others))

    async def ask(self, sentinel: NodeAddress) -> Outlook:
        """Everything there is to ask one sentinel."""
        try:
            async with asyncio.timeout(ASK_TIMEOUT_S):
                link = await self._here.dial(sentinel)
                outlook = await self._look_from(sentinel, link)
        except TimeoutError:
            return Outlook(sentinel, LinkError(ErrorCode.TIMEOUT, "no answer"))
        except RemoteError as error:
            return Outlook(sentinel, error)
        reservation = await self._reserve(link)
        if reservation is not None:
            return replace(outlook, reservation=reservation)
        echo_ms, echo = await self._echo(sentinel)
        return replace(outlook, echo_ms=echo_ms, echo=echo)

    async def _look_from(self, sentinel: NodeAddress, link: Link) -> Outlook:
        rtt_ms, port = await link.ping(), self.bound[1]
        probed = await self._inbox.ask(link, Probe(secrets.token_bytes(16), port), Probed)
        return Outlook(
            sentinel,
            rtt_ms=rtt_ms,
            skew_ms=_skew_ms(probed),
            observed=(probed.host, port),
            dial_back=remote_error(probed.code) if probed.code else None,
        )

    async def _reserve(self, link: Link) -> RemoteError | None:
        """Hold a reservation on this link; or why there is none."""
        link.accepts_circuits = True
        try:
            async with asyncio.timeout(RESERVE_TIMEOUT_S):
                reserved = await self._inbox.ask(link, Reserve(RESERVE_S), Reserved)
        except TimeoutError:
            return LinkError(ErrorCode.TIMEOUT, "no answer")
        except RemoteError as error:
            return error
        return remote_error(reserved.code) if reserved.code else None

    async def _echo(self, sentinel: NodeAddress) -> tuple[float | None, RemoteError | None]:
        """Dial ourselves through the sentinel; the round trip in ms, or why that fails."""
        own = NodeAddress(self._here.node_id, sentinel.host, sentinel.port, sentinel.node_id)
        try:
            async with asyncio.timeout(ASK_TIMEOUT_S):
                link = await self._caller.dial(own)
                return await link.ping(), None
        except TimeoutError:
            return None, LinkError(ErrorCode.TIMEOUT, "no answer")
        except RemoteError as error:
            return None, error

    async def _announced_sentinels(self, bootstraps: Sequence[NodeAddress]) -> list[NodeAddress]:
        """Sentinels that gossip knows besides those that were named."""
        settings = NetworkSettings(
            self._membership.network_id,
            psk=self._membership.psk,
            bootstraps=tuple(bootstraps),
            token=self._token,
            tls=self._membership.tls,
        )
        network = Network(self._identity, settings)
        network.directory.interests = frozenset()  # look only: dial no node
        async with network.running():
            await network.first_look(ASK_TIMEOUT_S)
            nodes = network.status().nodes
        named = {address.node_id for address in bootstraps}
        sentinels = [node for node in nodes if "sentinel" in node.roles and node.node_id not in named]
        direct = [next((it for it in node.contacts if not it.is_relayed), None) for node in sentinels]
        return [address for address in direct if address is not None][:MAX_SENTINELS]

    def _endpoint(self, inbox: _Replies) -> Endpoint:
        return Endpoint(
            self._identity,
            self._membership.network_id,
            lambda: Capabilities(token=self._token),
            inbox,
            psk=self._membership.psk,
            accepted_psks=self._membership.accepted_psks,
            tls=self._membership.tls,
        )


def _skew_ms(probed: Probed) -> float | None:
    """Our clock less the sentinel's, too low by the way back: milliseconds, where seconds matter."""
    return time.time() * 1000 - probed.now_ms if probed.now_ms else None


class _Replies:
    """A `LinkReceiver` that waits for one kind of message on each link."""

    def __init__(self) -> None:
        self._awaited: dict[tuple[Link, type[Message]], asyncio.Future[Message]] = {}

    async def ask(self, link: Link, question: Message, kind: type[Reply]) -> Reply:
        """Send a question and wait for the answer of this kind. Raises `RemoteError` when the link ends."""
        awaited: asyncio.Future[Message] = asyncio.get_running_loop().create_future()
        self._awaited[link, kind] = awaited
        try:
            await link.send(question)
            answer = await awaited
        finally:
            del self._awaited[link, kind]
        assert isinstance(answer, kind)
        return answer

    def on_message(self, link: Link, message: Message) -> None:
        awaited = self._awaited.get((link, type(message)))
        if awaited is not None and not awaited.done():
            awaited.set_result(message)

    def on_link_up(self, link: Link) -> None:
        """Nothing to do."""

    def on_link_closed(self, link: Link, error: RemoteError | None) -> None:
        for (awaited_on, _), awaited in self._awaited.items():
            if awaited_on is link and not awaited.done():
                awaited.set_exception(error or LinkError(ErrorCode.LINK_LOST, "the link was closed"))
