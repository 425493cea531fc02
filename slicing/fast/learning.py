"""Learns what a decoder does from a miniature of it, and remembers it per configuration.

The recipe is only trusted once the miniature's steps agree with the stock model's (see `check`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from transformers import PretrainedConfig, PreTrainedModel

from slicing.fast.explaining import (
    NUM_FIRST_ROWS,
    NUM_RUN_ROWS,
    SHRUNK,
    explain_closing,
    explain_layer,
)
from slicing.fast.fitting import is_close
from slicing.fast.recipe import LayerRecipe, ModelRecipe, NotComposable
from slicing.fast.skeleton import numeric_settings
from slicing.fast.tracing import ModelTape, record, rotary_calls, set_recorded
from slicing.miniature import build_miniature
from slicing.stacks import CannotCut, block_kinds, embedding_weight, find_stack, first_line


@dataclass(frozen=True)
class Learned:
    """A recipe and the miniature that it was learned from."""

    recipe: ModelRecipe
    miniature: PreTrainedModel = field(repr=False)


def learn(config: PretrainedConfig) -> Learned:
    """Learn the recipe of models of this configuration. Raises `NotComposable` with the reason."""
    try:
        miniature = build_miniature(config)
        return Learned(_explain(miniature, config), miniature)
    except NotComposable:
        raise
    except CannotCut as error:
        raise NotComposable(str(error)) from error
    except Exception as error:  # stock code of any family, on inputs of our making
        raise NotComposable(f"its miniature fails: {type(error).__name__}: {first_line(error)}") from error


def _explain(model: PreTrainedModel, config: PretrainedConfig) -> ModelRecipe:
    settings = _shared_settings(model.config, config)
    implementation = model.config._attn_implementation
    stack, kinds = find_stack(model), block_kinds(find_stack(model))
    vocab_size = embedding_weight(model).shape[0]
    token_ids = torch.arange(max(NUM_FIRST_ROWS, NUM_RUN_ROWS)) * 7 % (vocab_size - 4) + 4
    set_recorded(model)
    try:
        first = record(model, stack, token_ids[:NUM_FIRST_ROWS, None])
        run = record(model, stack, token_ids[None, :NUM_RUN_ROWS])
    finally:
        for changed in (model.config, model.config.get_text_config(decoder=True)):
            changed._attn_implementation = implementation
    layers: dict[object, LayerRecipe] = {}
    rotaries = rotary_calls(run)
    for block, kind, one, other in zip(stack.blocks, kinds, first.layers, run.layers, strict=True):
        recipe = explain_layer(one, other, block, rotaries, settings)
        if layers.setdefault(kind, recipe) != recipe:
            raise NotComposable("two layers of a kind do different things")
    hidden = first.layers[-1].hidden_out, run.layers[-1].hidden_out
    assert hidden[0] is not None
    assert hidden[1] is not None
    assert first.logits is not None
    assert run.logits is not None
    closing = explain_closing(
        (hidden[0], hidden[1]), (first.closing, run.closing), (first.logits, run.logits), settings
    )
    is_plain = _is_plain_opening(first, embedding_weight(model)) and _is_plain_opening(
        run, embedding_weight(model)
    )
    return ModelRecipe(layers, closing, is_plain)


def _is_plain_opening(tape: ModelTape, table: torch.Tensor) -> bool:
    """Tell whether what enters the first block is the tokens' rows of the table, times one number."""
    rows = table[tape.token_ids.reshape(-1)].double().numpy()
    hidden = tape.layers[0].hidden_in
    if hidden.shape[-1] != table.shape[-1]:
        return False
    entered = hidden.double().reshape(rows.shape).numpy()
    factor = float((rows * entered).sum() / (rows * rows).sum())
    return is_close(rows * factor, entered)


def _shared_settings(small: PretrainedConfig, real: PretrainedConfig) -> Mapping[str, float]:
    """Return the numbers that mean the same in the miniature and in the model; windows also where they were cut."""
    mine, theirs = numeric_settings(small), numeric_settings(real)
    return {
        name: value
        for name, value in mine.items()
        if theirs.get(name) == value or any(word in name for word in SHRUNK)
    }
