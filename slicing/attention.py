"""Attention whose rows do not depend on their neighbours, over the keys and values of several sessions.

Stock layers reach it through transformers' attention interface; `PackedCache` stands in for their cache.
Rows that attend to an encoder's states (`crossing`) see all of them. The arithmetic is in `attention_blocks`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers import AttentionInterface
from transformers.cache_utils import Cache, DummyLayer, EncoderDecoderCache

from slicing.attention_blocks import (
    BLOCK,
    TRIED_BLOCKS,
    TRIED_MEMORY,
    HeadShape,
    Terms,
    attend_block,
    block_bias,
    block_end,
    block_mask,
    blocks_of,
    find_multiple,
    first_key,
)
from slicing.batch import Work
from slicing.block_slice import as_position_ids
from slicing.crossing import Crossing, unseen
from slicing.kv_cache import KVCache
from slicing.row_linear import NotInvariant, unwatched
from slicing.slab import SlabLayer

NAME = "diffuse_invariant"  # in transformers' attention interface


class Block(NamedTuple):
    """Rows of a session whose attention is computed at once."""

    begin: int  # position
    end: int
    keys: torch.Tensor  # [kv heads, keys, dim]
    values: torch.Tensor
    mask: torch.Tensor  # added to the logits


@dataclass(frozen=True, slots=True)
class Span:
    """Where one session's rows stand in a packed call."""

    cache: KVCache
    row: int
    rows: int
    position: int
    places: torch.Tensor | None = None  # [axes, rows]; None: counted from `position`

    def positions(self, axes: int, device: torch.device) -> torch.Tensor:
        """Return the positions of its rows [axes, rows]."""
        if self.places is not None:
            return self.places.to(device)
        counted = torch.arange(self.position, self.position + self.rows, device=device)
        return counted.expand(axes, -1)


class PackedCache(Cache):
    """What stock layers take for the cache of the one long sequence that a packed call looks like."""

    is_compileable = False

    def __init__(self, num_layers: int, blank: torch.Tensor | None = None) -> None:
        """`blank`: a row of encoder states [1, 1, width], where layers attend to some."""
        super().__init__(layers=[DummyLayer() for _ in range(num_layers)])
        self._crossing = Crossing(num_layers)
        self._pair = EncoderDecoderCache(self, self._crossing) if blank is not None else None
        self._blank = blank
        self.has_biases = False  # layers make a bias of the positions that they count
        self.num_calls = 0  # of attention, since the start
        self.num_rows = 0
        self._spans: list[Span] = []
        self._masks: dict[object, torch.Tensor] = {}
        self._multiples: dict[tuple[HeadShape, bool], int] = {}
        self._last: tuple[int, torch.Tensor] | None = None
        self._axes = 1

    def take(self, works: Sequence[Work], num_rows: int, start: int = 0, end: int = 0) -> None:
        """Begin a call of `num_rows` rows over layers [start, end); those after the works' own are filling.

        Raises ValueError where sessions have positions of several numbers of axes.
        """
        self._spans, row = [], 0
        for work in works:
            self._spans.append(Span(work.cache, row, work.rows, work.position, work.places))
            row += work.rows
        self._axes = _num_axes(works)
        self.num_rows = num_rows
        self._masks.clear()
        self._last = None
        if self._pair is not None:
            memories = [memory for span in self._spans if (memory := span.cache.memory) is not None]
            self._pair.is_updated = self._crossing.take(memories, start, end)

    def position_ids(self, _position: int, rows: int, device: torch.device) -> torch.Tensor:
        """Return every row's position in its own session, [1, rows] or [axes, 1, rows]; filling stands at 0."""
        places = [span.positions(self._axes, device) for span in self._spans]
        missing = rows - sum(span.rows for span in self._spans)
        places.append(torch.zeros(self._axes, missing, dtype=torch.int64, device=device))
        return as_position_ids(torch.cat(places, dim=1))

    def for_model(self) -> Cache:
        """Return what stock layers take for their cache."""
        return self if self._pair is None else self._pair

    def memory_states(self, device: torch.device) -> torch.Tensor | None:
        """Return the encoder states that keys are still to be made of [1, rows, width], a row of nothing for none."""
        if self._blank is None:
            return None
        states = self._crossing.states(device)
        return self._blank if states is None else states.to(self._blank)

    def begin(self, _position: int, start: int, end: int) -> None:
        """Get every session ready for its rows. Raises `CannotRollBack` as one of them does."""
        for span in self._spans:
            if start < end:
                span.cache.begin(span.position, start, end)

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
        if self.has_biases:
            key_states = key_states[:, :, :1].expand(-1, -1, self._num_positions, -1)
        self._last = (layer_idx, key_states)
        return key_states, value_states

    @property
    def _num_positions(self) -> int:
        """Of the longest session in the call, or what its rows would be one after the other."""
        return max([self.num_rows, *(span.position + span.rows for span in self._spans)])

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

        def blocks(span: Span) -> Iterator[Block]:
            layer = _slab(span, number)
            for begin, end in blocks_of(span.position, span.position + span.rows):
                keys, values = layer.held(first_key(begin, window), block_end(begin))
                mask = self._mask(begin, end - begin, window, shape, multiple, query.device)
                if terms.bias is not None:
                    mask = mask + block_bias(begin, end - begin, window, terms.bias, shape.kv_heads, multiple)
                yield Block(begin, end, keys[0], values[0], mask)

        return self._attend_blocks(query, blocks, shape.v_dim, multiple, terms)

    def crossed_layer(self, key: torch.Tensor) -> int | None:
        """Tell which layer's cross-attention asks with these keys; None: they are a session's own."""
        return None if self._pair is None else self._crossing.layer_of(key)

    def attend_memory(self, query: torch.Tensor, number: int, terms: Terms) -> torch.Tensor:
        """Attend from [1, heads, rows, dim] to every session's own encoder states: [1, rows, heads, dim]."""
        memories = [memory for span in self._spans if (memory := span.cache.memory) is not None]
        keys, values = memories[0].crossed(number)
        shape = HeadShape(query.shape[1], keys.shape[1], query.shape[3], values.shape[3])
        multiple = self._multiple_for(shape, query.device, is_memory=True)

        def blocks(span: Span) -> Iterator[Block]:
            memory = span.cache.memory
            assert memory is not None
            keys, values = memory.crossed(number)
            mask = self._memory_mask(memory.rows, query.device)
            for begin, end in blocks_of(span.position, span.position + span.rows):
                yield Block(begin, end, keys[0], values[0], mask)

        return self._attend_blocks(query, blocks, shape.v_dim, multiple, terms)

    def _attend_blocks(
        self,
        query: torch.Tensor,
        blocks: Callable[[Span], Iterable[Block]],
        v_dim: int,
        multiple: int,
        terms: Terms,
    ) -> torch.Tensor:
        queries = query[0].float() * terms.scale  # [heads, rows, dim]
        made = query.new_zeros(1, query.shape[2], query.shape[1], v_dim)
        for span in self._spans:
            for block in blocks(span):
                row, rows = span.row + block.begin - span.position, block.end - block.begin
                attended = attend_block(
                    queries.narrow(1, row, rows),
                    block.keys.float(),
                    block.values.float(),
                    block.mask,
                    multiple,
                    terms,
                )
                made[0, row : row + rows] = attended.transpose(0, 1)
        return made

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Return 0: positions are given to the layers, not counted by them.

        Where they count them for a bias, the call's rows are the last ones of the longest session: the last row's bias
        is then that of every distance.
        """
        return self._num_positions - self.num_rows if self.has_biases else 0

    def distances(self, position_bias: torch.Tensor) -> torch.Tensor:
        """Return a layer's bias by distance [heads, distances], from its bias of every row [1, heads, rows, keys]."""
        if not self.has_biases or position_bias.shape[-1] != self._num_positions:
            raise NotInvariant("its layers bring a bias of their own to attention")
        return position_bias[0, :, -1].float().flip(-1)

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        """Return the rows of the call: masks are no part of it."""
        return query_length, 0

    def _window(self, number: int, terms: Terms) -> int | None:
        """Return what the layer says, or else what its kind of storage does: some leave the window to the mask."""
        held = _slab(self._spans[0], number).window
        if held is not None and terms.window is not None and terms.window > held:
            raise NotInvariant("its layers look further back than their storage holds")
        return terms.window if terms.window is not None else held

    def _multiple_for(self, shape: HeadShape, device: torch.device, *, is_memory: bool = False) -> int:
        key = shape, is_memory
        if key not in self._multiples:
            self._multiples[key] = find_multiple(shape, device, TRIED_MEMORY if is_memory else TRIED_BLOCKS)
        return self._multiples[key]

    def _memory_mask(self, rows: int, device: torch.device) -> torch.Tensor:
        key = (rows, device)
        if key not in self._masks:
            self._masks[key] = unseen(rows, device)
        return self._masks[key]

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
    number = packed.crossed_layer(key)
    if attention_mask is not None:
        raise NotInvariant("its layers bring a mask of their own to attention")
    if number is None and (is_causal is False or not getattr(module, "is_causal", True)):
        raise NotInvariant("its attention is not causal")
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    with unwatched():
        if number is not None:
            if position_bias is not None and bool(position_bias.any()):
                raise NotInvariant("its layers bring a bias to an encoder's states")
            return packed.attend_memory(query, number, Terms(scale, softcap=softcap, sinks=s_aux)), None
        bias = None if position_bias is None else packed.distances(position_bias)
        return packed.attend(query, key, value, Terms(scale, sliding_window, softcap, s_aux, bias)), None


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
            packed.has_biases |= bool(getattr(module, "has_relative_attention_bias", False))


def _num_axes(works: Sequence[Work]) -> int:
    """Return the axes of the positions in a call. Raises ValueError where sessions do not agree."""
    axes = {len(work.places) for work in works if work.places is not None}
    if len(axes) > 1:
        raise ValueError(f"positions of {sorted(axes)} axes in one call")
    return axes.pop() if axes else 1


def _slab(span: Span, number: int) -> SlabLayer:
    layer = span.cache.layers[number]
    if not isinstance(layer, SlabLayer):
        raise NotInvariant(f"layer {number} keeps something else than positions")
    return layer
