"""A copy of a pipeline's noise scheduler that tells of its steps, of the class it had and with the same results.

Works for every scheduler: nothing but `step` is touched. Knows nothing of pictures or nodes.
"""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class SchedulerStep:
    """One step that was made. Tensors are the pipeline's own, not to be changed."""

    number: int  # from 0
    of: int
    model_output: torch.Tensor | None
    sample: torch.Tensor | None  # before the step
    latents: torch.Tensor | None  # after it
    clean: torch.Tensor | None  # what the scheduler itself says of the noiseless picture, where it does
    sigma: float | None  # of `sample`, where the scheduler has sigmas


class _Watch:
    """Whom a scheduler tells. A copy that a pipeline makes of its scheduler (one for sound) tells nobody."""

    def __init__(self, on_step: Callable[[SchedulerStep], None] | None) -> None:
        self.on_step = on_step
        self.number = 0

    def __deepcopy__(self, memo: dict[int, Any]) -> _Watch:
        return _Watch(None)


def watched_scheduler(scheduler: Any, on_step: Callable[[SchedulerStep], None]) -> Any:
    """A copy of `scheduler` that calls `on_step` after each of its steps, in the thread that makes it."""
    watched = copy.deepcopy(scheduler)
    watched.__class__ = _watching(type(scheduler))
    watched._watch = _Watch(on_step)
    return watched


def _watching(kind: Any) -> Any:
    """The same class, with a step that tells. It goes by the same name: pipelines ask for it."""
    signature = inspect.signature(kind.step)

    @functools.wraps(kind.step)
    def step(self: Any, *args: Any, **kwargs: Any) -> Any:
        watch: _Watch = self._watch
        if watch.on_step is None:
            return kind.step(self, *args, **kwargs)
        given = signature.bind(self, *args, **kwargs).arguments
        sigma = _sigma(self, given.get("timestep"))
        made = kind.step(self, *args, **kwargs)
        told = SchedulerStep(
            watch.number,
            len(self.timesteps),
            given.get("model_output"),
            given.get("sample"),
            *_results(made),
            sigma,
        )
        watch.number += 1
        watch.on_step(told)
        return made

    namespace = {"step": step, "__module__": kind.__module__, "__doc__": kind.__doc__}
    return type(kind.__name__, (kind,), namespace)


def _results(made: Any) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    if isinstance(made, tuple):
        second = made[1] if len(made) > 1 else None
        return made[0], second if isinstance(second, torch.Tensor) else None
    return getattr(made, "prev_sample", None), getattr(made, "pred_original_sample", None)


def _sigma(scheduler: Any, timestep: Any) -> float | None:
    """The noise level of the sample that is about to be stepped."""
    sigmas = getattr(scheduler, "sigmas", None)
    if not isinstance(sigmas, torch.Tensor) or timestep is None:
        return None
    index = getattr(scheduler, "step_index", None)
    if index is None:
        index = getattr(scheduler, "begin_index", None) or 0
    return float(sigmas[min(int(index), len(sigmas) - 1)])
