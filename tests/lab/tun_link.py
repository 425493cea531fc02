"""One delayed link between two network namespaces: a TUN device in each, packets kept in a queue until they are due.

The kernel here has no netem, so this stands in for it: `python -m tests.lab.tun_link '{"ends": [[NS, DEV], ...], …}'`.
Order is kept under jitter, as in the queues of a real path. Prints "up" when both devices exist. Linux, root.
"""

from __future__ import annotations

import ctypes
import fcntl
import json
import os
import random
import select
import struct
import sys
import time
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path

_CLONE_NEWNET = 0x40000000
_TUNSETIFF = 0x400454CA
_IFF_TUN, _IFF_NO_PI = 0x0001, 0x1000
_MAX_PACKET = 65536
_MAX_QUEUED = 4096  # packets; 6 MB of full ones: a real router's deep buffer


@dataclass
class LinkShape:
    """What the link does to packets, the same both ways."""

    delay_s: float = 0.0  # one way
    jitter_s: float = 0.0  # up to so much more, drawn anew every `jitter_every_s`
    jitter_every_s: float = 0.05
    loss: float = 0.0  # of each packet
    rate_bps: float = 0.0  # bytes per second each way; 0: as fast as it goes


@dataclass
class _Direction:
    source: int
    target: int
    shape: LinkShape
    rng: random.Random
    queue: deque[tuple[float, bytes]] = field(default_factory=deque)
    last_due: float = 0.0
    free_at: float = 0.0
    jitter_s: float = 0.0
    jitter_until: float = 0.0

    def take(self, now: float) -> None:
        """Read what there is, and say when each packet is due."""
        while True:
            try:
                packet = os.read(self.source, _MAX_PACKET)
            except BlockingIOError:
                return
            if self.rng.random() < self.shape.loss or len(self.queue) >= _MAX_QUEUED:
                continue
            if now >= self.jitter_until:
                self.jitter_s = self.rng.uniform(0, self.shape.jitter_s)
                self.jitter_until = now + self.shape.jitter_every_s
            if self.shape.rate_bps:
                self.free_at = max(self.free_at, now) + len(packet) / self.shape.rate_bps
            due = max(now, self.free_at) + self.shape.delay_s + self.jitter_s
            self.last_due = max(self.last_due, due)
            self.queue.append((self.last_due, packet))

    def give(self, now: float) -> None:
        """Write what is due."""
        while self.queue and self.queue[0][0] <= now:
            try:
                os.write(self.target, self.queue.popleft()[1])
            except BlockingIOError:
                return  # the kernel's queue is full: lost, as anywhere
            except OSError:
                return  # the device is down: the namespace is being taken apart


def main() -> None:
    """Carry packets until killed."""
    wanted = json.loads(sys.argv[1])
    shape = LinkShape(**wanted.get("shape", {}))
    devices = [_open_tun(namespace, name) for namespace, name in wanted["ends"]]
    rng = random.Random(wanted.get("seed", 0))
    there = _Direction(devices[0], devices[1], shape, rng)
    back = _Direction(devices[1], devices[0], shape, rng)
    print("up", flush=True)
    while True:
        now = time.monotonic()
        dues = [direction.queue[0][0] for direction in (there, back) if direction.queue]
        wait_s = max(0.0, min(dues) - now) if dues else 1.0
        ready, _, _ = select.select(devices, [], [], wait_s)
        now = time.monotonic()
        for direction in (there, back):
            if direction.source in ready:
                direction.take(now)
            direction.give(now)


def _open_tun(namespace: str, name: str) -> int:
    """A non-blocking TUN device inside a namespace; this process goes back to where it was."""
    libc = ctypes.CDLL(None, use_errno=True)
    with Path("/proc/self/ns/net").open("rb") as home, Path(f"/run/netns/{namespace}").open("rb") as there:
        if libc.setns(there.fileno(), _CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), f"cannot enter {namespace}")
        try:
            device = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
            request = struct.pack("16sH22x", name.encode(), _IFF_TUN | _IFF_NO_PI)
            fcntl.ioctl(device, _TUNSETIFF, request)
        finally:
            libc.setns(home.fileno(), _CLONE_NEWNET)
    return device


if __name__ == "__main__":
    main()
