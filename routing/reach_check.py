"""Asking others how they see us and whether they can dial us back, now and then and when links come up.

Knows the messages and the rhythm; what the answers prove is `reach`'s part.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from routing.errors import RemoteError
from routing.link import Link
from routing.reach import PROBE_EVERY_S, PROBE_TIMEOUT_S, RECHECK_S, Reachability, Verdict
from routing.types import Message, NodeId, Probe, Probed

logger = logging.getLogger(__name__)

ANSWER_TIMEOUT_S = PROBE_TIMEOUT_S + 2.0
NONCE_SIZE = 16
MAX_SKEW_S = 30.0  # half of what makes a record "of the future" at others (transport.md 5.5)
MAX_ASKED = 4  # probers at once
MAX_OBSERVED = 16  # probers, the latest ones
SETTLE_S = 0.05  # links and news come in bursts


@dataclass(slots=True)
class _Asked:
    link: Link
    port: int
    answered: asyncio.Event


class ReachCheck:
    """A link's receiver that keeps a `Reachability` up to date by asking those whom `probers()` names, best first.

    `port()` is the port to be proved, 0 where nothing listens: then only our outside host and the clock are learnt.
    """

    def __init__(
        self,
        reachability: Reachability,
        probers: Callable[[], Sequence[Link]],
        port: Callable[[], int],
        on_change: Callable[[], None],
        *,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._reachability = reachability
        self._probers = probers
        self._port = port
        self._on_change = on_change
        self._clock = clock
        self._asked: dict[bytes, _Asked] = {}
        self._done_with: dict[int, float] = {}  # links by id, when they were asked last (monotonic)
        self._wake = asyncio.Event()
        self._is_skew_told = False
        self.observed: dict[NodeId, str] = {}  # hosts as probers see us

    def wake(self) -> None:
        """A link came up, or a prober became known: look whether somebody should be asked."""
        self._wake.set()

    async def run(self) -> None:
        """Ask until cancelled."""
        while True:
            self._wake.clear()
            if due := self._due():
                await self._ask_all(due)
                continue
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(PROBE_EVERY_S / 6):
                    await self._wake.wait()
                    await asyncio.sleep(SETTLE_S)

    def on_message(self, link: Link, message: Message) -> None:
        if isinstance(message, Probed):
            self.take(link, message)

    def on_link_up(self, link: Link) -> None:
        self.wake()

    def on_link_closed(self, link: Link, error: RemoteError | None) -> None: ...

    def take(self, link: Link, probed: Probed) -> None:
        """Take an answer, if it is one to what was asked on this very link."""
        asked = self._asked.get(probed.nonce)
        if asked is None or asked.link is not link or probed.port != asked.port:
            return  # another port is none of ours: announced, it would lead to somebody else
        del self._asked[probed.nonce]
        now = self._clock()
        way_ms = (link.rtt_ms or 0.0) / 2
        skew_ms = now * 1000 - way_ms - probed.now_ms if probed.now_ms else None
        self._note_observed(link.peer_id, probed.host)
        before = (self._reachability.verdict, self._reachability.proved)
        if probed.port:
            self._reachability.note(link.peer_id, link.peer_host, probed, skew_ms=skew_ms)
        elif skew_ms is not None:
            self._reachability.note_skew(link.peer_id, skew_ms)
        asked.answered.set()
        self._tell_skew()
        if (self._reachability.verdict, self._reachability.proved) != before:
            self._on_change()

    def _note_observed(self, prober: NodeId, host: str) -> None:
        self.observed.pop(prober, None)
        self.observed[prober] = host
        while len(self.observed) > MAX_OBSERVED:
            del self.observed[next(iter(self.observed))]

    def _due(self) -> list[Link]:
        """Links whose peer should be asked now: new ones at once, others after a while."""
        is_public = self._reachability.verdict is Verdict.PUBLIC and not self._reachability.is_doubted
        pause = RECHECK_S if is_public or not self._port() else 1.1 * PROBE_EVERY_S
        now = time.monotonic()
        links = self._probers()[:MAX_ASKED]
        live = {id(link) for link in links}
        self._done_with = {key: at for key, at in self._done_with.items() if key in live}
        return [link for link in links if now - self._done_with.get(id(link), -pause) >= pause]

    async def _ask_all(self, links: Sequence[Link]) -> None:
        await asyncio.gather(*(self._ask(link) for link in links))

    async def _ask(self, link: Link) -> None:
        self._done_with[id(link)] = time.monotonic()
        nonce, port = secrets.token_bytes(NONCE_SIZE), self._port()
        asked = self._asked[nonce] = _Asked(link, port, asyncio.Event())
        try:
            async with asyncio.timeout(ANSWER_TIMEOUT_S):
                link.post(Probe(nonce, port))
                await asked.answered.wait()
        except (TimeoutError, RemoteError):  # one that does not answer tells nothing
            return
        finally:
            self._asked.pop(nonce, None)

    def _tell_skew(self) -> None:
        skew_ms = self._reachability.clock_skew_ms
        is_off = skew_ms is not None and abs(skew_ms) > MAX_SKEW_S * 1000
        if is_off and not self._is_skew_told and skew_ms is not None:
            ahead = "ahead of" if skew_ms > 0 else "behind"
            logger.error(
                "this machine's clock is %.0f s %s the others': they refuse what it announces, and it what they do; "
                "set the clock",
                abs(skew_ms) / 1000,
                ahead,
            )
        self._is_skew_told = is_off
