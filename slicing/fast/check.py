"""Tries a composed model against the plain runner: a miniature in many steps, then real layers with their weights."""

from __future__ import annotations

from collections.abc import Sequence
from threading import Lock

import torch
from transformers import PretrainedConfig

from slicing.ends import Parts
from slicing.fast.learning import Learned, learn
from slicing.fast.loading import ModelTensors, TensorSource, build_runner
from slicing.fast.packed_layer import Packing
from slicing.fast.packing import Form
from slicing.fast.recipe import ModelRecipe, NotComposable
from slicing.fast.runner import FastRunner
from slicing.fast.skeleton import Skeleton
from slicing.miniature import STEPS, config_digest
from slicing.model_kind import ModelKind, kind_of
from slicing.rotary_axes import rotary_axes
from slicing.runner import PlainRunner, max_positions

TOLERANCE = 1e-4  # of the largest value, in float32: sums in another order
ROUNDED_TOLERANCE = 2e-2  # weights rounded to bfloat16
INT8_TOLERANCE = 0.1  # weights in int8; a wrong scale or a swapped half is off by more
LAYER_STEPS = ((0, 6), (6, 1))  # (position, rows)
SEED = 17


def learn_checked(config: PretrainedConfig) -> ModelRecipe:
    """Learn a recipe and try it on the miniature; remembered per configuration. Raises `NotComposable`."""
    key = config_digest(config)
    with _LOCK:
        found = _FOUND.get(key)
        if found is None:
            try:
                learned = learn(config)
                check_miniature(learned)
                found = learned.recipe
            except NotComposable as error:
                found = error
            _FOUND[key] = found
    if isinstance(found, NotComposable):
        raise NotComposable(*found.args)
    return found


def check_miniature(learned: Learned) -> None:
    """Run a session through the miniature, composed and plain: forward, in chunks, back, from the start."""
    model = learned.miniature
    parts = Parts.whole(model.config.get_text_config(decoder=True).num_hidden_layers)
    plain = PlainRunner.from_model(model, parts)
    skeleton = Skeleton(model, max_positions(model.config.get_text_config(decoder=True)))
    fast = build_runner(ModelTensors(model), learned.recipe, parts, Packing("fp32"), skeleton=skeleton)
    token_ids = torch.arange(max(position + rows for position, rows in STEPS)) * 7 + 5
    token_ids = token_ids % (plain.vocab_size - 4) + 4
    fast_cache, plain_cache = fast.new_cache(), plain.new_cache()
    for position, rows in STEPS:
        ids = token_ids[position : position + rows]
        mine = _logits(fast, fast_cache, ids, position)
        theirs = _logits(plain, plain_cache, ids, position)
        _compare(mine, theirs, TOLERANCE, f"the miniature's logits at position {position}")
        if not torch.equal(mine.argmax(-1), theirs.argmax(-1)) and _is_decided(theirs):
            raise NotComposable(f"the miniature's composed form draws other tokens at position {position}")
    if kind_of(model.config) is ModelKind.MULTIMODAL:
        _check_senses(fast, plain)


def _check_senses(fast: FastRunner, plain: PlainRunner) -> None:
    """Refuse what pictures and sounds bring and the fast form has not: positions that are not counted.

    Input embeddings are compared, too: it takes them for the hidden states themselves.
    """
    if rotary_axes(plain) > 1:
        raise NotComposable("its rows stand at positions of several axes, where kernels count them")
    embeds = torch.randn(LAYER_STEPS[0][1], plain.hidden_size, generator=torch.Generator().manual_seed(SEED))
    _compare(
        _logits(fast, fast.new_cache(), embeds, 0),
        _logits(plain, plain.new_cache(), embeds, 0),
        TOLERANCE,
        "the miniature's logits of embeddings",
    )


def check_layers(
    fast: FastRunner, source: TensorSource, skeleton: Skeleton, form: Form, is_exact: bool
) -> None:
    """Compare the first held layer of each kind with the plain one, with its real weights.

    `is_exact`: the form holds the checkpoint's own numbers. Raises `NotComposable`.
    """
    seen = set()
    for start, end in fast.parts.layers:
        for number in range(start, end):
            if (kind := skeleton.kinds[number]) not in seen:
                seen.add(kind)
                _check_layer(fast, source.plain(Parts(((number, number + 1),))), number, form, is_exact)


def _check_layer(fast: FastRunner, plain: PlainRunner, number: int, form: Form, is_exact: bool) -> None:
    generator = torch.Generator().manual_seed(SEED)
    tolerance = INT8_TOLERANCE if form == "int8" else TOLERANCE if is_exact else ROUNDED_TOLERANCE
    fast_cache, plain_cache = fast.new_cache(), plain.new_cache()
    for position, rows in LAYER_STEPS:
        states = torch.randn(rows, fast.hidden_size, generator=generator)
        mine = fast.run_layers(fast_cache, states, position, start=number, end=number + 1)
        theirs = plain.run_layers(plain_cache, states, position, start=number, end=number + 1)
        _compare(mine, theirs, tolerance, f"layer {number} with its own weights")
    fast_cache.close()


def _compare(mine: torch.Tensor, theirs: torch.Tensor, tolerance: float, what: str) -> None:
    difference = float((mine - theirs).abs().max())
    if not difference <= tolerance * float(theirs.abs().max()):  # not a number is a difference, too
        raise NotComposable(f"{what}: composed and plain differ by {difference:.2g}")


def _logits(
    runner: FastRunner | PlainRunner, cache: object, token_ids: torch.Tensor, position: int
) -> torch.Tensor:
    """Run what an opening takes: logits of every row."""
    states = runner.run_opening(cache, token_ids, position, end=runner.num_layers)
    every: Sequence[int] = range(len(token_ids))
    return runner.run_closing(cache, states, position, start=runner.num_layers, keep=list(every))


def _is_decided(logits: torch.Tensor) -> bool:
    """Tell whether the best logit of every row leads by more than rounding."""
    best = logits.topk(2, dim=-1).values
    return bool((best[:, 0] - best[:, 1]).min() > TOLERANCE * logits.abs().max())


_LOCK = Lock()
_FOUND: dict[bytes, ModelRecipe | NotComposable] = {}
