"""Signing and spreading what this node says of itself: when something changed, and before the last word expires.

Knows when a record is due and which sequence it gets. What it says is composed elsewhere; how it travels is gossip's.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import replace

from routing.address_policy import AddressPolicy
from routing.announcement import (
    LOAD_REFRESH_S,
    MAX_LAYER_MS,
    MIN_LAYER_MS,
    RECORD_LIFETIME_S,
    REFRESH_S,
    Announcement,
    sign_announcement,
)
from routing.errors import DiffuseError, SettingsError
from routing.identity import Identity
from routing.known_peers import KnownPeers
from routing.types import SliceOffer

logger = logging.getLogger(__name__)

WITHDRAW_AFTER_S = 10.0  # without any way to us: a short loss of the last sentinel is no reason
LEAST_PAUSE_S = 0.25  # others take one record of an author a second, and twenty at once
RIVAL_PAUSE_S = 5.0  # two processes with one key answer each other no faster; doubles
MAX_RIVAL_PAUSE_S = 300.0


class Announcer:
    """Keeps one record of ours in gossip.

    `compose` returns what to say now (sequence and times are set here), with no contacts where nobody can reach us:
    then nothing is said. `publish` hands a signed record to gossip.
    """

    def __init__(
        self,
        identity: Identity,
        network_id: bytes,
        policy: AddressPolicy,
        known: KnownPeers,
        *,
        compose: Callable[[], Announcement],
        publish: Callable[[bytes], None],
        clock: Callable[[], float] = time.time,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._identity = identity
        self._network_id = network_id
        self._policy = policy
        self._known = known
        self._compose = compose
        self._publish = publish
        self._clock = clock
        self._now = now
        self._woken = asyncio.Event()
        self._said: Announcement | None = None
        self._said_at = 0.0  # monotonic, as are the next three
        self._silent_since: float | None = None
        self._rival_due = 0.0
        self._rival_pause = RIVAL_PAUSE_S
        self._above = -1
        self._has_left = False
        self._trouble = ""

    @property
    def announced(self) -> Announcement | None:
        """What others have of us now, if anything."""
        return None if self._said is None or self._said.has_left else self._said

    def wake(self) -> None:
        """Something changed: look whether others should know."""
        self._woken.set()

    async def run(self) -> None:
        """Announce until cancelled."""
        while True:
            self._woken.clear()
            pause_s = self.step()
            try:
                async with asyncio.timeout(pause_s):
                    await self._woken.wait()
            except TimeoutError:
                continue
            await asyncio.sleep(0.02)  # several parts may change at once

    def leave(self) -> bytes | None:
        """Say that we are gone, and nothing more afterwards; return the tombstone, None if nobody knew of us."""
        was_known = self.announced is not None
        self._has_left = True
        return self._bury() if was_known else None

    def note_rival(self, sequence: int) -> None:
        """Others hold a record of our key that we did not make since we started: our past, or somebody's copy."""
        self._above = max(self._above, sequence)
        self._woken.set()

    def step(self) -> float:
        """Announce what is due; return for how many seconds nothing else will be."""
        if self._has_left:
            return REFRESH_S
        now = self._now()
        draft = self._compose()
        if not draft.contacts:
            return self._fall_silent(now)
        self._silent_since = None
        due = self._due(draft, now)
        if due <= now:
            self._say(draft, now)
            due = self._due(draft, now)
        return min(max(due - now, 0.05), LOAD_REFRESH_S)  # the load changes without a word

    def _due(self, draft: Announcement, now: float) -> float:
        said = self._said
        if said is None or said.has_left:
            return now
        if self._above >= said.sequence:
            return self._rival_due
        if _without_figures(draft) != _without_figures(said):
            return self._said_at + LEAST_PAUSE_S
        if _without_times(draft) != _without_times(said):
            return self._said_at + LOAD_REFRESH_S
        return self._said_at + min(REFRESH_S, (said.expires_ms - said.issued_ms) / 3000)

    def _say(self, draft: Announcement, now: float) -> None:
        if self._said is not None and self._above >= self._said.sequence:
            self._rival_due = now + self._rival_pause
            self._rival_pause = min(2 * self._rival_pause, MAX_RIVAL_PAUSE_S)
        self._said, self._said_at = self._sign(draft), now

    def _fall_silent(self, now: float) -> float:
        """Nobody can reach us: let the last word expire, or take it back if that lasts."""
        if self.announced is None:
            return LOAD_REFRESH_S
        self._silent_since = self._silent_since or now
        left_s = self._silent_since + WITHDRAW_AFTER_S - now
        if left_s <= 0:
            self._bury()
        return max(left_s, 0.05)

    def _bury(self) -> bytes:
        bare = replace(
            self._compose(), contacts=(), offers=(), neighbour_ms=(), neighbour_mbps=(), has_left=True
        )
        dated = self._dated(bare)
        record = sign_announcement(self._identity, self._network_id, dated, self._policy)
        self._said = dated
        self._hand_on(record)
        return record

    def _hand_on(self, record: bytes) -> None:
        try:
            self._publish(record)
        except DiffuseError as error:  # ours to mend, and no reason for everything else here to stop
            logger.error("this node's record was not taken: %s", error)  # noqa: TRY400 - no bug to trace

    def _sign(self, draft: Announcement) -> Announcement | None:
        """Sign and spread; leave out what others can do without if it is too much. None if nothing can be said."""
        trouble = ""
        for bare in _ever_shorter(draft):
            dated = self._dated(bare)
            try:
                record = sign_announcement(self._identity, self._network_id, dated, self._policy)
            except SettingsError as error:
                trouble = trouble or str(error)
                continue
            num_left = len(draft.offers) - len(bare.offers)
            self._tell(f"{num_left} of its slices do not fit its announcement" if num_left else "")
            self._hand_on(record)
            return replace(
                draft, sequence=dated.sequence, issued_ms=dated.issued_ms, expires_ms=dated.expires_ms
            )
        self._tell(f"it cannot be announced: {trouble}")
        return self._said

    def _tell(self, trouble: str) -> None:
        if trouble and trouble != self._trouble:
            logger.error("this node: %s", trouble)
        self._trouble = trouble

    def _dated(self, bare: Announcement) -> Announcement:
        now_ms = int(self._clock() * 1000)
        ends = [it.voucher.expires_ms for it in bare.contacts if it.voucher is not None]
        expires_ms = min([now_ms + int(RECORD_LIFETIME_S * 1000), *ends])
        sequence = self._known.next_sequence(now_ms, above=self._above)
        return replace(bare, sequence=sequence, issued_ms=now_ms, expires_ms=expires_ms)


def believable(offer: SliceOffer) -> SliceOffer:
    """The offer with a speed that others take: one not measured yet counts as the fastest."""
    layer_ms = offer.layer_ms if math.isfinite(offer.layer_ms) else MAX_LAYER_MS
    return replace(offer, layer_ms=min(max(layer_ms, MIN_LAYER_MS), MAX_LAYER_MS), layer_hashes=())


def _ever_shorter(draft: Announcement) -> Iterator[Announcement]:
    """What to say, and what to say instead where that is too much."""
    whole = replace(draft, offers=tuple(believable(offer) for offer in draft.offers))
    yield whole
    bare = replace(whole, neighbour_mbps=())
    yield bare
    bare = replace(bare, neighbour_ms=())
    yield bare
    for count in (8, 4, 2, 1):
        if count < len(bare.offers):
            yield replace(bare, offers=bare.offers[:count])


def _without_times(it: Announcement) -> Announcement:
    return replace(it, sequence=0, issued_ms=0, expires_ms=0, neighbour_ms=(), neighbour_mbps=())


def _without_figures(it: Announcement) -> Announcement:
    offers = tuple(replace(offer, layer_ms=0.0) for offer in it.offers)
    return replace(_without_times(it), offers=offers, load=0, free_bytes=0)
