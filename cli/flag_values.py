"""How the values of flags are read: addresses, layers, pixels, times, prompts.

Knows the syntax of values and what a wrong one is told, not what commands do with them.
"""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TextIO

import typer

from cli import units

if TYPE_CHECKING:
    from routing.types import NodeAddress


def parse_local_layers(text: str) -> tuple[int, int]:
    """Read `K` or `K:J`; J is 0 unless given."""
    first, _, last = text.partition(":")
    last = last or "0"
    if not (first.isdecimal() and last.isdecimal()):
        raise typer.BadParameter(
            f"{text!r}: give the number of first and last layers as K or K:J (1:0)",
            param_hint="'--local-layers'",
        )
    return int(first), int(last)


def parse_host_port(text: str, flag: str) -> tuple[str, int]:
    """Read the `HOST:PORT` or `[v6]:PORT` that was given for a flag."""
    host, colon, port = text.rpartition(":")
    bare = host.removeprefix("[").removesuffix("]")
    if not (colon and bare and port.isdecimal() and int(port) < 1 << 16) or (":" in bare and bare == host):
        raise typer.BadParameter(
            f"{text!r}: give it as HOST:PORT (127.0.0.1:7000, [::1]:7000)", param_hint=f"'{flag}'"
        )
    return bare, int(port)


def parse_addresses(texts: Sequence[str] | None, flag: str) -> tuple[NodeAddress, ...]:
    """Read the `ID@HOST:PORT` that were given for a repeatable flag."""
    from routing.addresses import parse_address
    from routing.errors import SettingsError

    try:
        return tuple(parse_address(text) for text in texts or ())
    except SettingsError as error:
        whole = "copy the whole ID@HOST:PORT that the other side printed"
        raise typer.BadParameter(f"{error}; {whole}", param_hint=f"'{flag}'") from None


def parse_pixels(text: str | None) -> str | None:
    """Check the `512x512` that was given for --size."""
    width, _, height = (text or "1x1").lower().partition("x")
    if not (width.isdecimal() and height.isdecimal() and 0 < int(width) < 1e5 and 0 < int(height) < 1e5):
        raise typer.BadParameter(f"{text!r}: give a size in pixels like 512x512", param_hint="'--size'")
    return None if text is None else f"{int(width)}x{int(height)}"


def parse_duration(text: str, flag: str) -> float:
    """Read the `90s`, `30m`, `24h` or `7d` that was given for a flag, in seconds; a unit must be there."""
    try:
        if text.strip()[-1:] in "smhd" and text.strip()[:-1].isdecimal():
            return units.duration(text)
    except typer.BadParameter:
        pass
    raise typer.BadParameter(f"{text!r}: give a time like 30m, 24h or 7d", param_hint=f"'{flag}'")


def read_prompt(prompt: str) -> str:
    """The prompt itself; `-` reads standard input."""
    text = standard_input().read() if prompt == "-" else prompt
    if not text.strip():
        raise typer.BadParameter("the prompt is empty", param_hint="'--prompt'")
    return text


def standard_input() -> TextIO:
    """Standard input, empty where whoever started us has closed it."""
    return sys.stdin or io.StringIO()


def use_threads(num_threads: int | None) -> None:
    """Tell numeric libraries how many threads to open; has an effect only before torch is imported."""
    if num_threads is not None:
        from cli.children import thread_environment

        os.environ.update(thread_environment(num_threads))


def messages_of(content: str | list[dict[str, Any]], system: str | None) -> tuple[dict[str, Any], ...]:
    """A conversation that begins with this message."""
    opening: Sequence[dict[str, Any]] = [{"role": "system", "content": system}] if system else []
    return (*opening, {"role": "user", "content": content})
