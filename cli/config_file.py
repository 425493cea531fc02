"""The file of settings: where it is looked for, what may stand in it, and what it says for one command.

Keys at its top count for every command that knows them, those in a table [serve], [host], [sentinel] or [up] for that
one. Knows of a command's parameters only their names and types. What is wrong is told with file, line and key.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import typer

from cli.failures import RefusedSettingsError
from cli.setting_names import SECRETS, did_you_mean

NAME: Final = "diffuse.toml"
SYSTEM_FILE: Final = Path("/etc/diffuse") / NAME
NO_FILE: Final = Path("none")  # says that no file counts
_HEADER: Final = re.compile(r"\s*\[+\s*\"?([^\]\"]*?)\"?\s*\]")
_KEY: Final = re.compile(r"\s*\"?([A-Za-z0-9_-]+)\"?\s*(?:\.\s*\"?([A-Za-z0-9_-]+)\"?\s*)?=")

Known = Mapping[str, Mapping[str, Any]]  # command -> parameter -> option


@dataclass(frozen=True, slots=True)
class ConfigFile:
    """What a file says: values for the command that runs, and the line of each."""

    path: Path
    values: dict[str, Any] = field(default_factory=dict)
    lines: dict[str, int] = field(default_factory=dict)
    warning: str = ""

    def where(self, name: str) -> str:
        """File and line of a key."""
        return f"{self.path}:{self.lines[name]}" if name in self.lines else str(self.path)


def search_path() -> tuple[Path, ...]:
    """Where a file is looked for that nobody named; the first counts."""
    return Path(typer.get_app_dir("diffuse")) / NAME, SYSTEM_FILE


def read_config(
    named: Path | None, command: str, known: Known, *, is_asking: bool = False
) -> ConfigFile | None:
    """Read the file that was named, or else the first that is there. Raises `RefusedSettingsError`.

    A command that only asks (`is_asking`) does without a file that it may not read.
    """
    if named == NO_FILE:
        return None
    for path in (named,) if named is not None else search_path():
        if named is None and not _is_seen(path):
            continue
        try:
            text, is_readable = _read(path)
        except FileNotFoundError as error:
            raise RefusedSettingsError(f"{path}: {error.strerror}: --config names no file") from error
        except PermissionError as error:
            if not is_asking or named is not None:
                raise RefusedSettingsError(f"{path}: {error.strerror}") from error
        except OSError as error:
            raise RefusedSettingsError(f"{path}: {error.strerror}: a file of settings is TOML") from error
        else:
            return _File(path, text, known).for_command(command, is_readable=is_readable)
    return None


def _is_seen(path: Path) -> bool:
    """Whether there is one; whoever may not look into its folder has none."""
    try:
        path.lstat()
    except OSError:
        return False
    return True


def _read(path: Path) -> tuple[str, bool]:
    """The text of a file that only its owner may write, and whether others may read it."""
    with path.open("rb") as file:
        found = os.fstat(file.fileno())
        content = file.read()
    mode = found.st_mode if os.name == "posix" and stat.S_ISREG(found.st_mode) else 0
    if mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise RefusedSettingsError(
            f"{path} can be written by others, who could change what runs: chmod go-w {path}"
        )
    try:
        return content.decode("utf-8-sig"), bool(mode & (stat.S_IRGRP | stat.S_IROTH))
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise RefusedSettingsError(f"{path}:{line}: this is not UTF-8, which TOML is written in") from error


class _File:
    """One parsed file."""

    def __init__(self, path: Path, text: str, known: Known) -> None:
        import tomllib

        self._path = path
        self._known = known
        try:
            self._tables: dict[str, Any] = tomllib.loads(text)
        except (tomllib.TOMLDecodeError, RecursionError) as error:
            raise RefusedSettingsError(f"{path}: this is no TOML: {error}") from error
        self._lines = dict(_lines_of_keys(text))

    def for_command(self, command: str, *, is_readable: bool) -> ConfigFile:
        """Check everything, and return what counts for this command. `is_readable` by others."""
        options = self._known.get(command, {})
        tables = {
            key: value
            for key, value in self._tables.items()
            if key in self._known and isinstance(value, dict)
        }
        top = {key: value for key, value in self._tables.items() if key not in tables}
        for table, entries in tables.items():
            self._check_table(table, entries)
        for key, value in top.items():
            self._check_top(key, value, command)
        values: dict[str, Any] = {}
        lines: dict[str, int] = {}
        for table, entries in (("", top), (command, tables.get(command, {}))):
            for key in options.keys() & entries.keys():
                values[key] = _read_value(options[key], entries[key])
                if (line := self._lines.get((table, key))) is not None:
                    lines[key] = line
        is_told = is_readable and self._holds_secrets()
        warning = (
            f"{self._path} holds keys, and others can read it: chmod 600 {self._path}" if is_told else ""
        )
        return ConfigFile(self._path, values, lines, warning)

    def _check_table(self, table: str, entries: Mapping[str, Any]) -> None:
        for key, value in entries.items():
            if key not in self._known[table]:
                others = sorted(name for name, options in self._known.items() if key in options)
                elsewhere = f": it belongs to [{'] or ['.join(others)}]" if others else ""
                nearest = elsewhere or _nearest_key(key, self._known[table])
                raise self._error(table, key, f"`diffuse {table}` has no such setting{nearest}")
            self._check_value(table, key, value, self._known[table][key])

    def _check_top(self, key: str, value: Any, command: str) -> None:
        knowing = {name: options for name, options in self._known.items() if key in options}
        if not knowing:
            names = {name for options in self._known.values() for name in options} | self._known.keys()
            what = "table" if isinstance(value, dict) else "setting"
            raise self._error("", key, f"there is no such {what}{_nearest_key(key, names)}")
        table = command if command in knowing else next(iter(knowing))
        self._check_value("", key, value, knowing[table][key])

    def _check_value(self, table: str, key: str, value: Any, option: Any) -> None:
        wanted = wanted_type(option)
        if not _fits(value, wanted):
            raise self._error(table, key, f"give {wanted}, not {_type_of(value)}")

    def _error(self, table: str, key: str, text: str) -> RefusedSettingsError:
        line = self._lines.get((table, key))
        place = f"{self._path}:{line}" if line is not None else str(self._path)
        where = f"[{table}] {key}" if table else key
        return RefusedSettingsError(f"{place}: {where}: {text}")

    def _holds_secrets(self) -> bool:
        """Whether somebody who reads it may ask in the owner's name."""
        tables = (self._tables, *(table for table in self._tables.values() if isinstance(table, dict)))
        return any(SECRETS & table.keys() for table in tables)


def wanted_type(option: Any) -> str:
    """What a file writes for an option, in words."""
    if option.multiple:
        return "an array of texts"
    if option.is_bool_flag:
        return "true or false"
    if option.metavar in ("TIME", "SIZE"):
        return f"a number, or a text like {'30s' if option.metavar == 'TIME' else '2GB'}"
    annotation = option.type_descriptor.annotation
    return "a whole number" if annotation is int else "a number" if annotation is float else "a text"


def _fits(value: Any, wanted: str) -> bool:
    if isinstance(value, bool):
        return wanted == "true or false"
    match value:
        case int():
            return "number" in wanted
        case float():
            return wanted.startswith("a number")
        case str():
            return "text" in wanted
        case list():
            return wanted == "an array of texts" and all(isinstance(item, str) for item in value)
    return False


def _read_value(option: Any, value: Any) -> Any:
    """As click takes it: one text of a list is a list."""
    return [value] if option.multiple and isinstance(value, str) else value


def _type_of(value: Any) -> str:
    kinds = (
        (bool, "true or false"),
        (int, "a number"),
        (float, "a fraction"),
        (str, "a text"),
        (list, "an array of something else"),
        (dict, "a table"),
    )
    return next((name for kind, name in kinds if isinstance(value, kind)), "a date")


def _nearest_key(key: str, names: Iterable[str]) -> str:
    return did_you_mean(key.replace("-", "_").lower(), names)


def _lines_of_keys(text: str) -> Iterator[tuple[tuple[str, str], int]]:
    """Table and key of each line that begins with one, and a table itself; texts over several lines are passed over."""
    table, is_in_text = "", False
    for number, line in enumerate(text.split("\n"), start=1):
        was_in_text = is_in_text
        is_in_text ^= (line.count('"""') + line.count("'''")) % 2 == 1
        if was_in_text:
            continue
        if header := _HEADER.match(line):
            table = header[1]
            yield ("", table), number
        elif key := _KEY.match(line):
            yield ((table, key[1]) if key[2] is None else (key[1], key[2])), number
