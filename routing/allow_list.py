"""Who may connect: a file of node ids that is read again when it changes, and guests whom its issuers vouch for.

    # node ids, one a line; what follows an id is its name
    3f0c…  the box under the stairs
    issuer 88aa…  anna: her guest tokens count

The list itself is the `allow` of an `Endpoint`. A broken edit changes nothing, and is told. Knows files, tokens and
statements that a key has moved; nothing of what allowed peers do.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from routing.errors import RemoteError, SettingsError
from routing.guest_token import GuestScope, GuestToken, read_guest_token
from routing.moved import read_moved
from routing.types import Capabilities, NodeId

logger = logging.getLogger(__name__)

POLL_S = 1.0
SETTLE_S = 0.2  # an editor empties a file before it fills it: what is read must have been still for so long
MAX_SIZE = 1 << 20  # B: 10,000 ids with their names
MAX_VISITORS = 4096  # guests and moved peers remembered at once
_ID_DIGITS = 64

Stamp = tuple[int, int, int]  # mtime in ns, size, inode


@dataclass(frozen=True, slots=True)
class Members:
    """What an allow file says: ids that may connect, and keys whose guest tokens count."""

    ids: frozenset[NodeId]
    issuers: frozenset[bytes]


class Links(Protocol):
    """What the list needs of an endpoint."""

    def recheck_allowed(self) -> object: ...

    def links_to(self, node_id: NodeId) -> Sequence[object]: ...


@dataclass(frozen=True, slots=True)
class _Visitor:
    """Somebody who is not listed, and let in for a time."""

    until_s: int
    max_sessions: int | None = None
    token: bytes = b""  # what a guest for anybody showed: one client at a time may


class AllowList:
    """The members of a swarm, and whoever they let in for a time. Raises `SettingsError` for a file it cannot read."""

    def __init__(
        self,
        path: Path,
        network_id: bytes,
        *,
        always: frozenset[NodeId] = frozenset(),
        now: Callable[[], float] = time.time,
    ) -> None:
        self._path = path
        self._network_id = network_id
        self._always = always  # whom the operator named by a flag
        self._now = now
        self._stamp = _stamp(path)
        self._members = read_members(path)
        self._visitors: dict[NodeId, _Visitor] = {}
        self._links: Links | None = None
        self.trouble = ""  # why the file's present content is not in use; "" while it is

    @property
    def members(self) -> Members:
        """The list in use."""
        return self._members

    def __call__(self, peer_id: NodeId, capabilities: Capabilities) -> bool:
        """Whether this authenticated peer may stay, by its id or by what it showed in its handshake."""
        if peer_id in self._members.ids or peer_id in self._always:
            return True
        try:
            visitor = self._moved_member(peer_id, capabilities) or self._guest(peer_id, capabilities)
        except RemoteError as error:
            logger.info("peer %s: %s", peer_id.hex()[:8], error)
            return False
        if visitor is None:
            return False
        self._remember(peer_id, visitor)
        return True

    def session_limit(self, peer_id: NodeId) -> int | None:
        """How many sessions a guest may have at once on one node; None for everybody else."""
        visitor = self._visitors.get(peer_id)
        return visitor.max_sessions if visitor is not None else None

    async def watch(self, links: Links) -> None:
        """Follow the file and the guests' time until cancelled; links of whoever may not stay are closed."""
        self._links = links
        while True:
            await asyncio.sleep(POLL_S)
            was_changed = await self._reload_changed()
            if was_changed or self._drop_expired():
                links.recheck_allowed()

    # --- the file

    async def _reload_changed(self) -> bool:
        """Take in a changed file; whether another list is in use now."""
        stamp = _stamp(self._path)
        if stamp == self._stamp:
            return False
        while True:
            await asyncio.sleep(SETTLE_S)
            if stamp == (stamp := _stamp(self._path)):
                break
        self._stamp = stamp
        try:
            members = await asyncio.to_thread(read_members, self._path)
        except SettingsError as error:
            self.trouble = str(error)
            logger.error("%s; the list from before stays in use", error)  # noqa: TRY400 - the text says it all
            return False
        self.trouble = ""
        self._tell(members)
        was_changed, self._members = members != self._members, members
        return was_changed

    def _tell(self, members: Members) -> None:
        added, removed = members.ids - self._members.ids, self._members.ids - members.ids
        logger.warning("%s: read again, %d ids more, %d less", self._path, len(added), len(removed))

    # --- those who are not listed

    def _moved_member(self, peer_id: NodeId, capabilities: Capabilities) -> _Visitor | None:
        if not capabilities.moved:
            return None
        moved = read_moved(capabilities.moved)
        is_member = moved.new_id == peer_id and moved.old_id in self._members.ids
        return _Visitor(moved.expires_s) if is_member and moved.is_live(self._now()) else None

    def _guest(self, peer_id: NodeId, capabilities: Capabilities) -> _Visitor | None:
        if not capabilities.token:
            return None
        token = read_guest_token(capabilities.token, self._network_id, now_s=self._now())
        if token.issuer_key not in self._members.issuers:
            return None
        if token.scope is not GuestScope.SERVE and (capabilities.seal_key or capabilities.slices):
            return None  # it presents itself as a node
        if not self._is_holder(peer_id, token, capabilities.token):
            return None
        return _Visitor(token.expires_s, token.quota, capabilities.token)

    def _is_holder(self, peer_id: NodeId, token: GuestToken, content: bytes) -> bool:
        if token.client_id is not None:
            return token.client_id == peer_id
        others = (other for other, visitor in self._visitors.items() if visitor.token == content)
        return all(other == peer_id or not self._is_linked(other) for other in others)

    def _is_linked(self, peer_id: NodeId) -> bool:
        return self._links is not None and bool(self._links.links_to(peer_id))

    def _remember(self, peer_id: NodeId, visitor: _Visitor) -> None:
        if len(self._visitors) >= MAX_VISITORS:
            self._visitors = {peer: known for peer, known in self._visitors.items() if self._is_linked(peer)}
        self._visitors[peer_id] = visitor

    def _drop_expired(self) -> bool:
        """Forget visitors whose time is over; whether there were any."""
        now_s = self._now()
        over = [peer_id for peer_id, visitor in self._visitors.items() if visitor.until_s <= now_s]
        for peer_id in over:
            del self._visitors[peer_id]
        return bool(over)


def read_members(path: Path) -> Members:
    """Read an allow file. Raises `SettingsError` naming the line that is wrong."""
    try:
        with path.open("rb") as file:
            content = file.read(MAX_SIZE + 1)
        if len(content) > MAX_SIZE:
            raise SettingsError(f"the allow list {path} is over {MAX_SIZE} bytes")
        text = content.decode()
    except OSError as error:
        raise SettingsError(f"cannot read the allow list {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise SettingsError(f"the allow list {path} is no text") from error
    return parse_members(text, str(path))


def parse_members(text: str, name: str) -> Members:
    """Read the text of an allow file. Raises `SettingsError` naming the line that is wrong."""
    ids: set[NodeId] = set()
    issuers: set[bytes] = set()
    for number, line in enumerate(text.splitlines(), start=1):
        words = line.partition("#")[0].split()
        if not words:
            continue
        is_issuer = words[0] == "issuer"
        digits = (words[1:] if is_issuer else words)[:1]
        key = _parse_digits(digits[0].partition("@")[0] if digits else "", f"{name}, line {number}")
        if is_issuer:
            issuers.add(key)
        else:
            ids.add(NodeId(key))
    if not ids and not issuers:
        raise SettingsError(f"the allow list {name} names nobody: one node id a line, 64 hex digits")
    return Members(frozenset(ids), frozenset(issuers))


def _parse_digits(digits: str, where: str) -> bytes:
    try:
        key = bytes.fromhex(digits) if len(digits) == _ID_DIGITS else b""
    except ValueError:
        key = b""
    if not key:
        raise SettingsError(
            f"{where}: give a node id, or `issuer` and a public key, as {_ID_DIGITS} hex digits"
        )
    return key


def _stamp(path: Path) -> Stamp | None:
    """What changes when a file is edited or replaced; None while there is no file."""
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_mtime_ns, status.st_size, status.st_ino
