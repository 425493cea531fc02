"""An answer on a terminal while it grows, with a line of numbers below it.

Finished lines are printed once and scroll away as usual; only the line being written and the numbers are
redrawn.
"""

from __future__ import annotations

import time
from types import TracebackType
from typing import Self

from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from cli import show
from cli.answer import Timings

ECHO_WIDTH = (
    3  # room behind the numbers for the ^C that a terminal echoes: on another line it upsets redrawing
)
REFRESH_PER_S = 10  # calm to the eye, and cheap beside a token


class LiveAnswer:
    """Writes pieces of one answer; a context manager, so that an interrupt leaves a clean terminal."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._line = ""
        self._status = "waiting"
        self._first: Timings | None = None
        self._began = time.perf_counter()
        self._live = Live(
            console=console, get_renderable=self._draw, refresh_per_second=REFRESH_PER_S, transient=True
        )

    def __enter__(self) -> Self:
        self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._live.stop()
        if self._line:
            self._console.print(Text(self._line))

    def write(self, text: str) -> None:
        """Add text to the answer."""
        *finished, self._line = (self._line + show.printable(text)).split("\n")
        rows: list[Text] = list(Text(self._line).wrap(self._console, self._console.width))
        finished += [row.plain for row in rows[:-1]]
        if rows:
            self._line = rows[-1].plain
        if finished:
            self._console.print(Text("\n".join(finished)))

    def note(self, timings: Timings | None) -> None:
        """Show these numbers below the answer."""
        if timings is not None:
            self._first = self._first or timings  # the first token pays for the prompt
            self._status = status_line(timings, self._first)

    def _draw(self) -> Group:
        elapsed = show.seconds(time.perf_counter() - self._began)
        numbers = Text(f"{elapsed} | {self._status}", style="dim", no_wrap=True)
        numbers.truncate(max(1, self._console.width - ECHO_WIDTH), overflow="ellipsis")
        return Group(Text(self._line), numbers)


def status_line(timings: Timings, first: Timings) -> str:
    """What is worth watching while tokens come: the pace since `first`, and where a token's time goes."""
    parts = [f"{timings.tokens} token{'' if timings.tokens == 1 else 's'}"]
    if timings.per_token_s is not None:
        parts.append(f"{show.milliseconds(timings.per_token_s)} per token")
    parts += [f"{name} {show.milliseconds(value)}" for name, value in timings.shares_per_token(first)]
    return " | ".join(parts)
