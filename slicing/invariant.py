"""The invariant runner: stock layers over the packed rows of several sessions, with bits that no neighbour changes.

A session's bits are the same alone and in any mix, however its rows are split, and when they are computed again.
Whether that holds for a model is tried at load (`invariant_check`), with the number of threads that torch has then;
where it does not, `NotInvariant` says why. On CPUs it holds in float32 and bfloat16 for every family that
`tests/slicing/test_invariant.py` names; on a GPU the same trials decide, and nothing is promised beforehand.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from slicing.attention import PackedCache, use_invariant_attention
from slicing.batch import IsCancelled, Work
from slicing.ends import Parts
from slicing.invariant_check import OWN_ATTENTION, ROW_MULTIPLES, check_class, keeps_rows_apart
from slicing.kv_cache import KVCache, SlabLayer
from slicing.miniature import CutReport
from slicing.progress import Progress
from slicing.row_linear import FullVectors, NotInvariant, RowKernels, RowLinear, RowMatmuls
from slicing.runner import DTYPE_NAMES, PlainRunner, kept_rows, kernel_class
from slicing.stacks import set_tensor
from slicing.weights import Checkpoint

__all__ = ["InvariantRunner", "NotInvariant"]

MAX_WORKS = 32  # products gain nothing from more rows than that (performance.md, section 4)
MOVING_ROPES = ("dynamic", "longrope")  # their frequencies follow the longest position in a call


class InvariantRunner(PlainRunner):
    """Some parts of one model, ready to run steps of several sessions in one call."""

    max_works = MAX_WORKS
    is_invariant = True

    def __init__(
        self,
        model: PreTrainedModel,
        parts: Parts,
        report: CutReport,
        *,
        layer_hashes: Mapping[int, bytes] | None = None,
    ) -> None:
        """Take over a model from `build_weightless` that has been given the tensors of `parts`.

        Raises `NotInvariant` where its bits depend on how rows come together.
        """
        super().__init__(model, parts, report, layer_hashes=layer_hashes)
        self.form = f"invariant/{DTYPE_NAMES.get(self.dtype, str(self.dtype))}/{kernel_class(self.device)}"
        _check_state(model, self.new_cache(), self._slice.takes_positions)
        self._packed = PackedCache(len(self._slice.stack))
        use_invariant_attention(model, self._packed)
        self.size_bytes += _use_row_products(model, RowKernels())
        self._find_multiple()

    @classmethod
    def load(
        cls,
        checkpoint: Checkpoint,
        parts: Parts,
        *,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
        progress: Progress | None = None,
        weightless: PreTrainedModel | None = None,
    ) -> InvariantRunner:
        """As `PlainRunner.load`. Raises `NotInvariant` too, for most models before anything is read."""
        check_class(checkpoint.config, cls)
        return super().load(  # type: ignore[return-value]  # it builds `cls`
            checkpoint, parts, dtype=dtype, device=device, progress=progress, weightless=weightless
        )

    @classmethod
    def from_model(cls, model: PreTrainedModel, parts: Parts) -> InvariantRunner:
        """Share the tensors of `parts` with a whole stock model in memory. Raises `NotInvariant`."""
        check_class(model.config, cls)
        return super().from_model(model, parts)  # type: ignore[return-value]  # it builds `cls`

    @property
    def num_attention_calls(self) -> int:
        """Calls of our attention since the start: a layer that does not call it computes its own."""
        return self._packed.num_calls

    def widen_head(self, num_threads: int | None = None) -> bool:
        """Leave the head as it is: its rows are tried with the threads of this process."""
        return False

    def run_opening_batch(
        self, works: Sequence[Work], *, end: int, is_cancelled: IsCancelled | None = None
    ) -> list[torch.Tensor]:
        """Embed token ids [rows] (int64) and run layers [0, end): hidden states [rows, hidden] of each work."""
        assert self.parts.opening, "this runner does not hold the opening end"
        self._check_works(works, 0, end)
        token_ids = self._filled([work.inputs.to(self.device) for work in works])
        self._packed.take(works, token_ids.shape[1])
        with FullVectors():
            states = self._slice.embed_and_run(self._cache, token_ids, 0, end, is_cancelled)
        return _unpacked(states, works)

    def run_layers_batch(
        self, works: Sequence[Work], *, start: int, end: int, is_cancelled: IsCancelled | None = None
    ) -> list[torch.Tensor]:
        """Run layers [start, end) on hidden states [rows, hidden] of each work, in one call.

        Raises `Cancelled` between two layers once `is_cancelled` turns true; every session can then be taken up again
        at the same position. Raises ValueError, before anything is computed, for a position above a cache's length.
        """
        self._check_works(works, start, end)
        inputs = [work.inputs.to(device=self.device, dtype=self.dtype) for work in works]
        if start == end:
            return inputs
        return _unpacked(self._run(works, inputs, start, end, is_cancelled), works)

    def run_closing_batch(
        self, works: Sequence[Work], *, start: int, is_cancelled: IsCancelled | None = None
    ) -> list[torch.Tensor]:
        """Run layers [start, N), norm and head: logits [len(keep), vocab] (float32) of each work."""
        assert self.parts.closing, "this runner does not hold the closing end"
        states = self.run_layers_batch(works, start=start, end=self.num_layers, is_cancelled=is_cancelled)
        kept = [rows[kept_rows(work.rows, work.keep)] for rows, work in zip(states, works, strict=True)]
        batch = self._filled(kept)
        self._packed.take([], batch.shape[1])
        with FullVectors():
            logits = self._slice.run_to_logits(self._cache, batch, 0, self.num_layers, is_cancelled)[0]
        return list(logits[: sum(map(len, kept))].float().split([len(rows) for rows in kept]))

    def run_whole(
        self,
        cache: KVCache,
        token_ids: torch.Tensor,
        position: int,
        *,
        keep: int | Sequence[int] | None = None,
        is_cancelled: IsCancelled | None = None,
    ) -> torch.Tensor:
        """Run the uncut model on token ids [rows]: logits [n, vocab] (float32)."""
        assert self.parts == Parts.whole(self.num_layers), "this runner holds a part of the model only"
        states = self.run_opening(cache, token_ids, position, end=self.num_layers, is_cancelled=is_cancelled)
        return self.run_closing(cache, states, position, start=self.num_layers, keep=keep)

    def _find_multiple(self) -> None:
        """Find the number of rows to whose multiples calls are filled up, as small as may be."""
        for self.row_multiple in ROW_MULTIPLES:
            if keeps_rows_apart(self, self._slice.stack):
                return
        if self.num_attention_calls == 0:
            raise NotInvariant(OWN_ATTENTION)
        raise NotInvariant("its layers give other bits for other numbers of rows, whatever is filled up")

    def _run(
        self,
        works: Sequence[Work],
        inputs: Sequence[torch.Tensor],
        start: int,
        end: int,
        is_cancelled: IsCancelled | None,
    ) -> torch.Tensor:
        batch = self._filled(inputs)
        self._packed.take(works, batch.shape[1])
        with FullVectors():
            return self._slice.run_blocks(self._cache, batch, 0, start, end, is_cancelled)

    @property
    def _cache(self) -> Any:
        return self._packed

    def _filled(self, inputs: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return the rows of all works and some zeros [1, rows, ...], in fresh memory."""
        missing = -sum(map(len, inputs)) % self.row_multiple
        return torch.cat([*inputs, inputs[0].new_zeros(missing, *inputs[0].shape[1:])]).unsqueeze(0)


def _unpacked(states: torch.Tensor, works: Sequence[Work]) -> list[torch.Tensor]:
    """Cut [1, rows, hidden] into the rows of each work, without the filling."""
    counts = [work.rows for work in works]
    return list(states[0, : sum(counts)].split(counts))


def _check_state(model: PreTrainedModel, cache: KVCache, takes_positions: bool) -> None:
    if not takes_positions:
        raise NotInvariant(f"the forward of {type(model).__name__} takes no positions")
    if not all(isinstance(layer, SlabLayer) for layer in cache.layers):
        raise NotInvariant("some of its layers keep a running state, which has to go through rows in turn")
    for module in model.modules():
        kinds = getattr(module, "rope_type", None) or ()
        for kind in kinds.values() if isinstance(kinds, Mapping) else [kinds]:
            if kind in MOVING_ROPES:
                raise NotInvariant(f"its rotary frequencies ({kind}) follow the longest position in a call")


def _use_row_products(model: PreTrainedModel, kernels: RowKernels) -> int:
    """Put products whose rows do not depend on each other in the place of the held layers' own.

    Returns the bytes that this takes more: a packed head that is tied to the embeddings is there twice.
    """
    uses = Counter(id(tensor) for _, tensor in model.named_parameters(remove_duplicate=False))
    more = 0
    for name, module in list(model.named_modules()):
        held = [tensor for tensor in module.parameters(recurse=False) if not _is_hollow(tensor)]
        if type(module).forward is nn.Linear.forward and held:
            assert isinstance(module, nn.Linear)
            product = RowLinear(module, kernels)
            module.forward = product  # type: ignore[method-assign, assignment]
            if product.is_packed:  # hollow from here on, as `stacks.make_hollow` leaves it
                weight, zero = module.weight, torch.zeros((), dtype=module.weight.dtype)
                set_tensor(model, f"{name}.weight", zero.expand(weight.shape))
                more += weight.nbytes if uses[id(weight)] > 1 else 0
        elif any(tensor.dim() > 1 for tensor in held) and not isinstance(module, nn.Embedding):
            module.forward = _inside(kernels, module.forward)
    return more


def _inside(kernels: RowKernels, forward: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(forward)
    def run(*args: Any, **kwargs: Any) -> Any:
        with RowMatmuls(kernels):
            return forward(*args, **kwargs)

    return run


def _is_hollow(tensor: torch.Tensor) -> bool:
    return tensor.numel() > 1 and all(step == 0 for step in tensor.stride())
