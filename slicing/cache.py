"""Where what was fetched or converted is kept, and the lock that makes several processes do it once.

Knows nothing of models; deleting the folder costs time, never data.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from huggingface_hub.utils import WeakFileLock  # type: ignore[attr-defined]  # public, but exported without a stub

from slicing.errors import ModelError


def cache_root(cache_dir: Path | None = None) -> Path:
    """Return the cache's folder: the argument, else $DIFFUSE_CACHE, else ~/.cache/diffuse."""
    return cache_dir or Path(os.environ.get("DIFFUSE_CACHE") or "~/.cache/diffuse").expanduser()


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold the lock file beside `path`; waits for other processes. Raises `ModelError`."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        lock = WeakFileLock(path.with_name(path.name + ".lock"))
        lock.__enter__()
    except OSError as error:
        raise ModelError(
            f"cannot write to {path.parent} ({error.strerror}); set DIFFUSE_CACHE to a folder you own"
        ) from error
    try:
        yield
    finally:
        lock.__exit__(None, None, None)
