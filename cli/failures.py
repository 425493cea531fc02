"""What a failed command says, and the exit code it leaves: one clear line, and a traceback only on demand.

Knows the exceptions of this project and of the libraries a command touches; foreign ones are translated
here.
"""

from __future__ import annotations

import errno
import os
import sys
import traceback
from typing import Final

from routing.errors import DiffuseError, ErrorCode, NoRouteError, RemoteError

EXIT_FAILURE: Final = 1
EXIT_USAGE: Final = 2
EXIT_INTERRUPTED: Final = 130  # 128 + SIGINT, as shells have it
DEBUG_VARIABLE: Final = "DIFFUSE_DEBUG"

# Settings whose flag is not their name, and those that only a DIFFUSE_* variable sets.
_FLAGS: Final[dict[str, str | None]] = {
    "host": "--listen",
    "port": "--listen",
    "api_keys": "--api-key",
    "allowed_hosts": "--allowed-host",
    "cors_origins": "--cors-origin",
    "model_aliases": "--alias",
    "request_timeout_s": "--request-timeout",
    "drain_s": "--drain",
    "max_choices": None,
    "max_body_bytes": None,
    "body_timeout_s": None,
    "keepalive_s": None,
    "heartbeat_s": None,
    "load_wait_s": None,
    "max_pixels": None,
    "max_media": None,
    "max_media_pixels": None,
    "max_heard_s": None,
    "pictures_bytes": None,
    "pictures_lifetime_s": None,
    "videos_bytes": None,
    "videos_lifetime_s": None,
    "videos_at_once": None,
    "videos_waiting": None,
    "key_path": "--key",
    "kv_budget_bytes": "--kv-budget",
    "memory_bytes": "--memory",
    "models": "--model",
    "bootstraps": "--bootstrap",
    "psk": "--psk-file",
    "accepted_psks": "--psk-file",
    "token": "--token-file",
    "allow": "--allow-file",
    "owner": "--owner-key",
    "is_sentinel": "--sentinel",
}
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
    if _is_validation_error(error):
        return _explain_settings(error)
    if type(error).__module__.partition(".")[0] in _OUR_PACKAGES:
        return str(error)
    return f"{type(error).__name__}: {error} (a fault of ours: {DEBUG_VARIABLE}=1 shows where)"


def exit_code_of(error: BaseException) -> int:
    """The exit code a command that ended with this error leaves."""
    return EXIT_USAGE if _is_validation_error(error) else EXIT_FAILURE


def report(error: BaseException) -> None:
    """Print one line on standard error; with DIFFUSE_DEBUG=1 the traceback above it."""
    if os.environ.get(DEBUG_VARIABLE):
        traceback.print_exception(error)
    line = " ".join(explain(innermost(error)).split())
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


def _is_validation_error(error: BaseException) -> bool:
    """Whether this is pydantic's, without importing pydantic for commands that never use it."""
    module = sys.modules.get("pydantic")
    return module is not None and isinstance(error, module.ValidationError)


def _explain_settings(error: BaseException) -> str:
    problems = error.errors()  # type: ignore[attr-defined]
    return "; ".join(_setting(problem) for problem in problems)


def _setting(problem: dict[str, object]) -> str:
    location = problem.get("loc")
    parts = location if isinstance(location, tuple) else ()
    message = str(problem.get("msg", "is wrong")).removeprefix("Value error, ")
    return f"{_where_set(str(parts[0]))}: {message}" if parts else message


def _where_set(name: str) -> str:
    """Where a user sets this: by a flag, by a variable of the environment, or by either."""
    flag, variable = _FLAGS.get(name, "--" + name.replace("_", "-")), f"DIFFUSE_{name.upper()}"
    if variable not in os.environ:
        return flag or variable
    return f"{flag} or {variable}" if flag else variable
