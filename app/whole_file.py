"""Files that are whole or not there at all: written beside their place, flushed, then renamed. Only the owner reads."""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
from pathlib import Path

UNFINISHED = ".part"
OWNER_ONLY = 0o600
FULL_ERRNOS = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})


def write_whole(path: Path, content: bytes) -> None:
    """Put `content` at `path`. Raises OSError, and then leaves nothing behind."""
    part = path.with_name(f"{path.name}.{secrets.token_hex(4)}{UNFINISHED}")  # two at once do not mix
    try:
        descriptor = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, OWNER_ONLY)
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        part.replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            part.unlink(missing_ok=True)
        raise


def is_disk_full(error: OSError) -> bool:
    """Whether there was no room, or no more was allowed."""
    return error.errno in FULL_ERRNOS
