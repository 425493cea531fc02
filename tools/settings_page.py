"""Writes docs/settings.md from the flags: `python -m tools.settings_page > docs/settings.md` (`make settings`)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from enum import Enum
from itertools import groupby
from pathlib import Path
from typing import Any

from typer.main import get_command

from cli.main import app
from cli.setting_names import flag_of, variable_of
from cli.setting_rows import by_panel
from cli.settings_command import SERVICES, known_settings

HEAD = Path(__file__).with_name("settings_head.md")


def page() -> str:
    """The whole page."""
    known = known_settings(get_command(app).make_context("diffuse", ["serve"]))
    head = HEAD.read_text(encoding="utf-8")
    return head + "".join(
        f"\n## diffuse {command}\n{''.join(_tables(known[command]))}" for command in SERVICES
    )


def _tables(options: Mapping[str, Any]) -> Iterator[str]:
    for panel, members in groupby(by_panel(options.values()), key=lambda option: option.rich_help_panel):
        yield f"\n### {panel}\n\n| flag | variable | default | |\n|---|---|---|---|\n"
        for option in members:
            names = f"| `{flag_of(option.name)}` | `{variable_of(option.name)}`"
            yield f"{names} | {_default(option)} | {_text(option)} |\n"


def _default(option: Any) -> str:
    default = option.default.value if isinstance(option.default, Enum) else option.default
    if default in (None, (), False):
        return ""
    return f"`{default}`"


def _text(option: Any) -> str:
    choices = option.type_descriptor.choices
    among = " One of " + ", ".join(f"`{choice.value}`" for choice in choices) + "." if choices else ""
    return f"{option.help}{among}".replace("|", "\\|")


if __name__ == "__main__":
    print(page(), end="")
