"""Holds the keys and values of one session, by global layer number, where only some layers are ever used.

It stands in for transformers' `Cache`. The session owns its position: the runner says where a step begins, and
nothing is read back from a layer, since a slice's first layers may stay empty for ever.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PretrainedConfig
from transformers.cache_utils import (
    DYNAMIC_LAYER_TYPE_MAPPING,
    Cache,
    DummyLayer,
    DynamicIndexedLayer,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    get_layer_types_and_kwargs,
)

from slicing.memory import Memory
from slicing.model_kind import shape_of
from slicing.slab import MIN_CAPACITY, CannotRollBack, Cursor, SlabLayer, capacity_for, visible_keys

__all__ = ["MIN_CAPACITY", "CacheLayout", "CannotRollBack", "KVCache", "SlabLayer", "capacity_for"]


@dataclass(frozen=True)
class CacheLayout:
    """What kind of storage each layer of a model needs."""

    layers: tuple[tuple[str, Mapping[str, Any]], ...]  # transformers' layer type and its settings
    has_memory: bool = False  # layers attend to an encoder's states as well

    @classmethod
    def of(cls, config: PretrainedConfig) -> CacheLayout:
        """Read it from a configuration, as transformers does for its own cache."""
        shape = shape_of(config)
        if shape.kind.has_memory:
            return cls((("full_attention", {}),) * shape.num_layers, has_memory=True)
        types, settings = get_layer_types_and_kwargs(config.get_text_config(decoder=True))
        return cls(tuple(zip(types, settings, strict=True)))


class KVCache(Cache):
    """The keys and values of one session.

    `length` positions are held; a step at a lower position overwrites what follows it. Layers with a window hold what
    its last rows see, and can be taken back so far (`slab`). Layers that keep a running state instead of positions
    (recurrent, convolution) are transformers' own; they only go forward or back to 0.
    """

    is_compileable = False

    def __init__(self, layout: CacheLayout) -> None:
        self.layout = layout
        self._clear()

    def begin(self, position: int, start: int, end: int) -> None:
        """Get layers [start, end) ready for a step at `position`.

        Raises `CannotRollBack` when one of them keeps a running state that is at another position, or a window
        that does not reach back so far any more.
        """
        for number, layer in self._windowed.items():
            if start <= number < end:
                layer.check(position)
        self._cursor.position = position
        for number in self._states:
            if start <= number < end:
                self._set_back(number, position)
                self._states[number] = -1  # a step that fails midway leaves no usable state

    def finish(self, length: int, start: int, end: int) -> None:
        """Note that layers [start, end) hold `length` positions now."""
        self.length = length
        for number in self._states:
            if start <= number < end:
                self._states[number] = length
        for number, layer in self._windowed.items():
            if start <= number < end:
                layer.trim()

    @property
    def memory(self) -> Memory | None:
        """What cross-attention looks at; None for a model without."""
        return self._memory

    @property
    def memory_rows(self) -> int:
        """Encoder states that came."""
        return self._memory.rows if self._memory is not None else 0

    def add_memory(self, states: torch.Tensor) -> None:
        """Take encoder states [rows, width], all before the first step. Raises ValueError later, or for no use."""
        if self._memory is None:
            raise ValueError("this model takes no encoder states")
        self._memory.add(states)

    def memory_states(self, device: torch.device) -> torch.Tensor | None:
        """Return all encoder states [1, rows, width] on `device`, where they stay, or None."""
        return self._memory.states(device) if self._memory is not None else None

    def for_model(self) -> Cache:
        """Return what a stock forward takes for its cache."""
        return self if self._memory is None else self._memory.pair

    def truncate(self, position: int) -> None:
        """Forget everything from `position` on.

        Raises `CannotRollBack` where a running state cannot follow, or a window's rows before it are gone.
        """
        if not 0 <= position <= self.length:
            raise ValueError(f"cannot truncate to position {position}: the session holds {self.length}")
        for window in self._windowed.values():
            window.check(min(position, window.length))
        for number in self._states:
            if self._states[number] > position:
                self._set_back(number, position)
        for layer in self.layers:
            if isinstance(layer, SlabLayer):
                layer.truncate(position)
        self.length = position

    def can_fork(self, length: int) -> bool:
        """Tell whether `fork(length)` would succeed."""
        return (
            0 <= length <= self.length
            and self._stuck_at(length) is None
            and all(layer.can_go_on_at(min(length, layer.length)) for layer in self._windowed.values())
            and not (length and self.memory_rows)
        )

    def fork(self, length: int) -> KVCache:
        """Return another session's cache with a copy of the first `length` positions; this one is not changed.

        Raises ValueError for more than is held, `CannotRollBack` where a running state stands elsewhere, or a window's
        rows before `length` are gone.
        """
        if not 0 <= length <= self.length:
            raise ValueError(f"cannot fork at position {length}: the session holds {self.length}")
        stuck = self._stuck_at(length)
        if stuck is not None:
            raise CannotRollBack(f"layer {stuck} keeps a running state: it cannot be forked at {length}")
        for window in self._windowed.values():
            window.check(min(length, window.length))
        if length and self.memory_rows:
            raise CannotRollBack("a session with encoder states cannot be forked")
        other = KVCache(self.layout)
        if length == 0:
            return other
        other.length = length
        with torch.no_grad():
            for number, layer in enumerate(self.layers):
                mirror = other.layers[number]
                if isinstance(layer, SlabLayer) and isinstance(mirror, SlabLayer):
                    mirror.copy_from(layer, length)
                elif number in self._states and _size_bytes(layer):
                    other.layers[number] = copy.deepcopy(layer)
                    other._states[number] = self._states[number]
                    other._set_back(number, length)
        return other

    def close(self) -> None:
        """Free the storage; the cache is empty afterwards."""
        if self._memory is not None:
            self._memory.close()
        self._clear()

    @property
    def size_bytes(self) -> int:
        """Memory that the layers take, the room to grow and encoder states included."""
        more = self._memory.size_bytes if self._memory is not None else 0
        return more + sum(_size_bytes(layer) for layer in self.layers)

    @property
    def position_bytes(self) -> dict[int | None, int]:
        """What a position takes in the layers used so far, those of each window together (None: all that see all)."""
        sizes: dict[int | None, int] = {}
        for layer in self.layers:
            if isinstance(layer, SlabLayer) and layer.capacity:
                more = layer.size_bytes // layer.capacity
                sizes[layer.window] = sizes.get(layer.window, 0) + more
        return sizes

    @property
    def state_bytes(self) -> int:
        """Memory of the layers that keep something else than positions that double."""
        return sum(_size_bytes(layer) for layer in self.layers if not isinstance(layer, SlabLayer))

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Store what a layer made of the running step; return what its attention may look at."""
        layer: Any = self.layers[layer_idx]
        return layer.update(key_states, value_states, *args, **kwargs)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Return the position at which the running step begins, whichever layer is asked."""
        return self._cursor.position

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        """Return the number of keys that the layer will show in this step, and the position of the first."""
        layer = self.layers[layer_idx]
        window = layer.window if isinstance(layer, SlabLayer) else getattr(layer, "sliding_window", None)
        return visible_keys(self._cursor.position, query_length, window)

    def position_ids(self, position: int, rows: int, device: torch.device) -> torch.Tensor:
        """Return the positions of a step's rows [1, rows]."""
        return torch.arange(position, position + rows, device=device).unsqueeze(0)

    @property
    def is_sliding(self) -> list[bool]:
        """Which layers show a window only."""
        return self._sliding

    @property
    def is_linear(self) -> list[bool]:
        """Which layers hold a running state and nothing else."""
        return self._linear

    @property
    def is_dummy(self) -> list[bool]:
        """Which layers hold nothing."""
        return self._dummy

    def __repr__(self) -> str:
        return f"KVCache(length={self.length}, size_bytes={self.size_bytes})"

    def _clear(self) -> None:
        self.length = 0
        self._cursor = Cursor()
        super().__init__(layers=[_new_layer(*settings, self._cursor) for settings in self.layout.layers])
        self._memory = Memory(self, len(self.layers)) if self.layout.has_memory else None
        self._states = {
            number: 0
            for number, layer in enumerate(self.layers)
            if not isinstance(layer, SlabLayer | DummyLayer)
        }
        self._windowed = {
            number: layer
            for number, layer in enumerate(self.layers)
            if isinstance(layer, SlabLayer) and layer.window is not None
        }
        self._sliding = [bool(getattr(layer, "is_sliding", False)) for layer in self.layers]
        self._linear = super().is_linear
        self._dummy = super().is_dummy

    def _stuck_at(self, length: int) -> int | None:
        """Return the first layer whose running state cannot be had at `length`."""
        for number, held in self._states.items():
            layer = self.layers[number]
            is_fine = (
                length in (0, held)
                or (held == 0 and not _size_bytes(layer))  # a layer that never ran
                or (isinstance(layer, DynamicIndexedLayer) and held > length)
            )
            if not is_fine:
                return number
        return None

    def _set_back(self, number: int, position: int) -> None:
        held = self._states[number]
        layer = self.layers[number]
        if held == position:
            return
        if position == 0:
            self.layers[number] = _new_layer(*self.layout.layers[number], self._cursor)
        elif isinstance(layer, DynamicIndexedLayer) and held > position:
            layer.crop(position - held)
        else:
            raise CannotRollBack(
                f"layer {number} keeps a running state: it can only go on, or start again at 0"
            )
        self._states[number] = position


def _new_layer(layer_type: str, settings: Mapping[str, Any], cursor: Cursor) -> Any:
    cls = DYNAMIC_LAYER_TYPE_MAPPING[layer_type]
    if cls is DynamicLayer:
        return SlabLayer(cursor)
    if cls is DynamicSlidingWindowLayer:
        return SlabLayer(cursor, settings["sliding_window"])
    return cls(**settings)


def _size_bytes(layer: Any) -> int:
    if isinstance(layer, SlabLayer):
        return layer.size_bytes
    values = [
        held
        for value in vars(layer).values()
        for held in (value.values() if isinstance(value, dict) else (value,))
    ]
    return sum(value.nbytes for value in values if isinstance(value, torch.Tensor))
