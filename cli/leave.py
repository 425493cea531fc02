"""`diffuse leave`: let a host or sentinel of this user go, after the sessions it has."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Final

import typer

from cli import options as opt
from cli import show
from cli.failures import CommandError
from cli.state import Service, default_state_dir, is_running, read_service, running_services

LOOK_S: Final = 0.1


def leave(
    key: Annotated[
        Path | None, typer.Option("--key", help="The one with this identity key file.", show_default=False)
    ] = None,
    pid: Annotated[int | None, typer.Option("--pid", help="The one with this process number.")] = None,
    everyone: Annotated[bool, typer.Option("--all", help="Every host and sentinel of this user.")] = False,
    timeout: Annotated[
        float, typer.Option("--timeout", min=0, help="Seconds to wait for the end; 0: only ask.")
    ] = 60.0,
    state_dir: opt.StateDirOption = None,
) -> None:
    """Ask a running host or sentinel to leave: it tells the swarm, lets running sessions end, and stops.

    Without a flag, the only one that runs here. Exits with 1 if it still runs after --timeout.
    """
    services = running_services(state_dir or default_state_dir())
    chosen = _choose(services, key, pid, everyone)
    for service in chosen:
        _ask(service)
    deadline = time.monotonic() + timeout
    if timeout and not all(_wait_gone(service, deadline) for service in chosen):
        raise CommandError(
            f"still running after {timeout:g} s: wait with `diffuse leave --timeout S`, "
            "or end it at once with a second `kill PID`"
        )


def _choose(services: Sequence[Service], key: Path | None, pid: int | None, everyone: bool) -> list[Service]:
    """Whom the flags mean. Raises `CommandError` naming what runs where that is not clear."""
    if sum((key is not None, pid is not None, everyone)) > 1:
        raise typer.BadParameter("give one of --key, --pid and --all")
    chosen = list(services)
    if key is not None:
        from routing.identity import Identity

        node_id = Identity.load(key).node_id.hex()
        chosen = [service for service in services if service.node_id == node_id]
    elif pid is not None:
        chosen = [service for service in services if service.pid == pid]
    names = ", ".join(service.name for service in services)
    if not chosen:
        raise CommandError(
            f"none such runs here; running: {names}" if names else "no host or sentinel runs here"
        )
    if len(chosen) > 1 and not (everyone or key):
        raise CommandError(f"several run here: {names}. Say which with --pid or --key, or --all")
    return chosen


def _ask(service: Service) -> None:
    """A second SIGTERM would end it at once: one that leaves already is not asked again."""
    if service.state == "draining":
        show.note(f"{service.name} is leaving already")
        return
    try:
        os.kill(service.pid, signal.SIGTERM)
    except ProcessLookupError:
        return
    except PermissionError as error:
        raise CommandError(f"{service.name} belongs to another user") from error


def _wait_gone(service: Service, deadline: float) -> bool:
    """Wait for the end, telling how many sessions are left whenever that changes."""
    told: int | None = None
    while is_running(service.pid, service.started):
        now = read_service(service.path)
        if now is not None and now.num_sessions is not None and now.num_sessions != told:
            told = now.num_sessions
            show.note(f"{service.name}: {told} session{'' if told == 1 else 's'} left")
        if time.monotonic() > deadline:
            return False
        time.sleep(LOOK_S)
    show.out(f"{service.name} has left")
    return True
