"""Commands parsed as they would run, and values for each of their settings."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from typer.main import get_command

from cli.main import app
from cli.settings_command import SERVICES, setting_options

ROOT: Any = get_command(app)


def parse(command: str, *flags: str) -> Any:
    """The context of a command with these flags; nothing runs."""
    root = ROOT.make_context("diffuse", [command])
    return ROOT.commands[command].make_context(command, list(flags), parent=root)


def every_setting() -> list[tuple[str, str]]:
    """Command and name of each setting of the services."""
    return [(command, name) for command in SERVICES for name in setting_options(ROOT.commands[command])]


def option_of(command: str, name: str) -> Any:
    return setting_options(ROOT.commands[command])[name]


def write_config(path: Path, text: str, mode: int = 0o600) -> Path:
    path.write_text(text, encoding="utf-8")
    path.chmod(mode)
    return path


@dataclass(frozen=True)
class Spelled:
    """One value: as a flag, as a variable, in the file, and as the command gets it."""

    flags: Sequence[str]
    variable: str
    toml: str
    value: Any


def values_for(option: Any) -> tuple[Spelled, Spelled, Spelled]:
    """Values for the flag, the variable and the file: each differs from the next, and the last from the default."""
    flag = f"--{option.name.replace('_', '-')}"
    kind = option.type_descriptor
    if option.is_bool_flag:
        assert option.default is False
        yes = Spelled([flag], "true", "true", True)
        no = Spelled([flag.replace("--", "--no-", 1)], "false", "false", False)
        return yes, no, yes
    if kind.choices is not None:
        other, same = _two_choices(option)
        spelled = [_one(flag, choice.value, f'"{choice.value}"', choice) for choice in (other, same, other)]
    elif option.multiple:
        spelled = [
            Spelled(
                [flag, f"{one}1", flag, f"{one}2"],
                f"{one}1, {one}2",
                f'["{one}1", "{one}2"]',
                [f"{one}1", f"{one}2"],
            )
            for one in "abc"
        ]
    elif option.metavar == "TIME":
        spelled = [_one(flag, f"{n}m", f'"{n}m"', n * 60.0) for n in (11, 12, 13)]
    elif option.metavar == "SIZE":
        spelled = [_one(flag, f"{n}MiB", f'"{n}MiB"', n << 20) for n in (11, 12, 13)]
    elif kind.annotation is int:
        spelled = [_one(flag, str(n), str(n), n) for n in (11, 12, 13)]
    elif kind.annotation is float:
        spelled = [_one(flag, f"0.{n}", f"0.{n}", n / 100) for n in (11, 12, 13)]
    else:
        read = Path if kind.is_path else str
        spelled = [_one(flag, f"{one}1:1", f'"{one}1:1"', read(f"{one}1:1")) for one in "abc"]
    first, second, third = spelled
    return first, second, third


def _one(flag: str, text: str, toml: str, value: Any) -> Spelled:
    return Spelled([flag, text], text, toml, value)


def _two_choices(option: Any) -> tuple[Any, Any]:
    choices = option.type_descriptor.choices
    same = option.default if option.default is not None else choices[0]
    return next(choice for choice in choices if choice != same), same
