"""A pipeline folder's table of contents: model_index.json and the configuration of each component.

Says which classes a pipeline is made of, and refuses what would run code from the folder. Reads no weights.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slicing.errors import ModelError
from slicing.json_object import read_json_object

INDEX_NAME = "model_index.json"
TRANSFORMER = "transformer"  # a second one is called transformer_2


@dataclass(frozen=True)
class Component:
    """One entry of the index: where its class comes from ("diffusers", "transformers" or one of their modules)."""

    name: str
    library: str
    class_name: str


@dataclass(frozen=True)
class PipelineIndex:
    """What a pipeline folder says it is."""

    folder: Path
    class_name: str
    components: Mapping[str, Component]

    @property
    def transformers(self) -> tuple[Component, ...]:
        """The components whose blocks can lie elsewhere, in the order of their names."""
        names = sorted(name for name in self.components if is_transformer(name))
        return tuple(self.components[name] for name in names)

    def config(self, component: str) -> dict[str, Any]:
        """The configuration of a component; empty where it has none (a tokenizer). Raises `ModelError`."""
        file = self.folder / component / "config.json"
        return read_json_object(file) if file.is_file() else {}


def is_transformer(name: str) -> bool:
    """Whether a component of this name is one of the pipeline's transformers."""
    rest = name.removeprefix(TRANSFORMER + "_")
    return name == TRANSFORMER or (rest != name and rest.isdigit())


def read_pipeline_index(folder: Path) -> PipelineIndex:
    """Read model_index.json. Raises `ModelError` where it is not there, damaged, or names code of the folder itself."""
    file = folder / INDEX_NAME
    if not file.is_file():
        raise ModelError(f"{folder} holds no {INDEX_NAME}: it is no diffusers pipeline")
    entries = read_json_object(file)
    class_name = entries.get("_class_name")
    if not isinstance(class_name, str):
        raise ModelError(
            f"{file} names no pipeline class of diffusers; code that comes with a model is never run"
        )
    components = {}
    for name, entry in entries.items():
        if name.startswith("_") or not isinstance(entry, list) or entry == [None, None]:
            continue  # a setting of the pipeline, or an optional part that is not there
        if len(entry) != 2 or not all(isinstance(part, str) for part in entry) or Path(name).name != name:
            continue  # a setting that is a list
        components[name] = Component(name, *entry)
    return PipelineIndex(folder, class_name, components)


def pipeline_class(index: PipelineIndex) -> type:
    """The stock pipeline class. Raises `ModelError` for one unknown to the installed diffusers, or remote code."""
    import diffusers
    from diffusers import DiffusionPipeline, pipelines

    for component in index.components.values():
        if component.library not in ("diffusers", "transformers") and not hasattr(
            pipelines, component.library
        ):
            raise ModelError(
                f"{index.folder} takes its {component.name} from {component.library!r}, "
                "which is not part of diffusers; code that comes with a model is never run"
            )
    found = getattr(diffusers, index.class_name, None)
    if not isinstance(found, type) or not issubclass(found, DiffusionPipeline):
        raise ModelError(
            f"{index.folder} is a {index.class_name}, unknown to diffusers {diffusers.__version__}; update diffusers"
        )
    return found


def transformer_class(index: PipelineIndex, component: Component) -> type:
    """The stock class of a transformer. Raises `ModelError` for one unknown to the installed diffusers."""
    import diffusers
    from diffusers import ModelMixin

    found = getattr(diffusers, component.class_name, None) if component.library == "diffusers" else None
    if not isinstance(found, type) or not issubclass(found, ModelMixin):
        raise ModelError(
            f"{index.folder} has the {component.name} {component.class_name}, unknown to "
            f"diffusers {diffusers.__version__}; update diffusers"
        )
    return found
