"""An internet in network namespaces: a router, public hosts, and hosts behind NAT boxes, each on a delayed link.

Every link to the router delays 12.5 ms one way unless told otherwise, so two hosts are 50 ms of round trip apart.
Needs root, iproute2, nftables, conntrack and TUN devices; `why_not()` says what is missing.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from tests.lab.tun_link import LinkShape

HALF_HOP = LinkShape(delay_s=0.0125)
ROOT = Path(__file__).resolve().parents[2]
TOOLS = ("ip", "nft", "conntrack", "sysctl")
# What a lab does to its namespaces: containers often allow some of it.
TRIALS = (
    "sysctl -qw net.ipv4.ip_forward=1",
    "ip tuntap add dev try0 mode tun",
    "ip link add name try1 type bridge",
    "ip link add try2 type veth peer name try3",
    "nft add table ip try",
    "nft add chain ip try out { type nat hook postrouting priority 100; }",
    "nft add rule ip try out masquerade",
    "nft add rule ip try out ct state new accept",
    "conntrack -F",
)
NAT_RULES = """
table ip nat {{
  chain out {{
    type nat hook postrouting priority 100;
    oifname "wan0" masquerade;
  }}
}}
table ip flt {{
  chain fwd0 {{
    type filter hook forward priority 0;
    iifname "wan0" ct state new drop;
  }}
}}
"""


def why_not() -> str | None:
    """What keeps the lab from running here; None when nothing does."""
    if os.geteuid() != 0:
        return "not root"
    missing = [tool for tool in TOOLS if shutil.which(tool) is None]
    if missing:
        return f"{', '.join(missing)} not installed"
    if not Path("/dev/net/tun").exists():
        return "no TUN device"
    namespace = f"dl{os.getpid()}try"
    try:
        for command in (["ip", "netns", "add", namespace], *(_inside(namespace, it) for it in TRIALS)):
            tried = subprocess.run(command, capture_output=True, text=True)
            if tried.returncode:
                return f"not allowed here: {' '.join(command)}: {tried.stderr.strip()}"
    finally:
        subprocess.run(["ip", "netns", "del", namespace], capture_output=True)
    return None


def _inside(namespace: str, command: str) -> list[str]:
    return ["ip", "netns", "exec", namespace, *command.split()]


@dataclass
class Host:
    """One machine of the lab."""

    name: str
    namespace: str
    ip: str


@dataclass
class Lab:
    """The namespaces and processes of one or more tests; everything goes when it is closed.

    `closers` are called when every process has ended.
    """

    prefix: str = field(default_factory=lambda: f"dl{os.getpid()}")
    closers: list[Callable[[], object]] = field(default_factory=list)
    _namespaces: list[str] = field(default_factory=list)
    _processes: list[subprocess.Popen[Any]] = field(default_factory=list)
    _num_links: int = 0

    def __post_init__(self) -> None:
        self.router = self._namespace("r")
        self._sysctl(self.router, "net.ipv4.ip_forward=1")

    def public_host(self, name: str, ip: str, shape: LinkShape = HALF_HOP) -> Host:
        """A machine with an address of its own."""
        namespace = self._namespace(name)
        self._link(namespace, ip, shape)
        return Host(name, namespace, ip)

    def nat(self, name: str, public_ip: str, shape: LinkShape = HALF_HOP) -> Host:
        """A NAT box that lets nothing new in; its inside is 192.168.1.0/24, as every other's."""
        box = self.public_host(name, public_ip, shape)
        self._sysctl(box.namespace, "net.ipv4.ip_forward=1")
        subprocess.run(
            ["ip", "netns", "exec", box.namespace, "nft", "-f", "-"],
            input=NAT_RULES.format(),
            text=True,
            check=True,
        )
        self._ip("link", "add", "name", "lan", "type", "bridge", namespace=box.namespace)
        self._ip("addr", "add", "192.168.1.1/24", "dev", "lan", namespace=box.namespace)
        self._ip("link", "set", "lan", "up", namespace=box.namespace)
        return box

    def behind(self, box: Host, name: str, ip: str) -> Host:
        """A machine inside a NAT box's network."""
        namespace = self._namespace(name)
        port = f"p{self._num_links}"
        self._num_links += 1
        self._ip(
            "link",
            "add",
            port,
            "netns",
            box.namespace,
            "type",
            "veth",
            "peer",
            "name",
            "eth0",
            "netns",
            namespace,
        )
        self._ip("link", "set", port, "master", "lan", "up", namespace=box.namespace)
        self._ip("addr", "add", f"{ip}/24", "dev", "eth0", namespace=namespace)
        self._ip("link", "set", "eth0", "up", namespace=namespace)
        self._ip("route", "add", "default", "via", "192.168.1.1", namespace=namespace)
        return Host(name, namespace, ip)

    def spawn(self, host: Host, arguments: Sequence[str], **options: Any) -> subprocess.Popen[str]:
        """Start a program on a machine; it ends with the lab."""
        command = ["ip", "netns", "exec", host.namespace, *arguments]
        process = subprocess.Popen(command, text=True, cwd=ROOT, **options)
        self._processes.append(process)
        return process

    def run(self, host: Host, *arguments: str, timeout_s: float = 60.0) -> str:
        """Run a program on a machine to its end; returns what it printed."""
        command = ["ip", "netns", "exec", host.namespace, *arguments]
        return subprocess.run(
            command, text=True, cwd=ROOT, capture_output=True, check=True, timeout=timeout_s
        ).stdout

    def cut(self, box: Host) -> None:
        """Drop everything that a NAT box should pass on, silently."""
        rule = "add chain ip flt blk { type filter hook forward priority -5; policy drop; }"
        self.run(box, "nft", rule)

    def mend(self, box: Host) -> None:
        """Undo `cut`."""
        self.run(box, "nft", "delete chain ip flt blk")

    def silence(self, host: Host) -> None:
        """Drop what goes to and comes from a public machine, on its way: its uplink is gone, and nobody is told."""
        chain = f"table ip cut_{host.name}"
        rules = f"ip saddr {host.ip} drop\nip daddr {host.ip} drop"
        hook = "type filter hook forward priority -5;"
        subprocess.run(
            ["ip", "netns", "exec", self.router, "nft", "-f", "-"],
            input=f"{chain} {{\nchain fwd0 {{\n{hook}\n{rules}\n}}\n}}\n",
            text=True,
            check=True,
        )

    def hear(self, host: Host) -> None:
        """Undo `silence`."""
        subprocess.run(
            ["ip", "netns", "exec", self.router, "nft", f"delete table ip cut_{host.name}"], check=True
        )

    def forward(self, box: Host, inside: Host, port: int) -> None:
        """Let a NAT box pass a port on to a machine behind it, as people set up by hand."""
        for rule in (
            "add chain ip nat pre { type nat hook prerouting priority -100; }",
            f'add rule ip nat pre iifname "wan0" tcp dport {port} dnat to {inside.ip}:{port}',
            f'insert rule ip flt fwd0 iifname "wan0" tcp dport {port} accept',
        ):
            self.run(box, "nft", rule)

    def flush(self, box: Host) -> None:
        """Make a NAT box forget every connection."""
        self.run(box, "conntrack", "-F")

    def close(self) -> None:
        """End every process and take the namespaces apart."""
        for process in self._processes:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
        for process in self._processes:
            process.wait(10)
        for closer in self.closers:
            closer()
        for process in self._processes:
            for pipe in (process.stdin, process.stdout, process.stderr):
                if pipe is not None:
                    pipe.close()
        for namespace in reversed(self._namespaces):
            subprocess.run(["ip", "netns", "del", namespace], capture_output=True)

    def _link(self, namespace: str, ip: str, shape: LinkShape) -> None:
        port = f"t{self._num_links}"
        self._num_links += 1
        wanted = {
            "ends": [[namespace, "wan0"], [self.router, port]],
            "shape": asdict(shape),
            "seed": self._num_links,
        }
        program = subprocess.Popen(
            [sys.executable, "-m", "tests.lab.tun_link", json.dumps(wanted)],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._processes.append(program)
        assert program.stdout is not None
        assert program.stdout.readline() == "up\n", "the delayed link did not come up"
        self._ip("addr", "add", f"{ip}/32", "dev", "wan0", namespace=namespace)
        self._ip("link", "set", "wan0", "up", namespace=namespace)
        self._ip("route", "add", "default", "dev", "wan0", namespace=namespace)
        self._ip("link", "set", port, "up", namespace=self.router)
        self._ip("route", "add", f"{ip}/32", "dev", port, namespace=self.router)

    def _namespace(self, name: str) -> str:
        namespace = f"{self.prefix}{name}"
        self._ip("netns", "add", namespace)
        self._namespaces.append(namespace)
        self._ip("link", "set", "lo", "up", namespace=namespace)
        for scope in ("all", "default"):
            self._sysctl(namespace, f"net.ipv4.conf.{scope}.rp_filter=0")
        return namespace

    def _sysctl(self, namespace: str, setting: str) -> None:
        subprocess.run(
            ["ip", "netns", "exec", namespace, "sysctl", "-qw", setting], check=True, capture_output=True
        )

    def _ip(self, *arguments: str, namespace: str | None = None) -> None:
        where = ["-n", namespace] if namespace else []
        done = subprocess.run(["ip", *where, *arguments], capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(f"ip {' '.join(arguments)}: {done.stderr.strip()}")


@contextlib.contextmanager
def open_lab() -> Iterator[Lab]:
    """A lab, taken apart at the end."""
    lab = Lab()
    try:
        yield lab
    finally:
        lab.close()
