"""A file of settings with everything in it, as comments: made from the flags, so that it says what they say."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterator, Mapping
from enum import Enum
from typing import Any, Final

from cli.config_file import NAME, wanted_type
from cli.setting_rows import by_panel
from cli.settings_command import SERVICES

WIDTH: Final = 78
HEAD: Final = f"""\
# Settings of Diffuse. Put this into {NAME} in your settings folder or in /etc/diffuse, or name it with --config,
# and take away the # before what you change. What a flag or a DIFFUSE_ variable says counts more.
#
# A key up here counts for every command that knows it, one in a table for that command alone. Times are seconds or
# texts like "30s", "5m", "1h"; sizes are bytes or texts like "2GB", "32MiB". Relative paths count from the folder
# that a command is started in. Nobody but its owner may be able to write this file; chmod 600 it if keys are in it.
"""
_PLACEHOLDERS: Final = {"N": 1, "TIME": "30s", "SIZE": "2GB"}


def example(known: Mapping[str, Mapping[str, Any]]) -> str:
    """The text of the file, for the services among these commands."""
    lines = [HEAD]
    for command in SERVICES:
        lines += [f"[{command}]", *_table(known[command]), ""]
    return "\n".join(lines).rstrip() + "\n"


def _table(options: Mapping[str, Any]) -> Iterator[str]:
    panel = ""
    for option in by_panel(options.values()):
        if option.rich_help_panel != panel:
            panel = option.rich_help_panel
            yield from ("", f"# --- {panel}")
        yield ""
        yield from textwrap.wrap(_explained(option), WIDTH, initial_indent="# ", subsequent_indent="# ")
        yield f"#{option.name} = {_toml(_value(option))}"


def _explained(option: Any) -> str:
    choices = option.type_descriptor.choices
    among = " One of " + ", ".join(str(choice.value) for choice in choices) + "." if choices else ""
    return f"{option.help}{among}"


def _value(option: Any) -> Any:
    """The default, or where there is none something of the right form."""
    default = option.default
    if default not in (None, ()):
        return default.value if isinstance(default, Enum) else default
    placeholder: Any = _PLACEHOLDERS.get(option.metavar, option.metavar or "TEXT")
    if option.type_descriptor.choices:
        placeholder = option.type_descriptor.choices[0].value
    return [placeholder] if wanted_type(option) == "an array of texts" else placeholder


def _toml(value: Any) -> str:
    """Of a plain value; JSON writes texts, numbers, arrays and true as TOML does."""
    return json.dumps(value, ensure_ascii=False)
