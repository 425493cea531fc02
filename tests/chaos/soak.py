"""A swarm under fire: thousands of answers while its members are killed, frozen, cut off and set to wrong clocks.

`python -m tests.chaos.soak --requests 2000`: ends with a table, and with 1 when a token was wrong, a request hung or
a session leaked. Every slice keeps one replica that is not hurt, so that an answer is always possible.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from openai import APIError, AsyncOpenAI
from rich.console import Console
from rich.table import Table

from cli.membership import read_membership
from cli.options import DEFAULT_NETWORK
from cli.survey import survey
from routing.addresses import parse_address
from tests.chaos.members import Member
from tests.chaos.model import WholeAnswers, write_model
from tests.support.delay_proxy import DelayProxy

SLICES = ("1:3", "3:5", "5:7")
REPLICAS = 2
STREAMS = 8
HANG_S = 60.0
QUIET_S = 150.0  # an orphan is kept ten seconds, a silent session two minutes
PROMPTS = tuple(
    f"{word} the {place}" for word in ("hello", "quick", "brown") for place in ("fox", "world", "end")
)


@dataclass
class Tally:
    """What happened."""

    faults: Counter[str] = field(default_factory=Counter)
    completed: int = 0
    failed: Counter[str] = field(default_factory=Counter)
    wrong: int = 0
    hung: int = 0
    leaked: int = 0
    replays: int = 0
    longest_s: float = 0.0

    @property
    def is_clean(self) -> bool:
        return not (self.wrong or self.hung or self.leaked)


@dataclass
class Soak:
    """One run."""

    folder: Path
    num_requests: int
    rng: random.Random
    tally: Tally = field(default_factory=Tally)
    sentinels: list[Member] = field(default_factory=list)
    nodes: list[list[Member]] = field(default_factory=list)  # by slice
    gateway: Member | None = None
    num_left: int = 0

    async def run(self) -> Tally:
        """Start everything, ask and hurt, wait for quiet, count what is left."""
        model = write_model(self.folder / "model")
        whole = WholeAnswers(model)
        try:
            await self._start(model)
            self.num_left = self.num_requests
            hurting = asyncio.create_task(self._hurt_for_ever())
            try:
                await asyncio.gather(*(self._ask_on(whole) for _ in range(STREAMS)))
            finally:
                hurting.cancel()
                await asyncio.gather(hurting, return_exceptions=True)
            await self._mend_all()
            self.tally.leaked = await self._leaked()
        finally:
            await self._stop()
        return self.tally

    # The swarm ------------------------------------------------------------------------------------------------

    async def _start(self, model: Path) -> None:
        for index in range(2):
            sentinel = await self._member(f"sentinel{index}", ["sentinel", *self._bootstraps()])
            await sentinel.start()
            self.sentinels.append(sentinel)
        starts = []
        for number, layers in enumerate(SLICES):
            self.nodes.append([])
            for replica in range(REPLICAS):
                arguments = ["host", "--model", str(model), "--layers", layers, "--threads", "1"]
                arguments += ["--dtype", "float32", *self._bootstraps()]
                is_behind_nat = replica == 1 and number != 1  # two of six are reached through a sentinel
                node = await self._member(f"node{number}{'ab'[replica]}", arguments, is_dark=is_behind_nat)
                self.nodes[-1].append(node)
                starts.append(node.start())
        await asyncio.gather(*starts)
        arguments = ["serve", "--model", str(model), "--threads", "1", "--listen", "127.0.0.1:0"]
        self.gateway = Member("gateway", [*arguments, *self._bootstraps()], self.folder / "gateway.log")
        await self.gateway.start()
        await self._wait_ready()

    async def _member(self, name: str, arguments: list[str], *, is_dark: bool = False) -> Member:
        """A member behind a proxy: what it tells others is the proxy's port. A dark one cannot be dialled at all."""
        port, outside = _free_port(), _free_port()
        proxy = DelayProxy(("127.0.0.1", port))
        if not is_dark:
            await proxy.start(outside)
        arguments = [*arguments, "--listen", f"127.0.0.1:{port}", "--public-addr", f"127.0.0.1:{outside}"]
        arguments += [
            "--key",
            str(self.folder / f"{name}.key"),
            "--state-dir",
            str(self.folder / f"{name}.state"),
        ]
        return Member(name, arguments, self.folder / f"{name}.log", None if is_dark else proxy)

    def _bootstraps(self) -> list[str]:
        return [
            part for sentinel in self.sentinels for part in ("--bootstrap", str(sentinel.ready["address"]))
        ]

    async def _wait_ready(self) -> None:
        client, limit = self._client(), time.monotonic() + 60
        while time.monotonic() < limit:
            with contextlib.suppress(APIError):
                await self._answer(client, PROMPTS[0], 2)
                return
            await asyncio.sleep(0.2)
        raise RuntimeError(f"the gateway finds no route: see {self.folder}")

    async def _stop(self) -> None:
        members = [*self.sentinels, *(node for nodes in self.nodes for node in nodes)]
        members += [self.gateway] if self.gateway else []
        await asyncio.gather(*(member.stop() for member in members))
        await asyncio.gather(*(member.proxy.close() for member in members if member.proxy))

    # Asking ---------------------------------------------------------------------------------------------------

    def _client(self) -> AsyncOpenAI:
        assert self.gateway is not None
        return AsyncOpenAI(
            base_url=self.gateway.ready["url"], api_key="none", max_retries=0, timeout=HANG_S + 30
        )

    async def _ask_on(self, whole: WholeAnswers) -> None:
        client = self._client()
        while self.num_left > 0:
            self.num_left -= 1
            prompt, num_tokens = self.rng.choice(PROMPTS), self.rng.randint(4, 24)
            expected = whole.greedy(prompt, num_tokens)
            began = time.monotonic()
            try:
                async with asyncio.timeout(HANG_S):
                    text = await self._answer(client, prompt, num_tokens)
            except TimeoutError:
                self.tally.hung += 1
                continue
            except APIError as error:
                self.tally.failed[str(getattr(error, "code", None) or type(error).__name__)] += 1
                continue
            self.tally.completed += 1
            self.tally.longest_s = max(self.tally.longest_s, time.monotonic() - began)
            if text != expected:
                self.tally.wrong += 1
                print(f"wrong: {text!r} where {expected!r} is due", file=sys.stderr)

    async def _answer(self, client: AsyncOpenAI, prompt: str, num_tokens: int) -> str:
        models = await client.models.list()
        stream = await client.chat.completions.create(
            model=models.data[0].id,
            messages=[{"role": "user", "content": prompt}],
            temperature=0,
            max_tokens=num_tokens,
            stream=True,
        )
        text = ""
        async for chunk in stream:
            if chunk.choices and chunk.choices[0].delta.content:
                text += chunk.choices[0].delta.content
            self.tally.replays += int((chunk.model_extra or {}).get("replays") or 0)
        return text

    # Hurting --------------------------------------------------------------------------------------------------

    async def _hurt_for_ever(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            while True:
                await asyncio.sleep(self.rng.uniform(0.3, 1.2))
                victim = self._victim()
                if victim is not None:
                    tasks.create_task(self._hurt(victim))

    def _victim(self) -> Member | None:
        """A member whose loss leaves every slice a replica, and the swarm a sentinel."""
        groups = [
            group for group in (self.sentinels, *self.nodes) if not any(member.is_hurt for member in group)
        ]
        return self.rng.choice(self.rng.choice(groups)) if groups else None

    async def _hurt(self, member: Member) -> None:
        kinds: dict[str, Callable[[Member], Coroutine[Any, Any, None]]] = {
            "killed and restarted": self._restart,
            "frozen": self._freeze,
            "restarted with a wrong clock": self._skew,
        }
        if member.proxy is not None:
            kinds |= {"connections cut": self._cut, "path silent": self._silence}
        kind = self.rng.choice(list(kinds))
        member.is_hurt = True
        self.tally.faults[kind] += 1
        await kinds[kind](member)
        await asyncio.sleep(3)  # it is found again before its sibling is hurt
        member.is_hurt = False

    async def _restart(self, member: Member) -> None:
        await member.kill()
        await asyncio.sleep(self.rng.uniform(0, 2))
        await member.start()

    async def _skew(self, member: Member) -> None:
        member.skew_s = self.rng.choice((-20.0, 20.0, 45.0))
        await self._restart(member)
        member.skew_s = 0.0

    async def _freeze(self, member: Member) -> None:
        member.freeze()
        await asyncio.sleep(self.rng.uniform(0.5, 6))
        member.thaw()

    async def _cut(self, member: Member) -> None:
        assert member.proxy is not None
        member.proxy.cut()

    async def _silence(self, member: Member) -> None:
        assert member.proxy is not None
        member.proxy.stall()
        await asyncio.sleep(self.rng.uniform(0.5, 6))
        member.proxy.resume()

    async def _mend_all(self) -> None:
        for member in (*self.sentinels, *(node for nodes in self.nodes for node in nodes)):
            if member.process is not None and member.process.returncode is not None:
                await member.start()
            member.thaw()
            if member.proxy is not None:
                member.proxy.resume()

    # After it -------------------------------------------------------------------------------------------------

    async def _leaked(self) -> int:
        """Sessions that nodes still hold once nothing asks any more, after the time in which they must be gone."""
        limit = time.monotonic() + QUIET_S
        while True:
            held = await self._sessions()
            if held == 0 or time.monotonic() > limit:
                return held
            await asyncio.sleep(2)

    async def _sessions(self) -> int:
        membership = read_membership(DEFAULT_NETWORK, None)
        held = 0
        for node in (node for nodes in self.nodes for node in nodes):
            told = parse_address(str(node.ready["address"]))
            bound = str(node.ready["bound"]).rpartition(":")
            here = type(told)(told.node_id, bound[0], int(bound[2]))
            report = (await survey([here], membership))[0]
            held += report.description.load if report.description else 1
        return held


def _free_port() -> int:
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def show(tally: Tally, took_s: float) -> None:
    """Print the table."""
    table = Table(title="soak")
    table.add_column("what")
    table.add_column("count", justify="right")
    for kind, count in sorted(tally.faults.items()):
        table.add_row(f"faults: {kind}", str(count))
    table.add_row("faults in all", str(sum(tally.faults.values())))
    table.add_row("requests completed", str(tally.completed))
    for code, count in sorted(tally.failed.items()):
        table.add_row(f"requests failed: {code}", str(count))
    table.add_row("routes rebuilt", str(tally.replays))
    table.add_row("longest answer, s", f"{tally.longest_s:.1f}")
    table.add_row("took, s", f"{took_s:.0f}")
    table.add_row("wrong tokens", str(tally.wrong))
    table.add_row("hangs", str(tally.hung))
    table.add_row("leaked sessions", str(tally.leaked))
    Console().print(table)


def main() -> None:
    """Run the soak."""
    parser = argparse.ArgumentParser(prog="soak", description=__doc__)
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=int(time.time()))
    parser.add_argument("--folder", type=Path, help="keep logs here")
    options = parser.parse_args()
    print(f"seed {options.seed}", flush=True)
    with tempfile.TemporaryDirectory(prefix="soak") as temporary:
        folder = options.folder or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        began = time.monotonic()
        soak = Soak(folder, options.requests, random.Random(options.seed))
        tally = asyncio.run(soak.run())
        show(tally, time.monotonic() - began)
    sys.exit(0 if tally.is_clean else 1)


if __name__ == "__main__":
    main()
