"""Proves, before a model is served, that cutting it changes nothing: a miniature is run whole and cut.

The miniature is the same class with few layers, small widths and random weights. Every block call's arguments and
every output must agree bit for bit; the first that does not is named in the refusal.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import pairwise
from threading import Lock
from typing import Any

import torch
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel
from transformers.utils import logging

from slicing.block_slice import BlockSlice
from slicing.call_plan import (
    BlockCall,
    BlockForm,
    CallPlan,
    find_memory,
    first_difference,
    learn_form,
    name_arguments,
    recorded_calls,
    take_apart,
)
from slicing.ends import EndNames, Parts, learn_ends, needed_parameters
from slicing.forward_form import ForwardForm
from slicing.kv_cache import CacheLayout, CannotRollBack, KVCache
from slicing.model_kind import ModelShape, shape_of
from slicing.shrink import num_layers_of_one_period, small_configs
from slicing.stacks import (
    BUILDING,
    BlockStack,
    CannotCut,
    block_kinds,
    build_weightless,
    embedding_weight,
    find_stack,
    first_line,
    lend_tables,
    make_hollow,
    new_model,
    persistent_names,
    share_tensors,
)
from slicing.whole_text import WholeTextCache

__all__ = ["CannotCut", "CutReport", "build_miniature", "check_cut", "config_digest"]

MAX_PARAMETERS = 30_000_000  # above this the check would take seconds and hundreds of megabytes
NOISE = 0.1  # added to every weight, so that norms, gates and biases that start at 0 or 1 count
SEED = 20
# The steps of the session that is run whole and cut: (position, rows). The second is a chunk on a past, the fourth
# goes back, the last starts again.
STEPS = ((0, 6), (6, 3), (9, 1), (10, 1), (8, 2), (10, 1), (0, 4))
FORWARD_STEPS = STEPS[:4]
WHOLE_STEPS = ((0, 6), (0, 9), (0, 2))  # of a model in which every row sees every other: texts
MEMORY_ROWS = 7  # of what an encoder hands to the decoder; no step has as many
# Other kernels for other row counts move logits of this size by 1e-5 of the largest; a forgotten state by its half.
CHUNK_TOLERANCE = 1e-3


@dataclass(frozen=True)
class CutReport:
    """What the check learned about a model's class on the way to finding that it can be cut."""

    shape: ModelShape  # of the real model
    num_kinds: int  # of layers
    miniature_layers: int
    form: BlockForm
    ends: EndNames
    can_roll_back: bool  # to any position; otherwise only to 0

    @property
    def num_layers(self) -> int:
        """Of the real model."""
        return self.shape.num_layers


def check_cut(config: PretrainedConfig) -> CutReport:
    """Check that models of this configuration can be cut exactly; remembered per configuration.

    Raises `CannotCut`, which names the stack, block and argument where it knows them.
    """
    key = config_digest(config)
    with _LOCK:
        found = _FOUND.get(key)
        if found is None:
            found = _FOUND[key] = _check(config)
    if isinstance(found, CannotCut):
        raise CannotCut(*found.args)
    return found


def build_miniature(config: PretrainedConfig) -> PreTrainedModel:
    """Build the miniature that `check_cut` tries, with random weights (float32). Raises `CannotCut`."""
    with _quiet():
        return _build_miniature(config, block_kinds(find_stack(build_weightless(config, torch.float32))))


def config_digest(config: PretrainedConfig) -> bytes:
    """Return what tells configurations apart: equal for equal settings of one class."""
    text = json.dumps(config.to_dict(), sort_keys=True, default=str)
    return hashlib.sha256(f"{type(config).__qualname__} {text}".encode()).digest()


def _check(config: PretrainedConfig) -> CutReport | CannotCut:
    try:
        with _quiet():
            return _check_whole_against_cut(config)
    except CannotCut as error:
        return error
    except Exception as error:
        return CannotCut(
            f"its forward fails when it is run whole and cut: {type(error).__name__}: {first_line(error)}"
        )


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep what transformers says about the miniature's odd sizes, which concerns nobody."""
    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)


def _check_whole_against_cut(config: PretrainedConfig) -> CutReport:
    real = find_stack(build_weightless(config, torch.float32))
    kinds = block_kinds(real)
    model = _build_miniature(config, kinds)
    stack = find_stack(model)
    inputs = _Inputs(model)
    with recorded_calls(stack) as calls:
        ends = learn_ends(model, stack, lambda: inputs.run_stock(2))
    form = learn_form(stack, calls)
    _check_width(stack, calls[0], form, model)
    form = replace(form, takes_embeds=inputs.takes_embeds())
    memory = None
    if inputs.encoded is not None:
        place, memory = find_memory(calls[0], form, MEMORY_ROWS)
        form = replace(form, memory=place)
    trial = _Trial(model, form, ends, inputs, memory)
    trial.check_against_stock()
    trial.check_slices()
    return CutReport(shape_of(config), len(set(kinds)), len(stack), form, ends, trial.can_roll_back)


class _Inputs:
    """What a miniature is tried on: token ids, and what an encoder would have made."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model
        self.form = ForwardForm.of(model)
        self.token_ids = _token_ids(model)
        width = self.form.memory_width
        generator = torch.Generator().manual_seed(SEED)
        self.encoded = torch.randn(1, MEMORY_ROWS, width, generator=generator) if width else None

    @property
    def steps(self) -> tuple[tuple[int, int], ...]:
        return STEPS if self.form.is_causal else WHOLE_STEPS

    def rows(self, position: int, rows: int) -> torch.Tensor:
        return self.token_ids[:, position : position + rows]

    def run_stock(self, rows: int) -> torch.Tensor:
        """Run the stock model on the first rows, storing nothing."""
        with torch.no_grad():
            fed = self.form.with_ids(self.rows(0, rows), self.encoded)
            stores = {"use_cache": False} if self.form.is_causal else {}
            return self.form.made(self.model(**fed, **stores))

    def takes_embeds(self) -> bool:
        """Tell whether the model runs on input embeddings that belong to no token."""
        if self.form.shape.num_streams > 1:
            return False
        embeds = torch.zeros(1, 2, embedding_weight(self.model).shape[-1])
        stores = {"use_cache": False} if self.form.is_causal else {}
        try:
            self.model(**self.form.with_embeds(embeds), **stores)
        except Exception:
            return False
        return True


class _Trial:
    """One miniature, whole and in parts, and the comparisons between them."""

    def __init__(
        self,
        model: PreTrainedModel,
        form: BlockForm,
        ends: EndNames,
        inputs: _Inputs,
        memory: torch.Tensor | None,
    ) -> None:
        self.model = model
        self.form = form
        self.ends = ends
        self.inputs = inputs
        self.memory = memory  # what blocks attend to [1, rows, width]
        self.num_layers = len(find_stack(model))
        self.layout = CacheLayout.of(model.config)
        self.whole = self._part(Parts.whole(self.num_layers))
        self.can_roll_back = True

    def check_against_stock(self) -> None:
        """Compare our storage, filled at once and in chunks, with the stock model that stores nothing."""
        name = type(self.model).__name__
        steps = FORWARD_STEPS if self.inputs.form.is_causal else self.inputs.steps[:1]
        rows = sum(steps[-1])
        expected = self.inputs.run_stock(rows)
        if not _is_near(self._run_whole(self._new_cache(), 0, rows), expected):
            raise CannotCut(
                f"{name} gives other logits with our key/value storage and positions than without"
            )
        cache = self._new_cache()
        in_chunks = [self._run_whole(cache, *step) for step in steps]
        if not _is_near(torch.cat(in_chunks, dim=1), expected):
            raise CannotCut(f"{name} gives other logits when a prompt comes in chunks")

    def check_slices(self) -> None:
        """Cut at every place at once, one layer a slice, and compare every argument and output."""
        opening = self._part(Parts(opening=True))
        middle = self._part(Parts(((0, self.num_layers),)))
        closing = self._part(Parts(closing=True))
        caches = [self._new_cache() for _ in range(self.num_layers)]
        own_cache, whole_cache = self._new_cache(), self._new_cache()
        for position, rows in self.inputs.steps:
            if position < whole_cache.length and not self._roll_back(
                [whole_cache, own_cache, *caches], position
            ):
                continue
            with recorded_calls(self.whole.stack) as whole_calls:
                expected = self._run_whole(whole_cache, position, rows)
            states = opening.embed_and_run(own_cache, self.inputs.rows(position, rows), position, 0)
            for layer, cache in enumerate(caches):
                with recorded_calls(middle.stack) as calls:
                    states = middle.run_blocks(cache, states, position, layer, layer + 1)
                self._compare(whole_calls[layer], calls[layer], states)
            if not torch.equal(closing.run_to_logits(own_cache, states, position, self.num_layers), expected):
                raise CannotCut(
                    f"norm and head after {self.whole.stack.name} give other logits when run by themselves"
                )

    def _new_cache(self) -> Any:
        if not self.inputs.form.is_causal:
            return WholeTextCache()
        cache = KVCache(self.layout)
        if self.memory is not None:
            cache.add_memory(self.memory[0])
        return cache

    def _roll_back(self, caches: Sequence[Any], position: int) -> bool:
        try:
            for cache in caches:
                cache.truncate(min(position, cache.length))
        except CannotRollBack:
            self.can_roll_back = False
        return self.can_roll_back or position == 0

    def _compare(self, whole: BlockCall, cut: BlockCall, states: torch.Tensor) -> None:
        """Compare one block's call in a slice with its call in the whole model.

        Notes that blocks leave for each other in a dictionary may differ, as long as no block reads them; so may what
        a block makes by itself where the one before did not hand it on.
        """
        block = self.whole.stack.blocks[whole.number]
        theirs = take_apart(block, cut, self.form)
        name = first_difference(take_apart(block, whole, self.form), theirs)
        is_same = torch.equal(self.form.unwrap(whole.output), states)
        place = f"block {whole.number} of {self.whole.stack.name}"
        is_left = name is not None and (_is_note(block, whole, name) or self._is_made_again(name, theirs))
        if name is not None and not (is_same and is_left):
            raise CannotCut(f"{place} takes {name}, which a slice cannot derive from positions alone")
        if not is_same:
            raise CannotCut(
                f"{place} gives other hidden states when it is run by itself, from the same arguments"
            )

    def _is_made_again(self, name: str, cut: CallPlan) -> bool:
        """Whether a block that is not handed what an earlier one returned makes it by itself (`lend_tables`)."""
        returns_more = self.form.output_length is not None and self.form.output_length > 1
        return returns_more and self.memory is not None and cut.constants.get(name, 0) is None

    def _run_whole(self, cache: Any, position: int, rows: int) -> torch.Tensor:
        return self.whole.run_whole(cache, self.inputs.rows(position, rows), position)

    def _part(self, parts: Parts) -> BlockSlice:
        part = build_weightless(self.model.config, torch.float32)
        stack = find_stack(part)
        share_tensors(part, self.model, needed_parameters(stack, self.ends, parts))
        make_hollow(part, "cpu")
        return BlockSlice(part, stack, self.form)


def _build_miniature(config: PretrainedConfig, kinds: Sequence[object]) -> PreTrainedModel:
    """Build the smallest model of this class that runs and has every change of layer kind of the real one."""
    reasons = []
    for make_config in small_configs(config, num_layers_of_one_period(list(kinds))):
        try:
            small = make_config()
            size = sum(p.numel() for p in build_weightless(small, torch.float32).parameters())
            if size > MAX_PARAMETERS:
                raise CannotCut(f"it would have {size} parameters")
            model = _with_random_weights(small)
            missing = set(pairwise(kinds)) - set(pairwise(block_kinds(find_stack(model))))
            if missing:
                raise CannotCut(f"{len(missing)} changes between kinds of layers do not occur in it")
            _Inputs(model).run_stock(2)
        except CannotCut as error:
            reasons.append(str(error))
        except Exception as error:
            reasons.append(f"{type(error).__name__}: {first_line(error)}")
        else:
            return model
    raise CannotCut(
        f"no miniature of a {type(config).__name__} could be built: {'; '.join(dict.fromkeys(reasons))}"
    )


def _with_random_weights(config: PretrainedConfig) -> PreTrainedModel:
    with BUILDING, torch.random.fork_rng(devices=[]):
        torch.manual_seed(SEED)
        model = new_model(config, torch.float32).eval().requires_grad_(False)
        lend_tables(model)
        stored = persistent_names(model)
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            if name in stored and tensor.is_floating_point():
                tensor.add_(torch.randn_like(tensor) * NOISE)
    return model


def _token_ids(model: PreTrainedModel) -> torch.Tensor:
    """Return token ids [1, n] or [1, n, streams], enough for every step; none is one of the low special ones."""
    length = max(position + rows for position, rows in STEPS)
    shape = shape_of(model.config)
    numbers = torch.arange(length * shape.num_streams).view(1, length, shape.num_streams) * 7 + 5
    token_ids = numbers % (shape.vocab_size - 4) + 4
    return token_ids if shape.num_streams > 1 else token_ids[:, :, 0]


def _check_width(stack: BlockStack, call: BlockCall, form: BlockForm, model: PreTrainedModel) -> None:
    shape = tuple(form.hidden_of(call.args, call.kwargs).shape)
    width = shape_of(model.config).hidden_size
    if shape != (1, 2, width):
        raise CannotCut(f"the hidden states of {stack.name} have shape {shape}, not [1, rows, {width}]")


def _is_note(block: nn.Module, call: BlockCall, name: str) -> bool:
    return isinstance(name_arguments(block, call.args, call.kwargs).get(name.partition("[")[0]), Mapping)


def _is_near(ours: torch.Tensor, theirs: torch.Tensor) -> bool:
    return bool((ours - theirs).abs().max() <= CHUNK_TOLERANCE * theirs.abs().max())


_LOCK = Lock()
_FOUND: dict[bytes, CutReport | CannotCut] = {}
