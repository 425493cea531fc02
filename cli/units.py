"""Times and sizes as people write them: `30s`, `5m`, `2GB`, `32MiB`; a plain number counts seconds or bytes.

Knows nothing of flags: the same texts stand in variables and files.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Final

import typer

_TIMES: Final = {"": 1.0, "ms": 1e-3, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "d": 24 * 3600.0}
_POWERS: Final = tuple(enumerate("kmgt", start=1))
_SIZES: Final = {"": 1.0, "b": 1.0} | {
    letter + ending: base**power
    for power, letter in _POWERS
    for ending, base in (("", 1e3), ("b", 1e3), ("i", 1024.0), ("ib", 1024.0))
}
_NUMBER_AND_UNIT: Final = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([a-z]*)\s*", re.ASCII | re.IGNORECASE)
_END: Final = float(1 << 62)  # beyond it nothing is meant


def duration(value: str | float) -> float:
    """Seconds. Raises `typer.BadParameter`."""
    return _read(value, _TIMES, "give a time like 30s, 5m or 1h")


def size(value: str | float) -> int:
    """Bytes: KB is 1000 of them, KiB is 1024. Raises `typer.BadParameter`."""
    return int(_read(value, _SIZES, "give a size like 500MB, 2GB or 32MiB"))


def _read(value: str | float, units: Mapping[str, float], advice: str) -> float:
    match = _NUMBER_AND_UNIT.fullmatch(str(value))
    factor = units.get(match[2].lower()) if match else None
    if match is None or factor is None or (number := float(match[1]) * factor) >= _END:
        raise typer.BadParameter(f"{value!r}: {advice}")
    return number


def write_duration(seconds: float) -> str:
    """The shortest text that `duration` reads as these seconds."""
    return _write(seconds, (("h", 3600), ("m", 60), ("s", 1))) or f"{seconds:g}s"


def write_size(size_bytes: int) -> str:
    """A text that `size` reads as so many bytes: in binary or decimal units, where that is even."""
    binary = [(f"{letter.upper()}iB", 1 << 10 * power) for power, letter in _POWERS]
    decimal = [(f"{letter.upper()}B", 1000**power) for power, letter in _POWERS]
    return _write(size_bytes, sorted(binary + decimal, key=lambda unit: -unit[1])) or str(size_bytes)


def _write(number: float, units: Sequence[tuple[str, int]]) -> str:
    fitting = (f"{int(number / factor)}{unit}" for unit, factor in units if number and number % factor == 0)
    return next(fitting, "")
