"""Which tensors of a checkpoint each parameter of a model comes from, and how they are joined.

The names and the conversions are transformers' own (its loader's renamings and converters, in its order),
so that legacy names, added or stripped prefixes and fused experts are what stock loading makes of them.
Here they only become a plan; nothing is read.
"""

from __future__ import annotations

import copy
import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    Concatenate,
    MergeModulelist,
    WeightConverter,
    WeightRenaming,
    WeightTransform,
    dot_natural_key,
    rename_source_key,
)


@dataclass
class Recipe:
    """How some parameters are made: `sources` are read, then handed to `converter`, if there is one."""

    targets: tuple[str, ...]  # names in the model
    sources: list[tuple[str, str]] = field(
        default_factory=list
    )  # (name in the checkpoint, pattern it matched)
    converter: WeightConverter | None = None

    @property
    def source_names(self) -> list[str]:
        """The checkpoint's names, in the order that the converter needs."""
        return [name for name, _ in self.sources]

    def views(
        self, out: torch.Tensor, shapes: Mapping[str, tuple[int, ...]]
    ) -> dict[str, torch.Tensor] | None:
        """Return the part of `out` that each source is, where joining them is mere placement.

        That holds for a plain tensor and for experts that are stacked, or stacked and then joined along their
        rows: such sources are read straight into place. None means that the converter has to run.
        """
        if self.converter is None:
            source = self.sources[0][0]
            return {source: out} if shapes[source] == tuple(out.shape) else None
        if [(type(op), getattr(op, "dim", None)) for op in self.converter.operations] not in _PLACEMENTS:
            return None
        groups = [
            [name for name, matched in self.sources if matched == p] for p in self.converter.source_patterns
        ]
        return _expert_views(out, groups, shapes)

    def convert(self, tensors: list[torch.Tensor], model: nn.Module) -> dict[str, torch.Tensor]:
        """Run transformers' converter over `tensors` (one per source; the list is emptied)."""
        if self.converter is None:
            return {self.targets[0]: tensors.pop()}
        converter = copy.deepcopy(self.converter)
        for (source, pattern), tensor in zip(self.sources, tensors, strict=True):
            converter.add_tensor(self.targets[0], source, pattern, tensor)  # type: ignore[arg-type]  # or a future
        tensors.clear()
        made = converter.convert(self.targets[0], model=model, config=model.config)
        return {name: value[0] if isinstance(value, list) else value for name, value in made.items()}


_PLACEMENTS = (
    [(MergeModulelist, 0)],
    [(MergeModulelist, 0), (Concatenate, 1)],
)


def plan_tensors(
    model: nn.Module, names: Iterable[str], transforms: Sequence[WeightTransform] | None = None
) -> dict[str, Recipe]:
    """Match the checkpoint's tensor names with the model's: model name -> the recipe that makes it.

    `transforms` defaults to what transformers registers for the model's class. Names that the model has no
    place for (other layers of a cut model, training leftovers) are left out.
    """
    state = model.state_dict()
    if transforms is None:
        transforms = get_model_conversion_mapping(model) if isinstance(model, PreTrainedModel) else []
    renamings = [item for item in transforms if isinstance(item, WeightRenaming)]
    converters = [item for item in transforms if isinstance(item, WeightConverter)]
    of_pattern = {pattern: item for item in converters for pattern in item.source_patterns}
    prefix = getattr(model, "base_model_prefix", "") or None
    recipes: dict[str, Recipe] = {}
    # The loader's order: experts are stacked as they come, and some renamings depend on an earlier name.
    for name in sorted(names, key=dot_natural_key):
        renamed, pattern = rename_source_key(name, renamings, converters, prefix, state)
        if renamed not in state and name in state:
            renamed, pattern = rename_source_key(name, [], [], prefix, state)
        if renamed not in state or (pattern is None and renamed in recipes):
            continue
        if renamed not in recipes:
            recipes[renamed] = _new_recipe(renamed, of_pattern[pattern] if pattern is not None else None)
        recipes[renamed].sources.append((name, pattern or name))
    return {target: recipe for recipe in recipes.values() for target in recipe.targets if target in state}


def _new_recipe(first: str, converter: WeightConverter | None) -> Recipe:
    if converter is None:
        return Recipe((first,))
    lead = converter.target_patterns[0]
    targets = tuple(first.replace(lead, target) for target in converter.target_patterns)
    return Recipe(targets, converter=converter)


def _expert_views(
    out: torch.Tensor, groups: list[list[str]], shapes: Mapping[str, tuple[int, ...]]
) -> dict[str, torch.Tensor] | None:
    """Cut `out` [experts, rows, columns] into a view per source; groups follow each other along the rows."""
    if out.dim() < 2 or any(len(group) != out.shape[0] for group in groups):
        return None
    places: dict[str, torch.Tensor] = {}
    row = 0
    for group in groups:
        rows = shapes[group[0]][0] if shapes[group[0]] else 0
        if any(shapes[name] != (rows, *out.shape[2:]) for name in group) or row + rows > out.shape[1]:
            return None
        places.update({name: out[expert, row : row + rows] for expert, name in enumerate(group)})
        row += rows
    return places if row == out.shape[1] else None


def tied_groups(model: nn.Module) -> dict[str, list[str]]:
    """Return, for each name that the model's class ties to others, those others (the tie's source first).

    Names of one and the same object are tied as well.
    """
    ties: dict[str, str] = {}
    if isinstance(model, PreTrainedModel):
        ties = model.get_expanded_tied_weights_keys(all_submodels=True)
    groups: dict[str, list[str]] = defaultdict(list)
    for target, source in ties.items():
        groups[source].append(target)
    members = [[source, *targets] for source, targets in groups.items()]
    declared = {name: [other for other in group if other != name] for group in members for name in group}
    same: dict[int, list[str]] = defaultdict(list)
    for name, tensor in model.named_parameters(remove_duplicate=False):
        same[id(tensor)].append(name)
    shared = {name: [other for other in group if other != name] for group in same.values() for name in group}
    return {
        name: list(dict.fromkeys([*declared.get(name, ()), *shared.get(name, ())]))
        for name in (declared.keys() | shared.keys())
        if declared.get(name) or shared.get(name)
    }


def essential(model: nn.Module, names: Collection[str]) -> list[str]:
    """Keep the names that the model's class does not allow to be missing from a checkpoint."""
    optional = getattr(model, "_keys_to_ignore_on_load_missing", None) or ()
    return sorted(name for name in names if not any(re.search(pattern, name) for pattern in optional))
