"""Eight streams over real processes while a node is killed, and one frozen: no request fails, no text changes.

At every token and every stage: tests/chaos/test_failover_processes.py.
"""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from tests.chaos.model import NUM_LAYERS, WholeAnswers, long_answers, write_model
from tests.support.nursery import Nursery
from tests.support.processes import Processes
from tests.support.struck_swarm import StruckSwarm

NUM_TOKENS = 26


@pytest.mark.long
@pytest.mark.processes
async def test_eight_streams_survive_nodes_that_are_killed_and_frozen(
    tmp_path: Path, nursery: Nursery
) -> None:
    model = write_model(tmp_path / "model")
    due = long_answers(WholeAnswers(model), 8, NUM_TOKENS)
    with Processes(nursery) as processes:
        async with StruckSwarm(processes, str(model), ("1:4", f"4:{NUM_LAYERS}")).running() as swarm:
            rounds = [
                await swarm.round(stage, token, number, due, NUM_TOKENS)
                for token in (1, 6, 20)
                for stage, number in enumerate((signal.SIGKILL, signal.SIGSTOP))
            ]
    assert not [str(told) for told in rounds if told.failed or told.wrong]
    assert max(pause for told in rounds for pause in told.pauses_s) < 5
