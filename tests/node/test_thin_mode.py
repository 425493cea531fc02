"""Both ends on nodes: token ids in at the first, candidates or drawn ids out of the last."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import torch

from routing.errors import ErrorCode
from routing.types import Answer, AnswerKind, Step, StepFlag, Want
from slicing.sampler import Sampler, SamplingParams
from tests.node.fake_runner import NUM_LAYERS, VOCAB_SIZE, FakeRunner
from tests.node.rig import Rig, Script

CANDIDATE = np.dtype([("id", "<u4"), ("logit", "<f4")])
SEEDED = SamplingParams(temperature=0.7, top_k=20, repetition_penalty=1.3, frequency_penalty=0.5, seed=11)


class WholeWithEnds:
    """The uncut model with its own sampler."""

    def __init__(self, params: SamplingParams, prompt_ids: list[int]) -> None:
        self.runner = FakeRunner()
        self.cache = self.runner.new_cache()
        self.sampler = Sampler(params, VOCAB_SIZE, prompt_ids)

    def logits(self, position: int, token_ids: list[int]) -> torch.Tensor:
        states = self.runner.run_opening(self.cache, torch.tensor(token_ids), position, end=NUM_LAYERS)
        return self.runner.run_closing(self.cache, states, position, start=NUM_LAYERS)[0]

    def next_token(self, position: int, token_ids: list[int]) -> int:
        token_id = self.sampler.sample(self.logits(position, token_ids), position + len(token_ids))
        self.sampler.observe(token_id)
        return token_id


async def thin_script(rig: Rig, params: SamplingParams, prompt_ids: list[int], num_nodes: int = 2) -> Script:
    """A route over `num_nodes` nodes whose last has a link to the gateway."""
    cuts = np.linspace(0, NUM_LAYERS, num_nodes + 1).astype(int).tolist()
    spans = list(pairwise(cuts))
    hops = [(await rig.add_fake_node(start, end), start, end) for start, end in spans]
    await rig.gateway.endpoint.dial(hops[-1][0].address)
    sampling = {"params": params.to_map(), "prompt_ids": prompt_ids}
    script = rig.script(*hops, opens=True, closes=True, sampling=sampling)
    await script.open()
    return script


def drawn(answer: Answer) -> list[int]:
    if answer.kind is AnswerKind.TOKEN_IDS:
        return np.frombuffer(answer.payload, "<u4").tolist()
    return np.frombuffer(answer.payload, CANDIDATE)["id"].reshape(answer.rows, -1)[:, 0].tolist()


async def test_seeded_sampling_on_the_last_node_equals_sampling_over_the_whole_model(rig: Rig) -> None:
    prompt = [3, 1, 4, 1, 5]
    script = await thin_script(rig, SEEDED, prompt)
    whole = WholeWithEnds(SEEDED, prompt)
    position, tokens = 0, prompt
    for number in range(1, 13):
        answer = await script.run(number, position, tokens)
        assert answer.kind is AnswerKind.TOKEN_IDS
        assert drawn(answer) == [whole.next_token(position, tokens)]
        position, tokens = position + len(tokens), drawn(answer)


async def test_greedy_answers_hold_eight_candidates_best_first(rig: Rig) -> None:
    script = await thin_script(rig, SamplingParams(temperature=0.0), [7, 7])
    answer = await script.run(1, 0, [7, 7])
    assert answer.kind is AnswerKind.CANDIDATES
    assert len(answer.payload) == 64
    shortlist = np.frombuffer(answer.payload, CANDIDATE)
    logits = WholeWithEnds(SamplingParams(temperature=0.0), []).logits(0, [7, 7])
    assert shortlist["id"][0] == logits.argmax()
    assert np.array_equal(shortlist["logit"], logits.sort(descending=True).values[:8].numpy())


async def test_one_node_may_hold_both_ends(rig: Rig) -> None:
    script = await thin_script(rig, SEEDED, [2, 9], num_nodes=1)
    whole = WholeWithEnds(SEEDED, [2, 9])
    first = await script.run(1, 0, [2, 9])
    assert drawn(first) == [whole.next_token(0, [2, 9])]
    second = await script.run(2, 2, drawn(first))
    assert drawn(second) == [whole.next_token(2, drawn(first))]


async def test_only_the_first_hop_sees_token_ids(rig: Rig) -> None:
    script = await thin_script(rig, SEEDED, [2, 9])
    await script.run(1, 0, [2, 9])
    (between,) = (link for link in rig.network.links if link.own_id == script.hops[0][0].node_id)
    (onward,) = (message for message in between.sent if isinstance(message, Step))
    assert StepFlag.TOKEN_IDS not in onward.flags


async def test_a_repeated_step_never_draws_again(rig: Rig) -> None:
    script = await thin_script(rig, SEEDED, [1, 2])
    first = await script.run(1, 0, [1, 2])
    second = await script.run(2, 2, drawn(first))
    repeat = await script.run(2, 2, drawn(first))
    assert drawn(repeat) == drawn(second)
    sampler = script.hops[-1][0].server._sessions.get(script.session_id).state.sampler
    assert sampler is not None
    assert sampler.num_generated == 2


async def test_rolling_back_takes_the_draws_after_it_back(rig: Rig) -> None:
    prompt = [1, 2]
    script = await thin_script(rig, SEEDED, prompt)
    tokens, position, answers = prompt, 0, []
    for number in (1, 2, 3, 4):
        answers.append(drawn(await script.run(number, position, tokens)))
        position, tokens = position + len(tokens), answers[-1]
    again = drawn(await script.run(5, 3, answers[1]))  # the third step once more, as a new one
    assert again == answers[2]
    assert drawn(await script.run(6, 4, again)) == answers[3]


async def test_a_replay_on_a_new_route_draws_the_same(rig: Rig) -> None:
    prompt = [4, 2]
    script = await thin_script(rig, SEEDED, prompt)
    tokens, position, answers = prompt, 0, []
    for number in (1, 2, 3):
        answers.append(drawn(await script.run(number, position, tokens)))
        position, tokens = position + len(tokens), answers[-1]
    script.epoch = 2
    await script.first.send(script.opening())
    tokens, position = prompt, 0
    for number in (1, 2, 3):
        assert drawn(await script.run(number, position, tokens)) == answers[number - 1]
        position, tokens = position + len(tokens), answers[number - 1]


async def test_rows_of_drafts_are_drawn_one_after_the_other(rig: Rig) -> None:
    prompt = [1, 2]
    script = await thin_script(rig, SEEDED, prompt)
    whole = WholeWithEnds(SEEDED, prompt)
    first = drawn(await script.run(1, 0, prompt))
    assert first == [whole.next_token(0, prompt)]
    plain = [first[0]]
    for offset in range(3):
        plain.append(whole.next_token(2 + offset, [plain[-1]]))
    answer = await script.run(2, 2, plain[:3], want=Want.ALL)
    assert drawn(answer) == plain[1:]


async def test_a_token_id_outside_the_vocabulary_is_refused(rig: Rig) -> None:
    script = await thin_script(rig, SEEDED, [1])
    for number, wrong in ((1, [VOCAB_SIZE]), (1, [-1])):
        await script.send(number, 0, wrong)
        failure = await script.failure()
        assert (failure.code, failure.hop) == (ErrorCode.MALFORMED, 0)
    await script.run(1, 0, [1])


async def test_logits_without_a_choice_end_that_session_only(rig: Rig) -> None:
    script = await thin_script(rig, SEEDED, [1])
    script.hops[-1][0].runner.error = None
    healthy = rig.script(*script.hops, opens=True, closes=True, sampling=script.sampling)
    await healthy.open()
    last = script.hops[-1][0].runner
    original = last.run_closing
    last.run_closing = lambda *args, **kwargs: original(*args, **kwargs) * float("nan")
    await script.send(1, 0, [1])
    failure = await script.failure()
    assert (failure.code, failure.text, failure.hop) == (ErrorCode.COMPUTE, "LogitsError", 1)
    last.run_closing = original
    await healthy.run(1, 0, [1])


async def test_wrong_drafts_leave_no_trace_in_what_is_drawn_later(rig: Rig) -> None:
    """The last node draws as if every draft held; the next step's position takes back what it drew for the others."""
    prompt = [1, 2]
    script = await thin_script(rig, SEEDED, prompt)
    whole = WholeWithEnds(SEEDED, prompt)
    true = [whole.next_token(0, prompt)]
    for offset in range(8):
        true.append(whole.next_token(2 + offset, [true[-1]]))
    assert drawn(await script.run(1, 0, prompt)) == true[:1]
    wrong = (true[2] + 1) % VOCAB_SIZE
    assert drawn(await script.run(2, 2, [true[0], true[1], wrong, 5], want=Want.ALL))[:2] == true[1:3]
    all_wrong = [true[2], (true[3] + 1) % VOCAB_SIZE, 7]
    assert drawn(await script.run(3, 4, all_wrong, want=Want.ALL))[:1] == true[3:4]
    assert drawn(await script.run(4, 5, true[3:8], want=Want.ALL)) == true[4:9]
    sampler = script.hops[-1][0].server._sessions.get(script.session_id).state.sampler
    assert sampler is not None
    assert sampler.num_generated == 9
