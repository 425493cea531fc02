"""Writes one layer's operations, and gives each value a place in a buffer. Knows nothing of models."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import Any

from slicing.fast.head_sizes import HeadSizes
from slicing.fast.layer_plan import LayerPlan
from slicing.fast.packed_layer import FloatArray, PackedLayer
from slicing.fast.program import Columns, ProgramBuilder
from slicing.fast.recipe import (
    Activate,
    Attention,
    Experts,
    Gate,
    Linear,
    Norm,
    NotComposable,
    Rotary,
    Route,
    Source,
    Sum,
)
from slicing.fast.tracing import AttentionCall

Tables = Callable[[Rotary], tuple[FloatArray, FloatArray]]  # a rotation's cosines and sines [positions, dim]


class BufferPool:
    """Buffers by width: what one layer has done with, the next takes."""

    def __init__(self, builder: ProgramBuilder) -> None:
        self._builder = builder
        self._free: dict[int, list[int]] = defaultdict(list)
        self._widths: dict[int, int] = {}

    def take(self, width: int) -> int:
        """Return a buffer of this width that nobody uses."""
        if self._free[width]:
            return self._free[width].pop()
        number = self._builder.buffer(width)
        self._widths[number] = width
        return number

    def give(self, number: int) -> None:
        """Return a buffer."""
        self._free[self._widths[number]].append(number)


class LayerWriter:
    """Writes one layer; `places` says where each value lies."""

    def __init__(
        self,
        plan: LayerPlan,
        builder: ProgramBuilder,
        pool: BufferPool,
        packed: PackedLayer,
        hidden: int,
        slot: int,
        tables: Tables,
    ) -> None:
        self.plan = plan
        self.builder = builder
        self.pool = pool
        self.packed = packed
        self.hidden = hidden
        self.slot = slot
        self.tables = tables
        self.places: dict[int, Columns] = {0: Columns(hidden)}
        self.part_places: dict[Source, Columns] = {}

    def write(self) -> Columns:
        for n, step in enumerate(self.plan.steps):
            if isinstance(step, Linear):
                self._products(n)
            else:
                place = getattr(self, f"_{type(step).__name__.lower()}")(n, step)
                if place is not None:
                    self.places[n + 1] = place
            self._release(n)
        return self.places[self.plan.result]

    def place(self, source: Source) -> Columns:
        return self.places[source.value] if source.part is None else self.part_places[source]

    def _products(self, n: int) -> None:
        members = self.plan.joined.get(n)
        if members is None:
            return  # made with another
        weight, bias = self.packed.products[n]
        step = self.plan.steps[n]
        assert isinstance(step, Linear)
        if n in self.plan.added:
            base = self.places[self.plan.added[n]]
            self.builder.linear(self.place(step.source), base, weight, bias, add=True)
            return
        buffer = self.pool.take(sum(member.width for member in members))
        self.builder.linear(self.place(step.source), Columns(buffer), weight, bias)
        for member in members:
            self.places[member.step + 1] = Columns(buffer, member.column)
            column = member.column
            for part in member.parts:
                self.part_places[part] = Columns(buffer, column)
                column += self.plan.width_of(part)

    def _norm(self, n: int, step: Norm) -> Columns:
        source = step.source.source
        self._turn(source, step.source.rotary, self.plan.norm_width(step))
        src = self.place(source)
        place = src if self._is_last(source, n) else Columns(self.pool.take(self.plan.width_of(source)))
        weight, bias = self.packed.vectors[n]
        width, heads = self.plan.norm_width(step), self.plan.heads(step)
        if step.form.kind == "rms":
            self.builder.rms_norm(src, place, weight, step.form.epsilon, width, heads)
        else:
            self.builder.layer_norm(src, place, weight, bias, step.form.epsilon, width, heads)
        return place

    def _attention(self, n: int, step: Attention) -> Columns:
        call = self.plan.calls[step.call]
        assert isinstance(call, AttentionCall)
        sizes = HeadSizes.of(call)
        self._turn(step.query.source, step.query.rotary, sizes.k_dim)
        self._turn(step.key.source, step.key.rotary, sizes.k_dim)
        keys, values = self.place(step.key.source), self.place(step.value)
        self.builder.append(keys, values, sizes.kv_heads, sizes.k_dim, sizes.v_dim, self.slot)
        place = Columns(self.pool.take(sizes.heads * sizes.v_dim))
        self.builder.attention(
            self.place(step.query.source),
            place,
            sizes.heads,
            sizes.kv_heads,
            sizes.k_dim,
            sizes.v_dim,
            self.slot,
            call.scale,
            call.softcap or 0.0,
            self.plan.window() or 0,
            self.packed.vectors[n][0],
        )
        return place

    def _gate(self, _n: int, step: Gate) -> Columns:
        gate, up, inter = self.place(step.gate), self.place(step.up), self.plan.width_of(step.gate)
        if up != Columns(gate.buffer, gate.column + inter):
            raise NotComposable("a gate does not lie beside what it lets through")
        place = Columns(self.pool.take(inter))
        activation: Any = step.activation
        self.builder.gate(gate, place, inter, activation)
        return place

    def _activate(self, n: int, step: Activate) -> Columns:
        src, width = self.place(step.source), self.plan.width_of(step.source)
        place = src if self._is_last(step.source, n) else Columns(self.pool.take(width))
        activation: Any = step.activation
        self.builder.activate(src, place, width, activation)
        return place

    def _sum(self, n: int, step: Sum) -> Columns:
        base, width = self.plan.bases[n], self.plan.widths[n + 1]
        terms = [(s, f.of(self.plan.settings)) for s, f in step.terms]
        if base is None:
            place = Columns(self.pool.take(width))
            source, factor = terms.pop(0)
            self.builder.copy(self.place(source), place, width)
            if factor != 1.0:
                self.builder.scale(place, width, factor)
        else:
            place = self.places[base]
        for source, factor in terms:
            if source.value != base and self.plan.added.get(source.value - 1, -1) != base:
                self.builder.add(self.place(source), place, width, factor)
        return place

    def _route(self, n: int, step: Route) -> Columns:
        weight, bias = self.packed.products[n]
        logits = self.pool.take(weight.rows)
        self.builder.linear(self.place(step.source), Columns(logits), weight, bias)
        place = Columns(self.pool.take(self.plan.widths[n + 1]))
        top_k, form = self.plan.top_k(step), step.form
        settings = self.plan.settings
        self.builder.route(
            Columns(logits),
            place,
            weight.rows,
            top_k,
            form.mode,
            form.is_normalised,
            step.factor.of(settings),
            self.packed.vectors[n][0],
            int(settings[step.groups]) if step.groups else 1,
            int(settings[step.top_groups]) if step.top_groups else 1,
        )
        self.pool.give(logits)
        return place

    def _experts(self, n: int, step: Experts) -> Columns | None:
        base = self.plan.added.get(n)
        place = self.places[base] if base is not None else Columns(self.pool.take(self.plan.widths[n + 1]))
        experts, routes = self.packed.experts[n], self.places[step.routes.value]
        activation: Any = step.form.activation
        self.builder.experts(
            self.place(step.source),
            place,
            routes.buffer,
            experts,
            self.plan.widths[step.routes.value] // 2,
            experts[0].down.columns,
            activation,
            step.form.layout,
            step.form.alpha,
            step.form.limit,
            add=base is not None,
        )
        return place if base is None else None

    def _turn(self, source: Source, rotary: Rotary | None, head_dim: int) -> None:
        if rotary is None:
            return
        cos, sin = self.tables(rotary)
        heads = self.plan.width_of(source) // head_dim
        self.builder.rotary(self.place(source), heads, head_dim, cos.shape[1], cos, sin, rotary.form.style)

    def _is_last(self, source: Source, n: int) -> bool:
        """Whether nobody needs a source after step n, so that it may be overwritten."""
        later = [s for other in self.plan.steps[n + 1 :] for s in other.sources if s.value == source.value]
        if self.plan.result == source.value:
            return False
        return not later if source.part is None else source not in later and Source(source.value) not in later

    def _release(self, n: int) -> None:
        """Give back the buffers that no value needs any more."""
        live = {place.buffer for value, place in self.places.items() if self.plan.last_use[value] > n}
        held = {place.buffer for place in self.places.values()}
        for buffer in held - live - {self.hidden}:
            self.pool.give(buffer)
        self.places = {v: p for v, p in self.places.items() if p.buffer in live | {self.hidden}}
