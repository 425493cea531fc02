"""What each setting of a command is, as it is shown: its value, where that was said, and never a secret.

Knows options and contexts of click, not what any setting means.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

from cli import panels, units
from cli.setting_names import SECRETS, flag_of, variable_of
from cli.settings_command import config_file, setting_options, source_of

MASK: Final = "***"


@dataclass(frozen=True, slots=True)
class SettingRow:
    """One setting; `value` is plain JSON, masked where it is secret."""

    name: str
    panel: str
    value: Any
    text: str  # the value as people write it; "" where there is none
    source: str  # flag, variable, file or default
    place: str  # the flag, the variable, or file and line; "" for a default


def rows_of(ctx: Any) -> list[SettingRow]:
    """Every setting of a command that was parsed, in the order of the panels."""
    return [_row(ctx, option) for option in by_panel(setting_options(ctx.command).values())]


def by_panel(options: Iterable[Any]) -> list[Any]:
    """Options in the order of the panels, and within one in that of the command."""
    return sorted(options, key=lambda option: panels.PANELS.index(option.rich_help_panel))


def _row(ctx: Any, option: Any) -> SettingRow:
    name = option.name
    value = _masked(name, _plain(ctx.params.get(name)))
    source = source_of(ctx, name)
    place = {"flag": flag_of(name), "variable": variable_of(name), "file": config_file(ctx).where(name)}
    return SettingRow(
        name, option.rich_help_panel, value, written(option, value), source, place.get(source, "")
    )


def _plain(value: Any) -> Any:
    match value:
        case Enum():
            return value.value
        case Path():
            return str(value)
        case list() | tuple():
            return [_plain(item) for item in value] or None
    return value


def _masked(name: str, value: Any) -> Any:
    if value is None:
        return None
    if isinstance(value, list):
        return [_masked(name, item) for item in value]
    if name in SECRETS:
        return MASK
    return masked_url(value) if isinstance(value, str) and "://" in value else value


def masked_url(url: str) -> str:
    """A URL without what lets one in: user, password, and whatever stands behind the `?`."""
    try:
        parts = urlsplit(url)
    except ValueError:
        return MASK
    place = parts.netloc.rpartition("@")[2]
    netloc = f"{MASK}@{place}" if "@" in parts.netloc else place
    query = f"?{MASK}" if parts.query or parts.fragment else ""
    return f"{parts.scheme}://{netloc}{parts.path}{query}"


def written(option: Any, value: Any) -> str:
    """A value as it is written in a variable."""
    match value:
        case None:
            return ""
        case bool():
            return "true" if value else "false"
        case list():
            return ", ".join(map(str, value))
        case int() | float() if option.metavar == "TIME":
            return units.write_duration(value)
        case int() if option.metavar == "SIZE":
            return units.write_size(value)
    return str(value)
