"""Commands whose flags are settings: each is also a variable and a key of the file, under the same name.

click alone knows where a value came from (`ParameterSource`): a flag before a variable before the file before the
default. What is wrong with one is told by the name that it was set with.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, Final

import typer
from typer.core import TyperCommand, TyperOption

from cli import failures, show
from cli.config_file import ConfigFile, read_config
from cli.failures import CommandError, RefusedSettingsError
from cli.setting_names import (
    CONFIG_VARIABLE,
    NO_SETTINGS,
    OTHER_VARIABLES,
    PREFIX,
    SHARED,
    did_you_mean,
    flag_of,
    variable_of,
)
from routing.errors import DiffuseError

SERVICES: Final = ("serve", "host", "sentinel", "up")  # those with a table of their own in the file
EPILOG: Final = (
    "Every flag is a setting too: --log-level is DIFFUSE_LOG_LEVEL in the environment and log_level in the file. What "
    "a yes turns on, --no-... turns off. `diffuse config` shows what counts, and where it was said."
)
_FILE: Final = "diffuse.config_file."  # and a command, of a context: the file that was read for it
_NOTED: Final = "diffuse.noted"
_FLAG: Final = re.compile(r"--([a-z]+(?:-[a-z]+)*)")
_SERVICE_LINK: Final = re.compile(r"\w+_(SERVICE_HOST|SERVICE_PORT(_\w+)?|PORT_\d+_(TCP|UDP|SCTP)(_\w+)?)")


class SettingsCommand(TyperCommand):
    """A command that takes all its flags from variables and the file, too."""

    is_asking = False

    def __init__(self, *arguments: Any, **options: Any) -> None:
        options["epilog"] = options.get("epilog") or (None if self.is_asking else EPILOG)
        super().__init__(*arguments, **options)
        for option in setting_options(self).values():
            if not self.is_asking:
                option.show_envvar = False  # every flag has one: the help would be twice as long
            option.envvar = variable_of(option.name)
            option.envvar_list_splitter = ","  # type: ignore[misc]  # of all instances in click, which splits at blanks

    def make_parser(self, ctx: Any) -> Any:
        """Flags that say yes can be taken back: `--no-pad` where a variable says otherwise."""
        parser = super().make_parser(ctx)
        for option in setting_options(self).values():
            if option.is_bool_flag:
                negative = flag_of(f"no_{option.name}")
                parser.add_option(
                    obj=option, opts=[negative], dest=option.name, action="store_const", const=False
                )
        return parser

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        is_help = not set(ctx.help_option_names).isdisjoint(args)
        if not is_help and all(option.name != "config" for option in self.params):
            use_file(ctx, Path(os.environ[CONFIG_VARIABLE]) if os.environ.get(CONFIG_VARIABLE) else None)
        with naming(ctx):
            rest = super().parse_args(ctx, args)
        for option in setting_options(self).values():
            ctx.params[option.name] = _tidied(ctx, option)
        _warn_of_unknown_variables(ctx)
        return rest

    def invoke(self, ctx: Any) -> Any:
        with naming(ctx):
            return super().invoke(ctx)


class AskingCommand(SettingsCommand):
    """A command that asks or looks after services: it takes its key and their folder from where these do."""

    is_asking = True


@contextmanager
def naming(ctx: Any) -> Iterator[None]:
    """Whatever is found wrong with a setting inside is told by the name that it was set with."""
    try:
        yield
    except typer.BadParameter as error:
        name = _parameter_of(ctx, error)
        if name is None or source_of(ctx, name) not in ("variable", "file"):
            raise
        raise RefusedSettingsError(f"{where_set(ctx, name)}: {error.message}") from error
    except Exception as error:
        cause = failures.innermost(error)
        if failures.is_validation_error(cause):
            text = failures.explain_settings(cause, lambda name: where_set(ctx, name))
            raise RefusedSettingsError(_renamed(ctx, text)) from error
        told = failures.explain(cause) if isinstance(cause, DiffuseError) else ""
        if (renamed := _renamed(ctx, told)) == told:
            raise
        raise CommandError(renamed) from error


def setting_options(command: Any) -> dict[str, TyperOption]:
    """The options of a command that are settings, by name."""
    options = {option.name: option for option in command.params if isinstance(option, TyperOption)}
    if command.is_asking:
        return {name: option for name, option in options.items() if name in SHARED}
    return {name: option for name, option in options.items() if name not in NO_SETTINGS and not option.hidden}


def source_of(ctx: Any, name: str) -> str:
    """Where the value of a parameter came from: `flag`, `variable`, `file` or `default`."""
    source = ctx.get_parameter_source(name)
    return {"COMMANDLINE": "flag", "ENVIRONMENT": "variable", "DEFAULT_MAP": "file"}.get(
        getattr(source, "name", ""), "default"
    )


def is_flag(ctx: Any, name: str) -> bool:
    """Whether a flag said it, this once, and no variable or file."""
    return source_of(ctx, name) == "flag"


def where_set(ctx: Any, name: str) -> str:
    """What a parameter was called by whoever set it: the flag, the variable, or the key with its file and line."""
    match source_of(ctx, name):
        case "variable":
            return variable_of(name)
        case "file":
            return f"{name} in {config_file(ctx).where(name)}"
    return flag_of(name)


def config_file(ctx: Any) -> ConfigFile:
    """The file that counts for a command that runs; one without values where there is none."""
    found: ConfigFile | None = ctx.meta.get(_FILE + ctx.command.name)
    return found or ConfigFile(Path())


def known_settings(ctx: Any) -> dict[str, Mapping[str, TyperOption]]:
    """The settings of every command that has some, by its name; services first."""
    root = ctx.find_root().command
    commands = getattr(root, "commands", {root.name: root})
    named = {name: command for name, command in commands.items() if isinstance(command, SettingsCommand)}
    order = sorted(
        named, key=lambda name: (SERVICES.index(name) if name in SERVICES else len(SERVICES), name)
    )
    return {name: setting_options(named[name]) for name in order}


def use_file(ctx: typer.Context, value: Path | None) -> Path | None:
    """Read the file before anything else is: click takes from it what neither a flag nor a variable says."""
    if ctx.resilient_parsing:
        return value
    command: Any = ctx.command
    found = read_config(value, command.name, known_settings(ctx), is_asking=command.is_asking)
    if found is not None:
        ctx.meta[_FILE + command.name] = found
        ctx.default_map = found.values
        if found.warning:
            show.note(f"diffuse: {found.warning}")
    return value


ConfigOption = Annotated[
    Path | None,
    typer.Option(
        "--config",
        metavar="FILE",
        envvar=CONFIG_VARIABLE,
        show_envvar=False,
        is_eager=True,
        callback=use_file,
        help="A TOML file of settings, `none` for no file. Left out: diffuse.toml in this user's folder or in "
        "/etc/diffuse. `diffuse config` shows what counts.",
    ),
]


def _tidied(ctx: Any, option: TyperOption) -> Any:
    """What a shell does to flags, for variables and files: blanks around items go, and ~ is this user's folder."""
    value = ctx.params.get(option.name)
    if source_of(ctx, option.name) not in ("variable", "file"):
        return value
    if isinstance(value, list | tuple):
        return [item.strip() if isinstance(item, str) else item for item in value if str(item).strip()]
    return value.expanduser() if isinstance(value, Path) else value


def _parameter_of(ctx: Any, error: Any) -> str | None:
    """Which setting a usage error is about."""
    if error.param_hint is None:
        return getattr(error.param, "name", None)
    return next(
        (name for name in setting_options(ctx.command) if error.param_hint == f"'{flag_of(name)}'"), None
    )


def _renamed(ctx: Any, text: str) -> str:
    """A text that speaks of flags, with each called as it was set."""
    options = setting_options(ctx.command)

    def rename(flag: re.Match[str]) -> str:
        name = flag[1].replace("-", "_")
        return where_set(ctx, name) if name in options else flag[0]

    return _FLAG.sub(rename, text)


def _warn_of_unknown_variables(ctx: Any) -> None:
    """A misspelled variable would do nothing without a word."""
    if ctx.resilient_parsing or ctx.meta.get(_NOTED):
        return
    ctx.meta[_NOTED] = True
    known = OTHER_VARIABLES | {
        variable_of(name) for options in known_settings(ctx).values() for name in options
    }
    for name in _unknown(os.environ, known):
        show.note(f"diffuse: {name} is no setting and does nothing{did_you_mean(name, known)}")


def _unknown(variables: Mapping[str, str], known: Iterable[str]) -> Iterator[str]:
    """Variables of ours that nothing reads; those that Kubernetes makes of services are its own."""
    for name in sorted(variables.keys() - set(known)):
        value = variables[name]
        is_service = _SERVICE_LINK.fullmatch(name) or (name.endswith("_PORT") and "://" in value)
        if name.startswith(PREFIX) and value and not is_service:
            yield name
