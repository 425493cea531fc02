"""A layer's weights as its operations read them: joined, ordered and packed. Knows nothing of where they come from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray

from slicing.fast.layer_plan import LayerPlan, Member
from slicing.fast.packing import Form, PackedWeight, pack
from slicing.fast.program import Expert
from slicing.fast.recipe import Attention, Experts, Linear, Norm, Route

FloatArray = NDArray[np.float32]
ROWS_AT_ONCE = 4096  # looked at together, so that looking needs little memory of its own


@dataclass(frozen=True)
class Packing:
    """In which form weights are held; a lossless bf16 is one only where it holds a weight's own numbers, else fp32."""

    form: Form
    is_lossless: bool = False

    def pack(self, weight: torch.Tensor) -> PackedWeight:
        """Pack a weight [N, K]."""
        is_rounded = self.form == "bf16" and self.is_lossless and not _is_bfloat16(weight)
        return pack(weight, "fp32" if is_rounded else self.form)

    def pack_choice(self, weight: torch.Tensor) -> PackedWeight:
        """Pack a weight that decides which way rows go: few numbers, and no form may change the choice."""
        return Packing("fp32" if self.form == "int8" else self.form, True).pack(weight)


@dataclass
class PackedLayer:
    """A layer's weights, by the step that uses them first."""

    products: dict[int, tuple[PackedWeight, FloatArray | None]] = field(default_factory=dict)
    vectors: dict[int, tuple[FloatArray | None, FloatArray | None]] = field(default_factory=dict)
    experts: dict[int, list[Expert]] = field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        """Memory they take."""
        packed = [weight for weight, _ in self.products.values()]
        packed += [w for experts in self.experts.values() for e in experts for w in (e.gate_up, e.down)]
        arrays = [bias for _, bias in self.products.values()]
        arrays += [array for pair in self.vectors.values() for array in pair]
        arrays += [
            b for experts in self.experts.values() for e in experts for b in (e.gate_up_bias, e.down_bias)
        ]
        return sum(w.nbytes for w in packed) + sum(array.nbytes for array in arrays if array is not None)


def pack_layer(
    plan: LayerPlan,
    tensors: Mapping[str, torch.Tensor],
    packing: Packing,
    ready: tuple[torch.Tensor, PackedWeight] | None = None,
) -> PackedLayer:
    """Pack the layer's tensors (by their names in the block); `ready` is one that is packed already."""
    packed = PackedLayer()
    for n, step in enumerate(plan.steps):
        if n in plan.joined:
            packed.products[n] = _pack_joined(plan, plan.joined[n], tensors, packing, ready)
        elif isinstance(step, Norm):
            packed.vectors[n] = _norm_vectors(step, tensors)
        elif isinstance(step, Attention):
            packed.vectors[n] = (_floats(tensors[step.sinks]) if step.sinks else None, None)
        elif isinstance(step, Route):
            weight = packing.pack_choice(tensors[f"{step.module}.weight"])
            packed.products[n] = (weight, _optional(tensors, f"{step.module}.bias"))
            packed.vectors[n] = (_floats(tensors[step.bias]) if step.bias else None, None)
        elif isinstance(step, Experts):
            packed.experts[n] = _pack_experts(step, tensors, packing)
    return packed


def _pack_joined(
    plan: LayerPlan,
    members: Sequence[Member],
    tensors: Mapping[str, torch.Tensor],
    packing: Packing,
    ready: tuple[torch.Tensor, PackedWeight] | None,
) -> tuple[PackedWeight, FloatArray | None]:
    weights, biases = [], []
    for member in members:
        step = plan.steps[member.step]
        assert isinstance(step, Linear)
        weight = tensors[f"{step.module}.weight"]
        weight = weight.T if step.is_transposed else weight
        bias = tensors.get(f"{step.module}.bias")
        if member.parts:
            order = torch.from_numpy(np.concatenate([plan.columns(part) for part in member.parts]))
            weight = weight[order]
            bias = bias[order] if bias is not None else None
        weights.append(weight)
        biases.append(bias)
    whole = weights[0] if len(weights) == 1 else torch.cat(weights)
    packed = ready[1] if ready is not None and ready[0] is whole else packing.pack(whole)
    if all(bias is None for bias in biases):
        return packed, None
    filled = [
        bias.float() if bias is not None else torch.zeros(len(weight))
        for bias, weight in zip(biases, weights, strict=True)
    ]
    return packed, _floats(torch.cat(filled))


def _is_bfloat16(weight: torch.Tensor) -> bool:
    """Tell whether every number of a weight is one that bfloat16 has."""
    return weight.dtype == torch.bfloat16 or all(
        torch.equal(part, part.bfloat16().to(part.dtype)) for part in weight.split(ROWS_AT_ONCE)
    )


def _norm_vectors(
    step: Norm, tensors: Mapping[str, torch.Tensor]
) -> tuple[FloatArray | None, FloatArray | None]:
    weight = tensors[f"{step.module}.weight"].float() + step.form.offset if step.form.has_weight else None
    bias = tensors[f"{step.module}.bias"] if step.form.has_bias else None
    return None if weight is None else _floats(weight), None if bias is None else _floats(bias)


def _pack_experts(step: Experts, tensors: Mapping[str, torch.Tensor], packing: Packing) -> list[Expert]:
    def part(name: str | None) -> torch.Tensor | None:
        return tensors[f"{step.module}.{name}"] if name is not None else None

    gate_up, down = tensors[f"{step.module}.{step.gate_up}"], tensors[f"{step.module}.{step.down}"]
    if step.is_transposed:
        gate_up, down = gate_up.transpose(1, 2), down.transpose(1, 2)
    gate_up_bias, down_bias = part(step.gate_up_bias), part(step.down_bias)
    return [
        Expert(
            packing.pack(gate_up[n]),
            packing.pack(down[n]),
            None if gate_up_bias is None else _floats(gate_up_bias[n]),
            None if down_bias is None else _floats(down_bias[n]),
        )
        for n in range(len(gate_up))
    ]


def _optional(tensors: Mapping[str, torch.Tensor], name: str) -> FloatArray | None:
    return _floats(tensors[name]) if name in tensors else None


def _floats(tensor: torch.Tensor) -> FloatArray:
    return np.array(tensor.detach().float().cpu().numpy(), np.float32)
