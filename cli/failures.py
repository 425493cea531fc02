"""What a failed command says, and the exit code it leaves: one clear line, and a traceback only on demand.

Knows the exceptions of this project and of the libraries a command touches; foreign ones are translated
here.
"""

from __future__ import annotations

import errno
import logging
import os
import sys
import traceback
from collections.abc import Callable
from typing import Final

from cli.setting_names import flag_of, parameter_of
from routing.errors import DiffuseError, ErrorCode, NoRouteError, RemoteError

EXIT_FAILURE: Final = 1
EXIT_USAGE: Final = 2
EXIT_INTERRUPTED: Final = 130  # 128 + SIGINT, as shells have it
DEBUG_VARIABLE: Final = "DIFFUSE_DEBUG"

_OUR_PACKAGES: Final = frozenset({"app", "node", "routing", "slicing"})  # their texts say what to do
_ADVICE: Final[dict[ErrorCode, str]] = {
    ErrorCode.TIMEOUT: "is the node running, and is its port open from here?",
    ErrorCode.LINK_LOST: "is the node running, and is its port open from here?",
    ErrorCode.HANDSHAKE: "compare the whole id@host:port, --network and --psk-file with the node's own",
    ErrorCode.ID_MISMATCH: "copy the whole id@host:port that `diffuse host` printed",
    ErrorCode.CERTIFICATE_EXPIRED: "set the clocks of both machines",
    ErrorCode.NETWORK: "both sides need the same --network",
    ErrorCode.VERSION: "both sides need a version that speaks the same protocol",
    ErrorCode.NOT_ALLOWED: "it lists whom it lets in: give its operator the id of your --key file, or show a guest "
    "token with --token-file",
    ErrorCode.TLS: "members of one swarm either all speak TLS or none does",
    ErrorCode.NO_RESERVATION: "the node has left this sentinel: `diffuse status` shows where it is now",
    ErrorCode.PEER_GONE: "try again in a second",
    ErrorCode.QUOTA: "try again later, or use another sentinel",
    ErrorCode.RELAY_FULL: "use another sentinel",
    ErrorCode.GOING_AWAY: "use another sentinel",
    ErrorCode.BUSY: "wait, or add a node for these layers",
    ErrorCode.NO_SLICE: "ask `diffuse models` which layers each node serves",
}


class CommandError(DiffuseError):
    """A command cannot go on; the text says why and what to do."""


class RefusedSettingsError(CommandError):
    """A setting is wrong; the text calls it as it was set."""


def explain(error: BaseException) -> str:
    """Say in one line what went wrong and what to do about it."""
    if isinstance(error, NoRouteError) and error.missing:
        return f"{error}: start `diffuse host --layers {_ranges(error)}` or name more nodes with --node"
    if isinstance(error, RemoteError):
        advice = _ADVICE.get(error.code)
        return f"{error}; {advice}" if advice else str(error)
    if isinstance(error, DiffuseError):
        return str(error)
    if isinstance(error, OSError):
        return _explain_os_error(error)
    if is_validation_error(error):
        return explain_settings(error, flag_of)
    if type(error).__module__.partition(".")[0] in _OUR_PACKAGES:
        return str(error)
    return f"{type(error).__name__}: {error} (a fault of ours: {DEBUG_VARIABLE}=1 shows where)"


def exit_code_of(error: BaseException) -> int:
    """The exit code a command that ended with this error leaves."""
    is_usage = isinstance(error, RefusedSettingsError) or is_validation_error(error)
    return EXIT_USAGE if is_usage else EXIT_FAILURE


def report(error: BaseException) -> None:
    """Print one line on standard error; with DIFFUSE_DEBUG=1 the traceback above it, unless lines are JSON."""
    line = " ".join(explain(innermost(error)).split())
    logs = sys.modules.get("cli.logs")  # imported by whoever configured them
    if logs is not None and logs.told_as_json(line, logging.CRITICAL, error):
        return
    if os.environ.get(DEBUG_VARIABLE):
        traceback.print_exception(error)
    print(f"diffuse: {line}", file=sys.stderr)  # noqa: T201 - the one place that reports failures


def innermost(error: BaseException) -> BaseException:
    """The first single error inside nested exception groups, which is the one that caused the rest."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


def _ranges(error: NoRouteError) -> str:
    return ", ".join(f"{start}:{end}" for start, end in error.missing)


def _explain_os_error(error: OSError) -> str:
    if error.errno == errno.EADDRINUSE:
        return f"{error.strerror or error}: choose another port, or stop what listens there"
    where = f"{error.filename}: " if error.filename else ""
    return f"{where}{error.strerror or error}"


def is_validation_error(error: BaseException) -> bool:
    """Whether this is pydantic's, without importing pydantic for commands that never use it."""
    module = sys.modules.get("pydantic")
    return module is not None and isinstance(error, module.ValidationError)


def explain_settings(error: BaseException, where: Callable[[str], str]) -> str:
    """Say what pydantic found wrong, each field by what `where` calls the parameter that fills it."""
    problems = error.errors()  # type: ignore[attr-defined]
    return "; ".join(_setting(problem, where) for problem in problems)


def _setting(problem: dict[str, object], where: Callable[[str], str]) -> str:
    location = problem.get("loc")
    parts = location if isinstance(location, tuple) else ()
    message = str(problem.get("msg", "is wrong")).removeprefix("Value error, ")
    return f"{where(parameter_of(str(parts[0])))}: {message}" if parts else message
