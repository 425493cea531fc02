"""Tells by values what routers and stacked experts compute."""

from __future__ import annotations

import itertools
from collections.abc import Mapping

import numpy as np
import torch
from torch import nn

from slicing.fast import fitting
from slicing.fast.fitting import Array, GateForm
from slicing.fast.recipe import Experts, NotComposable
from slicing.fast.tracing import Call


def fit_experts(
    blank: Experts, module: nn.Module, given: Array, made: Array, chosen: np.ndarray, weights: Array
) -> Experts | None:
    """Tell how stacked weights are laid out and gated."""
    stacked = {n: p.detach().double().numpy() for n, p in module.named_parameters(recurse=False)}
    pairs = [n for n, p in stacked.items() if p.ndim == 3]
    biases: list[str | None] = [n for n, p in stacked.items() if p.ndim == 2]
    if len(pairs) != 2 or len(biases) not in (0, 2):
        return None
    alpha, limit = float(getattr(module, "alpha", 0) or 0), float(getattr(module, "limit", 0) or 0)
    forms = [
        GateForm(name, layout)  # type: ignore[arg-type]
        for name, layout in itertools.product(fitting.ACTIVATIONS, ("halves", "alternating"))
    ]
    if alpha and limit:
        forms += [GateForm("oss_swiglu", layout, alpha, limit) for layout in ("alternating", "halves")]
    orders = itertools.product(itertools.permutations(pairs), (False, True), forms)
    for (gate_up, down), is_transposed, form in orders:
        bias = sorted(biases, key=lambda name: not str(name).startswith(gate_up)) or [None, None]
        step = Experts(
            blank.call, blank.module, blank.source, blank.routes,
            gate_up, down, bias[0], bias[1], is_transposed, form,
        )  # fmt: skip
        result = _run_experts(step, stacked, given, chosen, weights)
        if result is not None and fitting.is_close(result, made):
            return step
    return None


def _run_experts(
    step: Experts, stacked: Mapping[str, Array], given: Array, chosen: np.ndarray, weights: Array
) -> Array | None:
    gate_up, down = stacked[step.gate_up], stacked[step.down]
    if step.is_transposed:
        gate_up, down = gate_up.transpose(0, 2, 1), down.transpose(0, 2, 1)
    inter = down.shape[2]
    if gate_up.shape[1:] != (2 * inter, given.shape[1]) or down.shape[1] != given.shape[1]:
        return None
    result = np.zeros_like(given)
    for row, rank in np.ndindex(*chosen.shape):
        expert = int(chosen[row, rank])
        both = gate_up[expert] @ given[row]
        both = both + stacked[step.gate_up_bias][expert] if step.gate_up_bias else both
        out = down[expert] @ fitting.apply_gate(step.form, *fitting.halves_of(both, step.form.layout))
        out = out + stacked[step.down_bias][expert] if step.down_bias else out
        result[row] += weights[row, rank] * out
    return result


def route_parts(call: Call) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Return a router's weights [rows, k] and its chosen experts [rows, k]."""
    chosen = [v for v in call.outputs if isinstance(v, torch.Tensor) and not v.is_floating_point()]
    if len(chosen) != 1:
        return None
    weights = [
        v
        for v in call.outputs
        if isinstance(v, torch.Tensor) and v.is_floating_point() and v.shape == chosen[0].shape
    ]
    return (weights[-1], chosen[0]) if weights else None


def weights_of(call: Call) -> torch.Tensor:
    """Return a router's weights [rows, k]. Raises `NotComposable` where it returns none."""
    parts = route_parts(call)
    if parts is None:
        raise NotComposable(f"{call.name} does other things on other rows")
    return parts[0]


def is_fed_by(experts: Call, router: Call) -> bool:
    """Tell whether experts are called with what a router returned."""
    parts = route_parts(router)
    return parts is not None and all(any(part is tensor for tensor in experts.tensors) for part in parts)


def router_logits(module: nn.Module, given: Array) -> Array:
    """Return a router's product [rows, experts] with what it was given."""
    weight, bias = module.weight, getattr(module, "bias", None)
    assert isinstance(weight, torch.Tensor)
    extra = bias.detach().double().numpy() if isinstance(bias, torch.Tensor) else 0.0
    return given @ weight.detach().double().numpy().T + extra
