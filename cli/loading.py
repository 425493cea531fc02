"""How far a local swarm is with loading: bars on a terminal, lines elsewhere. Always on standard error."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from cli import show

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID


class LoadingView:
    """Follows the events of several processes; a context manager that owns the bars."""

    def __init__(self) -> None:
        self._console = show.console(stderr=True)
        self._bars: Progress | None = None
        self._tasks: dict[str, TaskID] = {}
        if self._console.is_terminal:
            from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

            self._bars = Progress(
                TextColumn("{task.fields[who]:16}"),
                TextColumn("{task.description:24}"),
                BarColumn(24),
                TextColumn("{task.fields[amount]:>20}"),
                TimeElapsedColumn(),
                console=self._console,
            )

    def __enter__(self) -> Self:
        if self._bars:
            self._bars.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bars:
            self._bars.stop()

    def listener(self, who: str) -> Callable[[Mapping[str, Any]], None]:
        """A function that takes this process's events."""
        self.say(who, "starting")
        return lambda event: self._take(who, event)

    def say(self, who: str, what: str) -> None:
        """Show what a process is doing."""
        if self._bars is None:
            show.note(f"{who}: {what}")
        elif who in self._tasks:
            self._bars.update(self._tasks[who], description=what)
        else:
            self._tasks[who] = self._bars.add_task(what, who=who, amount="", total=None)

    def done(self, who: str, what: str) -> None:
        """Show that a process is ready."""
        self.say(who, what)
        if self._bars is not None:
            task = self._bars.tasks[self._tasks[who]]
            total = task.total or 1
            self._bars.update(task.id, total=total, completed=total)
            self._bars.stop_task(task.id)

    def _take(self, who: str, event: Mapping[str, Any]) -> None:
        if self._bars is None or event.get("event") != "progress":
            return
        done, total = int(event["done_bytes"]), int(event["total_bytes"])
        self._bars.update(
            self._tasks[who],
            description=str(event["stage"]),
            completed=done,
            total=total or None,
            amount=f"{show.size(done)} of {show.size(total)}" if total else show.size(done),
        )
