"""One call of a transformer as it was made, kept to be compared with the next: equal means equal in every bit.

Knows nothing of models, steps or threads.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from slicing.diffusion.block_range import ALIGNMENT_BYTES
from slicing.diffusion.calls import map_tensors

Entry = int | str  # a positional argument's place, or a keyword


@dataclass(frozen=True, eq=False)
class GuidanceCall:
    """The arguments of one call; the tensors in them are copies, which nobody changes."""

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]

    @classmethod
    def copied(
        cls, args: Sequence[Any], kwargs: Mapping[str, Any], known: Sequence[GuidanceCall] = ()
    ) -> GuidanceCall:
        """Keep a call; of what stands at the same place in a `known` one, bit for bit, no second copy is made."""
        entries = {entry: _copied(value, _at(known, entry)) for entry, value in _entries(args, kwargs)}
        return cls(
            tuple(entries[place] for place in range(len(args))), {name: entries[name] for name in kwargs}
        )

    @property
    def entries(self) -> Mapping[Entry, Any]:
        return dict(_entries(self.args, self.kwargs))

    def equals(self, other: GuidanceCall) -> bool:
        """Whether the other has the same arguments, every tensor the same bits."""
        mine, others = self.entries, other.entries
        return mine.keys() == others.keys() and all(_same(value, others[key]) for key, value in mine.items())

    def as_guessed_from(self, first_before: GuidanceCall, own_before: GuidanceCall) -> GuidanceCall:
        """This first call of a step turned into a later one: what differed between the two a step ago is put in."""
        before, own = first_before.entries, own_before.entries
        entries: dict[Entry, Any] = {}
        for key in own:
            shared = key in before and _same(before[key], own[key])
            entries[key] = self.entries[key] if shared and key in self.entries else own[key]
        places = sorted(key for key in entries if isinstance(key, int))
        return GuidanceCall(
            tuple(entries[place] for place in places),
            {key: value for key, value in entries.items() if isinstance(key, str)},
        )

    def kept_since(self, before: GuidanceCall) -> frozenset[Entry]:
        """Entries with tables of numbers (two dimensions at least: the text, not the time) that did not change."""
        others = before.entries
        return frozenset(
            key
            for key, value in self.entries.items()
            if key in others
            and any(tensor.dim() > 1 for tensor in _tensors(value))
            and _same(value, others[key])
        )

    def latents_shape(self) -> tuple[int, ...]:
        """Shape of the first tensor with numbers: what is denoised."""
        for value in self.entries.values():
            for tensor in _tensors(value):
                if tensor.is_floating_point() and tensor.dim() > 1:
                    return tuple(tensor.shape)
        return ()


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors are equal in every bit (a NaN equals itself, 0.0 is not -0.0), and lie alike in memory."""
    if a is b:
        return True
    if (a.dtype, a.shape, a.device, a.stride()) != (b.dtype, b.shape, b.device, b.stride()):
        return False
    return not a.numel() or torch.equal(_bits(a), _bits(b))


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    flat = tensor.detach().reshape(-1)
    flat = flat if flat.stride(0) == 1 else flat.clone(memory_format=torch.contiguous_format)
    return flat.view(torch.uint8)


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    """A copy that lies in memory as the original does: kernels give other bits for other strides or odd addresses."""
    tensor = tensor.detach()
    if not tensor.numel():
        return tensor.clone()
    extent = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    odd = tensor.data_ptr() % ALIGNMENT_BYTES // tensor.element_size()
    buffer = torch.empty(odd + extent, dtype=tensor.dtype, device=tensor.device)
    buffer[odd:] = tensor.as_strided((extent,), (1,), tensor.storage_offset())
    return buffer.as_strided(tensor.shape, tensor.stride(), odd)


def _entries(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[tuple[Entry, Any]]:
    yield from enumerate(args)
    yield from kwargs.items()


def _at(known: Sequence[GuidanceCall], entry: Entry) -> list[Any]:
    return [call.entries[entry] for call in known if entry in call.entries]


def _copied(value: Any, known: Sequence[Any]) -> Any:
    for other in known:
        if _same(value, other):
            return other
    return map_tensors(value, _copy)


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor) or isinstance(b, torch.Tensor):
        return isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor) and same_bits(a, b)
    if type(a) is not type(b):
        return False
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(_same(x, y) for x, y in zip(a, b, strict=True))
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(_same(value, b[key]) for key, value in a.items())
    if isinstance(a, float):
        return a == b or (math.isnan(a) and math.isnan(b))
    if isinstance(a, bool | int | str | bytes | torch.dtype | torch.device | torch.Size | type(None)):
        return bool(a == b)
    return a is b  # whatever it is, only the very same object is known to be the same


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _tensors(item)
    elif isinstance(value, dict):
        for item in value.values():
            yield from _tensors(item)
