"""Which announced names this machine can open by itself: packaged models, what the hub's cache holds, folders here.

Names come from strangers: they are matched against what is there, never followed as paths. Whether the model behind
a name is the announced one is for its digest to say.
"""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

from huggingface_hub import try_to_load_from_cache

from slicing.diffusion.packaged import packaged_pipeline
from slicing.diffusion.pipeline_index import INDEX_NAME
from slicing.gguf import PACKAGED
from slicing.model_source import HUB_ID
from slicing.packaged_models import PACKAGED_FOLDERS, is_installed

CONFIG_NAMES = ("config.json", INDEX_NAME)  # one of them makes a folder a text model or a diffusion model
FOLDER_NAME = re.compile(r"[A-Za-z0-9][\w.-]{0,127}")  # one part of a path, and no hidden one


def is_here(name: str) -> bool:
    """Whether a model of this name can be opened without fetching anything; looks at files only."""
    if (folder := packaged_pipeline(name)) is not None:
        return folder.is_dir()
    if name in PACKAGED:
        return importlib.util.find_spec(PACKAGED[name].module) is not None
    if name in PACKAGED_FOLDERS:
        return is_installed(name)
    if is_hub_id(name):
        return _is_cached(name)
    if FOLDER_NAME.fullmatch(name) is None:
        return False
    return any((Path(name) / config).is_file() for config in CONFIG_NAMES)


def is_hub_id(name: str) -> bool:
    """Whether a name is an "org/name" of a hub, and no folder of this machine."""
    return HUB_ID.fullmatch(name) is not None and ".." not in name and not Path(name).exists()


def _is_cached(name: str) -> bool:
    repo, _, revision = name.partition("@")
    try:
        return any(
            isinstance(try_to_load_from_cache(repo, config, revision=revision or None), str)
            for config in CONFIG_NAMES
        )
    except ValueError:  # no name that a hub would give
        return False
