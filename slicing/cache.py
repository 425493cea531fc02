"""Where what was fetched or converted is kept, and the lock that makes several processes do it once.

Knows nothing of models; deleting the folder costs time, never data.
"""

from __future__ import annotations

import glob
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from huggingface_hub.utils import WeakFileLock  # type: ignore[attr-defined]  # public, but exported without a stub

from slicing.errors import ModelError


def cache_root(cache_dir: Path | None = None) -> Path:
    """Return the cache's folder: the argument, else $DIFFUSE_CACHE_DIR, else ~/.cache/diffuse."""
    return cache_dir or Path(os.environ.get("DIFFUSE_CACHE_DIR") or "~/.cache/diffuse").expanduser()


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold the lock file beside `path`; waits for other processes. Raises `ModelError`."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        lock = WeakFileLock(path.with_name(path.name + ".lock"))
        lock.__enter__()
    except OSError as error:
        raise ModelError(
            f"cannot write to {path.parent} ({error.strerror}); set DIFFUSE_CACHE_DIR to a folder you own"
        ) from error
    try:
        yield
    finally:
        lock.__exit__(None, None, None)


def made_once(folder: Path, make: Callable[[Path], None]) -> Path:
    """Return `folder`, which `make` fills if it is not there. Raises `ModelError`, and what `make` does.

    Processes that ask at the same time make it once, and one that is killed leaves nothing that would be taken for it.
    """
    if folder.is_dir():
        return folder
    with locked(folder):
        if not folder.is_dir():
            for leftover in folder.parent.glob(f"{glob.escape(folder.name)}.*.partial"):
                shutil.rmtree(
                    leftover, ignore_errors=True
                )  # of those that were killed: nobody else is at it now
            partial = folder.with_name(f"{folder.name}.{os.getpid()}.partial")
            try:
                make(partial)
                partial.rename(folder)
            finally:
                shutil.rmtree(partial, ignore_errors=True)
    return folder
