"""The conversion of one GGUF file into a safetensors folder: a program of its own, run by `gguf`.

Takes the steps of transformers' own GGUF loading (names, dequantisation, the families' reorderings), but
writes every tensor as it is made, as float32, instead of building the model. Families that transformers
reads through its older loader are unpacked in memory first: the peak is then the float32 model and the
mapped file.
"""

from __future__ import annotations

import functools
import json
import os
import sys
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import gguf
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig, PretrainedConfig
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.quantizers.quantizer_gguf import GgufHfQuantizer
from transformers.utils.quantization_config import GgufConfig

from slicing.errors import ModelError
from slicing.tensor_file import write_tensors
from slicing.tensor_plan import Recipe, essential, plan_tensors, tied_groups


def main() -> int:
    """Convert `argv[1]` into the folder `argv[2]`; tells its progress on stdout, ends when stdin closes."""
    threading.Thread(target=_end_with_parent, daemon=True).start()
    _remember_what_is_slow()
    try:
        convert(Path(sys.argv[1]), Path(sys.argv[2]))
    except Exception as error:  # the readers raise whatever they raise; the parent shows the last line
        sys.stderr.write(f"{type(error).__name__}: {' '.join(str(error).split())}\n")
        return 1
    return 0


def convert(file: Path, folder: Path) -> None:
    """Write config, generation config, tokenizer and weights of `file` into the new folder `folder`."""
    folder.mkdir(parents=True)
    config = AutoConfig.from_pretrained(file.parent, gguf_file=file.name, local_files_only=True)
    tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name, local_files_only=True)
    tokenizer.save_pretrained(folder)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    _write_weights(file, model, folder / "model.safetensors")
    GenerationConfig.from_model_config(config).save_pretrained(folder)
    _write_config(config, type(model).__name__, folder / "config.json")


def _write_weights(file: Path, model: nn.Module, target: Path) -> None:
    held, recipes = _read_gguf(file, model)
    needed = list({id(recipe): recipe for recipe in recipes.values()}.values())
    shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items() if name in recipes}
    total = sum(4 * torch.Size(shape).numel() for shape in shapes.values())
    done = 0
    for size in write_tensors(target, shapes, _make(needed, held, model)):
        done += size
        sys.stdout.write(f"{done} {total}\n")
        sys.stdout.flush()


def _read_gguf(file: Path, model: Any) -> tuple[dict[str, Any], Mapping[str, Recipe]]:
    """Return the file's tensors (read when indexed, where transformers can) and the model's recipes."""
    reader = GgufHfQuantizer(GgufConfig(dequantize=True))
    reader.read_header(str(file))
    reader.update_dtype(torch.float32)
    reader._process_model_before_weight_loading(model)
    held = dict(reader.get_state_dict(str(file), model))
    transforms = reader.update_weight_conversions(get_model_conversion_mapping(model), model)
    recipes = plan_tensors(model, held, transforms)
    aliases = tied_groups(model)
    missing = [name for name in model.state_dict() if not {name, *aliases.get(name, ())} & recipes.keys()]
    if lost := essential(model, missing):
        raise ModelError(f"{file.name} holds no tensor for {lost[0]}")
    return held, recipes


def _make(
    recipes: list[Recipe], held: dict[str, Any], model: nn.Module
) -> Iterator[tuple[str, torch.Tensor]]:
    """Convert recipe by recipe; what has been used is let go."""
    known = model.state_dict().keys()
    for recipe in recipes:
        parts = [held.pop(name)[...] for name in recipe.source_names]
        made = recipe.convert(parts, model)
        yield from ((name, tensor) for name, tensor in made.items() if name in known)


def _write_config(config: PretrainedConfig, architecture: str, file: Path) -> None:
    values = config.to_dict() | {"architectures": [architecture], "dtype": "float32"}
    for key in ("quantization_config", "_name_or_path", "_model_name_or_path"):
        values.pop(key, None)
    file.write_text(json.dumps(values, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def _remember_what_is_slow() -> None:
    """Keep what transformers' older loader makes anew at every use, in this process of one file.

    The file is parsed three times, its vocabulary included, and the table of names is built once a module: two
    thirds of the time of a small model.
    """
    gguf.GGUFReader = functools.cache(gguf.GGUFReader)  # type: ignore[assignment, misc]
    gguf.get_tensor_name_map = functools.cache(gguf.get_tensor_name_map)


def _end_with_parent() -> None:
    sys.stdin.read()
    os._exit(1)


if __name__ == "__main__":
    sys.exit(main())
