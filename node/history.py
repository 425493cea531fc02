"""What became of each step of a session, kept so that the node after this one can be rebuilt from here.

In the row groups that were computed, without what roll-backs undid. Where every step ended is kept always; outputs
only within budgets, the oldest let go first. Knows nothing of links, threads or tensors.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, field, replace

from node.stats import NodeStats
from routing.frames import first_rows
from routing.recorded import wants_before
from routing.types import Answer, Step, Want, WireDtype

Output = Step | Answer | None  # what a step became here; None where nothing is wanted of the last hop

# A 7B model sends 8 KiB a row in bfloat16: 8192 rows, as much as a replay of the gateway may have pending.
SESSION_BYTES = 64 << 20
NODE_BYTES = 256 << 20  # all sessions of a node: a tenth of what a small machine has free
# The last hop sends to the gateway, which keeps what it got: only what may be on its way (W of DESIGN decision 7).
KEPT_ANSWERS = 4
KEPT_ANSWER_BYTES = 8 << 20  # decode rows are tiny beside it, the rows of a very long prefill are let go

KEPT_CALL_BYTES = 1 << 20  # calls are made again for a later route; repeats on the same one are rare


@dataclass(slots=True)
class DoneStep:
    """One computed step: the rows from `position` on, of all branches, and what they became."""

    number: int
    position: int
    rows: int
    wire: WireDtype  # the element type of the output's rows
    is_answer_due: bool  # the gateway wanted something of it
    output: Output = field(repr=False)
    end: int  # the position after its last row
    is_memory: bool = False  # it takes no positions, and no roll-back undoes it

    @property
    def size_bytes(self) -> int:
        """What its output takes."""
        return 0 if self.output is None else len(self.output.payload)

    def cut(self, position: int, branches: int, axes: int) -> None:
        """Keep the rows before `position`; an answer is undone with the row it was for."""
        frames = position - self.position
        if isinstance(self.output, Step):
            self.output = _first_frames(self.output, frames, branches, axes)
        else:
            self.output = None
        self.rows, self.end, self.is_answer_due = frames * branches, position, False


class History:
    """The steps of one session in order. Belongs to the event loop.

    `branches` and `axes` say how rows lie in what was sent on, see `routing.frames`.
    """

    def __init__(
        self,
        budget: HistoryBudget,
        *,
        max_bytes: int,
        max_outputs: int | None = None,
        branches: int = 1,
        axes: int = 0,
    ) -> None:
        self._budget = budget
        self._branches = branches
        self._axes = axes
        self._max_bytes = max_bytes
        self._max_outputs = max_outputs
        self._steps: list[DoneStep] = []
        self._first_held = 0  # index: outputs before it were let go
        self.skipped = 0  # positions that no step was needed for: there is no output of theirs to send
        self.size_bytes = 0
        budget.add(self)

    @property
    def last_number(self) -> int:
        """The number of the last step done; 0 before the first."""
        return self._steps[-1].number if self._steps else 0

    @property
    def num_held(self) -> int:
        """Steps whose output can be sent again."""
        return len(self._steps) - self._first_held

    def add(self, step: Step, output: Output, wire: WireDtype) -> None:
        """A step was computed; rows at and after its position are overwritten by it, memory never."""
        is_memory = step.is_memory
        if not is_memory:
            self._cut(step.position)
        is_due, end = step.want is not Want.NONE, step.end(self._branches)
        done = DoneStep(step.step, step.position, step.rows, wire, is_due, output, end, is_memory)
        self._steps.append(done)
        self._resize(done.size_bytes)
        most = len(self._steps) if self._max_outputs is None else self._max_outputs
        while self.size_bytes > self._max_bytes or len(self._steps) - self._first_held > most:
            self.let_go()
        self._budget.trim()

    def holds(self, step: Step) -> bool:
        """Whether this step repeats one whose output is held."""
        index = self._index(step.step)
        if not self._first_held <= index < len(self._steps):
            return False
        done = self._steps[index]
        return (done.number, done.position, done.rows) == (step.step, step.position, step.rows)

    def output_of(self, step: Step) -> Output:
        """The output of a step that is held; None where it had none (the last hop, and nothing wanted)."""
        return self._steps[self._index(step.step)].output

    def holds_from(self, number: int) -> bool:
        """Whether the outputs of all steps from this number on are held."""
        return self._index(number) >= self._first_held and not self._is_skipped(number)

    def steps_from(self, number: int) -> list[DoneStep]:
        """The steps from this number on, in order."""
        return self._steps[self._index(number) :]

    def first_due(self, answered: int) -> int | None:
        """The first step after `answered` whose answer is due and can't be sent again; None when there is none."""
        for done in self._steps[self._index(answered + 1) : self._first_held]:
            if done.is_answer_due:
                return done.number
        return None

    def roll_back(self, number: int) -> int:
        """Forget the steps from this number on; returns the position that is next then."""
        if self._is_skipped(number):  # they come for the first time, those for what was held here included
            self._drop_after(0)
            self.skipped = 0
            return 0
        index = self._index(number)
        if index == len(self._steps):
            return self._steps[-1].end if self._steps else self.skipped
        position = self._steps[index].position
        self._drop_after(index)
        return position

    def let_go(self) -> None:
        """Drop the oldest output that is held."""
        oldest = self._steps[self._first_held]
        self._first_held += 1
        self._resize(-oldest.size_bytes)
        oldest.output = None

    def let_all_go(self) -> None:
        """Drop every output: they are not what the next route takes."""
        while self.num_held:
            self.let_go()

    def close(self) -> None:
        """Give everything back."""
        self._drop_after(0)
        self._budget.remove(self)

    def _cut(self, position: int) -> None:
        keep = len(self._steps)
        while keep and not self._steps[keep - 1].is_memory and self._steps[keep - 1].position >= position:
            keep -= 1
        if keep < len(self._steps):
            self._drop_after(keep)
        if self._steps and self._steps[-1].end > position:
            last = self._steps[-1]
            before = last.size_bytes
            last.cut(position, self._branches, self._axes)
            self._resize(last.size_bytes - before)

    def _drop_after(self, index: int) -> None:
        dropped = sum(done.size_bytes for done in self._steps[index:])
        del self._steps[index:]
        self._first_held = min(self._first_held, len(self._steps))
        self._resize(-dropped)

    def _is_skipped(self, number: int) -> bool:
        """Whether a step stands for positions that were held here from the beginning."""
        first = self._steps[0].number if self._steps else 2
        return bool(self.skipped) and number < first

    def _index(self, number: int) -> int:
        return bisect_left(self._steps, number, key=_number)

    def _resize(self, more: int) -> None:
        self.size_bytes += more
        self._budget.note(more)


class HistoryBudget:
    """Bytes of all histories of a node. Where they are too many, the largest history gives first.

    One session that must be replayed as a whole is better than many that have lost their beginning.
    """

    def __init__(self, stats: NodeStats, limit_bytes: int = NODE_BYTES) -> None:
        self.limit_bytes = limit_bytes
        self._stats = stats
        self._histories: dict[int, History] = {}

    def add(self, history: History) -> None:
        """Count one more history."""
        self._histories[id(history)] = history

    def remove(self, history: History) -> None:
        """Count it no more."""
        self._histories.pop(id(history), None)

    def note(self, more: int) -> None:
        """A history grew by so many bytes."""
        self._stats.history_bytes += more

    def trim(self) -> None:
        """Let the oldest outputs of the largest histories go until all fit."""
        while self._stats.history_bytes > self.limit_bytes:
            max(self._histories.values(), key=_size_bytes).let_go()


def _first_frames(step: Step, frames: int, branches: int, axes: int) -> Step:
    """The first rows of a step that was sent on, with what is still wanted of them."""
    want, want_rows = wants_before(step.want, step.want_rows, frames)
    rows = frames * branches
    payload = bytes(
        first_rows(step.payload, step.rows, rows, axes)
    )  # a copy: a view would hold the rest as well
    return replace(step, rows=rows, payload=payload, want=want, want_rows=want_rows)


def _number(done: DoneStep) -> int:
    return done.number


def _size_bytes(history: History) -> int:
    return history.size_bytes
