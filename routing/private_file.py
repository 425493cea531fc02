"""Files that hold secrets: read only while nobody else may."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from routing.errors import SettingsError

OTHERS = stat.S_IRWXG | stat.S_IRWXO


def read_private(
    path: Path,
    what: str,
    max_bytes: int,
    *,
    not_allowed: int = OTHERS,
    trouble: str = "can be read by others",
) -> bytes:
    """Return the beginning of a file, up to `max_bytes`.

    Raises `SettingsError` that calls it `what`: it cannot be read, or one of the bits `not_allowed` of its mode is set,
    which is `trouble`.
    """
    try:
        with path.open("rb") as file:
            mode = os.fstat(file.fileno()).st_mode
            content = file.read(max_bytes)
    except OSError as error:
        raise SettingsError(f"cannot read the {what} {path}: {error.strerror}") from error
    if os.name == "posix" and mode & not_allowed:
        raise SettingsError(f"the {what} {path} {trouble}: run chmod 600 {path}")
    return content
