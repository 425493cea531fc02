"""Refuses what diffusers can put around a model's modules and a node would not have.

Caches, compilation, adapters (LoRA) and offloading all wrap or change real blocks; at a gateway there are none.
"""

from __future__ import annotations

from torch import nn

from slicing.errors import ModelError


def refuse_hooks(model: nn.Module) -> None:
    """Raise `ModelError` for the first hook on the model or any module in it, with how to take it off."""
    _refuse_on_model(model)
    for path, module in model.named_modules():
        _refuse_on_module(f"module {path}" if path else "the model", module)


def refuse_late_hooks(model: nn.Module, blocks: nn.Module) -> None:
    """Raise `ModelError` for hooks that came after the blocks were replaced: on the model as a whole, or on a block."""
    _refuse_on_model(model)
    _refuse_on_module("the model", model)
    for number, block in enumerate(blocks.children()):
        _refuse_on_module(f"block {number}", block)


def _refuse_on_model(model: nn.Module) -> None:
    if getattr(model, "_cache_config", None) is not None:
        raise ModelError(f"{type(model).__name__} has a cache on; call disable_cache() first")
    if getattr(model, "peft_config", None):
        raise ModelError(f"{type(model).__name__} has an adapter (LoRA) loaded; unload it first")


def _refuse_on_module(place: str, module: nn.Module) -> None:
    own = vars(module)
    if own.get("_compiled_call_impl") is not None or "_orig_mod" in module._modules:
        raise ModelError(f"{place} is compiled; across nodes it runs uncompiled")
    if "lora_A" in module._modules or own.get("lora_layer") is not None:
        raise ModelError(f"{place} has an adapter (LoRA) loaded; unload it first")
    if "_hf_hook" in own:
        raise ModelError(f"{place} has an offload hook; call remove_all_hooks() of its pipeline first")
    if hooks := getattr(own.get("_diffusers_hook"), "hooks", None):
        raise ModelError(f"{place} has the hook {next(iter(hooks))!r} on; take it off first")
