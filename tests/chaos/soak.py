"""A swarm under fire: thousands of answers while its members are killed, frozen, cut off and set to wrong clocks.

`python -m tests.chaos.soak --requests 2000`: ends with a table, and with 1 when a token was wrong, a request hung or
a session leaked. Every slice keeps one replica that is not hurt, so that an answer is always possible.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import random
import socket
import sys
import tempfile
import time
from pathlib import Path

from openai import APIError, AsyncOpenAI

from cli.membership import read_membership
from cli.options import DEFAULT_NETWORK
from cli.survey import survey
from routing.addresses import parse_address
from tests.chaos.faults import Faults
from tests.chaos.members import Member
from tests.chaos.model import WholeAnswers, write_model
from tests.chaos.questions import Question, Questions
from tests.chaos.tally import Tally, show
from tests.support.delay_proxy import DelayProxy

SLICES = ("1:3", "3:5", "5:7")
REPLICAS = 2
STREAMS = 8
HANG_S = 60.0
QUIET_S = 150.0  # an orphan is kept ten seconds, a silent session two minutes
LEAVES = 0.1  # of the clients: they close the connection in the middle of the answer
TOLD_EVERY_S = 10.0
SLOW_S = 6.0  # an answer that takes longer than any fault lasts is worth a line in the log
KV_BYTES = 64 << 20


class ClientLeftError(Exception):
    """We closed the connection ourselves."""


class Soak:
    """One run."""

    def __init__(self, folder: Path, num_requests: int, seed: int) -> None:
        self.tally = Tally()
        self._folder = folder
        self._num_left = self._num_requests = num_requests
        self._rng = random.Random(seed)
        self._sentinels: list[Member] = []
        self._nodes: list[list[Member]] = []  # by slice
        self._gateway: Member | None = None
        self._began = time.monotonic()
        self._log = (folder / "soak.log").open("a", encoding="utf-8")
        self._faults = Faults((), self._rng, self._note)

    async def run(self) -> Tally:
        """Start everything, ask and hurt, wait for quiet, count what is left."""
        model = write_model(self._folder / "model")
        whole = WholeAnswers(model)
        try:
            await self._start(model)
            client = self._client()
            questions = await Questions.learn(whole, lambda question: self._answer(client, question))
            self._say("started")
            telling = asyncio.create_task(self._tell_for_ever())
            try:
                await self._ask_under_fire(questions)
                await self._faults.mend()
            finally:
                telling.cancel()
            await self._count_leaks()
        finally:
            self.tally.faults = self._faults.counts
            await self._stop()
        return self.tally

    # The swarm ------------------------------------------------------------------------------------------------

    async def _start(self, model: Path) -> None:
        for index in range(2):
            sentinel = await self._member(f"sentinel{index}", ["sentinel", *self._bootstraps()])
            self._sentinels.append(sentinel)
            await sentinel.start()
        for number, layers in enumerate(SLICES):
            self._nodes.append([])
            for replica in range(REPLICAS):
                arguments = ["host", "--model", str(model), "--layers", layers, "--threads", "1"]
                arguments += ["--dtype", "float32", "--kv-budget", str(KV_BYTES), *self._bootstraps()]
                is_behind_nat = replica == 1 and number != 1  # two of six are reached through a sentinel
                node = await self._member(f"node{number}{'ab'[replica]}", arguments, is_dark=is_behind_nat)
                self._nodes[-1].append(node)
        await asyncio.gather(*(node.start() for nodes in self._nodes for node in nodes))
        arguments = ["serve", "--model", str(model), "--threads", "1", "--listen", "127.0.0.1:0"]
        self._gateway = Member("gateway", [*arguments, *self._bootstraps()], self._folder / "gateway.log")
        await self._gateway.start()
        await self._wait_ready()

    async def _member(self, name: str, arguments: list[str], *, is_dark: bool = False) -> Member:
        """A member behind a proxy: what it tells others is the proxy's port. A dark one cannot be dialled at all."""
        port, outside = _free_port(), _free_port()
        proxy = DelayProxy(("127.0.0.1", port))
        if not is_dark:
            await proxy.start(outside)
        arguments = [*arguments, "--listen", f"127.0.0.1:{port}", "--public-addr", f"127.0.0.1:{outside}"]
        arguments += ["--key", str(self._folder / f"{name}.key")]
        arguments += ["--state-dir", str(self._folder / f"{name}.state")]
        return Member(name, arguments, self._folder / f"{name}.log", None if is_dark else proxy)

    def _bootstraps(self) -> list[str]:
        told = [str(sentinel.ready["address"]) for sentinel in self._sentinels]
        return [part for address in told for part in ("--bootstrap", address)]

    async def _wait_ready(self) -> None:
        client, limit = self._client(), time.monotonic() + 60
        while time.monotonic() < limit:
            with contextlib.suppress(APIError):
                await self._answer(client, Question("hello", 2, None))
                return
            await asyncio.sleep(0.2)
        raise RuntimeError(f"the gateway finds no route: see {self._folder}")

    async def _stop(self) -> None:
        members = [*self._sentinels, *(node for nodes in self._nodes for node in nodes)]
        members += [self._gateway] if self._gateway else []
        await asyncio.gather(*(member.stop() for member in members))
        await asyncio.gather(*(member.proxy.close() for member in members if member.proxy))
        self._log.close()

    # Asking ---------------------------------------------------------------------------------------------------

    async def _ask_under_fire(self, questions: Questions) -> None:
        self._faults = Faults([self._sentinels, *self._nodes], self._rng, self._note)
        hurting = asyncio.create_task(self._faults.run())
        asking = asyncio.create_task(self._ask_all(questions))
        try:
            await asyncio.wait({hurting, asking}, return_when=asyncio.FIRST_COMPLETED)
            if hurting.done():
                hurting.result()  # a member did not come back
        finally:
            hurting.cancel()
            asking.cancel()
            await asyncio.gather(hurting, asking, return_exceptions=True)

    async def _ask_all(self, questions: Questions) -> None:
        await asyncio.gather(*(self._ask_on(questions) for _ in range(STREAMS)))

    def _client(self) -> AsyncOpenAI:
        assert self._gateway is not None
        url = self._gateway.ready["url"]
        return AsyncOpenAI(base_url=url, api_key="none", max_retries=0, timeout=HANG_S + 30)

    async def _ask_on(self, questions: Questions) -> None:
        client = self._client()
        while self._num_left > 0:
            self._num_left -= 1
            question = questions.draw(self._rng)
            leaves_after = self._rng.randrange(question.num_tokens) if self._rng.random() < LEAVES else None
            await self._ask(client, question, leaves_after)

    async def _ask(self, client: AsyncOpenAI, question: Question, leaves_after: int | None) -> None:
        began, tally = time.monotonic(), self.tally
        try:
            async with asyncio.timeout(HANG_S):
                text = await self._answer(client, question, leaves_after)
        except ClientLeftError:
            tally.left += 1
        except TimeoutError:
            tally.hung += 1
            self._say(f"hung: {question}")
        except APIError as error:
            tally.failed[str(error.code or type(error).__name__)] += 1
            self._say(f"failed: {error}")
        else:
            tally.completed += 1
            took_s = time.monotonic() - began
            tally.longest_s = max(tally.longest_s, took_s)
            if took_s > SLOW_S:
                self._note(f"slow: {took_s:.1f} s for {question.num_tokens} tokens")
            if text != question.expected:
                tally.wrong += 1
                self._say(f"wrong: {text!r} for {question}")

    async def _answer(self, client: AsyncOpenAI, question: Question, leaves_after: int | None = None) -> str:
        """The text of an answer; leaves in the middle of it if told so, by ClientLeftError."""
        assert self._gateway is not None
        stream = await client.chat.completions.create(
            model="model",
            messages=[{"role": "user", "content": question.prompt}],
            temperature=0 if question.seed is None else 1,
            seed=question.seed,
            max_tokens=question.num_tokens,
            stream=True,
        )
        text, num_chunks = "", 0
        async with stream:
            async for chunk in stream:
                if leaves_after is not None and num_chunks >= leaves_after:
                    raise ClientLeftError
                if chunk.choices and chunk.choices[0].delta.content:
                    text, num_chunks = text + chunk.choices[0].delta.content, num_chunks + 1
                self.tally.replays += int((chunk.model_extra or {}).get("replays") or 0)
        return text

    # Telling --------------------------------------------------------------------------------------------------

    async def _tell_for_ever(self) -> None:
        while True:
            await asyncio.sleep(TOLD_EVERY_S)
            tally, num_done = self.tally, self._num_requests - self._num_left
            self._say(
                f"{num_done} of {self._num_requests} asked, {self._faults.counts.total()} faults, "
                f"{tally.replays} routes rebuilt, {tally.failed.total()} failed, {tally.wrong} wrong, {tally.hung} hung"
            )

    def _say(self, text: str) -> None:
        print(f"{time.monotonic() - self._began:5.0f} s  {text}", flush=True)
        self._note(text)

    def _note(self, text: str) -> None:
        now = time.time()
        clock = time.strftime("%H:%M:%S", time.localtime(now))
        self._log.write(f"{clock},{int(now % 1 * 1000):03d} {text}\n")
        self._log.flush()

    # After it -------------------------------------------------------------------------------------------------

    async def _count_leaks(self) -> None:
        """What nodes still hold once nothing asks any more, after the time in which it must be gone."""
        limit = time.monotonic() + QUIET_S
        while True:
            self.tally.leaked, self.tally.leaked_bytes = await self._held()
            if not (self.tally.leaked or self.tally.leaked_bytes) or time.monotonic() > limit:
                return
            await asyncio.sleep(2)

    async def _held(self) -> tuple[int, int]:
        """Sessions on all nodes, a silent node counting as one; and bytes reserved for them."""
        membership = read_membership(DEFAULT_NETWORK, None)
        num_sessions = num_bytes = 0
        for node in (node for nodes in self._nodes for node in nodes):
            told = parse_address(str(node.ready["address"]))
            bound = str(node.ready["bound"]).rpartition(":")
            here = type(told)(told.node_id, bound[0], int(bound[2]))
            report = (await survey([here], membership))[0]
            num_sessions += report.description.load if report.description else 1
            num_bytes += KV_BYTES - report.description.free_bytes if report.description else 0
        return num_sessions, num_bytes


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def main() -> None:
    """Run the soak."""
    parser = argparse.ArgumentParser(prog="soak", description=__doc__)
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=int(time.time()))
    parser.add_argument("--folder", type=Path, help="keep logs here")
    parser.add_argument("--debug", action="store_true", help="let every member log everything")
    options = parser.parse_args()
    print(f"seed {options.seed}", flush=True)
    if options.debug:
        os.environ["DIFFUSE_DEBUG"] = "1"
    with tempfile.TemporaryDirectory(prefix="soak") as temporary:
        folder = options.folder or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        began = time.monotonic()
        tally = asyncio.run(Soak(folder, options.requests, options.seed).run())
        show(tally, time.monotonic() - began)
    sys.exit(0 if tally.is_clean else 1)


if __name__ == "__main__":
    main()
