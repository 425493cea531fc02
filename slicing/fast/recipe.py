"""What a decoder does, as a list of operations with the names of the parts that they come from.

Plain records, free of sizes and of weights: one recipe holds for the miniature it was learned from and for the real
model (see `explaining` and `composing`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from slicing.fast.fitting import GateForm, NormForm, RotaryForm, RouteForm

HIDDEN, POSITIONS = "<hidden states>", "<positions>"
PartName = Literal["query", "key", "value", "first", "second", "even", "odd"]


class NotComposable(Exception):
    """The model does something that no operation here does; the text says what."""


@dataclass(frozen=True)
class Part:
    """Some columns of a product that several were joined in."""

    name: PartName
    is_grouped: bool = (
        False  # query, key, value: per key/value head, as in [kv heads, its queries | key | value, dim]
    )


@dataclass(frozen=True)
class Source:
    """What an operation takes: value 0 is what came in, value n what step n - 1 made."""

    value: int
    part: Part | None = None


@dataclass(frozen=True)
class Factor:
    """A number that a term is multiplied with: 1, or a setting of the configuration (or one over it)."""

    setting: str | None = None
    is_inverse: bool = False

    def of(self, settings: Mapping[str, float]) -> float:
        """Return the number."""
        if self.setting is None:
            return 1.0
        value = float(settings[self.setting])
        return 1 / value if self.is_inverse else value


@dataclass(frozen=True)
class Rotary:
    """A rotation by the tables that one of the model's modules makes."""

    module: str  # its name in the model
    arguments: tuple[object, ...]  # what it is called with; HIDDEN and POSITIONS stand for tensors
    named_arguments: tuple[tuple[str, object], ...]
    form: RotaryForm


@dataclass(frozen=True)
class Turned:
    """A source, turned first where there is a rotation."""

    source: Source
    rotary: Rotary | None = None


@dataclass(frozen=True)
class Norm:
    """A norm of whole rows or of heads."""

    call: int  # its number among the calls of the layer
    module: str
    source: Turned
    form: NormForm

    @property
    def sources(self) -> tuple[Source, ...]:
        """What it takes."""
        return (self.source.source,)


@dataclass(frozen=True)
class Linear:
    """A product with a weight."""

    call: int
    module: str
    source: Source
    is_transposed: bool  # the stored weight is [inputs, outputs]

    @property
    def sources(self) -> tuple[Source, ...]:
        """What it takes."""
        return (self.source,)


@dataclass(frozen=True)
class Attention:
    """Causal attention. `window`: "argument" (of the call), the name of a setting, or None."""

    call: int
    query: Turned
    key: Turned
    value: Source
    window: str | None
    sinks: str | None  # the parameter's name in the block

    @property
    def sources(self) -> tuple[Source, ...]:
        """What it takes."""
        return (self.query.source, self.key.source, self.value)


@dataclass(frozen=True)
class Gate:
    """act(gate) * up."""

    gate: Source
    up: Source
    activation: str

    @property
    def sources(self) -> tuple[Source, ...]:
        """What it takes."""
        return (self.gate, self.up)


@dataclass(frozen=True)
class Activate:
    """An activation."""

    source: Source
    activation: str

    @property
    def sources(self) -> tuple[Source, ...]:
        """What it takes."""
        return (self.source,)


@dataclass(frozen=True)
class Sum:
    """A sum of values, each with a factor."""

    terms: tuple[tuple[Source, Factor], ...]

    @property
    def sources(self) -> tuple[Source, ...]:
        """What it takes."""
        return tuple(source for source, _ in self.terms)


@dataclass(frozen=True)
class Route:
    """The choice of experts. `bias` counts for the choice only; of `groups` of experts, `top_groups` are looked at."""

    call: int
    module: str
    source: Source
    form: RouteForm
    bias: str | None = None  # the tensor's name in the block
    groups: str | None = None  # names of settings
    top_groups: str | None = None
    factor: Factor = Factor()

    @property
    def sources(self) -> tuple[Source, ...]:
        """What it takes."""
        return (self.source,)


@dataclass(frozen=True)
class Experts:
    """The chosen experts' gated products, added up. Weights are [experts, outputs, inputs] or the last two swapped."""

    call: int
    module: str
    source: Source
    routes: Source
    gate_up: str  # names of the parameters in the module
    down: str
    gate_up_bias: str | None
    down_bias: str | None
    is_transposed: bool
    form: GateForm

    @property
    def sources(self) -> tuple[Source, ...]:
        """What it takes."""
        return (self.source, self.routes)


Step = Norm | Linear | Attention | Gate | Activate | Sum | Route | Experts


@dataclass(frozen=True)
class LayerRecipe:
    """One kind of layer: its steps, and which value goes on to the next layer."""

    steps: tuple[Step, ...]
    result: int
    call_names: tuple[str, ...] = field(repr=False)  # what the calls' numbers stand for


@dataclass(frozen=True)
class ClosingRecipe:
    """What follows the last layer: steps, then the logits' factor and cap."""

    steps: tuple[Step, ...]
    result: int
    factor: Factor
    softcap: Factor | None  # a setting's value


@dataclass(frozen=True)
class ModelRecipe:
    """A whole decoder. The opening's factor is None where it is more than a look-up in the table of tokens."""

    layers: Mapping[object, LayerRecipe]  # by kind of block
    closing: ClosingRecipe
    is_plain_opening: bool
