"""The console script: which commands there are, and the one place where a failure becomes a line and a code.

Only typer is imported here; each command imports what it needs when it runs, so that `--help` is instant.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
from typing import Annotated, Any, NoReturn

import typer
from typer.core import TyperGroup

from cli import (
    bench,
    chat,
    config,
    doctor,
    failures,
    host,
    keys,
    leave,
    models,
    query,
    sentinel,
    serve,
    show,
    status,
    up,
)
from cli.settings_command import AskingCommand, SettingsCommand


class Commands(TyperGroup):
    """The command group, with failures turned into one line on standard error."""

    def list_commands(self, ctx: Any) -> list[str]:
        """In the order they are added below, most used first."""
        return list(self.commands)

    def get_help_option(self, ctx: Any) -> Any:
        """With a default that is no question to pydantic, whose import would take half the time of a help."""
        option = super().get_help_option(ctx)
        if option is not None:
            option.default = False
        return option

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except (typer.Exit, typer.Abort, typer.TyperException):
            raise
        except KeyboardInterrupt:
            raise typer.Exit(failures.EXIT_INTERRUPTED) from None
        except Exception as error:
            cause = failures.innermost(error)
            if isinstance(cause, BrokenPipeError):
                show.silence_stdout()  # whoever read our output has had enough
            else:
                failures.report(error)
            raise typer.Exit(failures.exit_code_of(cause)) from None


app = typer.Typer(
    name="diffuse",
    cls=Commands,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _print_version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import PackageNotFoundError, version

        try:
            typer.echo(f"diffuse {version('diffuse')}")
        except PackageNotFoundError:
            typer.echo("diffuse (not installed: run from a checkout)")
        raise typer.Exit


@app.callback()
def diffuse(
    _version: Annotated[
        bool,
        typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit."),
    ] = False,
) -> None:
    """Run one large model across machines that do not have to trust each other.

    Set DIFFUSE_DEBUG=1 to see the traceback behind an error.
    """


app.command(cls=SettingsCommand)(up.up)
app.command(cls=AskingCommand)(query.query)
app.command(cls=AskingCommand)(chat.chat)
app.command(cls=SettingsCommand)(host.host)
app.command(cls=SettingsCommand)(serve.serve)
app.command(cls=SettingsCommand)(sentinel.sentinel)
app.command(cls=AskingCommand)(status.status)
app.command(cls=AskingCommand)(models.models)
app.command(cls=AskingCommand)(doctor.doctor)
app.command(cls=AskingCommand)(leave.leave)
app.command(cls=AskingCommand)(bench.bench)
app.command(context_settings=config.TAKES_FLAGS)(config.config)
app.add_typer(keys.app, name="keys")
app.command(hidden=True)(up.prepare)


def main() -> None:
    """Run the command line of this process."""
    try:
        app(prog_name="diffuse")
    except KeyboardInterrupt:  # before the command began
        raise SystemExit(failures.EXIT_INTERRUPTED) from None
    except SystemExit as end:
        if "torch" not in sys.modules or not isinstance(end.code, int):
            raise
        _leave(end.code)


def _leave(code: int) -> NoReturn:
    """End now: taking the modules of torch and transformers apart costs a second that nobody should wait for.

    Links are closed and files written by then; what is left is what the interpreter does at its end.
    """
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):  # nobody reads it any more
            stream.flush()
    os._exit(code)
