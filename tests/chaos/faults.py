"""Hurts members of a swarm at random, and brings each back: killed, frozen, starved, cut off, on a wrong clock.

Every group of members that can stand in for each other keeps one that is not hurt. Knows nothing of what is asked.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from tests.chaos.members import Member

PAUSE_S = 0.3, 1.2  # between two faults, where somebody may be hurt
LAST_S = 0.5, 6.0  # shorter than a glance, and longer than any time-out of a live route
RESTART_S = 0.0, 2.0
FOUND_AGAIN_S = 3.0  # a member that was hurt is found again before its sibling is hurt
SKEWS_S = -20.0, 20.0, 45.0  # a record may be a minute early
STARVED_S = 0.09, 0.01  # of every tenth of a second: stopped, running


class Faults:
    """What is done to `groups`, and `counts` of it; each is told to `note`."""

    def __init__(
        self, groups: Sequence[Sequence[Member]], rng: random.Random, note: Callable[[str], None]
    ) -> None:
        self.counts: Counter[str] = Counter()
        self._groups = groups
        self._rng = rng
        self._note = note

    async def run(self) -> None:
        """Hurt until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            while True:
                await asyncio.sleep(self._rng.uniform(*PAUSE_S))
                victim = self._victim()
                if victim is not None:
                    tasks.create_task(self._hurt(victim))

    async def mend(self) -> None:
        """Bring everybody back who was hurt when `run` was cancelled."""
        await asyncio.gather(*(_mend(member) for group in self._groups for member in group))

    def _victim(self) -> Member | None:
        groups = [group for group in self._groups if not any(member.is_hurt for member in group)]
        return self._rng.choice(self._rng.choice(groups)) if groups else None

    async def _hurt(self, member: Member) -> None:
        kinds: dict[str, Callable[[Member], Coroutine[Any, Any, None]]] = {
            "killed and restarted": self._restart,
            "frozen": self._freeze,
            "starved of CPU": self._starve,
            "restarted with a wrong clock": self._skew,
        }
        if member.proxy is not None:
            kinds |= {"connections cut": self._cut, "path silent": self._silence}
        kind = self._rng.choice(list(kinds))
        member.is_hurt = True
        self.counts[kind] += 1
        self._note(f"{member.name}: {kind}")
        await kinds[kind](member)
        self._note(f"{member.name}: mended")
        await asyncio.sleep(FOUND_AGAIN_S)
        member.is_hurt = False

    async def _restart(self, member: Member) -> None:
        await member.kill()
        await asyncio.sleep(self._rng.uniform(*RESTART_S))
        await member.start()

    async def _skew(self, member: Member) -> None:
        member.skew_s = self._rng.choice(SKEWS_S)
        await self._restart(member)
        member.skew_s = 0.0

    async def _freeze(self, member: Member) -> None:
        member.freeze()
        await asyncio.sleep(self._rng.uniform(*LAST_S))
        member.thaw()

    async def _starve(self, member: Member) -> None:
        until = time.monotonic() + self._rng.uniform(*LAST_S)
        while time.monotonic() < until:
            member.freeze()
            await asyncio.sleep(STARVED_S[0])
            member.thaw()
            await asyncio.sleep(STARVED_S[1])

    async def _cut(self, member: Member) -> None:
        assert member.proxy is not None
        member.proxy.cut()

    async def _silence(self, member: Member) -> None:
        assert member.proxy is not None
        member.proxy.stall()
        await asyncio.sleep(self._rng.uniform(*LAST_S))
        member.proxy.resume()


async def _mend(member: Member) -> None:
    assert member.process is not None
    if member.process.returncode is not None:
        await member.start()
    member.thaw()
    if member.proxy is not None:
        member.proxy.resume()
