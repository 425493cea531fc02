"""Which node of a local swarm holds which layers: a pure function of the model's depth and a few flags."""

from __future__ import annotations

from dataclasses import dataclass

import psutil

from cli.failures import CommandError


def threads_each(num_processes: int, num_cores: int | None = None) -> int:
    """Compute threads of each of so many processes, which share the cores of this machine: at least one.

    Threads that outnumber the cores wait for each other, and everybody waits longer.
    """
    cores = num_cores or psutil.cpu_count(logical=False) or 1
    return max(1, cores // num_processes)


@dataclass(frozen=True, slots=True)
class NodePlan:
    """One node to start: layers [start, end), and whether it serves an end of the model as well."""

    name: str
    start: int
    end: int
    hold_ends: bool = False

    @property
    def layers(self) -> str:
        """As the flag spells it."""
        return f"{self.start}:{self.end}"


def plan_nodes(
    num_layers: int, num_nodes: int, *, local_layers: tuple[int, int] = (0, 0), is_thin: bool = False
) -> list[NodePlan]:
    """Spread the layers that do not stay at home evenly, earlier nodes taking one more if need be.

    In the thin mode nothing stays at home, and the first and last node hold the ends. Raises `CommandError`.
    """
    first, last = (0, 0) if is_thin else local_layers
    remote = num_layers - first - last
    if remote < num_nodes:
        nodes = "one node" if num_nodes == 1 else f"{num_nodes} nodes"
        raise CommandError(
            f"{max(remote, 0)} of the model's {num_layers} layers are left for {nodes}: "
            "use fewer --nodes or smaller --local-layers"
        )
    share, rest = divmod(remote, num_nodes)
    plans, start = [], first
    for number in range(num_nodes):
        end = start + share + (number < rest)
        hold_ends = is_thin and number in (0, num_nodes - 1)
        plans.append(NodePlan(f"node {number + 1}", start, end, hold_ends))
        start = end
    return plans
