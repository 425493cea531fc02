"""The kernels' machine code: compiled once for a machine, kept on disk, tried before it is trusted.

Knows where compiled code is kept and how it is tried, not what the kernels do.
"""

from __future__ import annotations

import hashlib
import logging
import os
import platform
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from functools import cache
from pathlib import Path
from typing import Any

import llvmlite
import numba
import numba.extending

from slicing.cache import cache_root, locked
from slicing.errors import ModelError

log = logging.getLogger(__name__)

KEPT_S = 30 * 24 * 3600.0  # long enough for an old version that is started once a week

# For functions that only other kernels call: numba leaves out what would make them callable from Python.
_njit: Any = numba.njit
inner = _njit(nogil=True, error_model="numpy", no_cpython_wrapper=True, no_cfunc_wrapper=True)
emitted: Any = numba.extending.intrinsic  # for functions that write LLVM IR
_config: Any = numba.config


class KernelsUnusable(ModelError):
    """The compiled kernels cannot be used on this machine; the text says why."""


@cache
def kernels_folder() -> Path | None:
    """Return where compiled code is kept, or None where nothing can be written (it then lasts for the process).

    $DIFFUSE_KERNEL_CACHE, else `kernels` in the cache; below it a folder for this version of the sources, as numba
    looks only at the file of the outermost function when it decides whether what it kept is stale.
    """
    root = Path(os.environ.get("DIFFUSE_KERNEL_CACHE") or cache_root() / "kernels")
    folder = root / _sources_digest()
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        log.warning(
            "compiled kernels cannot be kept in %s (%s): set DIFFUSE_KERNEL_CACHE", root, error.strerror
        )
        return None
    return folder if os.access(folder, os.W_OK) else None


def has_feature(name: str) -> bool:
    """Whether the processor that numba compiles for has a feature, by LLVM's name of it."""
    if _config.CPU_NAME or _config.CPU_FEATURES:
        return f"+{name}" in str(_config.CPU_FEATURES or "").split(",")
    return bool(llvmlite.binding.get_host_cpu_features().get(name, False))


@contextmanager
def keeping_code() -> Iterator[bool]:
    """Have numba keep what it is told to compile in here; yields whether it can be kept."""
    folder = kernels_folder()
    before = _config.CACHE_DIR
    _config.CACHE_DIR = str(folder or "")
    try:
        yield folder is not None
    finally:
        _config.CACHE_DIR = before


@cache
def load_kernels() -> None:
    """Compile the kernels or load them, and try them. Raises `KernelsUnusable`; later calls cost nothing."""
    from slicing.fast.self_test import check_products

    compile_kernels()
    check_products()


@cache
def compile_kernels() -> None:
    """Compile the kernels, once for a machine, or load what was kept. Raises `KernelsUnusable`."""
    if platform.machine().lower() in {"x86_64", "amd64"} and not has_feature("fma"):
        raise KernelsUnusable("this processor has no fused multiply-add, without which the kernels are slow")
    folder = kernels_folder()
    begun = time.perf_counter()
    try:
        with locked(folder / "compiling") if folder else nullcontext():
            was_kept = _compile(folder)
    except ModelError:
        raise
    except Exception as error:  # numba and LLVM raise many kinds
        raise KernelsUnusable(f"the kernels do not compile on this machine: {error}") from error
    verb = "loaded" if was_kept else "compiled"
    log.info("%s kernels for %s in %.1f s", verb, _processor(), time.perf_counter() - begun)


def _compile(folder: Path | None) -> bool:
    """Return whether all code was kept from an earlier time."""
    from slicing.fast.execute import execute
    from slicing.fast.linking import load_linked

    if folder is None or not any(folder.rglob("*.nbi")):
        log.info("compiling kernels for %s, once for this machine: about 15 s", _processor())
    num_compiled = load_linked()
    execute.compile((numba.types.int64,) * 6)
    if folder is not None:
        _forget_others(folder)
    return not num_compiled and bool(execute.stats.cache_hits)


def _forget_others(folder: Path) -> None:
    """Delete the code of other versions that no process has loaded for KEPT_S."""
    os.utime(folder)
    for other in folder.parent.iterdir():
        with suppress(OSError):  # another process deletes it, too
            is_code = other.is_dir() and len(other.name) == len(folder.name)
            if is_code and other.stat().st_mtime < time.time() - KEPT_S:
                shutil.rmtree(other, ignore_errors=True)


def _processor() -> str:
    return str(_config.CPU_NAME or llvmlite.binding.get_host_cpu_name())


def _sources_digest() -> str:
    digest = hashlib.sha256(f"{numba.__version__} {llvmlite.__version__}".encode())
    for path in sorted(Path(__file__).parent.glob("*.py")):
        source = path.read_bytes()
        if b"numba" in source or path.name == "pages.py":  # what may end in machine code
            digest.update(source)
    return digest.hexdigest()[:16]
