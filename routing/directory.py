"""Who serves what, as far as this process knows now.

`LiveDirectory` follows a fixed list of nodes and those that gossip names, keeps a described link to each, and offers
the rest as strangers' claims. Knows nothing of planning or sessions, nor of how gossip travels.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
from collections.abc import Callable, Iterable, Mapping
from contextvars import Context
from typing import TYPE_CHECKING, Protocol

from routing.background import Background
from routing.endpoint import Endpoint
from routing.follower import Follower, name_of
from routing.link import Link, log_receiver_failure
from routing.node_records import announced_record, chosen_to_follow, described_record, slices_of
from routing.types import Description, Message, NodeAddress, NodeId, NodeRecord

if TYPE_CHECKING:
    from routing.announcement import Announcement
    from routing.errors import RemoteError

logger = logging.getLogger(__name__)

MAX_FOLLOWED = 128  # nodes of gossip with a link of ours; more are offered unverified
MAX_DIALS = 16  # at once
RETIRE_AFTER_S = 30.0  # an answer under way on a relayed link is usually over by then
RETIRE_LOOK_S = 1.0
SETTLE_S = 0.05  # gossip comes in bursts; one look at the end of each is enough


class Directory(Protocol):
    """What planning needs of whoever knows the nodes."""

    def records(self) -> tuple[NodeRecord, ...]:
        """Every node that may be asked for work now."""

    def note_description(self, link: Link, description: Description) -> None:
        """A node said what it serves."""

    def note_loss(self, node_id: NodeId) -> None:
        """A node was found gone or silent; do not offer it until it has answered again."""

    async def first_look(self, timeout_s: float) -> None:
        """Wait until every known node was tried once, or the time is over."""


class Members(Protocol):
    """Whoever knows the members of the swarm (see `neighbourhood`)."""

    @property
    def announcements(self) -> Mapping[NodeId, Announcement]: ...

    @property
    def suspected(self) -> frozenset[NodeId]: ...

    def note_failed(self, node_id: NodeId) -> None: ...

    def note_alive(self, node_id: NodeId) -> None: ...


class LiveDirectory:
    """A directory over a fixed list of `id@host:port`, and over the members of a swarm once it is connected to them.

    A node with several addresses is tried at one after the other, directly before through a sentinel.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        addresses: Iterable[NodeAddress] = (),
        *,
        interests: frozenset[bytes] | None = None,
    ) -> None:
        self._endpoint = endpoint
        self._addresses = tuple(dict.fromkeys(addresses))
        self._interests = interests
        self._members: Members | None = None
        self._news = asyncio.Event()
        self._looked = asyncio.Event()  # at the latest news
        self._tasks: dict[NodeId, asyncio.Task[None]] = {}
        self._background = Background()
        self._records: tuple[NodeRecord, ...] | None = None
        self._followers: dict[NodeId, Follower] = {}
        self._sequences: dict[NodeId, int] = {}
        self.dialling = asyncio.Semaphore(MAX_DIALS)
        self.in_use: Callable[[Link], bool] | None = None
        self.on_change: list[Callable[[], None]] = []
        self.last_errors: dict[NodeAddress, str] = {}
        for address in self._addresses:
            self._followers.setdefault(address.node_id, Follower(address.node_id, endpoint, self))
        self._static = frozenset(self._followers)

    def connect(self, members: Members) -> None:
        """Look at gossip too, from now on."""
        self._members = members
        self.refresh()

    async def run(self) -> None:
        """Keep a described link to every node that is wanted, until cancelled."""
        try:
            while True:
                self._news.clear()
                self._follow_wanted()
                self._looked.set()
                await self._news.wait()
                await asyncio.sleep(SETTLE_S)
        finally:
            await self._stop_all()

    def refresh(self) -> None:
        """Members, or what is suspected of them, have changed."""
        self._changed()
        self._looked.clear()
        self._news.set()

    @property
    def interests(self) -> frozenset[bytes] | None:
        """Digests of the models whose nodes are followed; None: all of them."""
        return self._interests

    @interests.setter
    def interests(self, digests: frozenset[bytes] | None) -> None:
        if digests != self._interests:
            self._interests = digests
            self.refresh()

    @property
    def addresses(self) -> tuple[NodeAddress, ...]:
        """The list this directory was given, each address once."""
        return self._addresses

    def records(self) -> tuple[NodeRecord, ...]:
        """Nodes with a described link, and announced ones that nobody has tried yet (`is_verified` False)."""
        if self._records is None:
            self._records = (*self._verified(), *self._claimed())
        return self._records

    def announced(self) -> tuple[Announcement, ...]:
        """Every member that lives, as far as we know; without ourselves."""
        suspected = self._suspected
        return tuple(it for node_id, it in self._announcements.items() if node_id not in suspected)

    def announcement(self, node_id: NodeId) -> Announcement | None:
        """What a node said of itself last, suspected or not."""
        return self._announcements.get(node_id)

    def is_suspected(self, node_id: NodeId) -> bool:
        """Whether the node is believed gone."""
        return node_id in self._suspected

    def addresses_of(self, node_id: NodeId) -> tuple[NodeAddress, ...]:
        """Every way to a node: ours first, then the announced ones, direct before relayed."""
        told = self._announcements.get(node_id)
        announced = [contact.address for contact in told.contacts] if told is not None else []
        listed = [address for address in self._addresses if address.node_id == node_id]
        ways = dict.fromkeys([*listed, *announced])
        return tuple(sorted(ways, key=lambda way: way.is_relayed))

    def note_description(self, link: Link, description: Description) -> None:
        """Take what we asked for."""
        if follower := self._followers.get(link.peer_id):
            follower.take(link, description)

    def note_loss(self, node_id: NodeId) -> None:
        """Forget what the node serves, and ask it again at once if its link is up: it may have been a false alarm."""
        if follower := self._followers.get(node_id):
            follower.doubt()
        elif self._members is not None and not self._endpoint.links_to(node_id):
            self._members.note_failed(node_id)

    async def first_look(self, timeout_s: float) -> None:
        """Wait until every node that is followed was tried once, or the time is over."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._looked.wait()
                while waiting := [it for it in self._followers.values() if not it.tried.is_set()]:
                    await waiting[0].tried.wait()

    # --- a link's receiver, for descriptions

    def on_message(self, link: Link, message: Message) -> None:
        if isinstance(message, Description):
            self.note_description(link, message)

    def on_link_up(self, link: Link) -> None:
        """A follower that waits to dial again can use it."""
        follower = self._followers.get(link.peer_id)
        if follower is not None and follower.link is None:
            follower.wake()

    def on_link_closed(self, link: Link, error: RemoteError | None) -> None:
        """A follower sees its link close by itself."""

    # --- what followers ask and tell (follower.FollowerHost)

    def ways_to(self, node_id: NodeId) -> tuple[NodeAddress, ...]:
        return self.addresses_of(node_id)

    def on_described(self, follower: Follower) -> None:
        if self._members is not None:
            self._members.note_alive(follower.node_id)
        self._changed()

    def on_lost(self, follower: Follower) -> None:
        self._changed()

    def on_unreachable(self, follower: Follower) -> None:
        if self._members is not None and not self._endpoint.links_to(follower.node_id):
            self._members.note_failed(follower.node_id)

    def note_error(self, address: NodeAddress, error: str | None) -> None:
        if error is None:
            self.last_errors.pop(address, None)
            return
        if self.last_errors.get(address) != error:
            level = logging.WARNING if address.node_id in self._static else logging.INFO
            logger.log(level, "node %s: %s", name_of(address), error)
        self.last_errors[address] = error

    def retire(self, link: Link) -> None:
        """Close a relayed link when nothing uses it any more: there is a direct one."""
        self._background.spawn(self._retire(link), "the end of a relayed link")

    async def _retire(self, link: Link) -> None:
        pause_s = RETIRE_AFTER_S if self.in_use is None else RETIRE_LOOK_S
        while not link.is_closed:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(pause_s):
                    await link.wait_closed()
            if self.in_use is None or not self.in_use(link):
                break
        await link.close()

    # --- whom to follow

    def _follow_wanted(self) -> None:
        wanted = self._static | self._chosen()
        for node_id in tuple(self._tasks):
            if node_id not in wanted:
                self._unfollow(node_id)
        for node_id in wanted:
            follower = self._followers.get(node_id)
            if follower is None:
                follower = self._followers[node_id] = Follower(node_id, self._endpoint, self)
            if node_id not in self._tasks:
                self._tasks[node_id] = asyncio.create_task(follower.run(), context=Context())
            elif self._has_news_of(node_id):
                follower.wake()
            elif self._serves_other_layers(node_id):
                follower.refresh()
        self._sequences = {node_id: it.sequence for node_id, it in self._announcements.items()}

    def _has_news_of(self, node_id: NodeId) -> bool:
        """Whether a node without a direct link announced itself anew: it may have come back, or moved."""
        link = self._followers[node_id].link
        return self._is_newer(node_id) and (link is None or link.is_relayed)

    def _serves_other_layers(self, node_id: NodeId) -> bool:
        """Whether a node announced other slices than it described itself with."""
        told, described = self._announcements.get(node_id), self._followers[node_id].description
        if told is None or described is None or not self._is_newer(node_id):
            return False
        return slices_of(told.offers) != slices_of(described.slices)

    def _is_newer(self, node_id: NodeId) -> bool:
        told = self._announcements.get(node_id)
        return told is not None and told.sequence > self._sequences.get(node_id, -1)

    def _chosen(self) -> frozenset[NodeId]:
        """Which announced nodes to follow: those followed already, then such as hold layers that few others do."""
        candidates = {node_id: it for node_id, it in self._announcements.items() if self._is_wanted(it)}
        suspected = self._suspected
        if len(candidates) <= MAX_FOLLOWED:
            return frozenset(candidates)
        well = [node_id for node_id in candidates if node_id not in suspected]
        kept = [node_id for node_id in well if node_id in self._tasks]
        fresh = [node_id for node_id in well if node_id not in self._tasks]
        random.shuffle(fresh)
        return chosen_to_follow(kept[:MAX_FOLLOWED], fresh, candidates, MAX_FOLLOWED)

    def _is_wanted(self, announcement: Announcement) -> bool:
        return any(
            self._interests is None or it.model_digest in self._interests for it in announcement.offers
        )

    def _unfollow(self, node_id: NodeId) -> None:
        self._tasks.pop(node_id).cancel()
        follower = self._followers.pop(node_id)
        for address in [address for address in self.last_errors if address.node_id == node_id]:
            del self.last_errors[address]
        follower.tried.set()  # whoever waits for a first look
        self._changed()

    async def _stop_all(self) -> None:
        tasks = tuple(self._tasks.values())
        for task in tasks:
            task.cancel()
        self._tasks.clear()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._background.close()
        for follower in self._followers.values():
            follower.link = follower.description = None
        self._records = None

    # --- what is known

    @property
    def _announcements(self) -> Mapping[NodeId, Announcement]:
        return {} if self._members is None else self._members.announcements

    @property
    def _suspected(self) -> frozenset[NodeId]:
        return frozenset() if self._members is None else self._members.suspected

    def _verified(self) -> Iterable[NodeRecord]:
        for node_id, follower in self._followers.items():
            link, description, address = follower.link, follower.description, follower.address
            if link is None or description is None or address is None:
                continue
            others = tuple(way for way in self.addresses_of(node_id) if way != address)
            record = described_record(address, others, link, description, self._announcements.get(node_id))
            if record is not None:
                yield record

    def _claimed(self) -> Iterable[NodeRecord]:
        suspected = self._suspected
        for node_id, told in self._announcements.items():
            follower = self._followers.get(node_id)
            is_known = follower is not None and (follower.has_failed or follower.description is not None)
            if not is_known and node_id not in suspected and told.contacts and self._is_wanted(told):
                yield announced_record(told, self.addresses_of(node_id))

    def _changed(self) -> None:
        self._records = None
        for tell in self.on_change:
            try:
                tell()
            except Exception as error:  # a listener's bug must not stop following
                log_receiver_failure("a change of the directory", error)


class StaticDirectory(LiveDirectory):
    """A directory over a fixed list alone."""
