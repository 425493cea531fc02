"""What sentence-transformers writes beside a model: how texts are prepared, and what becomes of their hidden states.

Without such files a model gets what its kind is trained for: the mean of all rows of an encoder, the last row of a
decoder, and vectors of length one. What cannot be honoured is refused by name. Runs no code of the folder.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import PretrainedConfig

from slicing.errors import ModelError
from slicing.json_object import read_json_object
from slicing.model_kind import ModelKind, kind_of
from slicing.pooling import ACTIVATIONS, Dense, Pooling, Step, VectorRecipe, normalize
from slicing.position_table import usable_positions
from slicing.tensor_file import read_tensor_ranges
from slicing.tensor_reader import TensorReader

MODULES_NAME = "modules.json"
MODES = {  # in the folder of the pooling module
    "pooling_mode_mean_tokens": Pooling.MEAN,
    "pooling_mode_cls_token": Pooling.CLS,
    "pooling_mode_lasttoken": Pooling.LAST,
    "pooling_mode_max_tokens": Pooling.MAX,
}
NAMED_MODES = {"mean": Pooling.MEAN, "cls": Pooling.CLS, "lasttoken": Pooling.LAST, "max": Pooling.MAX}
CUT_KEYS = ("matryoshka_dims", "matryoshka_dimensions")  # of config.json
LINEAR = ("linear.weight", "linear.bias")
MAX_MODULES = 16
MAX_DENSE = 1 << 14  # rows or columns of a dense layer


@dataclass(frozen=True)
class SentenceFiles:
    """How a model makes vectors of texts."""

    recipe: VectorRecipe
    max_tokens: int  # of a text: as the model was trained, and as its positions allow
    lower_case: bool = False
    prompt: str = field(default="", repr=False)  # before every text


def makes_vectors(folder: Path) -> bool:
    """Whether the folder's files say that the model in it makes vectors, whatever its class is called."""
    file = folder / MODULES_NAME
    return file.is_file() and any(_name(module) == "Pooling" for module in _modules(file))


def read_sentence_files(folder: Path, config: PretrainedConfig) -> SentenceFiles:
    """Read how texts become vectors. Raises `ModelError` that names what is not supported, or damaged."""
    size, file = int(config.get_text_config().hidden_size), folder / MODULES_NAME
    limit = usable_positions(config)
    if not file.is_file():
        pooling = Pooling.LAST if kind_of(config) is ModelKind.EMBEDDING else Pooling.MEAN
        return SentenceFiles(VectorRecipe(pooling, size, (normalize,), _cuts(config, size)), limit)
    found: Pooling | None = None
    steps: list[Step] = []
    for module in _modules(file):
        match _name(module):
            case "Transformer":
                continue
            case "Pooling" if found is None:
                found = _pooling(_own_folder(folder, module) / "config.json")
            case "Dense" if found is not None:
                dense = _dense(_own_folder(folder, module), size)
                size = dense.weight.shape[0]
                steps.append(dense)
            case "Normalize" if found is not None:
                steps.append(normalize)
            case name:
                raise ModelError(
                    f"{file} asks for a module {name[:40]!a} at this place, which is not supported"
                )
    if found is None:
        raise ModelError(f"{file} names no pooling: this model makes no vectors of texts")
    recipe = VectorRecipe(found, size, tuple(steps), _cuts(config, size))
    return _with_preparation(folder, recipe, limit)


def _modules(file: Path) -> list[Mapping[str, Any]]:
    try:
        modules = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(f"{file} is damaged: it is not valid JSON") from error
    if not isinstance(modules, list) or len(modules) > MAX_MODULES:
        raise ModelError(f"{file} is damaged: it holds no short list of modules")
    if not all(isinstance(module, dict) for module in modules):
        raise ModelError(f"{file} is damaged: it lists something that is no module")
    return modules


def _name(module: Mapping[str, Any]) -> str:
    """The class, without the package, which differs between versions."""
    return str(module.get("type")).rpartition(".")[2]


def _own_folder(folder: Path, module: Mapping[str, Any]) -> Path:
    path = str(module.get("path"))
    if Path(path).name != path or path in ("", "."):
        raise ModelError(f"{folder / MODULES_NAME} names {path[:80]!a}, which is no folder beside it")
    return folder / path


def _pooling(file: Path) -> Pooling:
    settings = read_json_object(file)
    if settings.get("include_prompt") is False:
        raise ModelError(f"{file} leaves the rows of a prompt out, which is not supported")
    named = settings.get("pooling_mode")
    asked = [key for key, value in settings.items() if key.startswith("pooling_mode_") and value is True]
    found = (
        NAMED_MODES.get(named) if isinstance(named, str) else MODES.get(asked[0]) if len(asked) == 1 else None
    )
    if found is None:
        told = named if named is not None else " and ".join(sorted(asked)) or "nothing"
        raise ModelError(
            f"{file} asks for {str(told)[:120]}; mean, first, last row and maximum are supported"
        )
    return found


def _dense(folder: Path, size: int) -> Dense:
    """Read a layer that takes vectors of `size`."""
    settings = read_json_object(folder / "config.json")
    name = str(settings.get("activation_function", "Tanh")).rpartition(".")[2]
    if name not in ACTIVATIONS:
        raise ModelError(f"{folder} has the activation {name[:40]!a}; {', '.join(ACTIVATIONS)} are supported")
    weights = folder / "model.safetensors"
    if not weights.is_file():
        raise ModelError(f"{folder} holds no model.safetensors; use a safetensors copy of the model")
    ranges = read_tensor_ranges(weights)
    shape = ranges[LINEAR[0]].shape if LINEAR[0] in ranges else ()
    if len(shape) != 2 or shape[1] != size or not 0 < shape[0] <= MAX_DENSE or not set(ranges) <= set(LINEAR):
        raise ModelError(f"{weights} holds no plain linear layer for vectors of {size}")
    if LINEAR[1] in ranges and ranges[LINEAR[1]].shape != (shape[0],):
        raise ModelError(f"{weights} holds a bias that does not fit its weight")
    read: dict[str, torch.Tensor] = {}
    with closing(TensorReader()) as reader:
        for key, where in ranges.items():
            read[key] = torch.empty(where.shape, dtype=torch.float32)
            reader.read_into(where, read[key])
    return Dense(read[LINEAR[0]], read.get(LINEAR[1]), ACTIVATIONS[name])


def _cuts(config: PretrainedConfig, size: int) -> frozenset[int]:
    """The numbers of dimensions that vectors may be cut to, by what config.json says of the training."""
    named = next((value for key in CUT_KEYS if (value := getattr(config, key, None))), None)
    if isinstance(named, list | tuple):
        return frozenset(number for number in named if type(number) is int and 0 < number <= size)
    return frozenset(range(1, size + 1)) if getattr(config, "is_matryoshka", False) is True else frozenset()


def _with_preparation(folder: Path, recipe: VectorRecipe, limit: int) -> SentenceFiles:
    own, told = folder / "sentence_bert_config.json", folder / "config_sentence_transformers.json"
    settings = read_json_object(own) if own.is_file() else {}
    prompts = read_json_object(told) if told.is_file() else {}
    trained, texts, name = (
        settings.get("max_seq_length"),
        prompts.get("prompts"),
        prompts.get("default_prompt_name"),
    )
    prompt = texts.get(name) if isinstance(texts, dict) and isinstance(name, str) else None
    return SentenceFiles(
        recipe,
        min(trained, limit) if type(trained) is int and trained > 0 else limit,
        settings.get("do_lower_case") is True,
        prompt if isinstance(prompt, str) else "",
    )
