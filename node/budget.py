"""How much memory sessions may take for their keys and values, and who has taken what.

Only counts: a reservation comes before the cache grows, so that a full node refuses a step instead of swapping.
Knows nothing of tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from pathlib import Path

import psutil
import torch

from node.stats import NodeStats

# Free memory is shared with the sessions' messages and with other nodes of the same machine (three of them and a
# gateway are the default swarm of `diffuse up`), which all look at the same number.
FREE_MEMORY_SHARE = 0.2
CGROUP_LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")


class MemoryBudget:
    """Bytes reserved per owner, never more than `limit_bytes` in all."""

    def __init__(self, limit_bytes: int, stats: NodeStats) -> None:
        self.limit_bytes = limit_bytes
        self._stats = stats
        self.make_room: Callable[[int], bool] | None = None  # is asked to get so many bytes free
        self._reserved: dict[Hashable, int] = {}

    @property
    def free_bytes(self) -> int:
        """What may still be reserved."""
        return self.limit_bytes - self._stats.kv_bytes

    @property
    def available_bytes(self) -> int:
        """What sessions may still get: what is free, and what is only kept until somebody needs it."""
        return self.free_bytes + self._stats.prefix_bytes

    def reserve(self, owner: Hashable, size_bytes: int) -> bool:
        """Raise the owner's reservation to `size_bytes`; false, and no change, where that exceeds the limit.

        Others may have to make way for it.
        """
        more = size_bytes - self._reserved.get(owner, 0)
        if more <= 0:
            return True
        if more > self.free_bytes and not (self.make_room is not None and self.make_room(more)):
            return False
        self._reserved[owner] = size_bytes
        self._stats.kv_bytes += more
        return True

    def reserved(self, owner: Hashable) -> int:
        """What the owner has reserved."""
        return self._reserved.get(owner, 0)

    def release(self, owner: Hashable) -> int:
        """Give back all that the owner has reserved; returns how much that was."""
        size_bytes = self._reserved.pop(owner, 0)
        self._stats.kv_bytes -= size_bytes
        return size_bytes


def default_budget_bytes(device: str = "cpu") -> int:
    """A share of the memory that is free now."""
    return int(free_memory_bytes(device) * FREE_MEMORY_SHARE)


def free_memory_bytes(device: str = "cpu") -> int:
    """What is free now: of the machine or of the container, whichever is less; of the GPU where weights go there."""
    if device.startswith("cuda"):
        return int(torch.cuda.mem_get_info(torch.device(device))[0])
    available = psutil.virtual_memory().available
    limit = _container_limit_bytes()
    if limit is not None:
        available = min(available, limit - psutil.Process().memory_info().rss)
    return max(0, available)


def _container_limit_bytes() -> int | None:
    for path in CGROUP_LIMITS:
        try:
            text = Path(path).read_text(encoding="ascii").strip()
        except OSError:
            continue
        return int(text) if text.isdecimal() else None  # "max": no limit
    return None


def peak_memory_bytes() -> int:
    """The most memory that this process has had resident so far (VmHWM); what it has now where that is not told."""
    try:
        lines = Path("/proc/self/status").read_text(encoding="ascii", errors="replace").splitlines()
    except OSError:
        lines = []
    for line in lines:
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    return psutil.Process().memory_info().rss
