"""Which guidance branch a transformer's call belongs to, and starting the next one before it is asked for.

A branch is the ordinal of the call since the last step of the noise scheduler. Once the first is asked for, the others
are guessed from the step before, run in threads of their own, and used only if the real call is the same in every bit.
Knows nothing of nodes: a runner runs one forward for one branch.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from contextlib import AbstractContextManager
from contextvars import copy_context
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from app.engine.diffusion.guidance_call import Entry, GuidanceCall

Forward = Callable[..., Any]


class Branch(NamedTuple):
    """A guidance branch: the `ordinal`-th call of a transformer in each step."""

    component: str  # "transformer", "transformer_2"
    ordinal: int


class BranchDropped(BaseException):
    """Ends the forward of a guess that turned out wrong. No `Exception`: models must not swallow it."""


class Attempt:
    """One forward for one branch; a guess can be dropped while it runs."""

    def __init__(self, branch: Branch, call: GuidanceCall, on_sent: Callable[[], None] | None = None) -> None:
        self.branch = branch
        self.call = call
        self._on_sent = on_sent
        self._is_dropped = threading.Event()

    @property
    def is_dropped(self) -> bool:
        return self._is_dropped.is_set()

    def note_sent(self) -> None:
        """Its first pass is on its way: time for the others."""
        if (tell := self._on_sent) is not None:
            self._on_sent = None
            tell()

    def drop(self) -> None:
        """Nobody wants it any more."""
        self._is_dropped.set()

    def check(self) -> None:
        """Raise `BranchDropped` once nobody wants it."""
        if self._is_dropped.is_set():
            raise BranchDropped


# Makes the context in which an attempt's forward runs: whose blocks run for this branch.
Running = Callable[[Attempt], AbstractContextManager[None]]


@dataclass
class BranchCounts:
    """How the guesses went."""

    calls: int = 0
    guesses: int = 0
    hits: int = 0


@dataclass
class _Ahead:
    """A guess that is running in its own thread."""

    attempt: Attempt
    result: Future[Any]
    thread: threading.Thread


@dataclass
class _Known:
    """What is known of a branch: its last call, and the entries that have stayed the same since its beginning."""

    call: GuidanceCall
    constants: frozenset[Entry] | None = None


class Branches:
    """The branches of one picture. `call` and `step_done` come from the pipeline's own thread.

    `running` makes the context of one forward, `on_change` hears of branches whose next pass must be whole: their text
    is another than before, or a wrong guess went through the blocks. `prefetches` off: nothing is guessed.
    """

    def __init__(
        self,
        running: Running,
        *,
        on_change: Callable[[Branch], None] = lambda branch: None,
        prefetches: bool = True,
        threads: int = 1,
    ) -> None:
        self.counts = BranchCounts()
        self._running = running
        self._on_change = on_change
        self._prefetches = prefetches
        self._threads = threads
        self._ordinals: dict[str, int] = {}
        self._known: dict[Branch, _Known] = {}
        self._before: dict[str, dict[int, GuidanceCall]] = {}  # of the last step
        self._now: dict[str, dict[int, GuidanceCall]] = {}
        self._ahead: dict[Branch, _Ahead] = {}
        self._left: list[_Ahead] = []  # dropped, perhaps still running

    def call(self, component: str, forward: Forward, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Run one call of a transformer, or take the result of the guess that was right."""
        branch = self._next(component)
        call = self._noted(branch, args, kwargs)
        self.counts.calls += 1
        if (ahead := self._ahead.pop(branch, None)) is not None:
            if ahead.attempt.call.equals(call):
                self.counts.hits += 1
                return ahead.result.result()
            self._drop(ahead)
            self._on_change(branch)  # what its nodes keep is of a pass that never was
        on_sent = (lambda: self._guess(component, call, forward)) if branch.ordinal == 0 else None
        attempt = Attempt(branch, call, on_sent)
        with self._running(attempt):
            return forward(*args, **kwargs)

    def step_done(self) -> None:
        """The noise scheduler made a step: the next call is a first one."""
        for ahead in self._ahead.values():  # guidance that is off from here on
            self._drop(ahead)
            self._on_change(ahead.attempt.branch)
        self._ahead.clear()
        self._before, self._now = self._now, {}
        self._ordinals.clear()

    def close(self) -> None:
        """Drop what is under way and wait for its threads: their passes must have been ended."""
        for ahead in self._ahead.values():
            self._drop(ahead)
        self._ahead.clear()
        for ahead in self._left:
            ahead.thread.join()
        self._left.clear()

    def _next(self, component: str) -> Branch:
        ordinal = self._ordinals.get(component, 0)
        self._ordinals[component] = ordinal + 1
        return Branch(component, ordinal)

    def _noted(self, branch: Branch, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> GuidanceCall:
        """Keep the call, and notice when what was constant in this branch is not any more."""
        known = self._known.get(branch)
        others = [*self._now.get(branch.component, {}).values()]
        call = GuidanceCall.copied(args, kwargs, [known.call, *others] if known else others)
        if known is None:
            self._known[branch] = _Known(call)
        else:
            kept = call.kept_since(known.call)
            if known.constants is not None and not known.constants <= kept:
                self._known[branch] = _Known(call)
                self._on_change(branch)
            else:
                constants = kept if known.constants is None else known.constants
                self._known[branch] = _Known(call, constants)
        self._now.setdefault(branch.component, {})[branch.ordinal] = call
        return call

    def _guess(self, component: str, first: GuidanceCall, forward: Forward) -> None:
        """Start the other branches of this step, as far as the step before tells what they will be."""
        before = self._before.get(component, {})
        if not self._prefetches or 0 not in before:
            return
        for ordinal in sorted(before.keys() - {0}):
            guess = first.as_guessed_from(before[0], before[ordinal])
            attempt = Attempt(Branch(component, ordinal), guess)
            self._ahead[attempt.branch] = self._started(attempt, forward)
            self.counts.guesses += 1

    def _started(self, attempt: Attempt, forward: Forward) -> _Ahead:
        result: Future[Any] = Future()
        is_inference = torch.is_inference_mode_enabled()

        def work() -> None:
            torch.set_num_threads(self._threads)
            try:
                with torch.inference_mode(is_inference), torch.no_grad(), self._running(attempt):
                    result.set_result(forward(*attempt.call.args, **attempt.call.kwargs))
            except BaseException as error:  # also a cancelled picture: whoever waits is told
                result.set_exception(error)

        name = f"branch-{attempt.branch.ordinal}"
        thread = threading.Thread(target=copy_context().run, args=(work,), name=name, daemon=True)
        thread.start()
        return _Ahead(attempt, result, thread)

    def _drop(self, ahead: _Ahead) -> None:
        ahead.attempt.drop()
        self._left = [other for other in self._left if other.thread.is_alive()]
        self._left.append(ahead)
