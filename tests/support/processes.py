"""Sentinels, nodes and gateways as users start them: through the CLI, in processes of their own.

Everything started ends with the `Processes` that started it; standard input is a pipe, so a killed test run takes
its children along (`--until-eof`).
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from openai import OpenAI

from cli.membership import read_membership
from cli.options import DEFAULT_NETWORK
from cli.survey import survey
from routing.addresses import parse_address
from routing.types import Description
from tests.support.nursery import ONE_THREAD, Forked, Nursery

START_TIMEOUT_S = 120.0
STOP_TIMEOUT_S = 20.0
DRAIN = ("--drain", "5")  # of hosts: less than STOP_TIMEOUT_S


class Process:
    """One child and what it says."""

    def __init__(self, popen: subprocess.Popen[str] | Forked) -> None:
        self.popen = popen
        self.events: list[dict[str, Any]] = []
        self.ready: dict[str, Any] = {}
        self._news = threading.Condition()
        self._is_over = False
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    @property
    def address(self) -> str:
        """What others are told."""
        return str(self.ready["address"])

    def kill(self, number: signal.Signals = signal.SIGKILL) -> None:
        """Send a signal; SIGKILL waits for the end."""
        self.popen.send_signal(number)
        if number == signal.SIGKILL:
            self.popen.wait(STOP_TIMEOUT_S)

    def freeze(self) -> None:
        """Stop the process without closing anything: it is silent from now on."""
        self.kill(signal.SIGSTOP)

    def thaw(self) -> None:
        """Let a frozen process go on."""
        self.kill(signal.SIGCONT)

    def wait_event(self, name: str, timeout_s: float = START_TIMEOUT_S) -> dict[str, Any]:
        """The first event of this name, as soon as it is there."""

        def told() -> dict[str, Any] | None:
            return next((event for event in self.events if event["event"] == name), None)

        with self._news:
            self._news.wait_for(lambda: told() is not None or self._is_over, timeout_s)
        event = told()
        if event is None:
            said = (
                f"ended with code {self.popen.wait(STOP_TIMEOUT_S)}" if self._is_over else "does not say so"
            )
            raise AssertionError(f"a child {said}: {name} was awaited")
        return event

    def close(self) -> None:
        """Wait for the end, by force if need be, and close the pipes."""
        try:
            self.popen.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self.kill()
        self._reader.join()
        for pipe in (self.popen.stdin, self.popen.stdout):
            if pipe is not None:
                pipe.close()

    def _read(self) -> None:
        assert self.popen.stdout is not None
        for line in self.popen.stdout:
            with self._news:
                self.events.append(json.loads(line))
                self._news.notify_all()
        with self._news:
            self._is_over = True
            self._news.notify_all()


@dataclass
class Processes:
    """A family of sentinels, nodes and gateways on this machine, with a state folder of their own.

    With a nursery they are forked: for tests that start many.
    """

    nursery: Nursery | None = None
    children: list[Process] = field(default_factory=list)
    environment: dict[str, str] = field(default_factory=dict)  # for children started from now on
    _folder: tempfile.TemporaryDirectory[str] = field(
        default_factory=lambda: tempfile.TemporaryDirectory(prefix="diffuse-test-")
    )

    def __enter__(self) -> Processes:
        return self

    def __exit__(self, *_: object) -> None:
        for child in self.children:
            with contextlib.suppress(ProcessLookupError):
                child.thaw()
                child.popen.terminate()
        for child in self.children:
            child.close()
        self._folder.cleanup()

    @property
    def state_dir(self) -> Path:
        """Where every child keeps its state, unless flags say otherwise."""
        return Path(self._folder.name)

    def sentinel(self, *flags: str, bootstraps: Sequence[Process | str] = ()) -> Process:
        """Start a sentinel on a free port, with a key of its own, and wait until it is there."""
        key = self.state_dir / f"sentinel-{len(self.children)}.key"
        own_key = () if "--key" in flags else ("--key", str(key))
        arguments = [*_unless("--listen", flags, "127.0.0.1:0"), *own_key, *_joining(bootstraps), *flags]
        return self._wait_ready(self._spawn("sentinel", *arguments))

    def hosts(
        self,
        model: str,
        *slices: str,
        flags: tuple[str, ...] = (),
        bootstraps: Sequence[Process | str] = (),
    ) -> list[Process]:
        """Start a node for each "A:B" ("": it chooses), all at once, and wait until every one serves."""
        children = [self._start_host(model, layers, *flags, bootstraps=bootstraps) for layers in slices]
        return [self._wait_ready(child) for child in children]

    def start_host(
        self, model: str, layers: str = "", *flags: str, bootstraps: Sequence[Process | str] = ()
    ) -> Process:
        """Start one node and wait until it serves."""
        return self._wait_ready(self._start_host(model, layers, *flags, bootstraps=bootstraps))

    def serve(
        self, model: str, nodes: Sequence[Process], *flags: str, bootstraps: Sequence[Process | str] = ()
    ) -> Process:
        """Start a gateway over nodes, or what the bootstraps know, on a free port. Without a model: all there are."""
        named = ("--model", model) if model else ()
        addresses = [part for node in nodes for part in ("--node", node.address)]
        arguments = [*named, *_unless("--listen", flags, "127.0.0.1:0"), *addresses, *_joining(bootstraps)]
        return self._wait_ready(self._spawn("serve", *arguments, "--threads", "1", *flags))

    def status(self, bootstraps: Sequence[Process | str], *flags: str) -> dict[str, Any]:
        """What `diffuse status --json` says of a swarm."""
        done = self.run("status", *_joining(bootstraps), "--json", *flags)
        assert done.returncode == 0, done.stderr
        told: dict[str, Any] = json.loads(done.stdout)
        return told

    def leave(self, process: Process, timeout_s: float = 30.0) -> subprocess.CompletedProcess[str]:
        """Run `diffuse leave` for one child, to its end."""
        return self.run("leave", "--pid", str(process.popen.pid), "--timeout", str(timeout_s))

    def run(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Run a command of the same user to its end."""
        return subprocess.run(
            [sys.executable, "-m", "cli", *arguments],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            env=self._environment(),
            timeout=START_TIMEOUT_S,
            check=False,
        )

    def _start_host(
        self, model: str, layers: str, *flags: str, bootstraps: Sequence[Process | str]
    ) -> Process:
        slices = ("--layers", layers) if layers else ()
        drain = () if "--drain" in flags else DRAIN
        arguments = [*slices, *_unless("--listen", flags, "127.0.0.1:0"), *drain, *_joining(bootstraps)]
        return self._spawn("host", "--model", model, *arguments, "--threads", "1", *flags)

    def _environment(self) -> dict[str, str]:
        return os.environ | ONE_THREAD | {"DIFFUSE_STATE_DIR": str(self.state_dir)} | self.environment

    def _spawn(self, *arguments: str) -> Process:
        child = Process(self._popen([*arguments, "--events", "json", "--until-eof"]))
        self.children.append(child)
        return child

    def _popen(self, arguments: Sequence[str]) -> subprocess.Popen[str] | Forked:
        if self.nursery is not None:
            return self.nursery.spawn(arguments, self._environment())
        return subprocess.Popen(
            [sys.executable, "-m", "cli", *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=self._environment(),
        )

    def _wait_ready(self, child: Process) -> Process:
        child.ready = child.wait_event("ready")
        return child


def _unless(flag: str, flags: Sequence[str], value: str) -> tuple[str, ...]:
    """The flag with this value, where the caller does not give it."""
    return () if flag in flags else (flag, value)


def _joining(bootstraps: Sequence[Process | str]) -> list[str]:
    places = [one if isinstance(one, str) else one.address for one in bootstraps]
    return [part for place in places for part in ("--bootstrap", place)]


def client_of(gateway: Process, **options: Any) -> OpenAI:
    """The official client over a gateway."""
    return OpenAI(base_url=gateway.ready["url"], api_key="none", max_retries=0, **options)


async def describe(nodes: Sequence[Process]) -> list[Description]:
    """What each node holds now, asked as any peer may."""
    addresses = [parse_address(node.ready["address"]) for node in nodes]
    reports = await survey(addresses, read_membership(DEFAULT_NETWORK, None))
    assert all(report.description for report in reports), [report.error for report in reports]
    return [report.description for report in reports if report.description]


def until(is_true: Callable[[], bool], timeout_s: float = 30.0) -> None:
    """Wait for something that other processes bring about."""
    limit = time.monotonic() + timeout_s
    while not is_true():
        assert time.monotonic() < limit, "it did not come about"
        time.sleep(0.02)
