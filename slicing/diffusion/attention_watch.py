"""Sees attention where every diffusers model computes it: at torch's `scaled_dot_product_attention`.

So no attention class is known here and nothing is patched: torch itself tells this thread, and no other. Knows nothing
of patches or of what is kept.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812
from torch.overrides import TorchFunctionMode


class Site(NamedTuple):
    """Where attention is computed: in global block number `block`, the `ordinal`-th attention call of it."""

    block: int
    ordinal: int


@dataclass(frozen=True)
class AttentionCall:
    """The arguments of one `scaled_dot_product_attention`: queries, keys and values [..., heads, tokens, width]."""

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    attn_mask: torch.Tensor | None = None
    dropout_p: float = 0.0
    is_causal: bool = False
    scale: float | None = None
    enable_gqa: bool = False

    @property
    def num_queries(self) -> int:
        return self.query.shape[-2]

    @property
    def num_keys(self) -> int:
        return self.key.shape[-2]

    def run(self) -> torch.Tensor:
        """What attention gives of these arguments."""
        options: dict[str, Any] = {"enable_gqa": True} if self.enable_gqa else {}
        return F.scaled_dot_product_attention(
            self.query,
            self.key,
            self.value,
            self.attn_mask,
            self.dropout_p,
            self.is_causal,
            scale=self.scale,
            **options,
        )


class Watch:
    """Sees the attention calls of each block that runs under it; by itself it changes nothing.

    A `Keeper` for `BlockRange.run`: `block(number)` surrounds the running of one block.
    """

    @contextmanager
    def block(self, number: int) -> Iterator[None]:
        """Watch this thread's attention calls as those of block `number`."""
        with _AttentionMode(number, self.attend):
            yield

    def arguments(
        self, number: int, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """A block's own arguments stay as they are: what is cut was cut before the pass began."""
        return args, kwargs

    def attend(self, site: Site, call: AttentionCall) -> torch.Tensor:
        """Compute one attention call."""
        return call.run()


class _AttentionMode(TorchFunctionMode):
    """Hands every attention call of this thread to `attend`. Torch leaves the mode while `attend` runs."""

    def __init__(self, block: int, attend: Callable[[Site, AttentionCall], torch.Tensor]) -> None:
        super().__init__()
        self._block = block
        self._attend = attend
        self._ordinal = 0

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is not F.scaled_dot_product_attention:
            return func(*args, **(kwargs or {}))
        site = Site(self._block, self._ordinal)
        self._ordinal += 1
        return self._attend(site, AttentionCall(*args, **(kwargs or {})))
