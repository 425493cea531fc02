"""Diffuse in the lab: its processes on the lab's machines, as users start them."""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.lab.lab import Host, Lab

START_TIMEOUT_S = 90.0


@dataclass
class Running:
    """One process on one machine."""

    host: Host
    process: subprocess.Popen[str]
    arguments: list[str]
    ready: dict[str, Any] = field(default_factory=dict)

    def wait_event(self, name: str, timeout_s: float = START_TIMEOUT_S) -> dict[str, Any]:
        """Read what it says until it says this."""
        limit = time.monotonic() + timeout_s
        assert self.process.stdout is not None
        while (left_s := limit - time.monotonic()) > 0:
            if not select.select([self.process.stdout], [], [], left_s)[0]:
                break
            line = self.process.stdout.readline()
            if not line:
                raise AssertionError(f"{self.arguments[0]} on {self.host.name} ended before {name!r}")
            event = json.loads(line)
            if event["event"] == name:
                return dict(event)
        raise AssertionError(
            f"{self.arguments[0]} on {self.host.name} did not say {name!r} in {timeout_s:g} s"
        )


@dataclass
class LabSwarm:
    """Starts members of one swarm; they end with the lab."""

    lab: Lab
    folder: Path
    scope: str = "public"
    bootstraps: list[str] = field(default_factory=list)

    def sentinel(self, host: Host, port: int = 9000, *flags: str) -> Running:
        """A sentinel; later members bootstrap from it."""
        arguments = [
            "sentinel",
            "--listen",
            f"{host.ip}:{port}",
            "--public-addr",
            f"{host.ip}:{port}",
            *flags,
        ]
        running = self._start(host, arguments)
        self.bootstraps.append(str(running.ready["address"]))
        return running

    def node(self, host: Host, model: Path, layers: str, *flags: str, port: int = 9100) -> Running:
        """A node that says nothing of where it is: it has to find out."""
        arguments = [
            "host",
            "--model",
            str(model),
            "--layers",
            layers,
            "--dtype",
            "float32",
            "--threads",
            "1",
        ]
        return self._start(host, [*arguments, "--listen", f"0.0.0.0:{port}", *flags])

    def gateway(self, host: Host, model: Path, *flags: str, port: int = 8000) -> Running:
        """A gateway on a machine of its own."""
        arguments = [
            "serve",
            "--model",
            str(model),
            "--threads",
            "1",
            "--listen",
            f"127.0.0.1:{port}",
            *flags,
        ]
        return self._start(host, arguments)

    def again(self, running: Running) -> Running:
        """The same member once more, with the same key."""
        return self._start(running.host, running.arguments, is_complete=True)

    def ask(self, gateway: Running, *prompts: str, num_tokens: int = 8, **wanted: Any) -> dict[str, Any]:
        """Ask from the gateway's own machine and wait for the answers."""
        process = self.asking(gateway, *prompts, num_tokens=num_tokens, **wanted)
        return self.answers(process, wanted.get("for_s", 0.0) + 120)

    def asking(
        self, gateway: Running, *prompts: str, num_tokens: int = 8, **wanted: Any
    ) -> subprocess.Popen[str]:
        """Begin to ask."""
        wanted |= {"prompts": prompts, "num_tokens": num_tokens}
        command = [sys.executable, "-m", "tests.lab.ask", gateway.ready["url"], json.dumps(wanted)]
        return self.lab.spawn(gateway.host, command, stdout=subprocess.PIPE)

    def answers(self, process: subprocess.Popen[str], timeout_s: float = 120.0) -> dict[str, Any]:
        """What came of `asking`."""
        out, _ = process.communicate(timeout=timeout_s)
        return dict(json.loads(out))

    def status(self, host: Host) -> dict[str, Any]:
        """What `diffuse status` says on a machine."""
        flags = [part for bootstrap in self.bootstraps for part in ("--bootstrap", bootstrap)]
        command = [sys.executable, "-m", "cli", "status", "--json", "--scope", self.scope, *flags]
        return dict(json.loads(self.lab.run(host, *command)))

    def _start(self, host: Host, arguments: list[str], *, is_complete: bool = False) -> Running:
        if not is_complete:
            place = self.folder / f"{arguments[0]}-{host.name}-{len(list(self.folder.iterdir()))}"
            place.mkdir()
            arguments = [*arguments, "--scope", self.scope]
            arguments += [part for bootstrap in self.bootstraps for part in ("--bootstrap", bootstrap)]
            if arguments[0] != "serve":
                arguments += ["--state-dir", str(place), "--key", str(place / "key")]
        log = (self.folder / f"{host.name}-{arguments[0]}.log").open("a")
        with log:
            process = self.lab.spawn(
                host,
                [sys.executable, "-m", "cli", *arguments, "--events", "json"],
                stdout=subprocess.PIPE,
                stderr=log,
                env=os.environ | {"OMP_NUM_THREADS": "1", "DIFFUSE_STATE": str(self.folder)},
            )
        running = Running(host, process, arguments)
        running.ready = running.wait_event("ready")
        return running
