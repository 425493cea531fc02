"""Nodes and gateways as users start them: through the CLI, in processes of their own.

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
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from openai import OpenAI

from cli.membership import read_membership
from cli.options import DEFAULT_NETWORK
from cli.survey import survey
from routing.addresses import parse_address
from routing.types import Description

START_TIMEOUT_S = 120.0
STOP_TIMEOUT_S = 20.0
ONE_THREAD = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}


@dataclass
class Process:
    """One child and what it said when it was ready."""

    popen: subprocess.Popen[str]
    ready: dict[str, Any]

    def kill(self, number: signal.Signals = signal.SIGKILL) -> None:
        self.popen.send_signal(number)
        if number == signal.SIGKILL:
            self.popen.wait(STOP_TIMEOUT_S)


@dataclass
class Processes:
    """A family of nodes and gateways on this machine."""

    children: list[Process] = field(default_factory=list)

    def __enter__(self) -> Processes:
        return self

    def __exit__(self, *_: object) -> None:
        for child in self.children:
            with contextlib.suppress(ProcessLookupError):
                child.popen.send_signal(signal.SIGCONT)
                child.popen.terminate()
        for child in self.children:
            try:
                child.popen.wait(STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                child.kill()
            for pipe in (child.popen.stdin, child.popen.stdout):
                if pipe is not None:
                    pipe.close()

    def hosts(self, model: str, *slices: str, flags: tuple[str, ...] = ()) -> list[Process]:
        """Start a node for each "A:B", all at once, and wait until every one serves."""
        popens = [
            self._spawn("host", "--model", model, "--layers", layers, "--listen", "127.0.0.1:0", *flags)
            for layers in slices
        ]
        return [self._wait_ready(popen) for popen in popens]

    def serve(self, model: str, nodes: list[Process], *flags: str) -> Process:
        """Start a gateway over nodes, on a free port."""
        addresses = [part for node in nodes for part in ("--node", node.ready["address"])]
        return self._wait_ready(
            self._spawn("serve", "--model", model, "--listen", "127.0.0.1:0", *addresses, *flags)
        )

    def _spawn(self, *arguments: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-m", "cli", *arguments, "--threads", "1", "--events", "json", "--until-eof"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | ONE_THREAD,
        )

    def _wait_ready(self, popen: subprocess.Popen[str]) -> Process:
        child = Process(popen, {})
        self.children.append(child)
        assert popen.stdout is not None
        for line in popen.stdout:
            event = json.loads(line)
            if event["event"] == "ready":
                child.ready = event
                return child
        raise AssertionError(f"a child ended with code {popen.wait(STOP_TIMEOUT_S)} before it was ready")


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
