"""`diffuse config`: every setting of a service, its value, and where that was said. Starts nothing."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from itertools import groupby
from typing import Annotated, Any, Final

import typer

from cli import options as opt
from cli import show
from cli.setting_rows import SettingRow, rows_of
from cli.settings_command import SERVICES, config_file, known_settings, naming

NOT_SET: Final = "-"
TAKES_FLAGS: Final = {"ignore_unknown_options": True, "allow_extra_args": True}


def config(
    ctx: typer.Context,
    command: Annotated[
        str | None, typer.Argument(metavar="[serve|host|sentinel|up]", help="Whose. Left out: all.")
    ] = None,
    as_json: opt.JsonOption = False,
    example: Annotated[
        bool, typer.Option("--example", help="Print a file with every setting, as comments, instead.")
    ] = False,
) -> None:
    """Show every setting of a service, and where its value was said: a flag, a variable, the file, or nowhere.

    Further flags are read as that service would read them: `diffuse config serve --max-requests 8`. Keys are hidden.
    """
    if example:
        from cli.config_example import example as written

        show.out(written(known_settings(ctx)).rstrip())
        return
    if command is not None and command not in SERVICES:
        raise typer.BadParameter(
            f"{command!r}: choose from {', '.join(SERVICES)}; a service's flags come behind it",
            param_hint="'COMMAND'",
        )
    parsed = [_parsed(ctx, name, ctx.args) for name in ([command] if command else SERVICES)]
    if as_json:
        told = [_told(one) for one in parsed]
        show.print_json(told[0] if command else {"commands": told})
        return
    for one in parsed:
        _print(one, with_name=command is None)


def _parsed(ctx: Any, name: str, arguments: list[str]) -> Any:
    """The context of a command as it would run, with what is wrong told as it would tell it."""
    root = ctx.find_root()
    parsed = root.command.commands[name].make_context(name, list(arguments), parent=root)
    with naming(parsed):
        _check(name, parsed.params)
    return parsed


def _check(name: str, params: Mapping[str, Any]) -> None:
    """What the service itself would say of values that cannot be; files that they name are not looked at."""
    if name == "serve":
        from cli.serve import gateway_settings

        gateway_settings(params)
    elif name == "host":
        from cli.host import node_settings

        node_settings(params, network_id=bytes(32), tls=None)


def _told(parsed: Any) -> dict[str, Any]:
    path = config_file(parsed).path
    return {
        "command": parsed.command.name,
        "file": str(path) if path.name else None,
        "settings": [
            {key: value for key, value in asdict(row).items() if key != "text"} for row in rows_of(parsed)
        ],
    }


def _print(parsed: Any, *, with_name: bool) -> None:
    rows = rows_of(parsed)
    widths = max(len(row.name) for row in rows), max(min(len(row.text), 24) for row in rows)
    path = config_file(parsed).path
    if with_name:
        show.out(f"[{parsed.command.name}]")
    show.out(f"file: {path if path.name else 'none'}")
    for panel, members in groupby(rows, key=lambda row: row.panel):
        show.out(f"\n{panel}")
        for row in members:
            show.out(_line(row, *widths))
    if with_name:
        show.out("")


def _line(row: SettingRow, name_width: int, value_width: int) -> str:
    return f"  {row.name:<{name_width}}  {row.text or NOT_SET:<{value_width}}  {row.place or 'default'}"
