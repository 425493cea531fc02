"""The diffusion models that come inside this package, by alias, so that pictures can be made on a fresh machine.

Each is a plain pipeline folder; what it can draw is said in its README.md. `tools/picture_model` trained it.
"""

from __future__ import annotations

from pathlib import Path

FOLDER = Path(__file__).parent.parent / "packaged"
PACKAGED_PIPELINES = ("tiny-pictures",)  # each an alias and its folder's name


def packaged_pipeline(name: str) -> Path | None:
    """Return the folder of the packaged pipeline of this name, or `None` if there is no such one."""
    return FOLDER / name if name in PACKAGED_PIPELINES else None
