"""The folder where what must survive a restart is kept, and the run files that tell which services run here.

A run file says who a service is and how far it is in leaving; it is gone when the service is. Knows nothing of what
services do.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

import typer

STATE_VARIABLE: Final = "DIFFUSE_STATE_DIR"
_SAME_START_S: Final = 2.0  # a start time is told in whole ticks, and clocks are set


def default_state_dir() -> Path:
    """Where state is kept unless a flag says otherwise (XDG base directories; DIFFUSE_STATE_DIR moves it)."""
    if named := os.environ.get(STATE_VARIABLE):
        return Path(named)
    if sys.platform in ("win32", "darwin"):
        return Path(typer.get_app_dir("diffuse"))
    return Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state") / "diffuse"


@dataclass(frozen=True, slots=True)
class Service:
    """A host or sentinel of this user, as its run file tells."""

    path: Path
    pid: int
    started: float  # unix, tells it from another process that got its number
    role: str
    node_id: str = ""  # hex; "" until it is known
    address: str = ""
    state: str = "starting"
    num_sessions: int | None = None
    limit_s: float | None = None

    @property
    def name(self) -> str:
        """How it is called in a sentence."""
        whose = f" {self.node_id[:8]}" if self.node_id else ""
        return f"{self.role}{whose} (pid {self.pid})"


class RunFile:
    """This process' own run file; a context manager, so that it is gone afterwards."""

    def __init__(self, state_dir: Path, role: str, node_id: str = "") -> None:
        self._path = state_dir / "run" / f"{os.getpid()}.json"
        self._told: dict[str, Any] = {
            "pid": os.getpid(),
            "role": role,
            "node_id": node_id,
            "state": "starting",
        }
        self.trouble = ""  # why there is none

    def __enter__(self) -> Self:
        self._told["started"] = _start_time(os.getpid())
        try:
            self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._write()
        except OSError as error:  # a home that cannot be written is no reason not to serve
            self.trouble = f"{self._path}: {error.strerror}: `diffuse leave` will not find this process"
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with suppress(OSError):
            self._path.unlink(missing_ok=True)

    def note(self, event: Mapping[str, Any]) -> None:
        """Take from an event of the service what others want to know."""
        match event:
            case {"event": "ready" | "reachable" as state, "address": str(address), **rest}:
                self._told |= {"state": "ready" if state == "reachable" else state, "address": address}
                self._told["node_id"] = address.partition("@")[0].partition("/")[0] or rest.get("node_id", "")
            case {"event": "draining", "num_sessions": num_sessions, **rest}:
                self._told |= {
                    "state": "draining",
                    "num_sessions": num_sessions,
                    "limit_s": rest.get("limit_s"),
                }
            case _:
                return
        if not self.trouble:
            with suppress(OSError):
                self._write()

    def _write(self) -> None:
        fresh = self._path.with_suffix(".new")
        fresh.write_text(json.dumps(self._told))
        fresh.chmod(0o600)
        fresh.replace(self._path)


def running_services(state_dir: Path) -> list[Service]:
    """The services of this user that run now; files that a killed one left behind are removed."""
    return sorted(_services(state_dir), key=lambda service: service.pid)


def _services(state_dir: Path) -> Iterator[Service]:
    for path in (state_dir / "run").glob("*.json"):
        service = read_service(path)
        if service is not None:
            yield service
        else:
            with suppress(OSError):
                path.unlink()


def read_service(path: Path) -> Service | None:
    """What a run file tells; None if it is gone or broken, or its process is."""
    try:
        told = json.loads(path.read_text())
        service = Service(
            path=path,
            pid=int(told["pid"]),
            started=float(told["started"]),
            role=str(told["role"]),
            node_id=str(told.get("node_id", "")),
            address=str(told.get("address", "")),
            state=str(told.get("state", "")),
            num_sessions=told.get("num_sessions"),
            limit_s=told.get("limit_s"),
        )
        return service if is_running(service.pid, service.started) else None
    except (OSError, ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError):
        return None


def is_running(pid: int, started: float) -> bool:
    """Whether a process lives, and is the one that began then: numbers are used again."""
    began = _start_time(pid)
    return bool(began) and abs(began - started) < _SAME_START_S


def _start_time(pid: int) -> float:
    """When a process began (unix); 0 if there is none, or only its zombie."""
    import psutil

    try:
        process = psutil.Process(pid)
        return 0.0 if process.status() == psutil.STATUS_ZOMBIE else process.create_time()
    except psutil.Error:
        return 0.0
