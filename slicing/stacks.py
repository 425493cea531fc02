"""Builds a model without weights and finds its block stack, by shape: no list of families.

Knows nothing of how a call is cut (`block_slice`) or of where weights come from (`weights`).
"""

from __future__ import annotations

import copy
import inspect
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import cast

import torch
from torch import nn
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForMultimodalLM,
    AutoModelForSeq2SeqLM,
    AutoModelForSpeechSeq2Seq,
    AutoModelForTextToWaveform,
    PretrainedConfig,
    PreTrainedModel,
)
from transformers.initialization import no_init_weights
from transformers.models.auto.modeling_auto import MODEL_MAPPING

from slicing.errors import ModelError
from slicing.model_kind import ModelKind, kind_of, shape_of

MIN_BLOCKS = 2
# transformers turns initialisation off and on for the whole process: two threads at once would leave it off for good.
BUILDING = threading.RLock()
BUILDERS = {
    ModelKind.TEXT: AutoModelForCausalLM,
    ModelKind.MULTIMODAL: AutoModelForMultimodalLM,
    ModelKind.SEQ2SEQ: AutoModelForSeq2SeqLM,
    ModelKind.SPEECH: AutoModelForSpeechSeq2Seq,
    ModelKind.MUSIC: AutoModelForTextToWaveform,
    ModelKind.ENCODER: AutoModel,
    ModelKind.EMBEDDING: AutoModel,
}
_IS_INITIALIZED = "_is_hf_initialized"  # the mark by which transformers leaves a tensor or module alone


class CannotCut(ModelError):
    """This model cannot be cut so that the slices compute exactly what the whole model does; the text says why."""


@dataclass(frozen=True)
class BlockStack:
    """The list of blocks that is cut, and its name in the model (such as "model.layers")."""

    name: str
    blocks: tuple[nn.Module, ...]

    def __len__(self) -> int:
        return len(self.blocks)

    def layer_of(self, parameter_name: str) -> int | None:
        """Return the global number of the block that a parameter belongs to; None outside the stack."""
        rest = parameter_name.removeprefix(self.name + ".")
        if rest == parameter_name:
            return None
        return int(rest.partition(".")[0])


def build_weightless(config: PretrainedConfig, dtype: torch.dtype) -> PreTrainedModel:
    """Build the stock model for `config`, of the class that its kind asks for.

    Parameters are on the meta device, computed buffers real.

    Buffers that no checkpoint holds (rotary frequencies, embedding scales) are computed on the CPU by the class's own
    initialisation, as stock loading does it. While a model is built, `dtype` is the default type of the whole process:
    for one other than float32 call this where nothing computes. Raises `CannotCut` when transformers has no such class.
    """
    config = copy.deepcopy(config)
    try:
        with BUILDING, torch.device("meta"), no_init_weights():
            model = new_model(config, dtype)
    except (ValueError, TypeError, KeyError, AttributeError, ImportError, AssertionError) as error:
        raise CannotCut(
            f"transformers builds no {_NAMES[kind_of(config)]} from a {type(config).__name__}: {first_line(error)}"
        ) from error
    with BUILDING:
        model.tie_weights()
        _compute_buffers(model)
    lend_tables(model)
    return model.eval().requires_grad_(False)


def new_model(config: PretrainedConfig, dtype: torch.dtype) -> PreTrainedModel:
    """Build a stock model of the class that `config` asks for. Raises what transformers raises."""
    kind = kind_of(config)
    kwargs = {"add_pooling_layer": False} if kind is ModelKind.ENCODER and _has_pooler(config) else {}
    return BUILDERS[kind].from_config(config, dtype=dtype, **kwargs)


def lend_tables(model: PreTrainedModel) -> None:
    """Give every block of an encoder-decoder's stack the small tables that only its first one has.

    T5's first block owns the table of relative positions and hands the biases that it makes of it to the others. With
    the table at hand the first block of any slice makes them itself. Nothing changes for blocks that are handed some.
    """
    if not kind_of(model.config).has_memory:
        return
    try:
        stack = find_stack(model)
    except CannotCut:
        return  # whoever looks for the stack is told why
    first = dict(stack.blocks[0].named_modules())
    for block in stack.blocks[1:]:
        own = dict(block.named_modules())
        for path in first.keys() - own.keys():
            owner, _, leaf = path.rpartition(".")
            if owner in own:
                setattr(own[owner], leaf, first[path])
                for key, value in vars(first[owner]).items():
                    if isinstance(value, bool) and value and key != "training":
                        setattr(own[owner], key, value)


def find_stack(model: PreTrainedModel) -> BlockStack:
    """Find the list of blocks: the largest `ModuleList` that is as long as the configuration says.

    Of a model with an encoder before its decoder only the decoder's are looked at. Where the class declares a pipeline
    plan, the list it names wins. Raises `CannotCut` when there is none.
    """
    try:
        num_layers: int | None = shape_of(model.config).num_layers
    except (AttributeError, TypeError):
        num_layers = None
    within = _decoder_name(model)
    lists = {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, nn.ModuleList) and (not within or name.startswith(within + "."))
    }
    planned = set(getattr(model.base_model, "_pp_plan", None) or ())
    candidates = [
        (name.rpartition(".")[2] in planned, sum(p.numel() for p in module.parameters()), name)
        for name, module in lists.items()
        if len(module) == num_layers and len(module) >= MIN_BLOCKS
    ]
    if not candidates:
        raise CannotCut(f"{type(model).__name__} has no list of {num_layers} blocks to cut")
    name = max(candidates)[2]
    return BlockStack(name, tuple(lists[name]))


def embedding_weight(model: PreTrainedModel) -> torch.Tensor:
    """Return the table of input embeddings [vocab, width], of a decoder's own where there are two.

    Raises `CannotCut` when there is none.
    """
    decoder = model.get_decoder() if kind_of(model.config).has_memory else model
    weight = getattr(decoder.get_input_embeddings(), "weight", None)
    if not isinstance(weight, torch.Tensor):  # one for each of several streams
        tables = [module for module in decoder.modules() if type(module) is nn.Embedding]
        weight = tables[0].weight if tables else None
    if not isinstance(weight, torch.Tensor):
        raise CannotCut(f"{type(model).__name__} has no table of input embeddings")
    return weight


def first_line(error: BaseException) -> str:
    """Return the beginning of a foreign error's text, which may run over pages."""
    return str(error).strip().partition("\n")[0][:200]


def block_kinds(stack: BlockStack) -> list[tuple[object, ...]]:
    """Tell the blocks of a stack apart: two of a kind compare equal.

    A kind is the classes and parameter names in a block plus its switches (attention type, whether it has a window);
    widths do not count, so that a miniature's kinds can be compared with the real model's.
    """
    numbers = [dict(block_numbers(block)) for block in stack.blocks]
    flags = {
        name
        for name in numbers[0]
        if {numbers_of.get(name) for numbers_of in numbers} == {0, 1} and len(stack) > len({0, 1})
    }
    return [
        (*_switches(block), *((name, own[name]) for name in sorted(flags)))
        for block, own in zip(stack.blocks, numbers, strict=True)
    ]


def block_numbers(block: nn.Module) -> Iterable[tuple[str, float]]:
    """Yield the numbers that a block's modules hold as attributes, by path and name."""
    for path, module in block.named_modules():
        for key, value in vars(module).items():
            if isinstance(value, int | float) and not isinstance(value, bool):
                yield f"{path}.{key}", value


def set_tensor(model: nn.Module, name: str, tensor: torch.Tensor) -> None:
    """Put `tensor` in the place of a model's parameter or buffer."""
    path, _, leaf = name.rpartition(".")
    module = model.get_submodule(path)
    if leaf in module._buffers:
        module._buffers[leaf] = tensor
        return
    module._parameters[leaf] = (
        tensor if isinstance(tensor, nn.Parameter) else nn.Parameter(tensor, requires_grad=False)
    )


def share_tensors(part: PreTrainedModel, whole: PreTrainedModel, wanted: Callable[[str], bool]) -> None:
    """Give `part` (weightless) those stored tensors of `whole` whose name satisfies `wanted`, without a copy."""
    tensors = dict(whole.named_parameters(remove_duplicate=False)) | dict(
        whole.named_buffers(remove_duplicate=False)
    )
    shared: dict[int, nn.Parameter] = {}  # one for each tensor, so that tied names stay tied
    aliases = names_of_one_tensor(part)
    for name in persistent_names(part):
        if wanted(name):
            tensor = next(tensors[alias] for alias in aliases[name] if alias in tensors)
            if isinstance(tensor, nn.Parameter):
                tensor = shared.setdefault(id(tensor), nn.Parameter(tensor.detach(), requires_grad=False))
            set_tensor(part, name, tensor)


def make_hollow(model: nn.Module, device: torch.device | str) -> None:
    """Give every tensor that is still on the meta device the memory of a single zero.

    The model's own code can then run over parts that are not held; what it makes of them is never used.
    """
    for name, tensor in [*model.named_parameters(remove_duplicate=False), *model.named_buffers()]:
        if tensor.is_meta:
            zero = torch.zeros((), dtype=tensor.dtype, device=device)
            set_tensor(model, name, zero.expand(tensor.shape))


def persistent_names(model: PreTrainedModel) -> set[str]:
    """Return the names of the parameters and buffers that a checkpoint holds, tied names included."""
    computed = {name for name, _ in model.named_non_persistent_buffers(remove_duplicate=False)}
    named = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    return {name for name, _ in named} - computed


def names_of_one_tensor(model: nn.Module) -> dict[str, list[str]]:
    """Return, for each name of a parameter or buffer, all names of that very object, its own first."""
    names: dict[int, list[str]] = {}
    named = [
        *model.named_parameters(remove_duplicate=False),
        *model.named_buffers(remove_duplicate=False),
    ]
    for name, tensor in named:
        names.setdefault(id(tensor), []).append(name)
    return {
        name: [name, *(other for other in group if other != name)]
        for group in names.values()
        for name in group
    }


def _decoder_name(model: PreTrainedModel) -> str:
    """Where the blocks are looked for; "": anywhere."""
    if kind_of(model.config) in (ModelKind.TEXT, ModelKind.ENCODER, ModelKind.EMBEDDING):
        return ""
    decoder = model.get_decoder()
    return next((name for name, module in model.named_modules() if module is decoder), "")


def _has_pooler(config: PretrainedConfig) -> bool:
    """Whether the class would bring a layer that only classifiers use, and that checkpoints may lack."""
    return "add_pooling_layer" in inspect.signature(cast(type, MODEL_MAPPING[type(config)])).parameters


_NAMES = {
    ModelKind.TEXT: "causal language model",
    ModelKind.MULTIMODAL: "multimodal language model",
    ModelKind.SEQ2SEQ: "sequence-to-sequence model",
    ModelKind.SPEECH: "speech recognition model",
    ModelKind.MUSIC: "music model",
    ModelKind.ENCODER: "encoder",
    ModelKind.EMBEDDING: "headless model",
}


def _compute_buffers(model: PreTrainedModel) -> None:
    for name, buffer in list(model.named_non_persistent_buffers()):
        if buffer.is_meta:
            set_tensor(model, name, torch.empty_like(buffer, device="cpu"))
    for name, parameter in list(model.named_parameters()):
        if not parameter.is_meta:  # a few classes draw some on the CPU whatever the default device
            set_tensor(model, name, torch.empty_like(parameter, device="meta"))
    for tensor in [*model.parameters(), *model.buffers()]:
        setattr(
            tensor, _IS_INITIALIZED, tensor.is_meta
        )  # transformers then draws no weights, only fills buffers
    for module in model.modules():
        setattr(module, _IS_INITIALIZED, False)
    model.initialize_weights()


def _switches(block: nn.Module) -> Iterable[object]:
    for path, module in block.named_modules():
        yield path, type(module).__name__
        yield from (name for name, _ in module.named_parameters(recurse=False))
        for key, value in sorted(vars(module).items()):
            if isinstance(value, bool | str) and not key.startswith("_"):
                yield key, value
            elif value is None or isinstance(value, int):
                yield key, value is None
