"""How numbers, answers and tables look on the terminal, the same in every command.

Knows nothing of gateways or nodes: it gets values and prints them.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import typer

from cli.answer import Timings

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

FILE_WIDTH: Final = 240  # columns of a table that goes into a pipe or file, where nothing wraps it
# C0 and C1 controls and DEL, but for newline and tab: an answer must not move the cursor or name windows.
_CONTROLS: Final = dict.fromkeys([*range(9), *range(11, 32), *range(127, 160)])


def printable(text: str) -> str:
    """Text without the characters a terminal would obey."""
    return text.translate(_CONTROLS)


def write_answer(text: str) -> None:
    """Print a piece of an answer at once; into a pipe or file unchanged, on a terminal without controls."""
    sys.stdout.write(printable(text) if sys.stdout.isatty() else text)
    sys.stdout.flush()


@contextmanager
def whole_lines() -> Iterator[Callable[[str], None]]:
    """How to print the pieces of an answer; what is said after it, a failure too, begins on a new line."""
    is_begun = False

    def write(text: str) -> None:
        nonlocal is_begun
        write_answer(text)
        is_begun = True

    try:
        yield write
    except BaseException:
        if is_begun:
            with suppress(OSError):  # nobody is there to read the end
                write_answer("\n")
        raise
    write_answer("\n")


def print_json(value: Mapping[str, Any]) -> None:
    """Print one object on one line of standard output."""
    typer.echo(json.dumps(value, ensure_ascii=False))


def out(text: str) -> None:
    """Print a line on standard output."""
    typer.echo(text)


def own_name() -> str:
    """How to call this program again: `diffuse`, or the path that it was called by where that is not found."""
    called = Path(sys.argv[0])
    return str(called) if called.name == "diffuse" and shutil.which("diffuse") is None else "diffuse"


def note(text: str) -> None:
    """Say something beside the answer: on standard error, so that piping the answer keeps it clean.

    Where log lines are JSON, it is one of them.
    """
    logs = sys.modules.get("cli.logs")  # imported by whoever configured them
    if logs is None or not logs.told_as_json(text):
        typer.echo(text, err=True)


def silence_stdout() -> None:
    """Stop writing to a pipe that nobody reads, so that the interpreter's last flush raises nothing."""
    devnull = os.open(os.devnull, os.O_WRONLY)
    os.dup2(devnull, sys.stdout.fileno())


def console(*, stderr: bool = False) -> Console:
    """A rich console; imported late, since most commands only echo."""
    from rich.console import Console

    plain = Console(stderr=stderr, highlight=False, soft_wrap=True)
    if not plain.is_terminal:
        plain.width = FILE_WIDTH
    return plain


def table(*columns: str) -> Table:
    """A plain table with the house's look: no box, two blanks between columns."""
    from rich.table import Table

    grid = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for column in columns:
        grid.add_column(column, no_wrap=True)
    return grid


def seconds(value: float) -> str:
    """A duration with three figures: `830 ms`, `1.23 s`, `12.3 s`, `123 s`."""
    if value < 1:
        return f"{value * 1000:.0f} ms"
    return f"{value:.3g} s" if value < 1000 else f"{value:.0f} s"


def milliseconds(value_s: float) -> str:
    """A short time per token: `0.04 ms`, `1.2 ms`, `23 ms`."""
    ms = value_s * 1000
    return f"{ms:.2f} ms" if ms < 1 else f"{ms:.1f} ms" if ms < 10 else f"{ms:.0f} ms"


def size(size_bytes: float) -> str:
    """Bytes in decimal units, as disks and networks count them."""
    for unit in ("B", "kB", "MB"):
        if size_bytes < 1000:
            return f"{size_bytes:.0f} {unit}" if unit == "B" else f"{size_bytes:.1f} {unit}"
        size_bytes /= 1000
    return f"{size_bytes:.2f} GB"


def host_port(host: str, port: int) -> str:
    """A place as the flags spell it, IPv6 in brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def ranges(spans: Iterable[tuple[int, int]]) -> str:
    """Half-open layer ranges as the flags spell them: `0:10, 20:30`."""
    return ", ".join(f"{start}:{end}" for start, end in spans)


def timings_line(timings: Timings) -> str:
    """One line: total, prefill, per token, then where a token's time went."""
    parts = [f"total {seconds(timings.total_s)}", f"prefill {seconds(timings.prefill_s)}"]
    if timings.per_token_s is not None:
        parts.append(
            f"per token {milliseconds(timings.per_token_s)} ({1 / timings.per_token_s:.1f} tokens/s)"
        )
    parts += [f"{name} {seconds(value)}" for name, value in timings.shares()]
    parts.append(f"{timings.tokens} token{'' if timings.tokens == 1 else 's'}")
    return " | ".join(parts)
