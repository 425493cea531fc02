"""Opens the state that a URL names: `memory:`, `sqlite:///FILE`, `redis://HOST`, `rediss://HOST` or `unix://SOCKET`."""

from __future__ import annotations

import re
from contextlib import AbstractAsyncContextManager, nullcontext
from pathlib import Path

from app.state.memory import MemoryState
from app.state.sqlite_state import sqlite_state
from app.state.state import State, StateError

MEMORY = "memory:"
SQLITE = "sqlite:"
REDIS = ("redis://", "rediss://", "unix://")
DRIVE = re.compile(r"/[A-Za-z]:")
FORMS = (
    "a state is memory:, sqlite:///FILE, redis://[USER:PASSWORD@]HOST[:PORT][/NUMBER], or rediss:// for TLS"
)


def open_state(url: str) -> AbstractAsyncContextManager[State]:
    """Hold the state open inside. Raises `StateError` for a URL of another form, and inside where it cannot be used.

    `sqlite:///var/lib/x.sqlite` is a file below the root, `sqlite:x.sqlite` one in the working directory.
    """
    check_form(url)
    if url == MEMORY:
        return nullcontext(MemoryState())
    if url.startswith(SQLITE):
        return sqlite_state(_path(url))
    from app.state.redis_state import redis_state  # only who has a Redis waits for its client

    return redis_state(url)


def check_form(url: str) -> None:
    """Raise `StateError` for what is no URL of a state, without quoting it."""
    is_file = url.startswith(SQLITE) and url.removeprefix(SQLITE).strip("/")
    if url != MEMORY and not is_file and not url.startswith(REDIS):
        raise StateError(FORMS)


def _path(url: str) -> Path:
    named = re.sub(r"^/{2,}", "/", url.removeprefix(SQLITE))
    return Path(named[1:] if DRIVE.match(named) else named).expanduser()
