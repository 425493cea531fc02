"""Services of compose.yaml without a container engine: network and mount namespaces, the image's user and environment.

What a container would be given is given here: a root that cannot be written, /tmp and volumes, names for the others, no
capabilities. The image itself is this checkout and its environment; the Dockerfile has a test of its own.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.deploy.files import ROOT, compose

USER = 10001  # of the Dockerfile
NET = "10.213.0"
HUB = "diffuse-compose-hub"
HEALTHY_S = 240.0
TOOLS = ("ip", "unshare", "nsenter", "setpriv")
AS_USER = [
    "setpriv",
    f"--reuid={USER}",
    f"--regid={USER}",
    "--clear-groups",
    "--no-new-privs",
    "--bounding-set=-all",
]


def why_not() -> str | None:
    """What keeps this from running here; None when nothing does."""
    if os.geteuid() != 0:
        return "not root"
    if missing := [tool for tool in TOOLS if shutil.which(tool) is None]:
        return f"{', '.join(missing)} not installed"
    tried = subprocess.run(
        ["unshare", "--net", "--mount", "true"], capture_output=True, text=True, check=False
    )
    return tried.stderr.strip() or None


def image_environment() -> dict[str, str]:
    """What the Dockerfile's ENV sets, with this checkout's programs in the path."""
    text = (ROOT / "Dockerfile").read_text().replace("\\\n", " ")
    block = re.search(r"^ENV (.*)$", text, re.M)
    assert block is not None
    told = dict(word.split("=", 1) for word in shlex.split(block[1]))
    places = [str(Path(sys.executable).parent), str(ROOT / "deploy" / "docker"), "/usr/bin", "/bin"]
    return told | {"PATH": ":".join(places), "OMP_NUM_THREADS": "1"}


@dataclass
class Container:
    """One service that runs."""

    name: str
    process: subprocess.Popen[bytes]
    health: list[str]
    environment: dict[str, str]
    log: Path

    def run(self, *words: str) -> subprocess.CompletedProcess[str]:
        """Run something inside, as `docker exec` does."""
        inside = ["nsenter", f"--target={self.process.pid}", "--net", "--mount", "--wd=/tmp", *AS_USER]
        return subprocess.run(
            [*inside, "env", "-i", *_pairs(self.environment), *words],
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )

    def is_healthy(self) -> bool:
        """What the health check of compose.yaml says, run inside."""
        return self.run(*self.health).returncode == 0

    def wait_healthy(self) -> None:
        limit = time.monotonic() + HEALTHY_S
        while not self.is_healthy():
            assert self.process.poll() is None, f"{self.name} ended: {self.log.read_text()[-2000:]}"
            assert time.monotonic() < limit, (
                f"{self.name}: {self.run(*self.health)} {self.log.read_text()[-2000:]}"
            )
            time.sleep(1)

    def stop(self, limit_s: float) -> int:
        """As `docker stop` does; the exit code."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(limit_s)


@dataclass
class Project:
    """A compose project: its network, volumes and containers, by `.env` values."""

    folder: Path
    env: dict[str, str]
    binds: dict[str, Path]  # more that every container sees, read-only: path inside -> folder
    running: dict[str, Container] = field(default_factory=dict)
    addresses: dict[str, str] = field(default_factory=dict)  # of services
    _names: dict[str, str] = field(
        default_factory=lambda: {"localhost": "127.0.0.1"}
    )  # and what else they are called

    def up(self, *names: str) -> list[Container]:
        """Start services, each with a network of its own, and wait until their checks say that they are well."""
        started = [self._start(name) for name in names]
        for container in started:
            container.wait_healthy()
        return started

    def ask(self, url: str, *, key: str = "", body: Any = None) -> tuple[int, str]:
        """Ask a service from beside it; status and body."""
        head = ["-H", f"Authorization: Bearer {key}"] if key else []
        data = ["-H", "Content-Type: application/json", "-d", json.dumps(body)] if body is not None else []
        done = subprocess.run(
            ["ip", "netns", "exec", HUB, "curl", "-s", "-m", "60", "-w", "\n%{http_code}", *head, *data, url],
            capture_output=True,
            text=True,
            check=True,
        )
        text, _, status = done.stdout.rpartition("\n")
        return int(status), text

    def _start(self, name: str) -> Container:
        service = compose(self.env)["services"][name]
        namespace = self._network(name, service)
        environment = image_environment() | {
            k: str(v) for k, v in service.get("environment", {}).items() if v
        }
        words = [*service["entrypoint"], *service["command"]]
        words = [
            word.replace("=/prometheus ", "=/var/lib/prometheus ") for word in words
        ]  # no folder of this machine
        script = "\n".join([*self._mounts(service), "cd /tmp", 'exec "$@"'])
        log = self.folder / f"{name}.log"
        with log.open("ab") as output:
            process = subprocess.Popen(
                [
                    *["ip", "netns", "exec", namespace, "unshare", "--mount", "--propagation=private"],
                    *["sh", "-euc", script, "sh", *AS_USER, "env", "-i", *_pairs(environment), *words],
                ],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
            )
        check = service["healthcheck"]["test"]
        assert check[0] == "CMD"
        container = Container(name, process, check[1:], environment, log)
        self.running[name] = container
        return container

    def _network(self, name: str, service: dict[str, Any]) -> str:
        namespace = f"diffuse-compose-{name}"
        if name in self.addresses:
            return namespace  # it was here before
        number = len(self.addresses) + 2
        address = self.addresses[name] = f"{NET}.{number}"
        networks = service["networks"]
        aliases = networks["network"]["aliases"] if isinstance(networks, dict) else []
        self._names |= dict.fromkeys((name, *aliases), address)
        _ip("netns", "add", namespace)
        _ip(
            "link",
            "add",
            f"dfc{number}",
            "netns",
            HUB,
            "type",
            "veth",
            "peer",
            "name",
            "eth0",
            "netns",
            namespace,
        )
        _ip("-n", HUB, "link", "set", f"dfc{number}", "master", "br0", "up")
        _ip("-n", namespace, "addr", "add", f"{address}/24", "dev", "eth0")
        for device in ("lo", "eth0"):
            _ip("-n", namespace, "link", "set", device, "up")
        _ip("-n", namespace, "route", "add", "default", "via", f"{NET}.1")
        lines = [f"{address} {name}" for name, address in self._names.items()]
        (self.folder / "hosts").write_text("\n".join(lines) + "\n")
        return namespace

    def _mounts(self, service: dict[str, Any]) -> Iterator[str]:
        """Shell lines that make the file system of a container out of this machine's."""
        yield from _opened_python(self.folder)
        yield f"mount --bind {self.folder / 'hosts'} /etc/hosts"
        yield "mount -t tmpfs -o mode=755 tmpfs /var/lib"
        yield "mount -t tmpfs -o mode=755 tmpfs /var/cache"
        volumes = [(self._volume(source), inside, mode) for source, inside, mode in _volumes(service)]
        for source, inside, mode in (
            *volumes,
            *((path, inside, "ro") for inside, path in self.binds.items()),
        ):
            inside = (
                inside.replace("/prometheus", "/var/lib/prometheus") if inside == "/prometheus" else inside
            )
            yield f"mkdir -p {inside}"
            yield f"mount --bind {source} {inside}"
            if mode == "ro":
                yield f"mount -o remount,ro,bind {inside}"
        yield "mount -t tmpfs -o mode=1777 tmpfs /tmp"
        yield "mount -o remount,ro,bind /"

    def _volume(self, source: str) -> Path:
        if source.startswith("./"):
            return ROOT / source
        path = self.folder / "volumes" / source
        if not path.exists():
            path.mkdir(parents=True, mode=0o700)
            os.chown(path, USER, USER)  # as the image's own folders, which an empty volume takes after
        return path


@contextmanager
def project(folder: Path, env: dict[str, str], binds: dict[str, Path]) -> Iterator[Project]:
    """A compose project; afterwards nothing of it is left."""
    _ip("netns", "add", HUB)
    made = Project(folder, env, binds)
    try:
        _ip("-n", HUB, "link", "add", "br0", "type", "bridge")
        _ip("-n", HUB, "addr", "add", f"{NET}.1/24", "dev", "br0")
        for device in ("lo", "br0"):
            _ip("-n", HUB, "link", "set", device, "up")
        yield made
    finally:
        for container in made.running.values():
            container.process.kill()
            container.process.wait(20)
        for name in {HUB.removeprefix("diffuse-compose-"), *made.addresses}:
            subprocess.run(
                ["ip", "netns", "del", f"diffuse-compose-{name}"], capture_output=True, check=False
            )


def _volumes(service: dict[str, Any]) -> Iterator[tuple[str, str, str]]:
    for volume in service.get("volumes", ()):
        source, inside, *mode = volume.split(":")
        yield source, inside, *(mode or ["rw"])


def _opened_python(folder: Path) -> Iterator[str]:
    """Let the user reach the Python that our environment is made of, where that lies in somebody's closed home."""
    home = Path(sys.base_prefix)
    closed = next((part for part in reversed(home.parents) if not part.stat().st_mode & 0o001), None)
    if closed is not None:
        kept = folder / "python"
        kept.mkdir(exist_ok=True)
        yield f"mount --bind {home} {kept}"
        yield f"mount -t tmpfs -o mode=755 tmpfs {closed}"
        yield f"mkdir -p {home}"
        yield f"mount --bind {kept} {home}"


def _pairs(environment: dict[str, str]) -> list[str]:
    return [f"{name}={value}" for name, value in environment.items()]


def _ip(*words: str) -> None:
    done = subprocess.run(["ip", *words], capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"ip {' '.join(words)}: {done.stderr}"
