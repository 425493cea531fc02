"""Two replicas of each stage, eight streams: a node killed or frozen at every token from 1 to 20, at every stage.

Not one request may fail, every text must be that of the uncut model. Prints how long answers stood still.
"""

from __future__ import annotations

import signal
import statistics
import time
from collections.abc import Iterable, Mapping
from pathlib import Path

import pytest

from app.engine.tokenizer import ChatTokenizer
from slicing.errors import ModelError
from slicing.model_source import open_checkpoint
from tests.chaos.model import NUM_LAYERS, WholeAnswers, long_answers, write_model
from tests.integration.conftest import MODEL, WholeModel
from tests.support.nursery import Nursery
from tests.support.processes import Processes
from tests.support.struck_swarm import Round, StruckSwarm, spread

pytestmark = [pytest.mark.chaos, pytest.mark.processes]
STREAMS = 8
NUM_TOKENS = 26
TOKENS = range(1, 21)
STAGES = ("1:3", "3:5", f"5:{NUM_LAYERS}")
CAUSES = {"killed": signal.SIGKILL, "frozen": signal.SIGSTOP}
# Median and longest of the small model, whose replay takes next to nothing; with what a busy machine of two cores adds.
# A closed connection is seen at once, a silent one within two seconds.
LIMITS_S = {"killed": (1.0, 2.0), "frozen": (2.25, 4.0)}


def judge(cause: str, rounds: list[Round], took_s: float) -> list[float]:
    """Print the figures; nothing may have failed. Returns the pauses in seconds."""
    pauses_s = [pause for told in rounds for pause in told.pauses_s]
    print(f"\n{cause}: {len(rounds)} faults in {took_s:.0f} s, {spread(pauses_s)}")
    assert not [str(told) for told in rounds if told.failed or told.wrong]
    return pauses_s


async def strike_all(
    swarm: StruckSwarm, cause: str, tokens: Iterable[int], num_stages: int, due: Mapping[str, str]
) -> list[float]:
    began = time.monotonic()
    rounds = [
        await swarm.round(stage, token, CAUSES[cause], due, NUM_TOKENS)
        for token in tokens
        for stage in range(num_stages)
    ]
    return judge(cause, rounds, time.monotonic() - began)


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("cause", CAUSES)
async def test_a_node_lost_at_any_token_of_any_stage_fails_no_request(cause: str, tmp_path: Path) -> None:
    model = write_model(tmp_path / "model")
    due = long_answers(WholeAnswers(model), STREAMS, NUM_TOKENS)
    with Nursery() as nursery, Processes(nursery) as processes:
        async with StruckSwarm(processes, str(model), STAGES).running() as swarm:
            pauses_s = await strike_all(swarm, cause, TOKENS, len(STAGES), due)
    assert statistics.median(pauses_s) <= LIMITS_S[cause][0]
    assert max(pauses_s) <= LIMITS_S[cause][1]


@pytest.mark.real
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("cause", CAUSES)
async def test_nor_with_a_real_model(cause: str) -> None:
    try:
        checkpoint = open_checkpoint(MODEL)
    except ModelError as error:
        pytest.skip(str(error))
    whole = WholeModel(checkpoint, ChatTokenizer.load(checkpoint.folder))
    places = ("the sea", "the hills", "a river", "the sky", "a city", "the north", "an island", "the desert")
    due = {f"Tell me about {place}.": "" for place in places}
    due = {text: whole.greedy(text, NUM_TOKENS) for text in due}
    with Nursery() as nursery, Processes(nursery) as processes:
        async with StruckSwarm(processes, MODEL, ("1:16", "16:30")).running() as swarm:
            await strike_all(swarm, cause, (1, 8, 20), 2, due)
