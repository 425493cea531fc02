"""Where a model comes from: a folder, a GGUF file, a package that carries one, or the hub.

Turns what the user typed into an open `Checkpoint`; the work is done by `checkpoint`, `gguf` and `hub`.
"""

from __future__ import annotations

import re
from pathlib import Path

from slicing.checkpoint import Checkpoint, open_folder
from slicing.errors import ModelError
from slicing.gguf import PACKAGED, converted_folder, packaged_gguf
from slicing.hub import open_hub
from slicing.packaged_models import PACKAGED_FOLDERS, packaged_folder
from slicing.progress import Progress, no_progress

HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+(@[\w./-]+)?")


def open_checkpoint(
    model: str,
    *,
    cache_dir: Path | None = None,
    progress: Progress | None = None,
    may_fetch: bool = True,
) -> Checkpoint:
    """Open a folder, a .gguf file, an alias of a packaged model ("smollm2") or "org/name[@revision]".

    Reads configuration and headers, no weights; a GGUF file is converted on first use. `progress` is told of
    conversions and downloads. Without `may_fetch` no hub is asked. Raises `ModelError`, its text saying what to do.
    """
    progress = progress or no_progress
    path = Path(model).expanduser()
    if path.is_dir():
        return _open_local(path, model, cache_dir, progress)
    if path.is_file():
        return open_folder(converted_folder(_only_gguf(path), cache_dir, progress), model)
    if model in PACKAGED:
        return open_folder(converted_folder(packaged_gguf(model, cache_dir), cache_dir, progress), model)
    if model in PACKAGED_FOLDERS:
        return open_folder(packaged_folder(model, cache_dir, progress), model)
    if HUB_ID.fullmatch(model):
        return open_hub(model, cache_dir, progress, may_fetch=may_fetch)
    raise ModelError(
        f"there is no model {model!r}: name a folder, a .gguf file, a hub id like org/name, "
        f"or one of {', '.join(sorted([*PACKAGED, *PACKAGED_FOLDERS]))}"
    )


def _open_local(folder: Path, name: str, cache_dir: Path | None, progress: Progress) -> Checkpoint:
    files = sorted(folder.glob("*.gguf"))
    if not files or any(folder.glob("*.safetensors")) or (folder / "config.json").is_file():
        return open_folder(folder, name)
    if len(files) > 1:
        raise ModelError(f"{folder} holds {len(files)} GGUF files; name one of them")
    return open_folder(converted_folder(_only_gguf(files[0]), cache_dir, progress), name)


def _only_gguf(file: Path) -> Path:
    if file.suffix != ".gguf":
        raise ModelError(
            f"{file} is not a .gguf file; for safetensors name the folder that holds config.json too"
        )
    if re.search(r"-\d{5}-of-\d{5}\.gguf$", file.name):
        raise ModelError(f"{file} is one part of several; join them first (llama.cpp's gguf-split --merge)")
    return file
