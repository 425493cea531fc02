"""The optimiser: Muon (Jordan et al., 2024) for matrices, AdamW for everything else.

Matrices of one shape are orthogonalised together in one batched product, which one thread likes better.
"""

from collections import defaultdict
from collections.abc import Iterable

import torch
from torch import Tensor, nn

NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)  # Jordan's quintic, five turns
MOMENTUM = 0.95


class Muon(torch.optim.Optimizer):
    """Momentum whose step is made (nearly) orthogonal, scaled so that its size is like AdamW's."""

    def __init__(self, weights: Iterable[nn.Parameter], lr: float, weight_decay: float = 0.0) -> None:
        super().__init__(list(weights), {"lr": lr, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            by_shape: dict[torch.Size, list[nn.Parameter]] = defaultdict(list)
            for weight in group["params"]:
                if weight.grad is not None:
                    by_shape[weight.shape].append(weight)
            for shape, weights in by_shape.items():
                updates = torch.stack([self._momentum(weight) for weight in weights]).flatten(2)
                updates = orthogonal(updates) * 0.2 * max(updates.shape[1:]) ** 0.5
                for weight, update in zip(weights, updates, strict=True):
                    weight.mul_(1 - group["lr"] * group["weight_decay"])
                    weight.add_(update.view(shape), alpha=-group["lr"])

    def _momentum(self, weight: nn.Parameter) -> Tensor:
        assert weight.grad is not None
        state = self.state[weight]
        if "momentum" not in state:
            state["momentum"] = torch.zeros_like(weight)
        momentum: Tensor = state["momentum"].lerp_(weight.grad, 1 - MOMENTUM)
        return weight.grad.lerp(momentum, MOMENTUM)


def orthogonal(matrices: Tensor) -> Tensor:
    """Return the nearest matrices [N, a, b] with singular values near 1."""
    tall = matrices.shape[1] > matrices.shape[2]
    x = (matrices.mT if tall else matrices).bfloat16()
    x = x / (x.norm(dim=(1, 2), keepdim=True) + 1e-7)
    a, b, c = NEWTON_SCHULZ
    for _ in range(5):
        square = x @ x.mT
        x = a * x + (b * square + c * square @ square) @ x
    return (x.mT if tall else x).float()
