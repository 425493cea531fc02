"""The oracle of patches: every patch runs all tokens, with no argument cut, and only its own rows are believed.

Slow and simple, and only here: in production it would lose to whole steps.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch.overrides import TorchFunctionMode

from slicing.diffusion.calls import Pass
from slicing.diffusion.patches import Cut, join_patches
from tests.slicing.diffusion.passes import Caught, Streams


class PlainPatches:
    """Runs the steps of one session over one stack."""

    def __init__(self, caught: Caught, grid: tuple[int, int, int]) -> None:
        self._caught = caught
        self._grid = grid
        self._tokens = Cut(grid, 0, 1).num_tokens
        self._kept: dict[tuple[int, int], tuple[torch.Tensor, torch.Tensor]] = {}
        self._rows: torch.Tensor | None = None
        self._text_is_new = True

    def whole(self, made: Pass) -> Streams:
        """A whole step, whose keys and values are kept."""
        self._rows = None
        return self._run(made)

    def patched(self, made: Pass, of: int) -> Streams:
        """A step of patches: one after the other, the text of the first counts."""
        cut = Cut(self._grid, 0, of)
        picture = next(n for n, stream in enumerate(made.streams) if stream.shape[1] == self._tokens)
        answers = []
        for one in cut.all():
            self._rows, self._text_is_new = one.rows(), one.index == 0
            streams = list(made.streams)
            streams[picture] = torch.zeros_like(streams[picture])
            streams[picture][:, self._rows] = made.streams[picture][:, self._rows]
            answers.append(self._run(Pass(made.plan, streams, made.slots)))
        return [
            join_patches([one.take(answer[n]) for one, answer in zip(cut.all(), answers, strict=True)], cut)
            if n == picture
            else answers[0][n]
            for n in range(len(made.streams))
        ]

    @contextmanager
    def block(self, number: int) -> Iterator[None]:
        """As a keeper of `BlockRange.run`."""
        with _EveryAttention(self, number):
            yield

    def arguments(self, number: int, args: Any, kwargs: Any) -> Any:
        """Nothing is cut."""
        return args, kwargs

    def keys_and_values(
        self, site: tuple[int, int], key: torch.Tensor, value: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Those of this step for the patch's rows, those of the step before for all others."""
        if self._rows is not None and site in self._kept:
            is_new = torch.zeros(key.shape[-2], dtype=torch.bool)
            num_text = key.shape[-2] - self._tokens
            text_first = num_text > 0 and self._text_first
            is_new[self._rows + (num_text if text_first else 0)] = True
            if num_text and self._text_is_new:
                is_new[slice(0, num_text) if text_first else slice(self._tokens, None)] = True
            old_key, old_value = self._kept[site]
            key = torch.where(is_new[:, None], key, old_key)
            value = torch.where(is_new[:, None], value, old_value)
        self._kept[site] = key.clone(), value.clone()
        return key, value

    def is_site(self, num_queries: int, num_keys: int) -> bool:
        """Attention of all tokens to all."""
        num_text = sum(stream.shape[1] for stream in self._caught.made.streams) - self._tokens
        return num_queries == num_keys and num_keys in (self._tokens, self._tokens + num_text)

    _text_first = True

    def text_behind(self) -> PlainPatches:
        """For models that put text behind the picture in attention."""
        self._text_first = False
        return self

    def _run(self, made: Pass) -> Streams:
        stack = self._caught.stack
        return self._caught.blocks.run(made, start=stack.offset, end=stack.end, keeper=self)


class _EveryAttention(TorchFunctionMode):
    def __init__(self, plain: PlainPatches, block: int) -> None:
        super().__init__()
        self._plain, self._block, self._ordinal = plain, block, 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func is F.scaled_dot_product_attention:
            names = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")
            args, kwargs = (), dict(zip(names, args, strict=False)) | kwargs
            if self._plain.is_site(kwargs["query"].shape[-2], kwargs["key"].shape[-2]):
                site = self._block, self._ordinal
                kwargs["key"], kwargs["value"] = self._plain.keys_and_values(
                    site, kwargs["key"], kwargs["value"]
                )
            self._ordinal += 1
        return func(*args, **kwargs)
