"""Explains a recorded miniature: which operation made each value, until every block's output is accounted for.

Works on values alone. The first tape holds rows that all stand at position 0, where rotations change nothing; the
second one session's rows at positions 0, 1, 2, ..., which show rotations and windows.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import nn

from slicing.fast import fitting
from slicing.fast.expert_fit import fit_experts, is_fed_by, route_parts, router_logits, weights_of
from slicing.fast.fitting import Array, GateForm
from slicing.fast.head_sizes import HeadSizes, columns_of
from slicing.fast.recipe import (
    HIDDEN,
    POSITIONS,
    Activate,
    Attention,
    ClosingRecipe,
    Experts,
    Factor,
    Gate,
    LayerRecipe,
    Linear,
    Norm,
    NotComposable,
    Part,
    Rotary,
    Route,
    Source,
    Step,
    Sum,
    Turned,
)
from slicing.fast.tracing import AttentionCall, Call, LayerTape, call_names, holds_experts, visible_window

NUM_FIRST_ROWS = 23  # sessions of one row; more rows than values, and no size of a miniature
NUM_RUN_ROWS = 11  # positions of one session; enough to leave a miniature's window
SHRUNK = ("window", "group")  # settings that are smaller in a miniature, and so are no factors
GROUP_SETTINGS = (("n_group", "topk_group"),)
HALVES = (("first", "second"), ("even", "odd"))


@dataclass(frozen=True)
class Known:
    """A value that is explained, in both tapes: [rows, width]."""

    first: Array = field(repr=False)
    run: Array = field(repr=False)

    @property
    def width(self) -> int:
        """Its columns."""
        return self.first.shape[1]


def explain_layer(
    first: LayerTape,
    run: LayerTape,
    block: nn.Module,
    rotaries: Sequence[Call],
    settings: Mapping[str, float],
) -> LayerRecipe:
    """Explain one block; `rotaries` are the calls that made tables in the second tape. Raises `NotComposable`."""
    assert first.hidden_out is not None
    assert run.hidden_out is not None
    attentions = [call for call in first.calls if isinstance(call, AttentionCall)]
    if len(attentions) != 1:
        raise NotComposable(f"a layer calls transformers' attention {len(attentions)} times, not once")
    if call_names(first) != call_names(run):
        raise NotComposable("a layer does other things on other rows")
    explainer = Explainer(_known(first.hidden_in, run.hidden_in), settings, HeadSizes.of(attentions[0]))
    explainer.explain_calls(first.calls, run.calls, block, rotaries)
    result = explainer.source_of(_known(first.hidden_out, run.hidden_out), "the layer's output")
    return LayerRecipe(tuple(explainer.steps), _whole(result).value, call_names(first))


def explain_closing(
    hidden: tuple[torch.Tensor, torch.Tensor],
    calls: tuple[Sequence[Call], Sequence[Call]],
    logits: tuple[torch.Tensor, torch.Tensor],
    settings: Mapping[str, float],
) -> ClosingRecipe:
    """Explain what makes logits of the last block's output; each pair is (first tape, second tape)."""
    explainer = Explainer(_known(*hidden), settings, None)
    explainer.explain_calls(*calls, None, ())
    made, head = _known(*logits).first, explainer.values[-1].first
    if not explainer.steps or not isinstance(explainer.steps[-1], Linear):
        raise NotComposable("the model does not end in a product")
    result = len(explainer.values) - 1
    factor = fitting.factor_between(head, made)
    if factor is not None:
        return ClosingRecipe(tuple(explainer.steps), result, explainer.factor(factor), None)
    cap = fitting.fit_softcap(head, made, list(settings.values()))
    if cap is None:
        raise NotComposable("what makes logits of the head's output is not understood")
    return ClosingRecipe(tuple(explainer.steps), result, Factor(), explainer.factor(cap))


class Explainer:
    """Collects steps; every explained value is known by its number."""

    def __init__(self, given: Known, settings: Mapping[str, float], sizes: HeadSizes | None) -> None:
        self.values = [given]
        self.steps: list[Step] = []
        self.settings = settings
        self.sizes = sizes
        self.summed: set[int] = set()  # values that went into a sum
        self.routes: dict[int, Call] = {}

    def explain_calls(
        self,
        first: Sequence[Call | AttentionCall],
        run: Sequence[Call | AttentionCall],
        block: nn.Module | None,
        rotaries: Sequence[Call],
    ) -> None:
        """Explain calls in order; what changes nothing or is not understood is passed over."""
        for number, (call, other) in enumerate(zip(first, run, strict=True)):
            if isinstance(call, AttentionCall):
                assert isinstance(other, AttentionCall)
                assert block is not None
                self._attention(number, call, other, block, rotaries)
            else:
                assert isinstance(other, Call)
                self._call(number, call, other, block, rotaries)

    def source_of(self, wanted: Known, what: str) -> Source:
        """Find `wanted` among what is known, or explain it by one more step."""
        found = self._find(wanted)
        if found is not None:
            return found
        step = self._gate(wanted) or self._activation(wanted) or self._sum(wanted)
        if step is None:
            raise NotComposable(f"what {what} is made of is not understood")
        return self._add(step, wanted)

    def factor(self, value: float) -> Factor:
        """Name a number by the setting it is. Raises `NotComposable` where it is none."""
        if value == 1.0:
            return Factor()
        for name, setting in self.settings.items():
            if any(word in name for word in SHRUNK):
                continue
            for is_inverse in (False, True):
                named = 1 / setting if is_inverse else setting
                if abs(named - value) <= fitting.TOLERANCE * abs(value):
                    return Factor(name, is_inverse)
        raise NotComposable(f"a factor of {value:.6g} is none of the model's settings")

    def _call(
        self, number: int, call: Call, other: Call, block: nn.Module | None, rotaries: Sequence[Call]
    ) -> None:
        module = call.module
        if not call.tensors:
            return
        if holds_experts(module):
            self._experts(number, call, other)
            return
        if len(call.outputs) > 1:
            self._route(number, call, other, block)
            return
        given, made = call.tensors[0], call.outputs[0]
        if not isinstance(made, torch.Tensor) or not any(True for _ in module.parameters()):
            if isinstance(made, torch.Tensor) and made.shape == given.shape:
                self._bare(number, call, other, rotaries)
            return
        transposed = fitting.fit_product(module, _rows(given, True), _rows(made, True))
        if transposed is not None:
            source = self.source_of(_known(given, other.tensors[0]), f"the input of {call.name}")
            self._add(Linear(number, call.name, source, transposed), _known(made, other.outputs[0]))
            return
        if not self._norm(number, call, other, rotaries):
            raise NotComposable(f"{call.name} ({type(module).__name__}) is no operation that is known")

    def _bare(self, number: int, call: Call, other: Call, rotaries: Sequence[Call]) -> None:
        """A module without parameters: a norm without weights, an activation, or something that does nothing."""
        given, made = call.tensors[0], call.outputs[0]
        if not torch.equal(given, made) and self._find(_known(made, other.outputs[0])) is None:
            self._norm(number, call, other, rotaries)

    def _norm(self, number: int, call: Call, other: Call, rotaries: Sequence[Call]) -> bool:
        given, made = call.tensors[0], call.outputs[0]
        form = fitting.fit_norm(call.module, given, made)
        if form is None:
            return False
        wanted = _known(given, other.tensors[0])
        turned = self._turned(wanted, form.width, rotaries, f"the input of {call.name}")
        self._add(Norm(number, call.name, turned, form), _known(made, other.outputs[0]))
        return True

    def _attention(
        self,
        number: int,
        call: AttentionCall,
        other: AttentionCall,
        block: nn.Module,
        rotaries: Sequence[Call],
    ) -> None:
        query = self._turned(_known(call.query, other.query), call.query.shape[-1], rotaries, "the query")
        key = self._turned(_known(call.key, other.key), call.key.shape[-1], rotaries, "the key")
        value = self.source_of(_known(call.value, other.value), "the value")
        step = Attention(number, query, key, value, self._window(other), _name_of(call.sinks, block))
        self._add(step, _known(call.output, other.output))

    def _window(self, call: AttentionCall) -> str | None:
        try:
            window = visible_window(call.mask, call.query.shape[2])
        except ValueError as error:
            raise NotComposable(str(error)) from error
        if window is None:
            return None
        if window == call.window:
            return "argument"
        named = [name for name, value in self.settings.items() if value == window and "window" in name]
        if not named:
            raise NotComposable(f"a window of {window} positions is none of the model's settings")
        return named[0]

    def _turned(self, wanted: Known, width: int, rotaries: Sequence[Call], what: str) -> Turned:
        """Find a value that may have been turned: at position 0 it looks as before, or scaled as the tables are."""
        source = self._find(wanted) or self._find_scaled(wanted, rotaries)
        if source is None:
            source = self.source_of(wanted, what)
        before = self._taken(source).run.reshape(NUM_RUN_ROWS, -1, width)
        after = wanted.run.reshape(NUM_RUN_ROWS, -1, width)
        if fitting.is_close(before, after):
            return Turned(source)
        for call in rotaries:
            cos, sin = (_table(output) for output in call.outputs)
            form = fitting.fit_rotary(before, after, cos, sin)
            if form is not None:
                arguments = tuple(_placeholder(value) for value in call.inputs)
                named = tuple((name, _placeholder(value)) for name, value in call.settings.items())
                return Turned(source, Rotary(call.name, arguments, named, form))
        raise NotComposable(f"how positions enter {what} is not understood")

    def _find_scaled(self, wanted: Known, rotaries: Sequence[Call]) -> Source | None:
        """Find a value that the tables' own factor (as YaRN has it) was applied to."""
        factors = {float(call.outputs[0].flatten()[0]) for call in rotaries} - {1.0}
        for factor in factors:
            found = self._find(Known(wanted.first / factor, wanted.run))
            if found is not None:
                return found
        return None

    def _route(self, number: int, call: Call, other: Call, block: nn.Module | None) -> None:
        if not isinstance(getattr(call.module, "weight", None), torch.Tensor):
            return
        parts = route_parts(call)
        if parts is None:
            return
        weights, chosen = parts
        given = _known(call.tensors[0], other.tensors[0])
        what = f"{call.name} ({type(call.module).__name__})"
        logits = router_logits(call.module, given.first)
        biases = _biases(call, block, logits.shape[-1])
        names = [name for name in GROUP_SETTINGS if all(key in self.settings for key in name)]
        groupings = [(int(self.settings[one]), int(self.settings[two])) for one, two in names]
        found = fitting.fit_route(
            logits,
            chosen.numpy(),
            _rows(weights, True),
            [None, *biases.values()],
            [(1, 1), *(g for g in groupings if logits.shape[-1] % g[0] == 0 and g[1] <= g[0])],
        )
        if found is None:
            raise NotComposable(f"how {what} chooses is not understood")
        form, bias, grouping, factor = found
        source = self.source_of(given, f"the input of {call.name}")
        step = Route(
            number,
            call.name,
            source,
            form,
            [None, *biases][bias],
            *([(None, None), *names][grouping]),
            self.factor(factor),
        )
        made = self._add(step, _known(weights, weights_of(other)))
        self.routes[made.value] = call

    def _experts(self, number: int, call: Call, other: Call) -> None:
        what = f"{call.name} ({type(call.module).__name__})"
        routes = [v for v, router in self.routes.items() if is_fed_by(call, router)]
        if not routes:
            raise NotComposable(f"{what} is not fed by a router that is understood")
        given, made = _known(call.tensors[0], other.tensors[0]), _known(call.outputs[0], other.outputs[0])
        weights, chosen = route_parts(self.routes[routes[-1]]) or (None, None)
        assert weights is not None
        assert chosen is not None
        source = self.source_of(given, f"the input of {call.name}")
        step = fit_experts(
            Experts(
                number, call.name, source, Source(routes[-1]), "", "", None, None, False, GateForm("silu")
            ),
            call.module,
            given.first,
            made.first,
            chosen.numpy(),
            _rows(weights, True),
        )
        if step is None:
            raise NotComposable(f"what {what} computes is not understood")
        self._add(step, made)

    def _gate(self, wanted: Known) -> Gate | None:
        for (gate, up), name in itertools.product(list(self._pairs(wanted.width)), fitting.ACTIVATIONS):
            product = fitting.activate(name, self._taken(gate).first) * self._taken(up).first
            if fitting.is_close(product, wanted.first):
                return Gate(gate, up, name)
        return None

    def _pairs(self, width: int) -> Iterator[tuple[Source, Source]]:
        """Yield values that may be a gate and what it lets through: two products, or the halves of one."""
        products = [n + 1 for n, step in enumerate(self.steps) if isinstance(step, Linear)]
        whole = [Source(n) for n in products if self.values[n].width == width]
        yield from itertools.permutations(reversed(whole), 2)
        for number in products:
            if self.values[number].width == 2 * width:
                for one, two in HALVES:
                    pair = Source(number, Part(one)), Source(number, Part(two))  # type: ignore[arg-type]
                    yield pair
                    yield pair[::-1]

    def _activation(self, wanted: Known) -> Activate | None:
        for number, name in itertools.product(reversed(range(len(self.values))), fitting.ACTIVATIONS):
            value = self.values[number]
            if value.width == wanted.width and fitting.is_close(
                fitting.activate(name, value.first), wanted.first
            ):
                return Activate(Source(number), name)
        return None

    def _sum(self, wanted: Known) -> Sum | None:
        numbers = [n for n, value in enumerate(self.values) if value.width == wanted.width]
        made_of_sums = {n + 1 for n, step in enumerate(self.steps) if isinstance(step, Sum)}
        for terms in (
            [n for n in numbers if n not in self.summed],
            [n for n in numbers if n not in made_of_sums],
        ):
            found = fitting.fit_sum([self.values[n].first for n in terms], wanted.first)
            if found is not None:
                rounded = [(terms[n], 1.0 if abs(f - 1) < fitting.TOLERANCE else f) for n, f in found]
                self.summed |= {number for number, _ in rounded}
                return Sum(tuple((Source(number), self.factor(factor)) for number, factor in rounded))
        return None

    def _find(self, wanted: Known) -> Source | None:
        """Find a value among the known ones, or as a part of one; the latest first."""
        for number in reversed(range(len(self.values))):
            if fitting.is_close(self.values[number].first, wanted.first):
                return Source(number)
        for number in reversed(range(1, len(self.values))):
            value = self.values[number]
            if (
                self.sizes is not None
                and isinstance(self.steps[number - 1], Linear)
                and value.width == self.sizes.joined_width
            ):
                for name, is_grouped in itertools.product(("query", "key", "value"), (False, True)):
                    source = Source(number, Part(name, is_grouped))  # type: ignore[arg-type]
                    if fitting.is_close(self._taken(source).first, wanted.first):
                        return source
        return None

    def _taken(self, source: Source) -> Known:
        value = self.values[source.value]
        if source.part is None:
            return value
        columns = columns_of(source.part, value.width, self.sizes)
        return Known(value.first[:, columns], value.run[:, columns])

    def _add(self, step: Step, made: Known) -> Source:
        self.steps.append(step)
        self.values.append(made)
        return Source(len(self.values) - 1)


def _biases(call: Call, block: nn.Module | None, num_experts: int) -> dict[str, Array]:
    """Return the tensors that may be added to a router's scores, by their names in the block."""
    if block is None:
        return {}
    named = dict([*block.named_parameters(), *block.named_buffers()])
    own = [t for name, t in named.items() if name.startswith(call.name) and not name.endswith(".bias")]
    candidates = [t for t in (*own, *call.tensors[1:]) if t.shape == (num_experts,)]
    return {
        name: tensor.detach().double().numpy()
        for name, tensor in named.items()
        if any(tensor is candidate for candidate in candidates)
    }


def _placeholder(value: object) -> object:
    if isinstance(value, torch.Tensor):
        return HIDDEN if value.is_floating_point() else POSITIONS
    return value


def _whole(source: Source) -> Source:
    if source.part is not None:
        raise NotComposable("the layer's output is a part of a product")
    return source


def _name_of(tensor: torch.Tensor | None, block: nn.Module) -> str | None:
    if tensor is None:
        return None
    for name, parameter in block.named_parameters():
        if parameter.shape == tensor.shape and torch.equal(parameter, tensor):
            return name
    raise NotComposable("its attention sinks are no parameter of the layer")


def _known(first: torch.Tensor, run: torch.Tensor) -> Known:
    return Known(_rows(first, True), _rows(run, False))


def _rows(tensor: torch.Tensor, is_first: bool) -> Array:
    """Return [rows, width] of a tensor [.., rows, ..] of either tape, heads behind rows."""
    rows = NUM_FIRST_ROWS if is_first else NUM_RUN_ROWS
    if not is_first and tensor.ndim == 4 and tensor.shape[2] == rows and tensor.shape[1] != rows:
        tensor = tensor.transpose(1, 2)
    if tensor.numel() % rows:
        raise NotComposable(f"a value of shape {tuple(tensor.shape)} has no {rows} rows")
    return tensor.detach().double().reshape(rows, -1).numpy()


def _table(tensor: torch.Tensor) -> Array:
    return tensor.detach().double().reshape(tensor.shape[-2], -1).numpy()
