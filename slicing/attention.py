"""Attention whose rows do not depend on their neighbours, over the keys and values of several sessions.

A row's arithmetic is set by its position alone: queries in blocks that end at multiples of 32 positions, keys up to
the end of the block and masked, and never fewer rows in a product than agree. Everything is computed in float32.
Stock layers reach it through transformers' attention interface; `PackedCache` stands in for their cache.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import AttentionInterface
from transformers.cache_utils import Cache, DummyLayer

from slicing.batch import Work
from slicing.kv_cache import KVCache, SlabLayer
from slicing.row_linear import NotInvariant, unwatched

NAME = "diffuse_invariant"  # in transformers' attention interface
BLOCK = 32  # positions
MULTIPLES = (1, 2, 4, 8, 16, 32)  # query rows of a block are filled up to one of these
MIN_PRODUCT_ROWS = 4  # fewer take the path of single rows, wherever that was looked at
TRIED_BLOCKS = (1, 2, 9)  # lengths of a trial
TRIED_BEGINS = (0, 1, 7, 20, 29)
TRIED_COUNTS = (*range(2, 10), 13, 17, 25, 31, 32)


@dataclass(frozen=True)
class HeadShape:
    """Sizes of one layer's attention, and how it is computed."""

    heads: int
    kv_heads: int
    k_dim: int
    v_dim: int


@dataclass(frozen=True)
class Terms:
    """What a layer asks of attention besides its tensors."""

    scale: float
    window: int | None = None
    softcap: float | None = None
    sinks: torch.Tensor | None = None  # [heads]: one more logit in the softmax, with no value


@dataclass(frozen=True, slots=True)
class Span:
    """Where one session's rows stand in a packed call."""

    cache: KVCache
    row: int
    rows: int
    position: int


class PackedCache(Cache):
    """What stock layers take for the cache of the one long sequence that a packed call looks like."""

    is_compileable = False

    def __init__(self, num_layers: int) -> None:
        super().__init__(layers=[DummyLayer() for _ in range(num_layers)])
        self.num_calls = 0  # of attention, since the start
        self.num_rows = 0
        self._spans: list[Span] = []
        self._masks: dict[object, torch.Tensor] = {}
        self._multiples: dict[HeadShape, int] = {}
        self._last: tuple[int, torch.Tensor] | None = None

    def take(self, works: Sequence[Work], num_rows: int) -> None:
        """Begin a call of `num_rows` rows; those after the works' own are filling."""
        self._spans, row = [], 0
        for work in works:
            self._spans.append(Span(work.cache, row, work.rows, work.position))
            row += work.rows
        self.num_rows = num_rows
        self._masks.clear()
        self._last = None

    def position_ids(self, _position: int, rows: int, device: torch.device) -> torch.Tensor:
        """Return every row's position in its own session [1, rows]; filling stands at 0."""
        places = [place for span in self._spans for place in range(span.position, span.position + span.rows)]
        return torch.tensor([places + [0] * (rows - len(places))], device=device)

    def begin(self, _position: int, _start: int, _end: int) -> None:
        """Nothing to get ready: sessions are told their positions with every write."""

    def finish(self, _length: int, start: int, end: int) -> None:
        """Note in every session what layers [start, end) hold now."""
        for span in self._spans:
            span.cache.finish(span.position + span.rows, start, end)

    def update(
        self,
        key_states: torch.Tensor,
        value_states: torch.Tensor,
        layer_idx: int,
        *_args: Any,
        **_kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Store [1, heads, rows, dim] in the sessions, and hand on the same tensors."""
        with unwatched():
            self._store(key_states, value_states, layer_idx)
        self._last = (layer_idx, key_states)
        return key_states, value_states

    def _store(self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int) -> None:
        if key_states.shape[2] != self.num_rows:
            raise NotInvariant("its layers store something else than one key a row")
        for span in self._spans:
            layer = _slab(span, layer_idx)
            layer.write(
                key_states.narrow(2, span.row, span.rows),
                value_states.narrow(2, span.row, span.rows),
                span.position,
            )
            layer.blank(-(-layer.length // BLOCK) * BLOCK)

    def attend(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, terms: Terms
    ) -> torch.Tensor:
        """Attend from [1, heads, rows, dim] to what the sessions hold in the layer that was just stored.

        Returns [1, rows, heads, dim].
        """
        if self._last is None or self._last[1] is not key:
            raise NotInvariant("its layers change keys after they were stored, or share them")
        number = self._last[0]
        self.num_calls += 1
        shape = HeadShape(query.shape[1], key.shape[1], query.shape[3], value.shape[3])
        multiple = self._multiple_for(shape, query.device)
        window = self._window(number, terms)
        queries = query[0].float() * terms.scale  # [heads, rows, dim]
        made = query.new_zeros(1, query.shape[2], shape.heads, shape.v_dim)
        for span in self._spans:
            layer = _slab(span, number)
            assert layer.keys is not None
            assert layer.values is not None
            for begin, end in _blocks(span.position, span.position + span.rows):
                first, row = _first_key(begin, window), span.row + begin - span.position
                stop = _block_end(begin)
                block = _attend_block(
                    queries.narrow(1, row, end - begin),
                    layer.keys[0, :, first:stop].float(),
                    layer.values[0, :, first:stop].float(),
                    self._mask(begin, end - begin, window, shape, multiple, query.device),
                    multiple,
                    terms,
                )
                made[0, row : row + end - begin] = block.transpose(0, 1)
        return made

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Return 0: positions are given to the layers, not counted by them."""
        return 0

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        """Return the rows of the call: masks are no part of it."""
        return query_length, 0

    def _window(self, number: int, terms: Terms) -> int | None:
        """Return what the layer says, or else what its kind of storage does: some leave the window to the mask."""
        return terms.window if terms.window is not None else _slab(self._spans[0], number).window

    def _multiple_for(self, shape: HeadShape, device: torch.device) -> int:
        if shape not in self._multiples:
            self._multiples[shape] = find_multiple(shape, device)
        return self._multiples[shape]

    def _mask(
        self,
        begin: int,
        rows: int,
        window: int | None,
        shape: HeadShape,
        multiple: int,
        device: torch.device,
    ) -> torch.Tensor:
        key = (begin, rows, window, shape, device)
        found = self._masks.get(key)
        if found is None:
            groups = shape.heads // shape.kv_heads
            found = self._masks[key] = block_mask(begin, rows, window, groups, multiple, device)
        return found


def invariant_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    position_bias: torch.Tensor | None = None,
    is_causal: bool | None = None,
    **_kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """What transformers' attention interface calls. Raises `NotInvariant` for what is not understood."""
    packed = getattr(module, "packed_cache", None)
    if packed is None:
        raise NotInvariant("its attention modules do not tell their layer")
    if attention_mask is not None or position_bias is not None:
        raise NotInvariant("its layers bring a mask or a bias of their own to attention")
    if is_causal is False or not getattr(module, "is_causal", True):
        raise NotInvariant("its attention is not causal")
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    with unwatched():
        return packed.attend(query, key, value, Terms(scale, sliding_window, softcap, s_aux)), None


def use_invariant_attention(model: nn.Module, packed: PackedCache) -> None:
    """Have a stock model's layers call `invariant_attention`, with `packed` for their cache."""
    AttentionInterface.register(NAME, invariant_attention)
    modules: list[Any] = list(model.modules())
    for config in {
        id(module.config): module.config for module in modules if hasattr(module, "config")
    }.values():
        config._attn_implementation = NAME
        config._experts_implementation = "eager"  # one product for each expert, which `RowMatmuls` takes over
    for module in modules:
        if hasattr(module, "layer_idx"):
            module.packed_cache = packed


def find_multiple(shape: HeadShape, device: torch.device) -> int:
    """Return the number of query rows, as small as may be, whose multiples agree. Raises `NotInvariant`."""
    groups = shape.heads // shape.kv_heads
    for multiple in MULTIPLES:
        if multiple * groups >= MIN_PRODUCT_ROWS and _rows_agree(shape, multiple, device):
            return multiple
    raise NotInvariant(f"attention with {shape} depends on the number of rows, whatever is done")


def block_mask(
    begin: int, rows: int, window: int | None, groups: int, multiple: int, device: torch.device
) -> torch.Tensor:
    """Return what is added to the logits of `rows` rows from position `begin` on: 0, or -inf for what is unseen.

    [groups * filled rows, keys]; the keys are those from `_first_key` to the end of the block.
    """
    filled = rows + -rows % multiple
    places = torch.arange(begin, begin + filled).clamp(max=begin + rows - 1).unsqueeze(1)
    keys = torch.arange(_first_key(begin, window), _block_end(begin))
    unseen = keys > places
    if window is not None:
        unseen |= keys <= places - window
    mask = torch.zeros(unseen.shape).masked_fill_(unseen, float("-inf"))
    return mask.repeat(groups, 1).to(device)


def _attend_block(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    mask: torch.Tensor,
    multiple: int,
    terms: Terms,
) -> torch.Tensor:
    """Queries [heads, rows, dim], scaled; keys and values [kv heads, keys, dim]: [heads, rows, dim]."""
    heads, rows, k_dim = queries.shape
    missing = -rows % multiple
    if missing:
        queries = torch.cat([queries, queries[:, -1:].expand(heads, missing, k_dim)], dim=1)
    folded = queries.reshape(keys.shape[0], -1, k_dim)  # [kv heads, groups * filled rows, dim]
    if terms.softcap is None:
        logits = torch.baddbmm(mask, folded, keys.transpose(1, 2))
    else:
        logits = torch.bmm(folded, keys.transpose(1, 2)).div_(terms.softcap).tanh_().mul_(terms.softcap)
        logits += mask
    sinks = terms.sinks
    shares = torch.softmax(logits, dim=-1) if sinks is None else _softmax_with_sinks(logits, sinks)
    return torch.bmm(shares, values).view(heads, rows + missing, -1)[:, :rows]


def _softmax_with_sinks(logits: torch.Tensor, sinks: torch.Tensor) -> torch.Tensor:
    """Softmax of [kv heads, groups * rows, keys] with one more logit of each head; its share is dropped."""
    kv_heads, rows, keys = logits.shape
    more = logits.new_full((kv_heads, rows, BLOCK), float("-inf"))  # keeps every row's address a multiple
    by_head = sinks.float().view(kv_heads, -1, 1)
    more[:, :, 0] = by_head.expand(-1, -1, rows // by_head.shape[1]).reshape(kv_heads, rows)
    return torch.softmax(torch.cat([logits, more], dim=-1), dim=-1)[:, :, :keys]


def _blocks(begin: int, end: int) -> Iterator[tuple[int, int]]:
    """Cut positions [begin, end) at multiples of `BLOCK`."""
    while begin < end:
        stop = min(_block_end(begin), end)
        yield begin, stop
        begin = stop


def _block_end(position: int) -> int:
    return (position // BLOCK + 1) * BLOCK


def _first_key(position: int, window: int | None) -> int:
    """Return the first key that is looked at from a position's block."""
    if window is None:
        return 0
    block_begin = position // BLOCK * BLOCK
    return max(block_begin - window + 1, 0) // BLOCK * BLOCK


def _slab(span: Span, number: int) -> SlabLayer:
    layer = span.cache.layers[number]
    if not isinstance(layer, SlabLayer):
        raise NotInvariant(f"layer {number} keeps something else than positions")
    return layer


def _rows_agree(shape: HeadShape, multiple: int, device: torch.device) -> bool:
    return all(
        _rows_of_a_block_agree(shape, multiple, num_blocks * BLOCK, device) for num_blocks in TRIED_BLOCKS
    )


def _rows_of_a_block_agree(shape: HeadShape, multiple: int, length: int, device: torch.device) -> bool:
    """Tell whether the last block of `length` positions gives every row what it gets alone."""
    generator = torch.Generator().manual_seed(shape.heads)

    def some(heads: int, rows: int, dim: int) -> torch.Tensor:
        return torch.randn(heads, rows, dim, generator=generator).to(device)

    queries = some(shape.heads, BLOCK, shape.k_dim) * shape.k_dim**-0.5
    keys = some(shape.kv_heads, 2 * length, shape.k_dim)[:, :length]
    values = some(shape.kv_heads, 2 * length, shape.v_dim)[:, :length]

    def run(begin: int, end: int) -> torch.Tensor:
        groups = shape.heads // shape.kv_heads
        mask = block_mask(length - BLOCK + begin, end - begin, None, groups, multiple, device)
        return _attend_block(queries[:, begin:end], keys, values, mask, multiple, Terms(1.0))

    alone = torch.cat([run(row, row + 1) for row in range(BLOCK)], dim=1)
    return all(
        torch.equal(run(begin, end), alone[:, begin:end])
        for begin in TRIED_BEGINS
        for end in sorted({min(begin + count, BLOCK) for count in TRIED_COUNTS})
    )
