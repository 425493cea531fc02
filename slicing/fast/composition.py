"""One program for everything that a runner holds of a model: its layers, and the closing end where it is held.

Knows recipes, sizes and packed weights; not where weights come from, nor sessions.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from slicing.ends import Parts
from slicing.fast.layer_plan import LayerPlan
from slicing.fast.layer_writer import BufferPool, LayerWriter
from slicing.fast.packed_layer import PackedLayer
from slicing.fast.pages import KVLayout, LayerKV
from slicing.fast.program import Columns, Program, ProgramBuilder
from slicing.fast.recipe import ModelRecipe, NotComposable
from slicing.fast.skeleton import Skeleton
from slicing.fast.tracing import AttentionCall
from slicing.stacks import block_numbers

HIDDEN_BUFFER = 0


class Plans:
    """What each layer and the closing end do, at real sizes. Raises `NotComposable`."""

    def __init__(self, recipe: ModelRecipe, skeleton: Skeleton) -> None:
        self.recipe = recipe
        self.skeleton = skeleton
        self.num_layers = len(skeleton.layers)
        self.closing = LayerPlan(
            recipe.closing.steps,
            recipe.closing.result,
            skeleton.closing,
            skeleton.hidden_size,
            skeleton.settings,
        )
        self._layers: dict[int, LayerPlan] = {}
        refuse_hidden_differences(skeleton)

    def layer(self, number: int) -> LayerPlan:
        """Return a layer's plan."""
        if number not in self._layers:
            self._layers[number] = self._plan(number)
        return self._layers[number]

    def held_layers(self, parts: Parts) -> list[int]:
        """Return the numbers of the held layers, ascending: their places are their slots in a cache."""
        return sorted({layer for start, end in parts.layers for layer in range(start, end)})

    def kv_layout(self, layers: Sequence[int]) -> KVLayout:
        """Return where keys and values of these layers lie."""
        slots = []
        for number in layers:
            plan = self.layer(number)
            assert plan.sizes is not None
            slots.append(LayerKV(plan.sizes.kv_heads, plan.sizes.k_dim, plan.sizes.v_dim, plan.window()))
        return KVLayout(slots)

    def _plan(self, number: int) -> LayerPlan:
        kind = self.skeleton.kinds[number]
        recipe = self.recipe.layers.get(kind)
        tape = self.skeleton.layers[number]
        if recipe is None or recipe.call_names != self.skeleton.call_names(number):
            raise NotComposable(f"layer {number} is of a kind that the miniature lacks")
        size = self.skeleton.hidden_size
        plan = LayerPlan(recipe.steps, recipe.result, tape.calls, size, self.skeleton.settings)
        if plan.result_width != size:
            raise NotComposable(f"layer {number} returns {plan.result_width} columns, not {size}")
        return plan


def refuse_hidden_differences(skeleton: Skeleton) -> None:
    """Raise `NotComposable` where layers of a kind differ in a number that shows in no call.

    Numbers that only count the layers, windows and scales (which calls show) may differ.
    """
    seen: dict[object, tuple[int, dict[str, float]]] = {}
    for number, (kind, block) in enumerate(zip(skeleton.kinds, skeleton.stack.blocks, strict=True)):
        own = dict(block_numbers(block))
        first, theirs = seen.setdefault(kind, (number, own))
        shown = {
            value
            for call in skeleton.layers[number].calls
            if isinstance(call, AttentionCall)
            for value in (call.scale, call.window, call.softcap)
        }
        for name, value in own.items():
            distance = value - theirs.get(name, value)
            if distance and distance != number - first and value not in shown:
                raise NotComposable(
                    f"layers {first} and {number} differ in {name}, in a way that is not seen"
                )


class Composition:
    """A program over packed weights, and where its parts begin and end."""

    def __init__(self, plans: Plans, layers: Mapping[int, PackedLayer], closing: PackedLayer | None) -> None:
        """Write the operations of these layers (ascending), and of norm and head where they are given."""
        self.plans = plans
        self.layers = sorted(layers)
        self.layout = plans.kv_layout(self.layers)
        self.slots = {number: slot for slot, number in enumerate(self.layers)}
        builder = ProgramBuilder(self.layout)
        assert builder.buffer(plans.skeleton.hidden_size) == HIDDEN_BUFFER
        pool = BufferPool(builder)
        for number in self.layers:
            builder.layer(number)
            self._write_layer(builder, pool, number, layers[number])
        builder.layer(plans.num_layers)
        self.logits_buffer = self._write_closing(builder, pool, closing) if closing is not None else -1
        self.program: Program = builder.build()
        marks = [self.program.layers[number] for number in (*self.layers, plans.num_layers)]
        self._ends = dict(zip(self.layers, marks[1:], strict=True))

    @property
    def closing_start(self) -> int:
        """The operation at which norm and head begin."""
        return self.program.layers[self.plans.num_layers]

    def operations(self, start: int, end: int) -> tuple[int, int]:
        """Return the range of operations of layers [start, end), at least one, all held."""
        return self.program.layers[start], self._ends[end - 1]

    def slot_range(self, start: int, end: int) -> tuple[int, int]:
        """Return the range of cache slots of layers [start, end), at least one, all held."""
        return self.slots[start], self.slots[end - 1] + 1

    def _write_layer(
        self, builder: ProgramBuilder, pool: BufferPool, number: int, packed: PackedLayer
    ) -> None:
        plan, tables = self.plans.layer(number), self.plans.skeleton.tables
        place = LayerWriter(plan, builder, pool, packed, HIDDEN_BUFFER, self.slots[number], tables).write()
        if place != Columns(HIDDEN_BUFFER):
            builder.copy(place, Columns(HIDDEN_BUFFER), plan.result_width)
            pool.give(place.buffer)

    def _write_closing(self, builder: ProgramBuilder, pool: BufferPool, packed: PackedLayer) -> int:
        size = self.plans.skeleton.hidden_size
        kept = pool.take(size)
        builder.gather(Columns(HIDDEN_BUFFER), Columns(kept), size)
        plan, recipe = self.plans.closing, self.plans.recipe.closing
        place = LayerWriter(plan, builder, pool, packed, kept, 0, self.plans.skeleton.tables).write()
        if place.column:
            raise NotComposable("the head is joined with another product")
        factor = recipe.factor.of(self.plans.skeleton.settings)
        if factor != 1.0:
            builder.scale(place, plan.result_width, factor)
        if recipe.softcap is not None:
            builder.softcap(place, plan.result_width, recipe.softcap.of(self.plans.skeleton.settings))
        return place.buffer
