"""Drafts without a model: what is proposed, what it costs by counted trips and rows, and that it never costs much."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from app.engine.drafts import (
    BUDGET_SHARE,
    MAX_DRAFT,
    Draft,
    Drafter,
    DraftGate,
    DraftMode,
    PromptLookup,
    TripCosts,
    kept_of,
)

VECTORS = Path(__file__).parents[1] / "vectors" / "answers.json"


def test_what_followed_the_last_tokens_before_is_proposed_the_longer_match_first() -> None:
    lookup = PromptLookup((1, 2, 3, 4, 9, 2, 3, 5, 6, 7, 1, 2, 3))
    assert lookup.propose(2) == Draft((4, 9), 3)
    lookup.extend((8, 2, 3))
    assert lookup.propose(3) == Draft((8, 2, 3), 2)
    lookup.extend((50, 7))
    assert lookup.propose(1) == Draft((1,), 1)
    lookup.extend((51,))
    assert lookup.propose(5) == Draft(())


def test_a_loop_is_followed_past_its_end() -> None:
    lookup = PromptLookup((1, 2, 3, 1, 2, 3, 1))
    assert lookup.propose(7).token_ids == (2, 3, 1, 2, 3, 1, 2)


def test_the_last_place_counts() -> None:
    assert PromptLookup((1, 2, 3, 7, 1, 2, 3, 8, 1, 2, 3)).propose(1) == Draft((8,), 3)


@pytest.mark.parametrize("size", [0, 1, 2, 3])
def test_few_tokens_propose_nothing_or_what_there_is(size: int) -> None:
    assert PromptLookup(range(size)).propose(4) == Draft(())
    assert PromptLookup((5,) * (size + 1)).propose(4).token_ids == ((5,) * 4 if size else ())


def test_tokens_are_kept_through_the_first_that_was_not_foretold() -> None:
    def drawn() -> Sequence[int]:
        return [4, 5, 6, 7]

    assert kept_of(drawn(), (4, 5, 9)) == ([4, 5, 6], 2)
    assert kept_of(drawn(), (4, 5, 6)) == ([4, 5, 6, 7], 3)
    assert kept_of(drawn(), ()) == ([4], 0)
    assert kept_of(drawn(), (4, 5, 6), frozenset({5})) == ([4, 5], 2)


def test_no_more_rows_are_drawn_than_are_kept() -> None:
    drawn = iter([4, 5, 6, 7])
    kept_of(drawn, (4, 9, 6))
    assert list(drawn) == [6, 7]


def test_a_row_costs_what_rows_were_measured_to_cost() -> None:
    costs = TripCosts()
    for _ in range(20):
        costs.note(1, 0.200, 0.040)
    assert costs.row_share == pytest.approx(0.040 / 0.200)  # as if it were a step of its own
    costs.note_chunk(20, 0.200)
    costs.note(1, 0.200, 0.040)
    assert costs.row_share == pytest.approx(0.010 / 0.200)
    for _ in range(20):
        costs.note(5, 0.216, 0.056)
    assert costs.row_share == pytest.approx(0.004 / 0.200)
    costs.note(1, 9.0, 9.0)  # a stall says nothing
    assert costs.row_share == pytest.approx(0.004 / 0.200)


def test_drafts_end_with_the_answer() -> None:
    costs = free_rows()
    for left in range(6):
        drafter = Drafter("auto", costs, (1, 2, 3, 1, 2), end_position=6 + left)
        assert len(drafter.next((3,), 0)) == max(0, left - 1)


def test_off_and_forbidden_drafts_are_none() -> None:
    costs = free_rows()
    assert Drafter("off", costs, (1, 2, 3, 1, 2), 99).next((3,), 0) == ()
    drafter = Drafter("auto", costs, (1, 2, 3, 1, 2), 99)
    assert drafter.next((3,), 0, is_allowed=False) == ()
    assert drafter.next((1,), 0) == (2, 3, 1, 2, 3, 1, 2, 3, 1, 2, 3, 1, 2, 3, 1)


def test_nothing_is_sent_before_a_trip_was_measured() -> None:
    assert Drafter("auto", TripCosts(), (1, 2, 3, 1, 2), 99).next((3,), 0) == ()


def free_rows() -> TripCosts:
    costs = TripCosts()
    costs.note(1, 1.0, 0.0)
    return costs


# The account --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("share", [0.001, 0.02, 0.08, 0.3, 1.0])
@pytest.mark.parametrize("chance", [0.0, 0.02, 0.1, 0.3, 0.7, 1.0])
def test_an_answer_is_never_slower_by_more_than_the_budget(share: float, chance: float) -> None:
    for seed in range(5):
        draws = random.Random(seed)
        costs = TripCosts()
        costs.note(1, 1.0, 1.0)
        costs.note(2, 1.0 + share, 1.0 + share)
        gate = DraftGate("auto", costs)
        tokens = taken = 0.0
        for _ in range(400):
            sent = gate.begin(Draft(tuple(range(MAX_DRAFT)), draws.choice((1, 2, 3))))
            right = next(
                (n for n in range(len(sent.token_ids)) if draws.random() >= chance), len(sent.token_ids)
            )
            gate.end(right)
            tokens, taken = tokens + 1 + right, taken + 1 + share * len(sent.token_ids)
            assert tokens / taken >= 1 - BUDGET_SHARE


def test_drafts_that_are_never_right_are_hardly_tried() -> None:
    costs = TripCosts()
    costs.note(1, 1.0, 1.0)
    costs.note(2, 1.05, 1.05)
    gate = DraftGate("auto", costs)
    sizes = []
    for _ in range(640):
        sizes.append(len(gate.begin(Draft(tuple(range(MAX_DRAFT)), 2)).token_ids))
        gate.end(0)
    assert sum(size > 0 for size in sizes[100:]) <= 20
    assert sum(sizes[100:]) <= 20


def test_drafts_grow_while_they_are_right_and_come_back_when_the_text_changes() -> None:
    gate, sizes = DraftGate("auto", free_with(0.08)), []
    for trip in range(600):
        is_copying = trip < 100 or trip >= 400
        draft = gate.begin(Draft(tuple(range(MAX_DRAFT)), 3))
        gate.end(len(draft.token_ids) if is_copying else 0)
        sizes.append(len(draft.token_ids))
    assert sizes[99] == MAX_DRAFT
    assert sum(sizes[200:400]) < 20
    assert sizes[-1] == MAX_DRAFT


def test_rows_that_others_wait_for_are_dearer() -> None:
    def after_success(sharing: int) -> int:
        gate = DraftGate("auto", free_with(0.08))
        for _ in range(40):
            sent = gate.begin(Draft(tuple(range(MAX_DRAFT)), 3))
            gate.end((len(sent.token_ids) + 1) // 2)
        return len(gate.begin(Draft(tuple(range(MAX_DRAFT)), 3), sharing=sharing).token_ids)

    assert after_success(1) > after_success(4) >= after_success(16)


def free_with(share: float) -> TripCosts:
    costs = TripCosts()
    costs.note(1, 1.0, 1.0)
    costs.note(2, 1.0 + share, 1.0 + share)
    return costs


# Trips and rows, counted over what a model really said ---------------------------------------------------------


@dataclass(frozen=True)
class Machine:
    """Virtual time: what a trip takes. Computing grows with its rows as measured (performance.md, section 9)."""

    network_ms: float
    compute_ms: float
    row_share: float = 0.083  # 5 rows take 1.33 times as long as 1

    def compute(self, rows: int) -> float:
        return self.compute_ms * (1 + self.row_share * (rows - 1))

    def trip(self, rows: int) -> float:
        return self.network_ms + self.compute(rows)


FAR = Machine(network_ms=200, compute_ms=55)  # gateway, 3 nodes and back over links of 50 ms; stock kernels
FAR_FAST = Machine(network_ms=200, compute_ms=16)
NEAR = Machine(network_ms=3, compute_ms=16)
CROWDED = Machine(network_ms=3, compute_ms=16, row_share=1.0)  # rows share nothing: a machine at its limit
MACHINES = {"far": FAR, "far and fast": FAR_FAST, "near": NEAR, "crowded": CROWDED}


@dataclass
class Count:
    """Of one answer."""

    tokens: int = 0
    trips: int = 0
    rows: int = 0
    taken_ms: float = 0.0

    def gain(self, machine: Machine) -> float:
        """Times as many tokens per second as without drafts."""
        return self.tokens * machine.trip(1) / self.taken_ms


def answers() -> dict[str, tuple[list[int], list[int]]]:
    told = json.loads(VECTORS.read_text())["answers"]
    return {name: (answer["prompt"], answer["answer"]) for name, answer in told.items()}


def counted(name: str, mode: DraftMode, machine: Machine, sharing: int = 1) -> Count:
    """Make this answer again, as engine and ends do: the first token is the prefill's."""
    prompt, answer = answers()[name]
    costs = TripCosts()
    costs.note_chunk(len(prompt), machine.compute(len(prompt)))
    drafter = Drafter(mode, costs, prompt, len(prompt) + len(answer))
    draft = drafter.next(answer[:1], 0, sharing=sharing)
    count, said = Count(), 1
    while said < len(answer):
        rows = 1 + len(draft)
        costs.note(rows, machine.trip(rows), machine.compute(rows))
        kept, num_right = kept_of(answer[said:], draft)
        count.trips, count.rows = count.trips + 1, count.rows + rows
        count.tokens, count.taken_ms = count.tokens + len(kept), count.taken_ms + machine.trip(rows)
        said += len(kept)
        draft = drafter.next(kept, num_right, sharing=sharing)
    assert said == len(answer)
    return count


@pytest.mark.parametrize("machine", [FAR, FAR_FAST], ids=["stock", "fast"])
def test_copying_over_far_links_is_two_and_a_half_times_as_fast(machine: Machine) -> None:
    for mode in ("auto", "lookup"):
        for name in ("greedy repeat", "greedy edit"):
            assert counted(name, mode, machine).gain(machine) >= 2.5, (name, mode)


@pytest.mark.parametrize("name", ["greedy explain", "greedy story", "greedy letter"])
@pytest.mark.parametrize("machine", [FAR, FAR_FAST], ids=["stock", "fast"])
def test_something_new_over_far_links_is_a_tenth_faster(name: str, machine: Machine) -> None:
    assert counted(name, "auto", machine).gain(machine) >= 1.1


@pytest.mark.parametrize("name", sorted(answers()))
@pytest.mark.parametrize("machine", MACHINES.values(), ids=MACHINES)
@pytest.mark.parametrize("sharing", [1, 8])
def test_no_answer_is_slower(name: str, machine: Machine, sharing: int) -> None:
    count = counted(name, "auto", machine, sharing)
    assert count.gain(machine) >= 0.98
    extra = count.rows - count.trips
    others_ms = (sharing - 1) * extra * machine.compute_ms * machine.row_share  # what the others waited
    assert count.tokens * machine.trip(1) / (count.taken_ms + others_ms) >= 0.98


def print_counts(write: Callable[[str], None] = print) -> None:
    """The numbers behind the bars: `python -m tests.app.test_drafts`."""
    for label, machine in MACHINES.items():
        for name in answers():
            for mode in ("auto", "lookup"):
                count = counted(name, mode, machine)
                write(
                    f"{label:14}{name:18}{mode:8}{count.tokens:4} tokens {count.trips:4} trips {count.rows:5} rows "
                    f"{count.gain(machine):5.2f}x"
                )


if __name__ == "__main__":
    print_counts()
