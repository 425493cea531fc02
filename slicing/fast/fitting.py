"""Tells by values which operation a part of a model is: a norm, a product, a gate, a rotation, a sum.

Every function is given what went in and what came out, as float64 arrays, and tries the forms there are. Knows nothing
of modules' names.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from torch.nn import functional

Array = NDArray[np.float64]
Layout = Literal["halves", "alternating"]

TOLERANCE = 2e-5  # of the largest value: stock code computes in float32
SMALL_INPUT = 1e-3  # makes a norm's epsilon of 1e-6 count
LARGEST_EPSILON = 1e-2
USUAL_EPSILONS = (1e-6, 1e-5)  # for classes that name theirs nowhere

ACTIVATIONS: Mapping[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": functional.silu,
    "gelu_tanh": lambda x: functional.gelu(x, approximate="tanh"),
    "gelu": functional.gelu,
    "relu": functional.relu,
    "relu2": lambda x: functional.relu(x) ** 2,
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
    "quick_gelu": lambda x: x * torch.sigmoid(1.702 * x),
}


def is_close(mine: Array, theirs: Array) -> bool:
    """Tell whether two arrays are equal up to float32's rounding."""
    if mine.shape != theirs.shape:
        return False
    size = float(np.abs(theirs).max(initial=0.0))
    return bool(np.abs(mine - theirs).max(initial=0.0) <= TOLERANCE * max(size, 1e-30))


def activate(name: str, values: Array) -> Array:
    """Return an activation of values."""
    return ACTIVATIONS[name](torch.from_numpy(np.ascontiguousarray(values))).numpy()


def factor_between(mine: Array, theirs: Array) -> float | None:
    """Return f with theirs = f * mine, None when there is none."""
    if mine.shape != theirs.shape:
        return None
    size = float((mine * mine).sum())
    factor = float((mine * theirs).sum()) / size if size else 0.0
    if factor and is_close(mine * factor, theirs):
        return 1.0 if abs(factor - 1) < TOLERANCE else factor
    return None


NormKind = Literal["rms", "layer"]
Style = Literal["half", "interleaved"]
Expansion = Literal["whole", "joined", "repeated", "first_repeated"]
RouteMode = Literal["softmax_then_topk", "topk_then_softmax", "sigmoid_then_topk"]
NORM_KINDS: tuple[NormKind, ...] = get_args(NormKind)
STYLES: tuple[Style, ...] = get_args(Style)
EXPANSIONS: tuple[Expansion, ...] = get_args(Expansion)
ROUTE_MODES: tuple[RouteMode, ...] = get_args(RouteMode)


@dataclass(frozen=True)
class NormForm:
    """How a norm computes: y = x / size(x) * (weight + offset) + bias."""

    kind: NormKind
    epsilon: float
    offset: float  # 1 where the stored weight is what is added to 1
    has_weight: bool
    has_bias: bool
    width: int


def fit_norm(module: nn.Module, given: torch.Tensor, made: torch.Tensor) -> NormForm | None:
    """Tell which norm over the last dimension a module is."""
    width = given.shape[-1]
    if given.shape != made.shape:
        return None
    weight = _vector(module, "weight", width)
    bias = _vector(module, "bias", width)
    if any(parameter.shape != (width,) for parameter in module.parameters()):
        return None
    small = given * SMALL_INPUT
    with torch.no_grad():
        made_small = module(small)
    offsets = (0.0, 1.0) if weight is not None else (0.0,)
    for kind, epsilon, offset in itertools.product(NORM_KINDS, _epsilons(module), offsets):
        form = NormForm(kind, epsilon, offset, weight is not None, bias is not None, width)
        if all(
            is_close(apply_norm(form, _array(x), weight, bias), _array(y))
            for x, y in ((given, made), (small, made_small))
        ):
            return form
    return None


def apply_norm(form: NormForm, values: Array, weight: Array | None, bias: Array | None) -> Array:
    """Return the norm of values [..., width]."""
    if form.kind == "layer":
        values = values - values.mean(-1, keepdims=True)
    values = values / np.sqrt((values * values).mean(-1, keepdims=True) + form.epsilon)
    if weight is not None:
        values = values * (weight + form.offset)
    return values + bias if bias is not None else values


def fit_product(module: nn.Module, given: Array, made: Array) -> bool | None:
    """Tell whether made = given @ weight.T + bias (False) or given @ weight + bias (True: transposed)."""
    weight, bias = getattr(module, "weight", None), getattr(module, "bias", None)
    if not isinstance(weight, torch.Tensor) or weight.ndim != 2:
        return None
    matrix, extra = _array(weight), 0.0 if bias is None else _array(bias)
    for transposed in (False, True):
        held = matrix.T if transposed else matrix
        if held.shape == (made.shape[-1], given.shape[-1]) and is_close(given @ held.T + extra, made):
            return transposed
    return None


@dataclass(frozen=True)
class GateForm:
    """act(gate) * up; oss_swiglu also clamps at `limit` and takes `alpha`."""

    activation: str
    layout: Layout = "halves"
    alpha: float = 0.0
    limit: float = 0.0


def apply_gate(form: GateForm, gate: Array, up: Array) -> Array:
    """Return the gated values."""
    if form.activation != "oss_swiglu":
        return activate(form.activation, gate) * up
    gate = np.minimum(gate, form.limit)
    return (np.clip(up, -form.limit, form.limit) + 1) * gate / (1 + np.exp(-form.alpha * gate))


def halves_of(values: Array, layout: Layout) -> tuple[Array, Array]:
    """Take values [..., 2n] apart into gate and up."""
    if layout == "alternating":
        return values[..., ::2], values[..., 1::2]
    middle = values.shape[-1] // 2
    return values[..., :middle], values[..., middle:]


@dataclass(frozen=True)
class RotaryForm:
    """How a table of positions turns the first `dim` of each head."""

    style: Style
    expansion: Expansion  # of the model's table to [rows, dim]


def fit_rotary(before: Array, after: Array, cos: Array, sin: Array) -> RotaryForm | None:
    """Tell how tables [rows, n] turn `before` [rows, heads, dim] into `after`."""
    for expansion, style in itertools.product(EXPANSIONS, STYLES):
        form = RotaryForm(style, expansion)
        c, s = expand_table(cos, expansion), expand_table(sin, expansion)
        if c.shape[-1] <= before.shape[-1] and is_close(turn(before, c, s, style), after):
            return form
    return None


def expand_table(table: NDArray[Any], expansion: str) -> NDArray[Any]:
    """Return the table [rows, dim] that belongs to whole heads, from the model's own [rows, n]."""
    if expansion == "joined":
        return np.concatenate((table, table), axis=-1)
    if expansion == "repeated":
        return np.repeat(table, 2, axis=-1)
    if expansion == "first_repeated":
        return np.repeat(table[..., : table.shape[-1] // 2], 2, axis=-1)
    return table


def turn(values: Array, cos: Array, sin: Array, style: str) -> Array:
    """Return values [rows, heads, dim] turned by tables [rows, up to dim]."""
    dim = cos.shape[-1]
    part = values[..., :dim]
    turned = np.empty_like(part)
    if style == "half":
        turned[..., : dim // 2], turned[..., dim // 2 :] = -part[..., dim // 2 :], part[..., : dim // 2]
    else:
        turned[..., ::2], turned[..., 1::2] = -part[..., 1::2], part[..., ::2]
    part = part * cos[:, None] + turned * sin[:, None]
    return np.concatenate((part, values[..., dim:]), axis=-1)


def fit_sum(terms: Sequence[Array], made: Array) -> list[tuple[int, float]] | None:
    """Return (index of a term, its factor) of the few terms that add up to `made`."""
    if not terms:
        return None
    matrix = np.stack([term.ravel() for term in terms], axis=1)
    factors = np.linalg.lstsq(matrix, made.ravel(), rcond=None)[0]
    sizes = np.abs(factors) * np.abs(matrix).max(0)
    kept = [index for index in range(len(terms)) if sizes[index] > 1e-3 * np.abs(made).max()]
    if not kept:
        return None
    factors = np.linalg.lstsq(matrix[:, kept], made.ravel(), rcond=None)[0]
    if not is_close((matrix[:, kept] @ factors).reshape(made.shape), made):
        return None
    return [(index, float(factor)) for index, factor in zip(kept, factors, strict=True)]


@dataclass(frozen=True)
class RouteForm:
    """How experts are chosen from their logits."""

    mode: RouteMode
    is_normalised: bool = False


def fit_route(
    logits: Array,
    chosen: NDArray[np.int64],
    weights: Array,
    biases: Sequence[Array | None] = (None,),
    groupings: Sequence[tuple[int, int]] = ((1, 1),),
) -> tuple[RouteForm, int, int, float] | None:
    """Tell how logits [rows, experts] became the experts [rows, k] and their weights, whatever the order of these.

    Returns the form, the numbers of the bias and of the grouping (groups, kept ones) that were used, and the factor of
    the weights.
    """
    top_k = chosen.shape[-1]
    order = np.argsort(chosen, axis=-1)
    theirs, their_weights = np.take_along_axis(chosen, order, -1), np.take_along_axis(weights, order, -1)
    forms = [RouteForm(mode, is_normalised) for mode in ROUTE_MODES for is_normalised in (False, True)]
    for form, (b, bias), (g, grouping) in itertools.product(forms, enumerate(biases), enumerate(groupings)):
        mine, mine_weights = apply_route(form, logits, top_k, bias, *grouping)
        order = np.argsort(mine, axis=-1)
        if np.array_equal(np.take_along_axis(mine, order, -1), theirs):
            factor = factor_between(np.take_along_axis(mine_weights, order, -1), their_weights)
            if factor is not None:
                return form, b, g, factor
    return None


def apply_route(
    form: RouteForm,
    logits: Array,
    top_k: int,
    bias: Array | None = None,
    groups: int = 1,
    top_groups: int = 1,
) -> tuple[NDArray[np.int64], Array]:
    """Return the chosen experts [rows, k], best first, and their weights.

    `bias` [experts] counts for the choice only, and so do groups, of which the best are looked at (DeepSeek-V3).
    """
    scores = torch.from_numpy(logits)
    if form.mode == "softmax_then_topk":
        scores = scores.softmax(-1)
    elif form.mode == "sigmoid_then_topk":
        scores = scores.sigmoid()
    choice = scores if bias is None else scores + torch.from_numpy(bias)
    if groups > 1:
        grouped = choice.reshape(len(choice), groups, -1)
        best_of = 2 if form.mode == "sigmoid_then_topk" else 1
        kept = (
            grouped.topk(min(best_of, grouped.shape[-1]), dim=-1)
            .values.sum(-1)
            .topk(top_groups, dim=-1)
            .indices
        )
        is_kept = torch.zeros(grouped.shape[:2], dtype=torch.bool).scatter(1, kept, True)
        choice = grouped.masked_fill(~is_kept[..., None], -torch.inf).reshape(scores.shape)
    chosen = choice.topk(top_k, dim=-1).indices
    values = scores.gather(1, chosen)
    if form.mode == "topk_then_softmax":
        values = values.softmax(-1)
    if form.is_normalised:
        values = values / values.sum(-1, keepdim=True)
    return chosen.numpy(), values.numpy()


def fit_softcap(given: Array, made: Array, candidates: Sequence[float]) -> float | None:
    """Return the cap with made = tanh(given / cap) * cap."""
    return next((cap for cap in candidates if cap > 0 and is_close(np.tanh(given / cap) * cap, made)), None)


def _epsilons(module: nn.Module) -> list[float]:
    named = [v for v in vars(module).values() if isinstance(v, float) and 0 < v < LARGEST_EPSILON]
    return [*named, *USUAL_EPSILONS, *([0.0] if not named else []), float(torch.finfo(torch.float32).eps)]


def _vector(module: nn.Module, name: str, width: int) -> Array | None:
    tensor = getattr(module, name, None)
    return _array(tensor) if isinstance(tensor, torch.Tensor) and tensor.shape == (width,) else None


def _array(tensor: torch.Tensor) -> Array:
    return tensor.detach().double().numpy()
