"""Tries whether bits depend on how rows come together: on a miniature of a class, and on the layers that are held.

The miniature shows that attention, windows, experts and positions are understood; the held layers, that the kernels
for their real widths keep rows apart. Knows nothing of where weights come from, nor of how a runner packs rows.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from threading import Lock
from typing import Protocol

import torch
from transformers import PretrainedConfig, PreTrainedModel

from slicing.batch import Runner, Work
from slicing.ends import Parts, needed_parameters
from slicing.miniature import CutReport, build_miniature, check_cut, config_digest
from slicing.row_linear import NotInvariant
from slicing.runner import PlainRunner
from slicing.stacks import (
    BlockStack,
    CannotCut,
    block_kinds,
    build_weightless,
    find_stack,
    first_line,
    share_tensors,
)

ROW_MULTIPLES = (1, 2, 4, 8, 16, 32)  # loops over single numbers take their last few another way
TOLERANCE = 1e-4  # of the largest logit, against the plain runner
MAX_POSITIONS = 75  # of a trial session: more than two blocks of attention
NUM_SESSIONS = 3
OWN_ATTENTION = "its attention does not go through transformers' attention interface"
SEED = 7
NUM_ROWS = 40
# How two sessions of `NUM_ROWS` rows come in a trial of the held layers: rows of each, a pair a call.
SPLITS = (
    ((40, 0), (0, 40)),
    ((1, 7), (1, 0), (2, 1), (3, 11), (13, 1), (1, 20), *((1, 0),) * 19),
    ((13, 3), (27, 37)),
    ((0, 17), (5, 2), (35, 1), (0, 9), *((0, 1),) * 11),
)

Calls = Callable[[Sequence[Work]], list[torch.Tensor]]


class PackingRunner(Runner, Protocol):
    """A runner on trial."""

    @property
    def num_attention_calls(self) -> int:
        """Calls of the attention that was put in the place of the model's."""


def check_class(
    config: PretrainedConfig, make: Callable[[PreTrainedModel, Parts, CutReport], PackingRunner]
) -> None:
    """Check a miniature of this configuration with runners from `make`; remembered.

    Raises `NotInvariant`, or `CannotCut`.
    """
    key = config_digest(config)
    with _LOCK:
        if key not in _FOUND:
            num_threads = torch.get_num_threads()
            torch.set_num_threads(
                1
            )  # the miniature is too small for more: they would only wait for each other
            try:
                _FOUND[key] = _reason(config, make)
            finally:
                torch.set_num_threads(num_threads)
        reason = _FOUND[key]
    if reason is not None:
        raise NotInvariant(reason)


def keeps_rows_apart(runner: Runner, stack: BlockStack) -> bool:
    """Tell whether one held layer of each kind, and the ends, give every row the same bits in all `SPLITS`."""
    generator = torch.Generator().manual_seed(SEED)
    states = [
        torch.randn(NUM_ROWS, runner.hidden_size, generator=generator).to(runner.dtype) for _ in range(2)
    ]
    token_ids = [torch.randint(runner.vocab_size, (NUM_ROWS,), generator=generator) for _ in range(2)]
    opening: Calls = lambda works: runner.run_opening_batch(works, end=0)  # noqa: E731
    closing: Calls = lambda works: runner.run_closing_batch(works, start=runner.num_layers)  # noqa: E731
    return (
        all(
            _agrees(runner, states, _layer(runner, number))
            for number in _one_of_each_kind(runner.parts, stack)
        )
        and (not runner.parts.opening or _agrees(runner, token_ids, opening))
        and (not runner.parts.closing or _agrees(runner, states, closing))
    )


def _layer(runner: Runner, number: int) -> Calls:
    return lambda works: runner.run_layers_batch(works, start=number, end=number + 1)


def _one_of_each_kind(parts: Parts, stack: BlockStack) -> list[int]:
    held = [number for number in range(len(stack)) if parts.holds(number, number + 1)]
    kinds = block_kinds(stack)
    return sorted({kinds[number]: number for number in reversed(held)}.values())


def _agrees(runner: Runner, inputs: Sequence[torch.Tensor], run: Calls) -> bool:
    made = [_in_splits(runner, inputs, run, splits) for splits in SPLITS]
    return all(
        torch.equal(one, other) for others in made[1:] for one, other in zip(made[0], others, strict=True)
    )


def _in_splits(
    runner: Runner, inputs: Sequence[torch.Tensor], run: Calls, splits: Sequence[Sequence[int]]
) -> list[torch.Tensor]:
    """Return what every session got, its calls joined."""
    caches = [runner.new_cache() for _ in inputs]
    positions, made = [0] * len(inputs), [[] for _ in inputs]  # type: tuple[list[int], list[list[torch.Tensor]]]
    for split in splits:
        taking = [place for place, rows in enumerate(split) if rows]
        works = []
        for place in taking:
            begin, end = positions[place], positions[place] + split[place]
            works.append(Work(caches[place], inputs[place][begin:end], begin, range(split[place])))
            positions[place] = end
        for place, states in zip(taking, run(works), strict=True):
            made[place].append(states)
    return [torch.cat(parts) for parts in made]


def _reason(
    config: PretrainedConfig, make: Callable[[PreTrainedModel, Parts, CutReport], PackingRunner]
) -> str | None:
    """Return why a class is refused, None when it holds."""
    report = check_cut(config)
    try:
        model = build_miniature(config)
        num_layers = len(find_stack(model))
        report, parts = replace(report, num_layers=num_layers), Parts.whole(num_layers)
        plain = PlainRunner(_part(model, report, parts), parts, report)
        packing = make(_part(model, report, parts), parts, report)
        _check_alone(plain, packing)
        _check_mixed(packing)
    except NotInvariant as error:
        return str(error)
    except CannotCut:
        raise
    except Exception as error:
        return f"its forward fails over packed rows: {type(error).__name__}: {first_line(error)}"
    return None


def _part(model: PreTrainedModel, report: CutReport, parts: Parts) -> PreTrainedModel:
    part = build_weightless(model.config, torch.float32)
    share_tensors(part, model, needed_parameters(find_stack(part), report.ends, parts))
    return part


def _check_alone(plain: PlainRunner, packing: PackingRunner) -> None:
    """Compare one session with the plain runner."""
    token_ids = _token_ids(packing, 0)
    before = packing.num_attention_calls
    mine = _run(packing, [Work(packing.new_cache(), token_ids, 0)])[0]
    if packing.num_attention_calls - before != packing.num_layers:
        raise NotInvariant(OWN_ATTENTION)
    theirs = plain.run_whole(plain.new_cache(), token_ids, 0, keep=range(len(token_ids)))
    difference = float((mine - theirs).abs().max() / theirs.abs().max())
    if not difference <= TOLERANCE:
        raise NotInvariant(
            f"packed rows give other logits than the plain runner: by {difference:.1e} of the largest"
        )


def _check_mixed(packing: PackingRunner) -> None:
    """Compare sessions alone, each at once, with the same in random company, pieces and second attempts."""
    token_ids = [_token_ids(packing, number) for number in range(NUM_SESSIONS)]
    alone = [_run(packing, [Work(packing.new_cache(), rows, 0)])[0] for rows in token_ids]
    caches = [packing.new_cache() for _ in token_ids]
    for steps in _schedule([len(rows) for rows in token_ids]):
        works = [Work(caches[number], token_ids[number][begin:end], begin) for number, begin, end in steps]
        for (number, begin, end), logits in zip(steps, _run(packing, works), strict=True):
            if not torch.equal(logits, alone[number][begin:end]):
                raise NotInvariant("the bits of a session change in the company of others")


def _run(runner: Runner, works: Sequence[Work]) -> list[torch.Tensor]:
    """Run everything: logits of all rows of each work."""
    states = runner.run_opening_batch(works, end=runner.num_layers)
    closing = [
        replace(work, inputs=rows, keep=range(work.rows)) for work, rows in zip(works, states, strict=True)
    ]
    return runner.run_closing_batch(closing, start=runner.num_layers)


def _schedule(lengths: Sequence[int]) -> Iterator[list[tuple[int, int, int]]]:
    """Yield calls of (session, begin, end) until all have come to their ends; some go back a little on the way."""
    draw = random.Random(SEED)  # noqa: S311  # no secret
    positions = [0] * len(lengths)
    while any(position < length for position, length in zip(positions, lengths, strict=True)):
        steps = []
        for number, length in enumerate(lengths):
            begin = max(positions[number] - draw.choice((0, 0, 0, 0, 3)), 0)
            end = min(begin + draw.choice((1, 1, 2, 3, 5, 11, 40)), length)
            if begin < end and draw.random() < 0.7:
                steps.append((number, begin, end))
                positions[number] = end
        if steps:
            yield steps


def _token_ids(runner: Runner, seed: int) -> torch.Tensor:
    length = min(MAX_POSITIONS, runner.max_positions)
    return torch.randint(4, runner.vocab_size, (length,), generator=torch.Generator().manual_seed(seed))


_LOCK = Lock()
_FOUND: dict[bytes, str | None] = {}
