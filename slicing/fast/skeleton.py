"""A model without weights, at its real sizes: what each layer is called with, and the tables of its rotations.

One token is run through it, with products that give zeros: shapes, scales and windows come out, no numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from torch.overrides import TorchFunctionMode
from transformers import PretrainedConfig, PreTrainedModel

from slicing.fast.fitting import expand_table
from slicing.fast.recipe import HIDDEN, POSITIONS, NotComposable, Rotary
from slicing.fast.tracing import Call, LayerTape, call_names, holds_experts, record, set_recorded
from slicing.stacks import (
    BlockStack,
    block_kinds,
    build_weightless,
    embedding_weight,
    find_stack,
    first_line,
    make_hollow,
)

FloatArray = NDArray[np.float32]
TABLE_ROWS = (
    256  # positions computed at once, always the same ones: vector code may round its rest differently
)
PROBED_POSITIONS = 8


class Skeleton:
    """A model's calls at its real sizes."""

    def __init__(self, model: PreTrainedModel, max_positions: int) -> None:
        """Take over a model whose weights are real, or hollow with an embedding of ones."""
        self.stack: BlockStack = find_stack(model)
        self.kinds = block_kinds(self.stack)
        self.settings = numeric_settings(model.config)
        set_recorded(model)
        tape = record(model, self.stack, torch.ones(1, 1, dtype=torch.int64))
        self.layers: Sequence[LayerTape] = tape.layers
        self.closing: Sequence[Call] = tape.closing
        self.hidden_size = tape.layers[0].hidden_in.shape[-1]
        self.opening_factor = float(tape.layers[0].hidden_in.flatten()[0])
        self.opening_factor /= float(embedding_weight(model)[1].flatten()[0])
        self.tables = RotaryTables(model, max_positions)

    def call_names(self, number: int) -> tuple[str, ...]:
        """Name a layer's calls in order."""
        return call_names(self.layers[number])

    @classmethod
    def of(cls, config: PretrainedConfig, max_positions: int) -> Skeleton:
        """Build it for a configuration. Raises `NotComposable` where the model's code does not run without weights."""
        try:
            return cls(_hollow(config), max_positions)
        except NotComposable:
            raise
        except Exception as error:  # stock code of any family, on weights that are none
            reason = f"{type(error).__name__}: {first_line(error)}"
            raise NotComposable(f"it does not run without weights: {reason}") from error


class RotaryTables:
    """Cosines and sines by position, for each way in which the model turns heads; filled as far as needed."""

    def __init__(self, model: PreTrainedModel, max_positions: int) -> None:
        self._model = model
        self._max_positions = max_positions
        self._tables: dict[Rotary, tuple[FloatArray, FloatArray]] = {}
        self._filled: dict[Rotary, int] = {}
        self._all_filled = 0

    def __call__(self, rotary: Rotary) -> tuple[FloatArray, FloatArray]:
        """Return tables [positions, dim], whose memory is only taken where it is filled.

        Raises `NotComposable` when what stands at a position depends on how many positions there are.
        """
        if rotary not in self._tables:
            self._refuse_growing(rotary)
            width = self._rows(rotary, np.arange(1))[0].shape[1]
            shape = (self._max_positions, width)
            self._tables[rotary] = (np.empty(shape, np.float32), np.empty(shape, np.float32))
            self._filled[rotary] = self._all_filled = 0
            self.fill(1)
        return self._tables[rotary]

    def fill(self, num_positions: int) -> None:
        """Make sure that the tables hold positions [0, num_positions)."""
        if num_positions <= self._all_filled:
            return
        for rotary, tables in self._tables.items():
            while self._filled[rotary] < num_positions:
                first = self._filled[rotary]
                last = min(first + TABLE_ROWS, self._max_positions)
                made = self._rows(rotary, np.arange(first, last))
                for table, rows in zip(tables, made, strict=True):
                    table[first:last] = rows
                self._filled[rotary] = last
        self._all_filled = min(self._filled.values(), default=num_positions)

    def _rows(self, rotary: Rotary, positions: NDArray[np.int64]) -> tuple[FloatArray, FloatArray]:
        stand_ins: dict[object, Any] = {
            HIDDEN: torch.zeros(1, 1, 1),
            POSITIONS: torch.from_numpy(positions).unsqueeze(0),
        }
        module = self._model.get_submodule(rotary.module)
        with torch.no_grad(), _ExactWaves():
            cos, sin = module(
                *(_filled_in(value, stand_ins) for value in rotary.arguments),
                **{name: _filled_in(value, stand_ins) for name, value in rotary.named_arguments},
            )
        return (
            expand_table(cos[0].float().numpy(), rotary.form.expansion),
            expand_table(sin[0].float().numpy(), rotary.form.expansion),
        )

    def _refuse_growing(self, rotary: Rotary) -> None:
        near = np.arange(PROBED_POSITIONS)
        alone = self._rows(rotary, near)
        with_far = self._rows(rotary, np.append(near, self._max_positions - 1))
        for mine, theirs in zip(alone, with_far, strict=True):
            if not np.array_equal(mine, theirs[:PROBED_POSITIONS]):
                raise NotComposable("its rotary table depends on the length of the run")


class _ExactWaves(TorchFunctionMode):
    """Computes cosines and sines in float64, so that their bits are the same on every machine."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in _WAVES and not kwargs and args[0].dtype == torch.float32:
            return func(args[0].double()).float()
        return func(*args, **(kwargs or {}))


_WAVES = frozenset((torch.cos, torch.sin, torch.Tensor.cos, torch.Tensor.sin))


def numeric_settings(config: PretrainedConfig) -> dict[str, float]:
    """Return the numbers of a text model's configuration by name, zeros left out."""
    settings = config.get_text_config(decoder=True).to_dict()
    return {
        name: float(value)
        for name, value in settings.items()
        if isinstance(value, int | float) and not isinstance(value, bool) and value
    }


def _hollow(config: PretrainedConfig) -> PreTrainedModel:
    """Build a model of zeros, but for the embedding: what enters the first block is then the opening's factor."""
    model = build_weightless(config, torch.float32)
    make_hollow(model, "cpu")
    ones = torch.ones(()).expand(embedding_weight(model).shape)
    model.get_input_embeddings()._parameters["weight"] = nn.Parameter(ones, requires_grad=False)
    for module in model.modules():
        if type(module) is nn.Linear:
            module.forward = _zeros_of(module.out_features)  # type: ignore[method-assign, assignment]
        elif holds_experts(module):
            module.forward = lambda hidden, *_args, **_named: torch.zeros_like(hidden)
    return model


def _zeros_of(width: int) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda rows: torch.zeros(*rows.shape[:-1], width)


def _filled_in(value: object, stand_ins: Mapping[object, Any]) -> Any:
    return stand_ins[value] if isinstance(value, str) and value in stand_ins else value
