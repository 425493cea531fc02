"""Linear layers whose rows do not depend on their neighbours: a tried kernel and a row count for each shape.

Math libraries take other paths (and give other bits) for one row, for a few and for the last of many. Which counts
agree is found out by trying, on this machine, with the weights themselves. Knows tensors only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

Product = Callable[[torch.Tensor], torch.Tensor]  # rows [rows, inputs] to [rows, outputs]

PACKING_HINT = 16  # rows; oneDNN packed for 1 row gives other bits for more (performance.md, section 4)
MAX_ROWS = 128  # in one product: what was tried; the rest follows in pieces
LARGE = 4 << 20  # weights; above this fewer row counts are tried, so that a load stays short
TRIED_ROWS = (36, 12)  # different rows in a trial, of a small and of a large weight
TRIED_COUNTS = ((*range(1, 35), 48, 63, 64, 100, 128), (1, 2, 3, 4, 5, 7, 8, 13, 16, 17, 32, 33, 64, 128))
LANES = 64  # numbers; two vectors of the widest kind, of bfloat16
POINTWISE = {
    *("silu", "gelu", "sigmoid", "logsigmoid", "tanh", "softplus", "mish", "elu", "erf"),
    *("exp", "log", "log1p", "cos", "sin"),
}
BATCHED = {"bmm", "baddbmm", "einsum", "_grouped_mm", "grouped_mm"}
SHIFTS = (0, 5)  # a row must not care about its place either


class NotInvariant(Exception):
    """This model's bits depend on how its rows come together, in a way that cannot be helped; the text says why."""


@dataclass(frozen=True)
class Kernel:
    """How products with one shape of weights are made."""

    is_packed: bool  # oneDNN's own layout; otherwise torch's linear on the weights as they are
    multiple: int  # rows are filled up to a multiple of it
    is_fixed: bool = False  # never more rows at once than that: every product has one and the same shape


CANDIDATES = (
    Kernel(True, 1),
    Kernel(True, 4),
    Kernel(False, 1),
    Kernel(False, 4),
    Kernel(True, 16),
    Kernel(False, 16),
    Kernel(False, 32, is_fixed=True),
    Kernel(False, 1, is_fixed=True),
)


unwatched = (
    torch._C.DisableTorchFunction
)  # inside, no call goes through a mode; torch's notes on extending it


class RowKernels:
    """Finds the kernel for each shape, once."""

    def __init__(self) -> None:
        self._found: dict[object, Kernel] = {}

    def kernel_for(self, weight: torch.Tensor, *, may_pack: bool) -> Kernel:
        """Return the first kernel that keeps rows apart for weights [outputs, inputs] like this one.

        Raises `NotInvariant` when not even single rows repeat.
        """
        key = (tuple(weight.shape), weight.stride(), weight.dtype, weight.device, may_pack)
        if key not in self._found:
            self._found[key] = _choose(weight, may_pack and _can_pack(weight))
        return self._found[key]

    def product(self, weight: torch.Tensor, bias: torch.Tensor | None, *, may_pack: bool = False) -> Product:
        """Return the product with weights [outputs, inputs]; a packed one keeps no other copy of them."""
        kernel = self.kernel_for(weight, may_pack=may_pack)
        return _in_pieces(_product(weight, bias, kernel), kernel)


class RowLinear:
    """Stands in for the forward of an `nn.Linear`."""

    def __init__(self, linear: nn.Linear, kernels: RowKernels) -> None:
        self.out_features = linear.out_features
        weight = linear.weight.detach()
        bias = None if linear.bias is None else linear.bias.detach()
        self.is_packed = kernels.kernel_for(weight, may_pack=True).is_packed
        self._product = kernels.product(weight, bias, may_pack=True)

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        """Multiply [..., inputs] to [..., outputs]."""
        with unwatched():
            return self._product(rows.reshape(-1, rows.shape[-1])).view(*rows.shape[:-1], self.out_features)


class FullVectors(TorchFunctionMode):
    """Inside, functions of single numbers see full vectors only.

    Loops over numbers take the rest that fills no vector another way (libm's), with other bits.
    """

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if getattr(func, "__name__", None) in POINTWISE:
            return _filled_up(func, *args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


class RowMatmuls(TorchFunctionMode):
    """Inside, products of rows with a matrix of weights are made by `RowKernels`, whatever module makes them.

    For modules such as experts, which gather as many rows as happen to be theirs.
    """

    def __init__(self, kernels: RowKernels) -> None:
        super().__init__()
        self._kernels = kernels

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is functional.linear:
            inputs = kwargs.pop("input", None)
            return self._linear(*args, **kwargs) if inputs is None else self._linear(inputs, *args, **kwargs)
        if func in _MATMULS:
            return self._linear(args[0], args[1].t()) if args[1].dim() == 2 else _refuse(func)
        if func is torch.addmm:
            bias, rows, weight = args
            return self._linear(rows, weight.t(), bias)
        if getattr(func, "__name__", None) in BATCHED:
            _refuse(func)
        return func(*args, **kwargs)

    def _linear(
        self, inputs: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        rows = inputs.reshape(-1, inputs.shape[-1])
        if len(rows) == 0:
            return inputs.new_empty(*inputs.shape[:-1], weight.shape[0])
        return self._kernels.product(weight, bias)(rows).view(*inputs.shape[:-1], weight.shape[0])


def _filled_up(func: Any, numbers: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    """Apply a function of single numbers to full vectors only."""
    missing = -numbers.numel() % LANES
    if not missing:
        return func(numbers.contiguous(), *args, **kwargs)  # loops over strides take the other way as well
    filled = functional.pad(numbers.reshape(-1), (0, missing))
    return func(filled, *args, **kwargs)[:-missing].view(numbers.shape)


def _refuse(func: Any) -> torch.Tensor:
    raise NotInvariant(f"a module multiplies several matrices at once ({getattr(func, '__name__', func)})")


def _in_pieces(product: Product, kernel: Kernel) -> Product:
    """Return the product made of calls with row counts that agree."""
    multiple, most = kernel.multiple, kernel.multiple if kernel.is_fixed else MAX_ROWS

    def in_pieces(rows: torch.Tensor) -> torch.Tensor:
        count = rows.shape[0]
        missing = -count % multiple
        filled = torch.cat([rows, rows.new_zeros(missing, rows.shape[1])]) if missing else rows.contiguous()
        pieces = filled.split(most) if count > most else (filled,)
        made = torch.cat([product(piece) for piece in pieces]) if len(pieces) > 1 else product(filled)
        return made[:count] if missing else made

    return in_pieces


def _product(weight: torch.Tensor, bias: torch.Tensor | None, kernel: Kernel) -> Product:
    if not kernel.is_packed:
        return lambda rows: functional.linear(rows, weight, bias)
    packed = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), PACKING_HINT)
    multiply = torch.ops.mkldnn._linear_pointwise
    return lambda rows: multiply(rows, packed, bias, "none", [], "")


def _can_pack(weight: torch.Tensor) -> bool:
    """Tell whether oneDNN takes weights like this one: it has only inner names in torch, so it is tried."""
    if weight.device.type != "cpu" or not torch.backends.mkldnn.is_available():
        return False
    try:
        some = weight[:32].clone()
        rows = torch.ones(3, weight.shape[1], dtype=weight.dtype)
        made = _product(some, None, Kernel(True, 1))(rows)
        expected = functional.linear(rows, some)
    except (RuntimeError, AttributeError):
        return False
    return torch.allclose(made, expected, rtol=1e-2, atol=1e-2)


def _choose(weight: torch.Tensor, may_pack: bool) -> Kernel:
    for kernel in CANDIDATES:
        if (may_pack or not kernel.is_packed) and _keeps_rows_apart(weight, kernel):
            return kernel
    raise NotInvariant(f"products with {tuple(weight.shape)} weights do not even repeat for single rows")


def _keeps_rows_apart(weight: torch.Tensor, kernel: Kernel) -> bool:
    is_large = weight.numel() > LARGE
    different = TRIED_ROWS[is_large]
    generator = torch.Generator().manual_seed(weight.shape[1])
    rows = torch.randn(different, weight.shape[1], generator=generator).to(weight)
    product = _in_pieces(_product(weight, None, kernel), kernel)
    alone = torch.cat([product(row) for row in rows.split(1)])
    for places in _places(different, (1, different) if kernel.is_fixed else TRIED_COUNTS[is_large]):
        if not torch.equal(product(rows[places]), alone[places]):
            return False
    return True


def _places(different: int, counts: tuple[int, ...]) -> Iterator[torch.Tensor]:
    for count in counts:
        for shift in SHIFTS:
            yield (torch.arange(count) + shift) % different


_MATMULS = (torch.matmul, torch.mm, torch.Tensor.matmul, torch.Tensor.__matmul__, torch.Tensor.mm)
