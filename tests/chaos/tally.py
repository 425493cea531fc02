"""What a soak did and what came of it, and the table of it."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from rich.console import Console
from rich.table import Table


@dataclass
class Tally:
    """What happened."""

    faults: Counter[str] = field(default_factory=Counter)
    completed: int = 0
    left: int = 0
    failed: Counter[str] = field(default_factory=Counter)
    wrong: int = 0
    hung: int = 0
    leaked: int = 0
    leaked_bytes: int = 0
    replays: int = 0
    longest_s: float = 0.0

    @property
    def is_clean(self) -> bool:
        return not (self.wrong or self.hung or self.leaked or self.leaked_bytes)


def show(tally: Tally, took_s: float) -> None:
    """Print the table."""
    table = Table(title="soak")
    table.add_column("what")
    table.add_column("count", justify="right")
    for kind, count in sorted(tally.faults.items()):
        table.add_row(f"faults: {kind}", str(count))
    table.add_row("faults in all", str(sum(tally.faults.values())))
    table.add_row("requests completed", str(tally.completed))
    table.add_row("clients that left", str(tally.left))
    table.add_row("requests failed", str(sum(tally.failed.values())))
    for code, count in sorted(tally.failed.items()):
        table.add_row(f"requests failed: {code}", str(count))
    table.add_row("routes rebuilt", str(tally.replays))
    table.add_row("longest answer, s", f"{tally.longest_s:.1f}")
    table.add_row("took, s", f"{took_s:.0f}")
    table.add_row("wrong tokens", str(tally.wrong))
    table.add_row("hangs", str(tally.hung))
    table.add_row("leaked sessions", str(tally.leaked))
    table.add_row("leaked bytes of sessions", str(tally.leaked_bytes))
    Console().print(table)
