"""Links to peers, chosen by us, and gossip over them.

The shell of `gossip`: keeps a full mesh of a small swarm and a dozen links in a large one, tries bootstraps and known
peers again and again, and sees who is lost. Knows nothing of what announcements are for.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from routing.background import Background
from routing.endpoint import Endpoint
from routing.errors import RemoteError
from routing.known_peers import KnownPeers
from routing.link import Link
from routing.reach import place_of
from routing.types import Digest, Message, NodeAddress, NodeId, Pull, Records

if TYPE_CHECKING:
    from routing.announcement import Announcement
    from routing.gossip import Gossip, Send
    from routing.liveness import Liveness
    from routing.suspicion import Suspicion

logger = logging.getLogger(__name__)

FULL_MESH = 24  # members up to which everybody links to everybody: a loss is seen at once by all
NUM_NEIGHBOURS = 12  # in a larger swarm
MAX_LOOKED_AT = 256  # of a huge swarm's members, for such in other places
FEW_LINKS = 3  # with fewer, peers known from earlier are tried too
FIRST_REDIAL_S = 0.25  # transport.md 5.3, as are the next two
LAST_REDIAL_S = 30.0
UP_FOR_LONG_S = 60.0
QUICK_REDIAL_S = 1.0  # how long a lost peer is given before it is suspected
POLITE_S = 1.0  # of two that would dial each other, the greater id waits so long for the lesser
LOOK_S = 1.0
REST = 9.0  # times as long as a look at all members took is no other: a tenth of the time, however many there are
CLOCK_STEP_S = 10.0
MAX_DIALS = 8  # at once
DIAL_TIMEOUT_S = 5.0
MAX_WAITING = 256 << 10  # bytes on a link beyond which gossip waits for a later round


@dataclass(slots=True)
class _Try:
    """When to dial a peer next."""

    due: float
    pause: float = FIRST_REDIAL_S
    is_running: bool = False
    up_at: float | None = None
    sequence: int = -1
    error: str = ""


class Neighbourhood:
    """Our peers. Also what the directory asks of the members (`directory.Members`)."""

    def __init__(
        self,
        endpoint: Endpoint,
        gossip: Gossip,
        suspicion: Suspicion,
        background: Background,
        known: KnownPeers,
        *,
        bootstraps: Sequence[NodeAddress],
        is_reachable: Callable[[], bool],
        on_change: Callable[[], None],
        clock: Callable[[], float] = time.time,
        rng: random.Random | None = None,
    ) -> None:
        self._endpoint = endpoint
        self._gossip = gossip
        self._suspicion = suspicion
        self._background = background
        self._known = known
        self._bootstraps = {it.node_id: it for it in bootstraps if it.node_id != endpoint.node_id}
        self._is_reachable = is_reachable
        self._on_change = on_change
        self._clock = clock
        self._rng = rng or random.Random()  # noqa: S311 - who is linked to whom is no secret
        self._tries: dict[NodeId, _Try] = {}
        self._picked: frozenset[NodeId] = frozenset()
        self._version = -1
        self._members: Mapping[NodeId, Announcement] = {}
        self._members_version = -1
        self._woken = asyncio.Event()
        self._room = asyncio.Semaphore(MAX_DIALS)
        self._is_leaving = False
        self.liveness: Liveness | None = None  # set by whoever builds both
        self.heard = asyncio.Event()  # a peer told what it knows
        self.tried = asyncio.Event()  # every bootstrap was dialled once, with whatever success

    async def run(self) -> None:
        """Gossip, and keep links up, until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._tick())
            tasks.create_task(self._connect())

    def send(self, sends: Iterable[Send], via: Link | None = None) -> None:
        """Post what gossip wants sent, where a link allows; gossip repairs what is left out.

        What is for the peer of `via` goes there: two processes with one key are one peer, on two links.
        """
        for peer_id, message in sends:
            is_answer = via is not None and via.peer_id == peer_id
            links = [via] if is_answer and via is not None else self._endpoint.links_to(peer_id)[:1]
            for link in links:
                if not link.is_closed and link.waiting_bytes <= MAX_WAITING:
                    link.post(message)

    def leave(self) -> None:
        """Dial nobody any more."""
        self._is_leaving = True

    async def first_word(self) -> None:
        """Wait until a peer told what it knows; or every bootstrap was tried and none is there."""
        heard = asyncio.ensure_future(self.heard.wait())
        tried = asyncio.ensure_future(self.tried.wait())
        try:
            await asyncio.wait({heard, tried}, return_when=asyncio.FIRST_COMPLETED)
            if self._endpoint.links:
                await heard
        finally:
            heard.cancel()
            tried.cancel()

    @property
    def bootstrap_errors(self) -> Mapping[NodeAddress, str]:
        """Why bootstraps that we have no link to could not be reached last."""
        failed = {address: self._tries.get(node_id) for node_id, address in self._bootstraps.items()}
        return {address: it.error for address, it in failed.items() if it is not None and it.error}

    # --- what the directory asks (directory.Members)

    @property
    def announcements(self) -> Mapping[NodeId, Announcement]:
        """Of the others, now."""
        if self._gossip.version != self._members_version:
            self._members_version = self._gossip.version
            members = dict(self._gossip.announcements)
            members.pop(self._endpoint.node_id, None)
            self._members = members
        return self._members

    @property
    def suspected(self) -> frozenset[NodeId]:
        return self._suspicion.suspected

    def note_failed(self, node_id: NodeId, sequence: int | None = None) -> None:
        if self.liveness is not None:
            self.liveness.note_failed(node_id, sequence)

    def note_alive(self, node_id: NodeId) -> None:
        if self.liveness is not None:
            self.liveness.note_alive(node_id)

    def ways(self, node_id: NodeId) -> tuple[NodeAddress, ...]:
        """A member's announced addresses, direct before relayed."""
        told = self._gossip.announcements.get(node_id)
        ways = [contact.address for contact in told.contacts] if told is not None else []
        return tuple(sorted(ways, key=lambda way: way.is_relayed))

    def sequence_of(self, node_id: NodeId) -> int | None:
        """The number of a member's present record."""
        told = self._gossip.announcements.get(node_id)
        return None if told is None else told.sequence

    # --- a link's receiver

    def on_message(self, link: Link, message: Message) -> None:
        if isinstance(message, Digest | Pull | Records):
            was_asked = self._gossip.is_asking(link.peer_id)
            answers = self._gossip.receive(link.peer_id, message)
            self.send(answers, via=link)
            if not self.heard.is_set():
                self.look()  # somebody waits for a first word
            elif self._gossip.version != self._version:
                self._woken.set()  # `_connect` looks: a look goes through all members, and messages come in floods
            if self._tells_all(message, was_asked) and not self._gossip.is_asking(link.peer_id):
                self.heard.set()

    @staticmethod
    def _tells_all(message: Message, was_asked: bool) -> bool:
        """Whether a peer speaks of all that it knows; what it pushes is only news, and a hint is only a doubt."""
        if isinstance(message, Digest):
            is_hint = message.is_reply and not message.entries and message.doubts
            return not is_hint
        return isinstance(message, Records) and was_asked

    def on_link_up(self, link: Link) -> None:
        attempt = self._tries.setdefault(link.peer_id, _Try(0.0))
        attempt.up_at, attempt.error = time.monotonic(), ""
        if len(self._endpoint.links) == 1:
            self._try_everybody()
        if len(self._endpoint.links_to(link.peer_id)) == 1:
            self.send(self._gossip.peer_up(link.peer_id))
        if direct := self._direct(link.peer_id):  # its record was here before its link
            self._known.note(direct[0])

    def on_link_closed(self, link: Link, error: RemoteError | None) -> None:
        peer_id = link.peer_id
        if self._endpoint.links_to(peer_id):
            return
        self._gossip.peer_down(peer_id)
        self._forget_link(peer_id)
        if self._is_leaving or peer_id not in self._gossip.announcements:
            return
        self._background.spawn(self._find_again(peer_id), "a quick re-dial")

    def look(self) -> None:
        """See whether the members have changed."""
        if self._gossip.version == self._version:
            return
        self._version = self._gossip.version
        for node_id, told in self.announcements.items():
            attempt = self._tries.get(node_id)
            if attempt is not None and told.sequence > attempt.sequence:
                if attempt.sequence >= 0 and attempt.error:  # it has come back, or says that it never left
                    attempt.due, attempt.pause = 0.0, FIRST_REDIAL_S
                attempt.sequence = told.sequence
            if self._endpoint.links_to(node_id) and (direct := self._direct(node_id)):
                self._known.note(direct[0])
        self._woken.set()
        self._on_change()

    # --- gossip

    async def _tick(self) -> None:
        while True:
            self.send(self._gossip.tick())
            self.look()
            wait_s = self._gossip.next_tick - self._clock()
            if wait_s > CLOCK_STEP_S:  # somebody has set the clock back
                self._gossip.next_tick = self._clock()
            await asyncio.sleep(min(max(wait_s, 0.05), LOOK_S))

    # --- links

    async def _connect(self) -> None:
        while True:
            self._woken.clear()
            began = time.monotonic()
            self.look()
            self._dial_due()
            rest_s = max(0.02, REST * (time.monotonic() - began))  # gossip comes in bursts
            try:
                async with asyncio.timeout(self._pause()):
                    await self._woken.wait()
            except TimeoutError:
                continue
            await asyncio.sleep(rest_s)

    def _pause(self) -> float:
        due = min(
            (it.due for it in self._tries.values() if not it.is_running and it.up_at is None), default=0.0
        )
        left_s = due - time.monotonic()
        return left_s if 0 < left_s < LOOK_S else LOOK_S

    def _dial_due(self) -> None:
        if self._is_leaving:
            return
        now = time.monotonic()
        wanted = self._wanted()
        for node_id, address in wanted.items():
            attempt = self._tries.get(node_id)
            if attempt is None:
                attempt = self._tries[node_id] = _Try(now + self._politeness(node_id))
            if not attempt.is_running and attempt.due <= now and not self._endpoint.links_to(node_id):
                attempt.is_running = True
                self._background.spawn(self._dial(address, attempt), "a dial")
        if len(self._tries) > 4 * (len(wanted) + len(self._endpoint.links) + FULL_MESH):
            self._tries = {
                key: it for key, it in self._tries.items() if key in wanted or it.up_at is not None
            }
        if not self._bootstraps:
            self.tried.set()

    def _politeness(self, node_id: NodeId) -> float:
        """Two that learn of each other at the same time would make two links."""
        may_wait = (
            node_id not in self._bootstraps and self._is_reachable() and self._endpoint.node_id > node_id
        )
        return POLITE_S if may_wait else 0.0

    def _wanted(self) -> dict[NodeId, NodeAddress]:
        """Whom to have a link to, and where: bootstraps, the picked members, and old friends while we have few."""
        wanted = dict(self._bootstraps)
        self._picked = self._pick()
        for node_id in self._picked:
            wanted.setdefault(node_id, self._direct(node_id)[0])
        if len(self._endpoint.links) < FEW_LINKS:
            for address in self._known.addresses[: 2 * FEW_LINKS]:
                if address.node_id != self._endpoint.node_id:
                    wanted.setdefault(address.node_id, address)
        return wanted

    def _pick(self) -> frozenset[NodeId]:
        members = [node_id for node_id in self.announcements if self._direct(node_id)]
        if len(members) <= FULL_MESH:
            return frozenset(members)
        well = [node_id for node_id in members if node_id not in self._suspicion.suspected]
        kept = [node_id for node_id in well if node_id in self._picked]
        fresh = [node_id for node_id in well if node_id not in self._picked]
        self._rng.shuffle(fresh)
        places = {place_of(self._direct(node_id)[0].host) for node_id in kept}
        elsewhere = []
        for node_id in fresh[:MAX_LOOKED_AT]:
            place = place_of(self._direct(node_id)[0].host)
            if place not in places:
                places.add(place)
                elsewhere.append(node_id)
        return frozenset([*kept, *elsewhere, *fresh][:NUM_NEIGHBOURS])

    def _direct(self, node_id: NodeId) -> list[NodeAddress]:
        told = self.announcements.get(node_id)
        ways = [contact.address for contact in told.contacts] if told is not None else []
        return [way for way in ways if not way.is_relayed]

    async def _dial(self, address: NodeAddress, attempt: _Try) -> None:
        sequence = self.sequence_of(address.node_id)
        try:
            async with self._room, asyncio.timeout(DIAL_TIMEOUT_S):
                await self._endpoint.dial(address)
        except (RemoteError, TimeoutError) as error:
            text = str(error) or "not reached in time"
            if address.node_id in self._bootstraps and attempt.error != text:
                place = f"{address.node_id.hex()[:8]} at {address.host}:{address.port}"
                logger.warning("bootstrap %s: %s", place, text)
            attempt.error = text
            self._note_unreached(address, sequence)
        else:
            attempt.error = ""
            self._known.note(address)
        finally:
            attempt.is_running = False
            attempt.due = time.monotonic() + self._rng.uniform(0.0, attempt.pause)
            attempt.pause = min(2 * attempt.pause, LAST_REDIAL_S)
            if all((it := self._tries.get(key)) and not it.is_running for key in self._bootstraps):
                self.tried.set()
            self._woken.set()

    def _note_unreached(self, address: NodeAddress, sequence: int | None) -> None:
        """A member that we cannot dial, and have no other link to, is not offered to anybody here."""
        node_id = address.node_id
        if address in self.ways(node_id) and not self._endpoint.links_to(node_id):
            self.note_failed(node_id, sequence)

    def _try_everybody(self) -> None:
        """We had no link at all and have one now: it was our own network that was away, not they."""
        for attempt in self._tries.values():
            attempt.due, attempt.pause = 0.0, FIRST_REDIAL_S
        self._woken.set()

    def _forget_link(self, peer_id: NodeId) -> None:
        attempt = self._tries.get(peer_id)
        if attempt is None:
            return
        if attempt.up_at is not None and time.monotonic() - attempt.up_at >= UP_FOR_LONG_S:
            attempt.pause = FIRST_REDIAL_S
        attempt.up_at = None
        attempt.due = time.monotonic() + self._rng.uniform(0.0, attempt.pause)
        self._woken.set()

    async def _find_again(self, peer_id: NodeId) -> None:
        """Dial a lost peer once more; one that is not back in time is suspected."""
        direct, sequence = self._direct(peer_id), self.sequence_of(peer_id)
        if not direct:
            if self.liveness is not None:
                self.liveness.check(peer_id, is_lost=True)
            return
        try:
            async with asyncio.timeout(QUICK_REDIAL_S):
                await self._endpoint.dial(direct[0])
        except (RemoteError, TimeoutError):
            if not self._endpoint.links_to(peer_id) and peer_id in self._gossip.announcements:
                self.note_failed(peer_id, sequence)
