"""Cuts every family of the table once and writes down what came of it: `python -m tests.support.family_table`.

The page `docs/diffusion-families.md` is its output; a test compares them.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from slicing.diffusion.calls import Pass
from slicing.diffusion.stacks import find_keys
from slicing.diffusion.thread import ThreadBroken
from tests.support.cut_transformer import SINK, CutTransformer
from tests.support.diffusers_families import FAMILIES, call, tiny_model

HEAD = """\
# Diffusion transformers across nodes

Which of diffusers' transformer classes can have their blocks on other nodes. This page is written by
`python -m tests.support.family_table > docs/diffusion-families.md`, which cuts each class at a tiny size (random
weights, every stack over two nodes) and compares every bit with the uncut model; a test fails when it is out of date.
No class is known by name to the program: a class that is not here is cut, or refused, by the same checks.

*Stacks*: the lists of blocks, with the setting that says how many there are (-: none alone does). *Call*: how many
arguments by position and by name; the size of its description. *Streams*: which output of a block is which argument of
the next. *In ranges*: one call for all blocks of a node. *One by one*: one call for every block, which also serves
models that compute between their blocks; it is used only when it is asked for, since every block costs a way through
all nodes, and tried here where ranges are refused. A stack with less than a twentieth of all block weights stays at
the gateway. Cosmos is called without its padding mask, the only thing for which it needs torchvision.

| class | stacks | call | streams | in ranges | one by one |
| --- | --- | --- | --- | --- | --- |
"""
EQUAL = "same bits"


@dataclass(frozen=True)
class Outcome:
    """What came of cutting one family."""

    told: str  # EQUAL, or why not
    passes: list[Pass]
    keys: dict[str, str | None]  # stack -> the setting that says how long it is


@cache
def outcome(name: str, *, per_block: bool = False) -> Outcome:
    """Cut a family's model, call it twice with different inputs, and compare with the uncut model."""
    family = FAMILIES[name]
    model = tiny_model(family)
    cut = CutTransformer(model, per_block=per_block)
    keys = {} if per_block else find_keys(type(model), model.config, [stack.path for stack in cut.stacks])
    SINK.set(cut.run)
    try:
        equal = all(_is_equal(call(model, family, seed), call(cut.model, family, seed)) for seed in (0, 1))
    except ThreadBroken as error:
        return Outcome(str(error), cut.passes, keys)
    return Outcome(EQUAL if equal else "OTHER BITS", cut.passes, keys)


def table() -> str:
    """Return the whole page."""
    return HEAD + "".join(_row(name) for name in FAMILIES)


def _is_equal(whole: list[torch.Tensor], answer: list[torch.Tensor]) -> bool:
    return all(torch.equal(one, other) for one, other in zip(whole, answer, strict=True))


def _row(name: str) -> str:
    ranges = outcome(name)
    passes = {made.plan.stack: made for made in ranges.passes}
    found = [passes.get(f"transformer.{path}") for path in ranges.keys]
    cells = [
        f"`{FAMILIES[name].model_class}`",
        "<br>".join(f"`{path}` ({key or '-'})" for path, key in ranges.keys.items()),
        "<br>".join("-" if made is None else _call(made) for made in found),
        "<br>".join("-" if made is None else ", ".join(_streams(made)) for made in found),
        _told(ranges),
        "" if ranges.told == EQUAL else _told(outcome(name, per_block=True)),
    ]
    return f"| {' | '.join(cells)} |\n"


def _told(found: Outcome) -> str:
    return found.told if found.told == EQUAL else f"refused: {found.told.partition('; these blocks')[0]}"


def _call(made: Pass) -> str:
    shape = made.plan.shapes[0]
    kinds = f", {len(made.plan.shapes)} kinds" if len(made.plan.shapes) > 1 else ""
    return f"{len(shape['args'])} + {len(shape['kwargs'])}, {len(made.plan.to_json())} bytes{kinds}"


def _streams(made: Pass) -> Iterator[str]:
    shape = made.plan.shapes[0]
    places: dict[int, Any] = {}
    for name, value in [*enumerate(shape["args"]), *shape["kwargs"].items()]:
        if isinstance(value, dict) and "stream" in value:
            places[value["stream"]] = f"argument {name}" if isinstance(name, int) else f"`{name}`"
    for output, stream in enumerate(made.plan.outputs or (0,)):
        if stream is not None:
            yield f"{output} → {places[stream]}"


if __name__ == "__main__":
    sys.stdout.write(table())
