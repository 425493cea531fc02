"""Diffuse in the lab: its processes on the lab's machines, as users start them.

Members are started without waiting for each other, with keys made beforehand: imports are most of a start.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from routing.identity import Identity
from tests.lab.lab import Host, Lab
from tests.support.processes import Process

START_TIMEOUT_S = 180.0  # five processes that import torch, on a machine that does other things too
SENTINEL_PORT, NODE_PORT, GATEWAY_PORT = 9000, 9100, 8000
ENVIRONMENT = os.environ | {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}


@dataclass
class Running:
    """One process on one machine."""

    host: Host
    process: Process
    arguments: list[str]
    log: Path
    address: str = ""  # of a sentinel, for --bootstrap

    def kill(self) -> None:
        """End it without a word."""
        self.process.kill()

    def said(self) -> str:
        """What it wrote into its log, over all its starts."""
        return self.log.read_text()


@dataclass
class LabSwarm:
    """Starts members of one swarm; they end with the lab."""

    lab: Lab
    folder: Path
    scope: str = "public"
    bootstraps: list[str] = field(default_factory=list)

    def sentinel(self, host: Host, *flags: str) -> Running:
        """A sentinel; later members bootstrap from it."""
        place, port = self._place("sentinel", host), f"{host.ip}:{SENTINEL_PORT}"
        identity = Identity.generate()
        identity.save(place / "key")
        arguments = ["sentinel", "--listen", port, "--public-addr", port, *flags]
        running = self._start(host, arguments, place)
        running.address = f"{identity.node_id.hex()}@{port}"
        self.bootstraps.append(running.address)
        return running

    def node(self, host: Host, model: Path, layers: str, *flags: str, key: Path | None = None) -> Running:
        """A node that says nothing of where it is: it has to find out."""
        arguments = ["host", "--model", str(model), "--layers", layers, "--dtype", "float32"]
        arguments += ["--threads", "1", "--listen", f"0.0.0.0:{NODE_PORT}", *flags]
        return self._start(host, arguments, self._place("host", host), key)

    def gateway(self, host: Host, model: Path, *flags: str) -> Running:
        """A gateway on a machine of its own."""
        arguments = ["serve", "--model", str(model), "--threads", "1"]
        arguments += ["--listen", f"127.0.0.1:{GATEWAY_PORT}", *flags]
        return self._start(host, arguments, self._place("serve", host))

    def again(self, running: Running) -> Running:
        """The same member once more, with the same key."""
        process = self._spawn(running.host, running.arguments, running.log)
        return Running(running.host, process, running.arguments, running.log, running.address)

    def wait_ready(self, *members: Running) -> None:
        """Wait until each of them says so."""
        for member in members:
            member.process.ready = member.process.wait_event("ready", START_TIMEOUT_S)

    def ask(self, gateway: Running, *prompts: str, num_tokens: int = 8, **wanted: Any) -> dict[str, Any]:
        """Ask from the gateway's own machine and wait for the answers."""
        process = self.asking(gateway, *prompts, num_tokens=num_tokens, **wanted)
        return self.answers(process, wanted.get("for_s", 0.0) + 120)

    def asking(
        self, gateway: Running, *prompts: str, num_tokens: int = 8, **wanted: Any
    ) -> subprocess.Popen[str]:
        """Ask, and return as soon as the first question is on its way."""
        wanted |= {"prompts": prompts, "num_tokens": num_tokens}
        url = f"http://127.0.0.1:{GATEWAY_PORT}/v1"
        command = [sys.executable, "-m", "tests.lab.ask", url, json.dumps(wanted)]
        process = self.lab.spawn(gateway.host, command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        assert process.stderr is not None
        said = ""
        while line := process.stderr.readline():
            if line == "asking\n":
                return process
            said += line
        raise AssertionError(f"nothing was asked: {said}")

    def answers(self, process: subprocess.Popen[str], timeout_s: float = 120.0) -> dict[str, Any]:
        """What came of `asking`."""
        out, said = process.communicate(timeout=timeout_s)
        assert process.returncode == 0, said
        return dict(json.loads(out))

    def status(self, host: Host) -> dict[str, Any]:
        """What `diffuse status` says on a machine."""
        command = [sys.executable, "-m", "cli", "status", "--json", "--scope", self.scope]
        return dict(json.loads(self.lab.run(host, *command, *self._entrances())))

    def refusal(self, host: Host, arguments: Sequence[str]) -> str:
        """What a command says that ends with an error."""
        place = self._place("refused", host)
        command = [sys.executable, "-m", "cli", *self._complete(list(arguments), place, None)]
        process = self.lab.spawn(
            host, command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=self._environment()
        )
        said, _ = process.communicate(timeout=START_TIMEOUT_S)
        assert process.returncode, f"it was not refused: {said}"
        return str(said)

    def _start(self, host: Host, arguments: list[str], place: Path, key: Path | None = None) -> Running:
        complete, log = self._complete(arguments, place, key), place / "log"
        return Running(host, self._spawn(host, complete, log), complete, log)

    def _complete(self, arguments: list[str], place: Path, key: Path | None) -> list[str]:
        arguments = [*arguments, "--scope", self.scope, *self._entrances(), "--events", "json"]
        if arguments[0] != "serve":
            arguments += ["--state-dir", str(place), "--key", str(key or place / "key")]
        return arguments

    def _entrances(self) -> list[str]:
        return [part for bootstrap in self.bootstraps for part in ("--bootstrap", bootstrap)]

    def _spawn(self, host: Host, arguments: list[str], log: Path) -> Process:
        with log.open("a") as stderr:
            popen = self.lab.spawn(
                host,
                [sys.executable, "-m", "cli", *arguments],
                stdout=subprocess.PIPE,
                stderr=stderr,
                env=self._environment(),
            )
        process = Process(popen)
        self.lab.closers.append(process.close)
        return process

    def _environment(self) -> dict[str, str]:
        return ENVIRONMENT | {"DIFFUSE_STATE_DIR": str(self.folder)}

    def _place(self, role: str, host: Host) -> Path:
        place = self.folder / f"{role}-{host.name}-{len(list(self.folder.iterdir()))}"
        place.mkdir(mode=0o700)
        return place
