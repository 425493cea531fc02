"""Tries whether bits depend on how rows come together: on a miniature of a class, and on the layers that are held.

The miniature shows that attention, windows, experts and positions are understood; the held layers, that the kernels
for their real widths keep rows apart. Knows nothing of where weights come from, nor of how a runner packs rows.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from threading import Lock
from typing import Protocol

import torch
from transformers import PretrainedConfig, PreTrainedModel

from slicing.batch import Runner, Work
from slicing.ends import Parts, needed_parameters
from slicing.miniature import CutReport, build_miniature, check_cut, config_digest
from slicing.rotary_axes import rotary_axes
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
from slicing.trial_sessions import NUM_SESSIONS, TrialSession

ROW_MULTIPLES = (1, 2, 4, 8, 16, 32)  # loops over single numbers take their last few another way
TOLERANCE = 1e-4  # of the largest logit, against the plain runner
OWN_ATTENTION = "its attention does not go through transformers' attention interface"
SEED = 7
NUM_ROWS = 40
MEMORY_ROWS = (37, 300)  # an encoder's states of two sessions
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


MakeRunner = Callable[[PreTrainedModel, Parts, CutReport], PackingRunner]


def check_class(config: PretrainedConfig, make: MakeRunner) -> int:
    """Check a miniature of this configuration with runners from `make`; remembered.

    Returns the most axes of positions that may travel with rows. Raises `NotInvariant`, or `CannotCut`.
    """
    key = config_digest(config)
    with _LOCK:
        if key not in _FOUND:
            num_threads = torch.get_num_threads()
            torch.set_num_threads(
                1
            )  # the miniature is too small for more: they would only wait for each other
            try:
                _FOUND[key] = _try_class(config, make)
            finally:
                torch.set_num_threads(num_threads)
        found = _FOUND[key]
    if found.reason is not None:
        raise NotInvariant(found.reason)
    return found.max_axes


def keeps_rows_apart(runner: Runner, stack: BlockStack) -> bool:
    """Tell whether one held layer of each kind, and the ends, give every row the same bits in all `SPLITS`."""
    generator = torch.Generator().manual_seed(SEED)
    states = [
        torch.randn(NUM_ROWS, runner.hidden_size, generator=generator).to(runner.dtype) for _ in range(2)
    ]
    shape = (NUM_ROWS, runner.num_streams) if runner.num_streams > 1 else (NUM_ROWS,)
    token_ids = [torch.randint(runner.vocab_size, shape, generator=generator) for _ in range(2)]
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
    for cache, rows in zip(caches, MEMORY_ROWS, strict=True) if runner.takes_memory else ():
        states = torch.randn(rows, runner.hidden_size, generator=torch.Generator().manual_seed(rows))
        cache.add_memory(states.to(runner.dtype))
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


@dataclass(frozen=True)
class _Found:
    """What the trial of a class found."""

    reason: str | None  # why it is refused; None: it holds
    max_axes: int = 0  # of positions that travel with rows


def _try_class(config: PretrainedConfig, make: MakeRunner) -> _Found:
    report = check_cut(config)
    try:
        model = build_miniature(config)
        num_layers = len(find_stack(model))
        parts = Parts.whole(num_layers)
        plain = PlainRunner(_part(model, report, parts), parts, report)
        packing = make(_part(model, report, parts), parts, report)
        sessions = [TrialSession.of(packing, number) for number in range(NUM_SESSIONS)]
        _check_alone(plain, packing, sessions[:2])
        _check_mixed(packing, sessions)
        axes = _try_senses(plain, packing, sessions, report) if plain.max_axes else 0
    except NotInvariant as error:
        return _Found(str(error))
    except CannotCut:
        raise
    except Exception as error:
        return _Found(f"its forward fails over packed rows: {type(error).__name__}: {first_line(error)}")
    return _Found(None, axes)


def _part(model: PreTrainedModel, report: CutReport, parts: Parts) -> PreTrainedModel:
    part = build_weightless(model.config, torch.float32)
    share_tensors(part, model, needed_parameters(find_stack(part), report.ends, parts))
    return part


def _check_alone(plain: PlainRunner, packing: PackingRunner, sessions: Sequence[TrialSession]) -> None:
    """Compare sessions, each by itself, with the plain runner."""
    for session in sessions:
        before = packing.num_attention_calls
        mine = _run(packing, [session.work(session.new_cache(packing))])[0]
        called = packing.num_attention_calls - before
        if not called or called % packing.num_layers:
            raise NotInvariant(OWN_ATTENTION)
        theirs = _run(plain, [session.work(session.new_cache(plain))])[0]
        difference = float((mine - theirs).abs().max() / theirs.abs().max())
        if not difference <= TOLERANCE:
            raise NotInvariant(
                f"packed rows give other logits than the plain runner: by {difference:.1e} of the largest"
            )


def _check_mixed(packing: PackingRunner, sessions: Sequence[TrialSession]) -> None:
    """Compare sessions alone, each at once, with the same in random company, pieces and second attempts."""
    alone = [_run(packing, [session.work(session.new_cache(packing))])[0] for session in sessions]
    caches = [session.new_cache(packing) for session in sessions]
    for steps in _schedule([session.length for session in sessions]):
        works = [sessions[number].work(caches[number], begin, end) for number, begin, end in steps]
        for (number, begin, end), logits in zip(steps, _run(packing, works), strict=True):
            if not torch.equal(logits, sessions[number].rows(alone[number], begin, end)):
                raise NotInvariant("the bits of a session change in the company of others")


def _try_senses(
    plain: PlainRunner, packing: PackingRunner, sessions: Sequence[TrialSession], report: CutReport
) -> int:
    """Try what comes of pictures and sounds: embeddings, and positions of several axes beside counted ones.

    Returns the most axes that the model takes.
    """
    axes = rotary_axes(plain)
    if report.form.takes_embeds:
        sessions = [sessions[0], *(session.with_embeds(packing.hidden_size) for session in sessions[1:])]
    sessions = [*sessions[:2], sessions[2].with_places(axes)]
    _check_alone(plain, packing, sessions[1:])
    _check_mixed(packing, sessions)
    return axes


def _run(runner: Runner, works: Sequence[Work]) -> list[torch.Tensor]:
    """Run everything: logits of all rows of each work."""
    states = runner.run_opening_batch(works, end=runner.num_layers)
    closing = [replace(work, inputs=rows) for work, rows in zip(works, states, strict=True)]
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


_LOCK = Lock()
_FOUND: dict[bytes, _Found] = {}
