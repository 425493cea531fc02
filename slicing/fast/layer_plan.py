"""Decides how one layer's steps are done at their real sizes: which products are joined, what is added up in place.

Knows nothing of weights (`packed_layer`) nor of buffers (`layer_writer`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from slicing.fast.head_sizes import HeadSizes, columns_of
from slicing.fast.recipe import (
    Attention,
    Experts,
    Gate,
    Linear,
    Norm,
    NotComposable,
    Route,
    Source,
    Step,
    Sum,
)
from slicing.fast.tracing import AttentionCall, Call


@dataclass(frozen=True)
class Member:
    """One product among joined ones: whose rows are ordered so that its parts lie one after the other."""

    step: int
    parts: tuple[Source, ...]  # in order; none: all of it, as it is
    column: int  # where it begins among the joined
    width: int


class LayerPlan:
    """One layer's steps at their real sizes. Raises `NotComposable` where they do not fit together."""

    def __init__(
        self,
        steps: Sequence[Step],
        result: int,
        calls: Sequence[Call | AttentionCall],
        hidden_size: int,
        settings: Mapping[str, float],
    ) -> None:
        self.steps = steps
        self.result = result
        self.calls = calls
        self.settings = settings
        attentions = [call for call in calls if isinstance(call, AttentionCall)]
        self.sizes = HeadSizes.of(attentions[0]) if attentions else None
        self.widths = [hidden_size]
        for step in steps:
            self.widths.append(self._width(step))
        self.last_use = self._last_uses()
        self.joined = self._join()
        self.bases = {n: self._base(n) for n, step in enumerate(steps) if isinstance(step, Sum)}
        self.added = {n: where for n in range(len(steps)) if (where := self._adds_to(n)) is not None}

    @property
    def result_width(self) -> int:
        """Columns of what goes on."""
        return self.widths[self.result]

    def attention(self) -> tuple[Attention, AttentionCall] | None:
        """Return the layer's attention and its real call."""
        for step in self.steps:
            if isinstance(step, Attention):
                call = self.calls[step.call]
                assert isinstance(call, AttentionCall)
                return step, call
        return None

    def window(self) -> int | None:
        """Return how many positions the layer's attention sees; None: all."""
        found = self.attention()
        if found is None or found[0].window is None:
            return None
        step, call = found
        return call.window if step.window == "argument" else int(self.settings[str(step.window)])

    def heads(self, step: Norm) -> int:
        """Return how many heads a norm takes one by one."""
        return (
            self.widths[step.source.source.value] // self.norm_width(step)
            if step.source.source.part is None
            else (len(self.columns(step.source.source)) // self.norm_width(step))
        )

    def norm_width(self, step: Norm) -> int:
        """Return over how many values a norm goes."""
        return self._call(step.call).tensors[0].shape[-1]

    def top_k(self, step: Route) -> int:
        """Return how many experts a row has."""
        return next(v for v in self._call(step.call).outputs if not v.is_floating_point()).shape[-1]

    def width_of(self, source: Source) -> int:
        """Return the columns of a source."""
        return self.widths[source.value] if source.part is None else len(self.columns(source))

    def _call(self, number: int) -> Call:
        call = self.calls[number]
        assert isinstance(call, Call)
        return call

    def columns(self, source: Source) -> np.ndarray:
        """Return which columns of a value a part is."""
        assert source.part is not None
        return columns_of(source.part, self.widths[source.value], self.sizes)

    def _width(self, step: Step) -> int:
        if isinstance(step, Linear):
            return self._call(step.call).outputs[0].shape[-1]
        if isinstance(step, Attention):
            call = self.calls[step.call]
            assert isinstance(call, AttentionCall)
            return call.query.shape[1] * call.value.shape[-1]
        if isinstance(step, Route):
            return 2 * self.top_k(step)
        source = step.gate if isinstance(step, Gate) else step.sources[0]
        if source.part is not None and self.sizes is None and source.part.name in ("query", "key", "value"):
            raise NotComposable("a joined product without attention")
        return self.width_of(source)

    def _last_uses(self) -> dict[int, int]:
        last = {value: value - 1 for value in range(len(self.widths))}
        for n, step in enumerate(self.steps):
            last |= {source.value: n for source in step.sources}
        return last | {self.result: len(self.steps)}

    def _join(self) -> dict[int, list[Member]]:
        """Join the products of the same source, where the first of them stands."""
        groups: dict[Source, list[int]] = {}
        for n, step in enumerate(self.steps):
            if isinstance(step, Linear):
                groups.setdefault(step.source, []).append(n)
        joined = {}
        for numbers in groups.values():
            members, column = [], 0
            for n in self._gates_together(numbers):
                members.append(Member(n, self._parts(n + 1), column, self.widths[n + 1]))
                column += self.widths[n + 1]
            joined[min(numbers)] = members
        return joined

    def _gates_together(self, numbers: Sequence[int]) -> list[int]:
        """Put each product that a gate lets through right behind the gate."""
        order = list(numbers)
        for step in self.steps:
            if isinstance(step, Gate) and step.gate.part is None:
                gate, up = step.gate.value - 1, step.up.value - 1
                if (gate in order) != (up in order):
                    raise NotComposable("a gate and what it lets through are products of different values")
                if gate in order:
                    order.remove(up)
                    order.insert(order.index(gate) + 1, up)
        return order

    def _parts(self, value: int) -> tuple[Source, ...]:
        used = dict.fromkeys(s for step in self.steps for s in step.sources if s.value == value)
        if not any(source.part for source in used):
            return ()
        if not all(source.part for source in used) or sum(map(self.width_of, used)) != self.widths[value]:
            raise NotComposable("a joined product is used in parts that are not all of it")
        return tuple(used)

    def _base(self, number: int) -> int | None:
        """Return the value that a sum is added onto in place: one that nobody needs afterwards."""
        step = self.steps[number]
        assert isinstance(step, Sum)
        free = [
            source.value
            for source, factor in step.terms
            if factor.setting is None and source.part is None and self.last_use[source.value] == number
        ]
        ready = [value for value in free if not self._is_made_by_product(value)]
        return next(iter(sorted(ready) or free), None)

    def _is_made_by_product(self, value: int) -> bool:
        return value > 0 and isinstance(self.steps[value - 1], Linear | Experts)

    def _adds_to(self, number: int) -> int | None:
        """Return the value onto which a product can be added as it is made."""
        step = self.steps[number]
        value = number + 1
        if not isinstance(step, Linear | Experts) or value == self.result:
            return None
        if isinstance(step, Linear) and len(self.joined.get(number, ())) != 1:
            return None
        users = [n for n, other in enumerate(self.steps) for s in other.sources if s.value == value]
        if len(users) != 1 or not isinstance(self.steps[users[0]], Sum):
            return None
        user = self.steps[users[0]]
        assert isinstance(user, Sum)
        base = self.bases[users[0]]
        factor = next(f for s, f in user.terms if s.value == value)
        readers = [s.value for other in self.steps[number : users[0]] for s in other.sources]
        if base is None or base in (value, *readers) or base > number or factor.setting is not None:
            return None
        return base
